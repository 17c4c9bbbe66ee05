"""`layerswap study`: a whole experiment from one file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from layerswap.study.steps import Graph

app = typer.Typer(no_args_is_help=True, help="A whole experiment from one file, never done twice.")
StudyFile = Annotated[
    str, typer.Argument(metavar="STUDY.yaml", help="A file, or the name of a ready study.")
]

Where = Annotated[
    str | None,
    typer.Option("--on", help="`ray`, or the address of a Ray cluster; here if not given."),
]


@app.command()
def run(
    study: StudyFile,
    *,
    out: Annotated[
        str,
        typer.Option(
            help="The folder of the study, or the URL of one (fsspec); an earlier run goes on."
        ),
    ],
    on: Where = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say which steps there are, and their cost.")
    ] = False,
) -> None:
    """Train, select, compose, judge and compare; what is done is not done again.

    Example: layerswap study run study.yaml --out study
    """
    from layerswap.cli.tables import plan_table
    from layerswap.study.plan import plan_study
    from layerswap.study.spec import find_study
    from layerswap.versions import missing_of

    spec, folder = find_study(study)
    graph = plan_study(spec, folder)
    if dry_run:
        if not (missing_of("train") or missing_of("eval")):
            from layerswap.study.preflight import check_plan

            check_plan(graph)
        typer.echo(plan_table(graph))
    else:
        run_file(graph, out, on=on)


def run_file(graph: Graph, out: str, *, on: str | None) -> None:
    """Run a planned study and show how it ended."""
    from layerswap.cli.tables import status_table
    from layerswap.errors import StudyError
    from layerswap.study import preflight
    from layerswap.study.journal import STEPS, StudyJournal
    from layerswap.study.report import write_study_report
    from layerswap.study.runner import run_graph, status
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
        from layerswap.study.ray_executor import OnRay

        executor = OnRay(None if on == "ray" else on)
    summary = run_graph(
        graph, root, step_functions(), executor=executor, storage=storage,
        log=lambda line: typer.echo(line, err=True),
    )  # fmt: skip
    typer.echo(status_table(status(StudyJournal(root, graph, storage))))
    if summary.failed:
        raise StudyError(
            f"{len(summary.failed)} steps failed and {len(summary.blocked)} need them; the others "
            "are done. Run it again to try them again; a step whose folder in "
            f"{root / STEPS} is deleted begins anew, with what follows it"
        )
    typer.echo(f"see {write_study_report(root, storage)}")


@app.command()
def status(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="The folder of a study, or its URL.")
    ],
) -> None:
    """Show what is done, what failed and why, and what is left.

    Example: layerswap study status study
    """
    from layerswap.cli.tables import status_table
    from layerswap.study.journal import read_journal
    from layerswap.study.runner import status as states
    from layerswap.study.storage import place

    typer.echo(status_table(states(read_journal(*place(folder)))))
