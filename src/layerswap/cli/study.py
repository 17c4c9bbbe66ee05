"""`layerswap study`: run a whole experiment from one file, and report it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from layerswap.cli import commands, options, output
from layerswap.ground.types import counted

if TYPE_CHECKING:
    from layerswap.study.estimate import StudyCosts
    from layerswap.study.runner import Executor
    from layerswap.study.steps import Graph, Step


LAST_LINES = 5
"""Lines of a failed step's log that the status shows."""
app = commands.group("Run a whole experiment from one file.")
Where = Annotated[
    str | None,
    Option("--on", show_default="here", help="Executor: slurm, ray, or a Ray cluster's address."),
]


@commands.command(app)
def run(
    study: str,
    *,
    out: Path,
    on: Where = None,
    device: str | None = None,
    allow_code: options.AllowCode = False,
    dry_run: bool = False,
) -> None:
    """Train, select, compose, evaluate and compare; resume where an earlier run stopped.

    Writes every step, the tables and the report into the folder OUT.

    Example: layerswap study run study.yaml --out study

    Options:
        study STUDY.yaml: Study file, or the name of a ready study.
        out: Folder of the study. Finished steps are kept.
        device DEVICE: Device to evaluate on: cpu, cuda, mps or xpu. (default: the study's)
        dry_run: Print the steps and their estimated cost, and exit.
    """
    from layerswap.cli.tables import plan_table
    from layerswap.merge.metadata import study_uses
    from layerswap.study.estimate import cost_study, read_speed
    from layerswap.study.journal import StudyJournal
    from layerswap.study.plan import plan_study
    from layerswap.study.spec import find_study
    from layerswap.versions import missing_of

    spec, folder = find_study(study)
    if device is not None:
        spec = spec.model_copy(update={"device": device})
    if allow_code:
        evaluate = spec.evaluate.model_copy(update={"allow_code": True})
        spec = spec.model_copy(update={"evaluate": evaluate})
    graph = plan_study(spec, folder)
    done = StudyJournal(out, graph).finished()
    costs = cost_study(spec, graph, read_speed(folder, spec.device), done)
    for note in spec.notes:
        output.log(f"note: {note}")
    if dry_run:
        if not (missing_of("train") or missing_of("eval")):
            from layerswap.study import preflight

            preflight.refuse_other_study(graph, out)
            preflight.check_plan(graph)
            left = StudyJournal(out, graph).left()
            preflight.check_data(left, fetch=False, log=output.log)
        output.say(plan_table(graph, costs, done))
        output.suggest("study", "run", *(word for word in sys.argv[3:] if word != "--dry-run"))
        return
    _run(graph, out, on, costs, spec.slurm)
    if not _suggest_verify(out):
        output.suggest("study", "merge", out)
    for best in sorted(out.glob("best/*.yaml"))[:1]:
        for words in study_uses(out, best.stem):
            output.suggest(*words)


def _run(
    graph: Graph, root: Path, on: str | None, costs: StudyCosts, slurm: Mapping[str, Any]
) -> None:
    """Run a planned study, and print its states and results; `slurm` are its parameters."""
    from layerswap.cli.tables import status_table
    from layerswap.ground.errors import StudyError
    from layerswap.study.journal import STEPS, StudyJournal, read_journal
    from layerswap.study.kinds import step_functions
    from layerswap.study.report import BEST, FinishedSteps, study_opening, write_study_report
    from layerswap.study.runner import run_graph
    from layerswap.versions import need_extras

    need_extras("a study", "train", "eval")
    output.log(f"estimate: {costs}")
    output.log(f"checking {len(graph)} steps: files, columns, settings and the device")
    from layerswap.study import preflight

    preflight.refuse_other_study(graph, root)
    preflight.check_plan(graph)

    def page_so_far(step: Step) -> None:
        if step.kind == "evaluate":
            with suppress(StudyError):  # no reason for the study to fail
                output.log(f"results so far: {write_study_report(root)}")

    try:
        left = StudyJournal(root, graph).left()
        preflight.check_here(left, device=on is None, log=output.log)
        executor: Executor | None = None
        if on == "slurm":
            from layerswap.study.on_slurm import OnSlurm

            jobs = StudyJournal(root, graph).root / "jobs"
            executor = OnSlurm(jobs, slurm, costs.hours)
        elif on is not None:
            from layerswap.study.on_ray import OnRay

            executor = OnRay(None if on == "ray" else on)
        summary = run_graph(
            graph, root, step_functions(), executor=executor, log=output.log, hours=costs.hours,
            ended=page_so_far,
        )  # fmt: skip
    except KeyboardInterrupt:
        output.log(f"stopped; run the same command again to resume in {root}")
        raise
    output.say(status_table(list(summary.records.values())))
    if summary.failed:
        raise StudyError(
            f"{counted(len(summary.failed), 'step')} failed, and {len(summary.blocked)} that need "
            "their output did not run; the others are done. Run the command again to retry; to "
            f"restart a step and those after it, delete its folder in {root / STEPS}"
        )
    study = FinishedSteps(read_journal(root))
    page = study.write()
    for part in study.results.parts:
        alone = part.result and len(study.results.by_benchmark[part.result.benchmark]) == 1
        if part.kind == "overview" or (part.kind == "scores" and alone):
            output.say(part.table)
    for line in study_opening(study.results.benchmarks, root):
        output.say(line)
    output.say(f"wrote {page} and {root / BEST}/<language>.yaml")
    if study.settings.merge:
        _merge(root)


