"""The tables of a study: treatments over pairs and languages, with intervals and ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from layerswap.errors import StudyError
from layerswap.evaluate.ranks import Friedman, friedman
from layerswap.report.page import Table
from layerswap.report.table_files import difference_words, write_tables
from layerswap.study.running import Context
from layerswap.study.scores import (
    BEST,
    CHOSEN,
    Abroad,
    Condition,
    Row,
    abroad,
    condition,
    read_judged,
)
from layerswap.study.treatments import DEFAULT, ELSEWHERE, RESULTS

TABLES, NUMBERS = "tables", "tables.json"
FLATTERED = f"{BEST}: chosen by the documents that it is judged on."


@dataclass(frozen=True)
class Findings:
    """What a study found.

    Attributes:
        conditions: every language on every benchmark.
        abroad: the models of every language in other languages.
    """

    conditions: list[Condition]
    abroad: list[Abroad]

    @cached_property
    def ranked(self) -> Friedman | None:
        """Friedman's test over the conditions; None where it says nothing."""
        return ranks_over(self.conditions)

    def own(self, other: Abroad) -> Condition | None:
        """The same models on the same benchmark in their own language, if it was asked there."""
        where = (other.language, other.benchmark)
        return next((c for c in self.conditions if (c.language, c.benchmark) == where), None)


def findings(folders: Mapping[str, Path], development: float) -> Findings:
    """What the steps found that judged the languages.

    Args:
        folders: of steps, by name.
        development: share of the documents to choose on.
    """
    conditions: list[Condition] = []
    others: list[Abroad] = []
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
            others += abroad(own, read_judged(folder / ELSEWHERE), development)
    return Findings(conditions, others)


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
    for other in found.abroad:
        rows = {name: {language: asdict(score) for language, score in row.items()}
                for name, row in other.rows.items()}  # fmt: skip
        facts.setdefault("elsewhere", {}).setdefault(other.language, {})[other.benchmark] = rows
    if found.ranked is not None:
        facts["friedman"] = asdict(found.ranked)
    (context.folder / NUMBERS).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    write_tables(context.folder / TABLES, tables_of(found))


def tables_of(found: Findings) -> dict[str, Table]:
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
    for other in found.abroad:
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


def heading_elsewhere(other: Abroad) -> str:
    """What the table of a language's models in other languages is called."""
    return f"{other.benchmark}, the models of {other.language} in other languages"


def elsewhere(other: Abroad, own: Condition | None) -> Table:
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


def _over_pairs(row: Row | None) -> str | float | None:
    if row is None:
        return None
    if row.lowest == row.highest:
        return row.score.mean
    return f"{100 * row.score.mean:.1f} ({100 * row.lowest:.1f}\u2013{100 * row.highest:.1f})"


def _honest(caption: str, names: Sequence[str]) -> str:
    return f"{caption} {FLATTERED}" if BEST in names else caption
