"""Tables of results for the terminal, one function per kind of result."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layerswap.ground.types import duration
from layerswap.report.tables import Number, Table

if TYPE_CHECKING:
    from layerswap.evaluation.preferences import Judgement
    from layerswap.study.estimate import StudyCosts
    from layerswap.study.journal import StepRecord
    from layerswap.study.on_slurm import JobState
    from layerswap.study.steps import Graph
    from layerswap.training.expert.select import FreezeOrRevert, Selection


def selection_table(selection: Selection) -> Table:
    """Checkpoints, the best first, with a mark on those to keep."""
    tasks = list(selection.ranked[0].scores)
    rows = [
        [candidate.folder, "keep" if candidate in selection.chosen else "",
         "" if candidate.loss is None else Number(candidate.loss, ".4f"),
         *(Number(candidate.scores[task], ".3f") for task in tasks)]
        for candidate in selection.ranked
    ]  # fmt: skip
    return Table(["checkpoint", "", "validation loss", *tasks], rows)


def plan_table(graph: Graph, costs: StudyCosts, done: Collection[str] = ()) -> Table:
    """The steps of a study, their needs, and their estimated time; `done` names finished steps."""
    rows: list[list[Any]] = [
        [step.name, "done" if step.name in done else
         duration(3600 * costs.hours[step.name]) if step.name in costs.hours else "",
         ", ".join(step.needs)]
        for step in graph
    ]  # fmt: skip
    before = f", {len(done)} of them done before; the others take" if done else ","
    takes = f"{before} {costs}" if len(done) < len(graph) else ", all of them done before"
    caption = f"{len(graph)} steps{takes}. Memory is without activations."
    return Table(["step", "time", "needs"], rows, caption)


def status_table(rows: Sequence[StepRecord], jobs: Mapping[str, JobState] | None = None) -> Table:
    """The steps of a study, their states, and the last Slurm job of each that had one."""
    done = sum(row.state == "done" for row in rows)
    jobs = jobs or {}
    cells = [
        [row.name, row.state, *([str(jobs.get(row.name, ""))] if jobs else []),
         "" if row.seconds is None else Number(row.seconds, ".1f"),
         f"since {row.since}: {row.progress}" if row.since else row.why]
        for row in rows
    ]  # fmt: skip
    columns = ["step", "state", *(["job"] if jobs else []), "seconds", "progress, or why"]
    return Table(columns, cells, f"{done} of {len(rows)} steps done")


def places_table(rows: Sequence[FreezeOrRevert]) -> Table:
    """Each partition frozen in training, and reset to the base after it (paper 2, table 2)."""
    tasks = list(rows[0].scores)
    cells: list[list[Any]] = [
        [row.partition or "", row.treatment, *(Number(row.scores[task], ".3f") for task in tasks)]
        for row in rows
    ]
    return Table(["partition", "rest of the model", *tasks], cells)


def mix_table(card: Mapping[str, Any]) -> Table:
    """The sources of a data card: rows read, dropped by each filter, and kept."""
    filters = [name for name, facts in card["filters"].items() if facts["dropped"]]
    rows = [
        [name, facts["looked_at"], facts["empty"] + facts["not_wanted"],
         *(facts["dropped"].get(title, 0) for title in filters), facts["kept"]]
        for name, facts in card["sources"].items()
    ]  # fmt: skip
    columns = ["source", "read", "left out", *filters, "kept"]
    words = [column.replace("_", " ") for column in columns]
    return Table(words, rows, "rows dropped by each filter, and rows kept")


def vote_table(judgement: Judgement) -> Table:
    """Preferences of speakers, a row for each pair of models."""
    rows: list[list[Any]] = [
        [f"{pair.first} against {pair.second}", pair.wins, pair.losses, pair.ties, pair.both_bad,
         pair.share] for pair in judgement.pairs
    ]  # fmt: skip
    columns = ["pair", "prompts won", "lost", "even", "votes both bad", "share won"]
    return Table(
        columns, rows,
        "% of decided prompts, with exact intervals (Clopper-Pearson) that hold together at 95%",
    )  # fmt: skip