def _merge(root: Path, languages: Sequence[str] = (), model: str | None = None) -> None:
    from layerswap.study.report import merge_models

    for path in merge_models(root, languages, model, log=output.log):
        output.say(f"wrote {path}")


@commands.command(app, name="list")
def list_() -> None:
    """List the ready studies: their data, base and estimated cost.

    Prints a table; nothing is written.

    Example: layerswap study list
    """
    from layerswap.ground.types import duration
    from layerswap.report.tables import Table
    from layerswap.study.estimate import cost_study
    from layerswap.study.plan import plan_study
    from layerswap.study.spec import find_study, ready_studies

    rows: list[list[Any]] = []
    for name in ready_studies():
        spec, folder = find_study(name)
        spec = spec.model_copy(update={"device": "cuda"})
        costs = cost_study(spec, plan_study(spec, folder))
        task = spec.task.data if isinstance(spec.task.data, str) else "files"
        rows.append([name, task, ", ".join(spec.languages), spec.base,
                     duration(3600 * sum(costs.hours.values())),
                     f"{costs.disk_gb:,.1f}"])  # fmt: skip
    columns = ["study", "task data", "languages", "base", "time on an A100", "disk, GB"]
    output.say(Table(columns, rows, "Estimates, with the checkpoints that the study keeps."))


@commands.command(app)
def show(name: str) -> None:
    """Print the YAML of a ready study.

    Prints to standard output; redirect it into a file to edit it.

    Example: layerswap study show headline-transfer

    Options:
        name: Name of a ready study.
    """
    from layerswap.study.spec import ready_study

    for line in ready_study(name).read_text("utf-8").splitlines():
        output.say(line)


@commands.command(app)
def merge(folder: Path, *, language: list[str] | None = None, model: str | None = None) -> None:
    """Merge the selected model of each language, or the model named by --model.

    Writes a checkpoint with its card into DIR/merged/<language>.

    Example: layerswap study merge study

    Options:
        folder DIR: Folder of a study.
        language: Language as the study writes it. Repeatable. (default: all)
        model: Name of a model in the study's tables, such as soup. (default: the selected one)
    """
    _merge(folder, language or (), model)
    _suggest_verify(folder)


def _suggest_verify(study: Path) -> bool:
    """Name the check of a merged model of a study; False if there is none."""
    folder = next(iter(sorted(study.glob("merged/*"))), None)
    if folder is not None:
        output.suggest("verify", folder)
    return folder is not None


@commands.command(app, json=True)
def status(folder: Path) -> None:
    """Show the state of every step of a study, its job, its progress, or why it failed.

    Prints a table; nothing is written.

    Example: layerswap study status study

    Options:
        folder DIR: Folder of a study.
    """
    from layerswap.cli.tables import status_table
    from layerswap.study.journal import read_journal
    from layerswap.study.on_slurm import jobs_of, last_lines

    journal = read_journal(folder)
    records = journal.status()
    keys = ("state", "seconds", "why", "blocked_by", "since", "progress")
    jobs = jobs_of(journal)
    steps: list[dict[str, Any]] = []
    lines: list[str] = []
    for record in records:
        job, log = jobs.get(record.name), journal.log(record.name)
        if job and (record.state == "running" or record.why.startswith(f"job {job.job} ")):
            log = Path(job.log)
        last = last_lines(log, LAST_LINES) if record.state == "failed" else []
        steps.append({
            "step": record.name, **{key: getattr(record, key) for key in keys},
            "job": asdict(job) if job else None, "log": str(log), "last_lines": last,
        })  # fmt: skip
        if record.state in ("running", "failed") and log.exists():
            lines += [f"{record.name}: {log}", *(f"  {line}" for line in last)]
    output.finish("study status", {"steps": steps}, [status_table(records, jobs), *lines])


@commands.command(app)
def report(folder: Path) -> None:
    """Write the report of a study: report.html, tables (Markdown, LaTeX) and figures.

    Covers the finished steps of an unfinished study. Writes into the study's folder.

    Example: layerswap study report study

    Options:
        folder DIR: Folder of a study.
    """
    from layerswap.study.report import write_study_report

    output.say(f"wrote {write_study_report(folder)}")
    output.suggest("study", "merge", folder)
