"""`layerswap study`: run a whole experiment from one file, and report it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from layerswap.cli import commands, output

if TYPE_CHECKING:
    from layerswap.study.steps import Graph


WATCH = 2.0
"""Seconds between two reads of a study's state."""
LARGE = 100.0
"""Disk of a study, GB, above which its plan lists ways to save disk."""
app = commands.group("Run a whole experiment from one file.")
StudyFile = Annotated[
    str, typer.Argument(metavar="STUDY.yaml", help="Study file, or the name of a ready study.")
]

Where = Annotated[
    str | None,
    typer.Option(
        "--on", show_default="here", help="Executor: slurm, ray, or a Ray cluster's address."
    ),
]


@commands.command(app)
def run(
    study: StudyFile,
    *,
    out: Annotated[
        str, typer.Option(help="Folder or fsspec URL of the study. Finished steps are kept.")
    ],
    on: Where = None,
    keep_checkpoints: Annotated[
        Literal["all", "selected"] | None,
        typer.Option(show_default="the study's", help="Checkpoints to keep."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the steps and their estimated cost, and exit.")
    ] = False,
) -> None:
    """Train, select, compose, evaluate and compare; resume where an earlier run stopped.

    Writes every step, the tables and the report into the folder OUT.

    Example: layerswap study run study.yaml --out study
    """
    from layerswap.cli.tables import amount, plan_table
    from layerswap.study.estimate import cost_study
    from layerswap.study.journal import StudyJournal
    from layerswap.study.plan import plan_study
    from layerswap.study.spec import find_study
    from layerswap.study.storage import place
    from layerswap.versions import missing_of

    spec, folder = find_study(study)
    if keep_checkpoints is not None:
        spec = spec.model_copy(update={"keep_checkpoints": keep_checkpoints})
    graph = plan_study(spec, folder)
    if dry_run:
        root, storage = place(out)
        if not (missing_of("train") or missing_of("eval")):
            from layerswap.study import preflight

            preflight.refuse_other_study(graph, root, storage)
            preflight.check_plan(graph)
        done = StudyJournal(root, graph, storage).finished()
        costs = cost_study(spec, graph)
        output.say(plan_table(graph, costs, done))
        if costs.disk_gb + costs.passing_gb > LARGE and spec.keep_checkpoints == "all":
            less = spec.model_copy(update={"keep_checkpoints": "selected"})
            smaller = cost_study(less, plan_study(less, folder))
            disk_gb = amount(smaller.disk_gb + smaller.passing_gb)
            output.say(f"with --keep-checkpoints selected: about {disk_gb} GB of disk")
    else:
        run_file(graph, out, on=on)


def run_file(graph: Graph, out: str, *, on: str | None) -> None:
    """Run a planned study, and print its states and results."""
    from layerswap.cli.tables import status_table
    from layerswap.errors import StudyError
    from layerswap.study import preflight
    from layerswap.study.journal import STEPS, StudyJournal, read_journal
    from layerswap.study.report import BEST, FinishedSteps
    from layerswap.study.runner import run_graph
    from layerswap.study.step_functions import step_functions
    from layerswap.study.storage import place
    from layerswap.versions import need_extras

    need_extras("a study", "train", "eval")
    root, storage = place(out)
    preflight.refuse_other_study(graph, root, storage)
    preflight.check_plan(graph)
    preflight.check_here(StudyJournal(root, graph, storage).left(), device=on is None)
    executor = None
    if on is not None:
        from layerswap.study.runner import executor_of

        executor = executor_of(on, StudyJournal(root, graph).root / "jobs")
    summary = run_graph(
        graph, root, step_functions(), executor=executor, storage=storage,
        log=output.log
    )  # fmt: skip
    output.say(status_table(list(summary.records.values())))
    if summary.failed:
        raise StudyError(
            f"{len(summary.failed)} steps failed and {len(summary.blocked)} depend on them; the "
            "others are done. Run the command again to retry; to restart a step and those after "
            f"it, delete its folder in {root / STEPS}"
        )
    study = FinishedSteps(read_journal(root, storage))
    page = study.write()
    output.say(study.results.summary)
    output.say(f"wrote {page} and {root / BEST}/<language>.yaml")
    if study.settings["merge"]:
        _merge(root)
    else:
        output.say(f"next: layerswap study merge {root}")


def _merge(root: Path, languages: Sequence[str] = ()) -> None:
    from layerswap.study.report import merge_best

    for path in merge_best(root, languages, log=output.log):
        output.say(f"wrote {path}")


@commands.command(app)
def merge(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a study.")],
    language: Annotated[
        list[str] | None,
        typer.Option(show_default="all", help="Language as the study writes it. Repeatable."),
    ] = None,
) -> None:
    """Merge the selected composition of each language of a study.

    Writes a checkpoint with its card into DIR/merged/<language>.

    Example: layerswap study merge study
    """
    _merge(folder, language or ())


@commands.command(app, json=True)
def status(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder of a study, or its URL.")],
    watch: Annotated[
        bool, typer.Option("--watch", help="Print the running steps until none runs.")
    ] = False,
) -> None:
    """Show the state of every step of a study, its progress, or the reason of its failure.

    Prints a table; nothing is written.

    Example: layerswap study status study
    """
    from layerswap.cli.tables import status_table
    from layerswap.study.journal import read_journal
    from layerswap.study.storage import place

    journal = read_journal(*place(folder))
    records = journal.status()
    shown: dict[str, str] = {}
    while watch and any(record.state == "running" for record in records):
        for record in records:
            if record.state == "running" and shown.get(record.name) != record.progress:
                shown[record.name] = record.progress
                output.log(f"{record.name}, {record.seconds:.0f} s: {record.progress}")
        time.sleep(WATCH)
        records = journal.status()
    keys = ("state", "seconds", "why", "blocked_by", "since", "progress")
    steps = [
        {"step": record.name, **{key: getattr(record, key) for key in keys}} for record in records
    ]
    output.finish("study status", {"steps": steps}, [status_table(records)])


@commands.command(app)
def report(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder of a study, or its URL.")],
) -> None:
    """Write the report of a study: report.html, tables (Markdown, LaTeX) and figures.

    Covers the finished steps of an unfinished study. Writes into the study's folder.

    Example: layerswap study report study
    """
    from layerswap.study.report import write_study_report
    from layerswap.study.storage import place

    output.say(f"wrote {write_study_report(*place(folder))}")
