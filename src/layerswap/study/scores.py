"""From what was judged to one row per treatment: the choice on development, the score on test."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from layerswap.compose.presets import Zones
from layerswap.evaluate.result_files import Score, read_scores
from layerswap.evaluate.statistics import Interval, mean_interval, paired_difference
from layerswap.study.treatments import DEFAULT, pair_of, treatment_of, zones_of

CHOSEN, BEST = "swap, chosen on development", "swap, best (flattered)"
SHARED = "all"
"""The pair of what is the same for all pairs, such as the base."""

Values = npt.NDArray[np.float64]
Pairs = dict[str, dict[str, Values]]
"""By pair and treatment, one score per document."""


class Row:
    """One treatment of one language.

    Args:
        values: by pair, one score per document.
        references: what it is compared with, by name: the same of the default swap and of the
            chosen one.
    """

    def __init__(
        self, values: Mapping[str, Values], references: Mapping[str, Mapping[str, Values]]
    ) -> None:
        means = [float(one.mean()) for one in values.values()]
        self.lowest, self.highest = min(means), max(means)
        whole = np.mean(list(values.values()), axis=0)
        self.score: Interval = mean_interval(whole)
        self.against = {
            name: paired_difference(whole, np.mean(list(other.values()), axis=0))
            for name, other in references.items()
        }


@dataclass(frozen=True)
class Condition:
    """One language on one benchmark, on the documents that nothing was chosen on.

    Attributes:
        language: as the study writes it.
        benchmark: such as `mgsm`.
        pairs: by pair and treatment, one score per test document; the grid as two treatments.
        grid: mean score of each composition of the grid over pairs, on the development documents.
        chosen: the composition chosen for each pair.
        best: the composition that is best on the test documents, for each pair.
        test: positions of the test documents, in the order of task and document.
    """

    language: str
    benchmark: str
    pairs: Pairs
    grid: Mapping[Zones, Interval] = field(default_factory=dict)
    chosen: Mapping[str, Zones] = field(default_factory=dict)
    best: Mapping[str, Zones] = field(default_factory=dict)
    test: tuple[int, ...] = ()

    @cached_property
    def rows(self) -> dict[str, Row]:
        """Every treatment over all pairs, against the default swap and the chosen one."""
        names = list(dict.fromkeys(name for values in self.pairs.values() for name in values))
        by_name = {
            name: {pair: values[name] for pair, values in self.pairs.items() if name in values}
            for name in names
        }
        references = {name: by_name[name] for name in (DEFAULT, CHOSEN) if name in by_name}
        return {
            name: Row(values, {n: v for n, v in references.items() if n != name})
            for name, values in by_name.items()
        }


def condition(language: str, benchmark: str, judged: Pairs, development: float) -> Condition:
    """One language on one benchmark.

    The composition of each pair is chosen on the first part of the documents, in an order drawn
    with a fixed seed, and all treatments are scored on the rest. The best on that rest is told
    too, as the papers do: it is flattered, since it was chosen by what it is judged on.

    Args:
        language: as the study writes it.
        benchmark: its name.
        judged: the scores of all documents.
        development: share of the documents to choose on.
    """
    shared = judged.get(SHARED, {})
    pairs: Pairs = {}
    chosen: dict[str, Zones] = {}
    best: dict[str, Zones] = {}
    grids: dict[Zones, list[Values]] = defaultdict(list)
    rest: npt.NDArray[np.int64] = np.array([], dtype=np.int64)
    for pair, treatments in judged.items():
        if pair == SHARED:
            continue
        together = {**shared, **treatments}
        first, rest = _split(len(next(iter(together.values()))), development)
        grid = {zones: v for n, v in together.items() if (zones := zones_of(n)) is not None}
        kept = {n: v[rest] for n, v in together.items() if zones_of(n) is None}
        if grid:
            chosen[pair] = max(grid, key=lambda zones: grid[zones][first].mean())
            best[pair] = max(grid, key=lambda zones: grid[zones][rest].mean())
            kept[CHOSEN], kept[BEST] = grid[chosen[pair]][rest], grid[best[pair]][rest]
        for zones, values in grid.items():
            grids[zones].append(values[first])
        pairs[pair] = kept
    means = {zones: mean_interval(np.mean(values, axis=0)) for zones, values in grids.items()}
    return Condition(language, benchmark, pairs, means, chosen, best, tuple(map(int, rest)))


@dataclass(frozen=True)
class Abroad:
    """The models of a language on a benchmark in other languages.

    Attributes:
        language: that the models are for.
        benchmark: such as `mgsm`.
        rows: by treatment and other language, the mean over pairs, on the documents that are at
            the places of those that nothing was chosen on.
    """

    language: str
    benchmark: str
    rows: Mapping[str, Mapping[str, Interval]]


def abroad(
    own: Sequence[Condition], judged: Mapping[tuple[str, str], Pairs], development: float
) -> list[Abroad]:
    """What the models of a language do in other languages; nothing is chosen there.

    Args:
        own: the language's own benchmarks. A benchmark that is not among them takes the
            composition that was chosen on the first.
        judged: the scores in other languages, by benchmark and language.
        development: share of the documents to choose on.
    """
    by_benchmark = {one.benchmark: one for one in own}
    rows: dict[str, dict[str, dict[str, Interval]]] = defaultdict(lambda: defaultdict(dict))
    for (benchmark, language), pairs in judged.items():
        chosen = by_benchmark.get(benchmark, own[0])
        values: dict[str, list[Values]] = defaultdict(list)
        for pair, treatments in pairs.items():
            for name, scores in treatments.items():
                test = scores[_split(len(scores), development)[1]]
                zones = zones_of(name)
                if zones is None:
                    values[name].append(test)
                if zones is not None and zones == chosen.chosen.get(pair):
                    values[CHOSEN].append(test)
                if zones is not None and zones == chosen.best.get(pair):
                    values[BEST].append(test)
        for name, scores_of in values.items():
            rows[benchmark][name][language] = mean_interval(np.mean(scores_of, axis=0))
    return [Abroad(own[0].language, benchmark, found) for benchmark, found in rows.items()]


def read_judged(folder: Path) -> dict[tuple[str, str], Pairs]:
    """By benchmark and language, the scores of every pair and treatment in a folder of results."""
    rows: dict[tuple[str, str], dict[str, list[Score]]] = defaultdict(lambda: defaultdict(list))
    for score in read_scores(folder):
        if score.main:
            name = score.task if score.benchmark == "flores" else score.benchmark
            rows[name, score.language][score.model].append(score)
    found: dict[tuple[str, str], Pairs] = {}
    for key, models in rows.items():
        pairs: Pairs = defaultdict(dict)
        for model, scores in models.items():
            ordered = sorted(scores, key=lambda score: (score.task, score.document))
            pairs[pair_of(model) or SHARED][treatment_of(model)] = np.array(
                [fraction(score) for score in ordered]
            )
        found[key] = dict(pairs)
    return found


def fraction(score: Score) -> float:
    """A score from 0 to 1; chrF, from 0 to 100, is shown in per cent like the others so."""
    return score.score / (100 if "chrf" in score.metric else 1)


def _split(count: int, development: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The documents to choose on and those to judge on, in an order drawn with a fixed seed."""
    order = np.random.default_rng(0).permutation(count)
    cut = min(count - 1, max(1, round(development * count)))
    return order[:cut], order[cut:]
