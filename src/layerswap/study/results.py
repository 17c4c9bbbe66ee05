"""From what was judged to one row per treatment: the choice on development, the score on test."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from layerswap.compose.presets import Zones
from layerswap.errors import StudyError
from layerswap.evaluation.results import Score, read_scores
from layerswap.evaluation.statistics import (
    Friedman,
    Interval,
    friedman,
    mean_interval,
    paired_difference,
)
from layerswap.report.tables import Table, difference_words, write_tables
from layerswap.study.conditions import DEFAULT, ELSEWHERE, RESULTS, pair_of, treatment_of, zones_of
from layerswap.study.runner import Context

CHOSEN, BEST = "swap, chosen on development", "swap, best (flattered)"
SHARED = "all"
"""The pair of what is the same for all pairs, such as the base."""

Values = npt.NDArray[np.float64]
Pairs = dict[str, dict[str, Values]]
"""By pair and treatment, one score per document."""


class ConditionScores:
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
    def rows(self) -> dict[str, ConditionScores]:
        """Every treatment over all pairs, against the default swap and the chosen one."""
        names = list(dict.fromkeys(name for values in self.pairs.values() for name in values))
        by_name = {
            name: {pair: values[name] for pair, values in self.pairs.items() if name in values}
            for name in names
        }
        references = {name: by_name[name] for name in (DEFAULT, CHOSEN) if name in by_name}
        return {
            name: ConditionScores(values, {n: v for n, v in references.items() if n != name})
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
class OtherLanguageScores:
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


def scores_in_other_languages(
    own: Sequence[Condition], judged: Mapping[tuple[str, str], Pairs], development: float
) -> list[OtherLanguageScores]:
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
    return [
        OtherLanguageScores(own[0].language, benchmark, found) for benchmark, found in rows.items()
    ]


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


TABLES, NUMBERS = "tables", "tables.json"
FLATTERED = f"{BEST}: chosen by the documents that it is judged on."


@dataclass(frozen=True)
class StudyTables:
    """What a study found.

    Attributes:
        conditions: every language on every benchmark.
        other_languages: the models of every language in other languages.
    """

    conditions: list[Condition]
    other_languages: list[OtherLanguageScores]

    @cached_property
    def ranked(self) -> Friedman | None:
        """Friedman's test over the conditions; None where it says nothing."""
        return ranks_over(self.conditions)

    def own(self, other: OtherLanguageScores) -> Condition | None:
        """The same models on the same benchmark in their own language, if it was asked there."""
        where = (other.language, other.benchmark)
        return next((c for c in self.conditions if (c.language, c.benchmark) == where), None)


def findings(folders: Mapping[str, Path], development: float) -> StudyTables:
    """What the steps found that judged the languages.

    Args:
        folders: of steps, by name.
        development: share of the documents to choose on.
    """
    conditions: list[Condition] = []
    others: list[OtherLanguageScores] = []
    for step, folder in folders.items():
        if not step.startswith("judge/"):
            continue
        language = step.partition("/")[2]
        own = [
            condition(language, benchmark, judged, development)
            for (benchmark, _), judged in read_judged(folder / RESULTS).items()
        ]
        conditions += own
        if (folder / ELSEWHERE).is_dir():
            others += scores_in_other_languages(own, read_judged(folder / ELSEWHERE), development)
    return StudyTables(conditions, others)


def write_study_tables(context: Context) -> None:
    """Write `tables.json`, `tables.md` and `tables.tex` from what was judged.

    Raises:
        StudyError: nothing was judged.
    """
    found = findings(context.inputs, context.step.settings["development"])
    if not found.conditions:
        raise StudyError("nothing was judged")
    facts: dict[str, Any] = {"name": context.step.settings["name"], "languages": {}}
    for one in found.conditions:
        told = {name: asdict(row.score) | {"low pair": row.lowest, "high pair": row.highest}
                for name, row in one.rows.items()}  # fmt: skip
        facts["languages"].setdefault(one.language, {})[one.benchmark] = told
        grid = [{**asdict(zones), **asdict(score)} for zones, score in one.grid.items()]
        chosen = {pair: asdict(zones) for pair, zones in one.chosen.items()}
        grids = {"development": grid, "chosen": chosen}
        facts.setdefault("grids", {}).setdefault(one.language, {})[one.benchmark] = grids
    for other in found.other_languages:
        rows = {name: {language: asdict(score) for language, score in row.items()}
                for name, row in other.rows.items()}  # fmt: skip
        facts.setdefault("elsewhere", {}).setdefault(other.language, {})[other.benchmark] = rows
    if found.ranked is not None:
        facts["friedman"] = asdict(found.ranked)
    (context.folder / NUMBERS).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    write_tables(context.folder / TABLES, tables_of(found))


def tables_of(found: StudyTables) -> dict[str, Table]:
    """Every table of a study, by its heading."""
    tables: dict[str, Table] = {}
    for benchmark in dict.fromkeys(one.benchmark for one in found.conditions):
        same = [one for one in found.conditions if one.benchmark == benchmark]
        if len(same) > 1:
            tables[benchmark] = over_languages(benchmark, same)
        for one in same:
            tables[f"{benchmark}, {one.language}"] = in_detail(one)
            if one.grid:
                tables[f"{benchmark}, {one.language}: the compositions"] = grid_table(one)
    for other in found.other_languages:
        tables[heading_elsewhere(other)] = elsewhere(other, found.own(other))
    if found.ranked is not None:
        tables["Ranks"] = rank_table(found.ranked)
    return tables


