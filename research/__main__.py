"""`python -m research`: run the experiments on the papers' open questions on the lab."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Experiments on the lab behind docs/questions.md.")


@app.command()
def questions() -> None:
    """List the open questions of the papers, and the settings that each compares."""
    from research.questions import questions as known

    for name, question in known().items():
        typer.echo(f"{name}: {question.title}")
        for setting in question.settings:
            typer.echo(f"    {setting.name}" + (" (a base of its own)" if setting.base else ""))


@app.command()
def ask(
    question: Annotated[
        list[str],
        typer.Argument(help="Names of questions; see `python -m research questions`."),
    ],
    *,
    out: Annotated[Path, typer.Option(help="Folder of the steps. Finished ones are kept.")],
    seeds: Annotated[int, typer.Option(min=1, help="Pairs of experts of each setting.")] = 2,
    n: Annotated[int, typer.Option(min=4, help="Development and test problems.")] = 500,
) -> None:
    """Run the experiment of an open question on the lab, and show its tables.

    Example: python -m research ask divergence rounds --out questions
    """
    from layerswap.study.journal import StudyJournal
    from layerswap.study.runner import run_graph
    from layerswap.versions import need_extras
    from research.answering import ANSWER
    from research.questions import find, plan, works

    need_extras("training", "train")
    graph = plan(find(question), seeds=seeds, n=n)
    run_graph(graph, out, works(), log=lambda line: typer.echo(line, err=True)).check()
    for name in question:
        folder = StudyJournal(out, graph).folder(f"answer/{name}")
        typer.echo((folder / ANSWER).with_suffix(".md").read_text("utf-8"))


if __name__ == "__main__":
    app()
