"""The page of a running study: its steps, losses and first results, written again and again."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from layerswap._types import Log, duration
from layerswap.errors import LayerswapError
from layerswap.report.charts import draw_losses
from layerswap.report.page import Report, Section, write_report
from layerswap.report.tables import Table
from layerswap.study.journal import PAGE, StudyJournal
from layerswap.study.report import FinishedSteps
from layerswap.study.step_functions import EXPERT
from layerswap.training.expert.save import CHECKPOINTS, read_training, trainer_state

EVERY, SHARE = 5.0, 0.05
"""Seconds between two writes, or more: writing takes at most this share of the time."""


@contextmanager
def live_page(journal: StudyJournal, log: Log) -> Iterator[None]:
    """Write the page of a study again and again while it runs; a browser reads it again by itself.

    A study without steps left keeps its page, and one in a storage has none until it ends.
    """
    if journal.storage is not None or "tables" not in journal.graph or not journal.left():
        yield
        return
    page, ended = _Page(journal), threading.Event()

    def write() -> None:
        pause = 0.0
        while not ended.wait(pause):
            started = time.monotonic()
            page.write(reload=round(EVERY))
            pause = max(EVERY, (time.monotonic() - started) / SHARE)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    log(f"progress, losses and first results: open {journal.root / PAGE} in a browser")
    try:
        yield
    finally:
        ended.set()
        thread.join()
        page.write(reload=0)


class _Page:
    """The page, with the results of the evaluations that have ended so far."""

    def __init__(self, journal: StudyJournal) -> None:
        self.journal = journal
        self.evaluated: list[str] = []
        self.results: list[Section] = []

    def write(self, *, reload: int) -> None:
        """Write the page."""
        with suppress(Exception):  # no reason for a study to fail
            report = progress_report(self.journal, self._results())
            write_report(self.journal.root / PAGE, replace(report, reload=reload))

    def _results(self) -> Sequence[Section]:
        evaluated = [n for n in self.journal.finished() if n.startswith("evaluate/")]
        if evaluated != self.evaluated:
            self.results = list(_results(FinishedSteps(self.journal)))
            self.evaluated = evaluated
        return self.results


def _results(study: FinishedSteps) -> Iterator[Section]:
    """The results so far, with empty columns for the languages that are not evaluated."""
    table = study.results.summary
    left = [one for one in study.settings["languages"] if one not in study.evaluations]
    rows = [[*row, *[None] * len(left)] for row in table.rows]
    yield Section("Results so far", table=Table([*table.columns, *left], rows, table.caption))
    yield from study.result_sections()


def progress_report(journal: StudyJournal, results: Sequence[Section] = ()) -> Report:
    """The steps of a study and the losses of its trainings, with sections of results so far."""
    records = journal.status()
    count = Counter(record.state for record in records)
    lead = []
    for record in records:
        passed = duration(record.seconds or 0)
        if record.state == "running":
            lead.append(f"{record.name} has run for {passed}: {record.progress}")
        elif record.state == "failed":
            lead.append(f"{record.name} failed after {passed}: {record.why}")
    losses = losses_of(journal)
    curves = Section("Losses of the trainings", figure=draw_losses(losses)) if losses else None
    name = journal.graph["tables"].settings["name"]
    rows = [[one.name, one.state, duration(one.seconds) if one.seconds else "",
             one.progress or one.why] for one in records]  # fmt: skip
    steps = Section("Steps", table=Table(["step", "state", "time", "progress"], rows))
    return Report(
        title=f"{name}: {count['done']} of {len(records)} steps done",
        lead="\n\n".join(lead) or "No step runs now.",
        sections=[*([curves] if curves else []), *results, steps],
    )


def losses_of(journal: StudyJournal) -> dict[str, list[tuple[int, float]]]:
    """The training loss by step of each training on this machine, running ones included."""
    found = {}
    for step in journal.graph:
        folder = journal.folder(step.name) / EXPERT
        if step.kind != "train" or not folder.is_dir():
            continue
        try:
            history = read_training(folder).get("log")
        except LayerswapError:
            continue
        if history is None:
            history = trainer_state(folder / CHECKPOINTS).get("log_history", [])
        points = [(int(one["step"]), float(one["loss"])) for one in history if "loss" in one]
        if points:
            found[step.name] = points
    return found