def grid_table(one: Condition) -> Table:
    """Compositions down: their counts, the score on development, and for which pairs each won."""
    columns = ["bottom", "top", "bottom transition", "top transition", "development, %",
               "chosen for"]  # fmt: skip
    cells: list[list[Any]] = [
        [*map(str, (z.bottom, z.top, z.bottom_transition, z.top_transition)), score,
         ", ".join(pair for pair, chosen in one.chosen.items() if chosen == z)]
        for z, score in one.grid.items()
    ]  # fmt: skip
    caption = (
        f"{one.benchmark}, {one.language}: layers from the language expert and blended ones; mean "
        f"over {_pairs(one)} on the documents that the compositions are chosen on."
    )
    return Table(columns, cells, caption=caption)


def _pairs(one: Condition) -> str:
    return "one pair" if len(one.pairs) == 1 else f"{len(one.pairs)} pairs"


def heading_elsewhere(other: OtherLanguageScores) -> str:
    """What the table of a language's models in other languages is called."""
    return f"{other.benchmark}, the models of {other.language} in other languages"


def elsewhere(other: OtherLanguageScores, own: Condition | None) -> Table:
    """Treatments down, languages across, and their mean (paper 1, tables 2 and 5).

    Args:
        other: the models in other languages.
        own: the same in their own, if it was asked there.
    """
    languages = list(dict.fromkeys(name for row in other.rows.values() for name in row))
    cells: list[list[Any]] = []
    for name, row in other.rows.items():
        scores = [row.get(language) for language in languages]
        if own is not None:
            scores = [own.rows[name].score if name in own.rows else None, *scores]
        means = [score.mean for score in scores if score is not None]
        cells.append([name, *scores, sum(means) / len(means)])
    columns = ["treatment", *([other.language] if own is not None else []), *languages, "mean"]
    caption = (
        f"{other.benchmark}: mean over pairs, with its 95% bootstrap interval; per cent. The "
        "compositions are those that were chosen in the language's own documents."
    )
    return Table(columns, cells, caption=_honest(caption, list(other.rows)))


def over_languages(benchmark: str, conditions: Sequence[Condition]) -> Table:
    """Treatments down, languages across: mean, lowest and highest pair (paper 1, table 1)."""
    rows = {one.language: one.rows for one in conditions}
    names = list(dict.fromkeys(name for by in rows.values() for name in by))
    cells: list[list[Any]] = []
    for name in names:
        here = [by.get(name) for by in rows.values()]
        scores = [row.score.mean for row in here if row is not None]
        mean = sum(scores) / len(scores) if len(scores) == len(here) else None
        cells.append([name, *map(_over_pairs, here), mean])
    caption = (
        f"{benchmark}: mean over pairs, with the lowest and the highest pair in brackets; per cent."
    )
    columns = ["treatment", *rows, "mean"]
    return Table(columns, cells, caption=_honest(caption, names))


def in_detail(one: Condition) -> Table:
    """Treatments down: score, spread over pairs, differences to the default and chosen swaps."""
    rows = one.rows
    references = [name for name in (DEFAULT, CHOSEN) if name in rows]
    columns = ["treatment", "score, %", "lowest pair", "highest pair",
               *(f"to the {name}" for name in references)]  # fmt: skip
    cells: list[list[Any]] = [
        [name, row.score, row.lowest, row.highest,
         *(difference_words(row.against.get(reference)) for reference in references)]
        for name, row in rows.items()
    ]  # fmt: skip
    caption = (
        f"{one.benchmark}, {one.language}: {next(iter(rows.values())).score.n} documents, mean "
        f"over {_pairs(one)} with its 95% bootstrap interval over documents, and paired "
        "differences; *: clear of zero."
    )
    return Table(columns, cells, caption=_honest(caption, list(rows)))


def ranks_over(conditions: Sequence[Condition]) -> Friedman | None:
    """Friedman's test over languages and benchmarks; None where it says nothing.

    A condition is the mean over its pairs: pairs share experts and documents, so they are no
    conditions of their own (paper 2, section 5, has models and languages).
    """
    values = [{name: row.score.mean for name, row in one.rows.items()} for one in conditions]
    common = set.intersection(*map(set, values)) - {BEST}
    names = [name for name in values[0] if name in common]
    if len(values) < 2 or len(names) < 3:
        return None
    return friedman({name: [one[name] for one in values] for name in names})


def rank_table(ranked: Friedman) -> Table:
    """Treatments by their mean rank, the best first."""
    cells = [
        [name, f"{rank:.2f}"]
        for name, rank in zip(ranked.treatments, ranked.mean_ranks, strict=True)
    ]
    caption = (
        f"Friedman over {ranked.conditions} conditions: p = {ranked.p:.3g}, Kendall's W = "
        f"{ranked.kendall_w:.2f}; mean ranks further apart than {ranked.critical_difference:.2f} "
        "differ (Nemenyi)."
    )
    return Table(["treatment", "mean rank"], cells, caption=caption)


def _over_pairs(row: ConditionScores | None) -> str | float | None:
    if row is None:
        return None
    if row.lowest == row.highest:
        return row.score.mean
    return f"{100 * row.score.mean:.1f} ({100 * row.lowest:.1f}\u2013{100 * row.highest:.1f})"


def _honest(caption: str, names: Sequence[str]) -> str:
    return f"{caption} {FLATTERED}" if BEST in names else caption
