"""The tables of a study: treatments over pairs and languages, with intervals and ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from layerswap.errors import StudyError
from layerswap.evaluate.ranks import Friedman, friedman
from layerswap.report.page import Table
from layerswap.report.table_files import difference_words, write_tables
from layerswap.study.running import Context
from layerswap.study.scores import BEST, CHOSEN, Condition, Row, condition, read_judged
from layerswap.study.treatments import DEFAULT

TABLES, NUMBERS = "tables", "tables.json"
FLATTERED = f"{BEST}: chosen by the documents that it is judged on."


def write_study_tables(context: Context) -> None:
    """Write `tables.json`, `tables.md` and `tables.tex` from what was judged.

    Raises:
        StudyError: nothing was judged.
    """
    conditions = conditions_of(context.inputs, context.step.settings["development"])
    if not conditions:
        raise StudyError("nothing was judged")
    ranked = ranks_over(conditions)
    facts: dict[str, Any] = {"name": context.step.settings["name"], "languages": {}}
    for one in conditions:
        told = {name: asdict(row.score) | {"low pair": row.lowest, "high pair": row.highest}
                for name, row in one.rows.items()}  # fmt: skip
        facts["languages"].setdefault(one.language, {})[one.benchmark] = told
    if ranked is not None:
        facts["friedman"] = asdict(ranked)
    tables = tables_of(conditions, ranked)
    (context.folder / NUMBERS).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    write_tables(context.folder / TABLES, tables)


def conditions_of(folders: Mapping[str, Path], development: float) -> list[Condition]:
    """Every language on every benchmark, from the folders of the steps that judged them."""
    return [
        condition(step.partition("/")[2], benchmark, judged, development)
        for step, folder in folders.items()
        if step.startswith("judge/")
        for benchmark, judged in read_judged(folder / "results").items()
    ]


def tables_of(conditions: Sequence[Condition], ranked: Friedman | None) -> dict[str, Table]:
    """Every table of a study, by its heading."""
    found: dict[str, Table] = {}
    for benchmark in dict.fromkeys(one.benchmark for one in conditions):
        same = [one for one in conditions if one.benchmark == benchmark]
        if len(same) > 1:
            found[benchmark] = over_languages(benchmark, same)
        for one in same:
            found[f"{benchmark}, {one.language}"] = in_detail(one)
    if ranked is not None:
        found["Ranks"] = rank_table(ranked)
    return found


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
        "over pairs with its 95% bootstrap interval, and paired differences; *: clear of zero."
    )
    return Table(columns, cells, caption=_honest(caption, list(rows)))


def ranks_over(conditions: Sequence[Condition]) -> Friedman | None:
    """Friedman's test over languages, benchmarks and pairs; None where it says nothing."""
    values = [treatments for one in conditions for treatments in one.pairs.values()]
    common = set.intersection(*map(set, values)) - {BEST}
    names = [name for name in values[0] if name in common]
    if len(values) < 2 or len(names) < 3:
        return None
    return friedman({name: [float(one[name].mean()) for one in values] for name in names})


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
