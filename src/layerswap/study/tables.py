"""The tables of a study: treatments over pairs, with intervals, and ranks over conditions."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from layerswap.errors import StudyError
from layerswap.evaluate.ranks import friedman
from layerswap.evaluate.result_files import Score, read_scores
from layerswap.evaluate.statistics import Interval, mean_interval, paired_difference
from layerswap.report.page import Report, Section, Table, write_report
from layerswap.study.running import Context

MARKDOWN, NUMBERS, PAGE = "tables.md", "tables.json", "report.html"
DEFAULT, CHOSEN, BEST = "swap, default", "swap, chosen on development", "swap, best (flattered)"

Values = npt.NDArray[np.float64]
Pairs = dict[str, dict[str, Values]]
"""By pair and treatment, one score per document; `all` for what is the same for all pairs."""


def write_tables(context: Context) -> None:
    """Write `tables.md`, `tables.json` and `report.html` from what was judged.

    Raises:
        StudyError: nothing was judged.
    """
    settings = context.step.settings
    facts: dict[str, Any] = {"name": settings["name"], "languages": {}}
    sections: list[Section] = []
    conditions: dict[str, dict[str, Values]] = {}
    for step, folder in context.inputs.items():
        language = step.partition("/")[2]
        for benchmark, pairs in _read(folder / "results").items():
            rows = summarise(pairs, settings["development"])
            told = {name: asdict(row.score) | {"low pair": row.lowest, "high pair": row.highest}
                    for name, row in rows.items()}  # fmt: skip
            facts["languages"].setdefault(language, {})[benchmark] = told
            sections.append(_section(language, benchmark, rows))
            for pair, values in _per_pair(pairs, settings["development"]).items():
                conditions[f"{language} {benchmark} {pair}"] = values
    if not sections:
        raise StudyError("nothing was judged")
    ranked = _ranked(conditions)
    if ranked is not None:
        facts["friedman"] = asdict(ranked)
        sections.append(_ranks_section(ranked))
    report = Report(title=settings["name"], lead=settings["description"] or settings["name"],
                    sections=sections)  # fmt: skip
    (context.folder / NUMBERS).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    (context.folder / MARKDOWN).write_text("\n\n".join(map(_markdown, sections)) + "\n", "utf-8")
    write_report(context.folder / PAGE, report)


class Row:
    """One treatment of one language.

    Args:
        values: by pair, one score per document.
        reference: the default swap's, by pair; None for itself.
    """

    def __init__(
        self, values: Mapping[str, Values], reference: Mapping[str, Values] | None
    ) -> None:
        means = [float(one.mean()) for one in values.values()]
        self.lowest, self.highest = min(means), max(means)
        whole = np.mean(list(values.values()), axis=0)
        self.score: Interval = mean_interval(whole)
        self.against: Interval | None = None
        if reference is not None:
            other = np.mean(list(reference.values()), axis=0)
            self.against = paired_difference(whole, other)


def summarise(pairs: Pairs, development: float) -> dict[str, Row]:
    """Every treatment's scores on the test documents, over all pairs.

    The composition of each pair is chosen on the first part of the documents, in an order drawn
    with a fixed seed, and all treatments are scored on the rest. The best on that rest is told
    too, as the papers do: it is flattered, since it was chosen by what it is judged on.

    Args:
        pairs: the scores.
        development: share of the documents to choose on.
    """
    table = _per_pair(pairs, development)
    names = list(dict.fromkeys(name for values in table.values() for name in values))
    by_name = {
        name: {pair: values[name] for pair, values in table.items() if name in values}
        for name in names
    }
    reference = by_name.get(DEFAULT)
    return {
        name: Row(values, None if name == DEFAULT else reference)
        for name, values in by_name.items()
    }


def _per_pair(pairs: Pairs, development: float) -> dict[str, dict[str, Values]]:
    """By pair, every treatment on the test documents; the swaps of the grid as two rows."""
    shared = pairs.get("all", {})
    found = {}
    for pair, treatments in pairs.items():
        if pair == "all":
            continue
        together = {**shared, **treatments}
        count = len(next(iter(together.values())))
        order = np.random.default_rng(0).permutation(count)
        cut = min(count - 1, max(1, round(development * count)))
        first, rest = order[:cut], order[cut:]
        kept = {n: v[rest] for n, v in together.items() if not n.startswith("swap ")}
        grid = {n: v for n, v in together.items() if n.startswith("swap ")}
        if grid:
            chosen = max(grid, key=lambda name: grid[name][first].mean())
            kept[CHOSEN] = grid[chosen][rest]
            kept[BEST] = max((v[rest] for v in grid.values()), key=lambda v: float(v.mean()))
        found[pair] = kept
    return found


def _read(folder: Any) -> dict[str, Pairs]:
    """By benchmark, the scores of every pair and treatment."""
    rows: dict[str, dict[str, list[Score]]] = defaultdict(lambda: defaultdict(list))
    for score in read_scores(folder):
        if score.main:
            rows[score.task if score.benchmark == "flores" else score.benchmark][
                score.model].append(score)  # fmt: skip
    found: dict[str, Pairs] = {}
    for benchmark, models in rows.items():
        pairs: Pairs = defaultdict(dict)
        for model, scores in models.items():
            pair, _, treatment = model.rpartition(": ")
            ordered = sorted(scores, key=lambda score: (score.task, score.document))
            # chrF is from 0 to 100; as a fraction it is shown in per cent like the others.
            scale = 100 if "chrf" in ordered[0].metric else 1
            values = np.array([score.score for score in ordered])
            pairs[pair or "all"][treatment] = values / scale
        found[benchmark] = dict(pairs)
    return found


def _ranked(conditions: Mapping[str, Mapping[str, Values]]) -> Any:
    """Friedman's test over languages, benchmarks and pairs; None where it says nothing."""
    common = set.intersection(*(set(values) for values in conditions.values())) - {BEST}
    names = [name for name in next(iter(conditions.values())) if name in common]
    if len(conditions) < 2 or len(names) < 3:
        return None
    return friedman(
        {name: [float(values[name].mean()) for values in conditions.values()] for name in names}
    )


def _section(language: str, benchmark: str, rows: Mapping[str, Row]) -> Section:
    columns = ["treatment", "score, %", "lowest pair", "highest pair", "to the default swap"]
    cells: list[list[Any]] = [
        [name, row.score, row.lowest, row.highest, "" if row.against is None else
         f"{100 * row.against.mean:+.1f} [{100 * row.against.low:+.1f}, "
         f"{100 * row.against.high:+.1f}]"]
        for name, row in rows.items()
    ]  # fmt: skip
    note = f"{BEST} is chosen by the documents that it is judged on." if BEST in rows else None
    return Section(f"{benchmark}, {language}", table=Table(columns, cells), note=note)


def _ranks_section(ranked: Any) -> Section:
    cells = [
        [name, f"{rank:.2f}"]
        for name, rank in zip(ranked.treatments, ranked.mean_ranks, strict=True)
    ]
    text = (
        f"Friedman over {ranked.conditions} conditions: p = {ranked.p:.3g}, Kendall's W = "
        f"{ranked.kendall_w:.2f}; mean ranks further apart than {ranked.critical_difference:.2f} "
        "differ (Nemenyi)."
    )
    return Section("Ranks", text, table=Table(["treatment", "mean rank"], cells))


def _markdown(section: Section) -> str:
    table = section.table
    assert table is not None, "every section of a study has a table"
    lines = [f"## {section.heading}", ""]
    if section.text:
        lines += [section.text, ""]
    lines += [f"| {' | '.join(table.columns)} |", "|---|" + "---:|" * (len(table.columns) - 1)]
    for row in table.rows:
        lines.append(f"| {' | '.join(map(_percent, row))} |")
    return "\n".join([*lines, "", section.note or ""]).rstrip()


def _percent(cell: Any) -> str:
    if isinstance(cell, Interval):
        return f"{100 * cell.mean:.1f} [{100 * cell.low:.1f}, {100 * cell.high:.1f}]"
    return f"{100 * cell:.1f}" if isinstance(cell, float) else str(cell)
