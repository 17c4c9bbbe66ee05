"""`python -m research`: run the experiments on the papers' open questions on the lab."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from research.questions import Question

app = typer.Typer(no_args_is_help=True, help="Experiments on the lab behind docs/lab.md.")


@app.command()
def questions() -> None:
    """List the open questions of the papers, and the settings that each compares."""
    from research.questions import questions as every

    for name, question in every().items():
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
    from layerswap.versions import need_extras
    from research.questions import find

    need_extras("training", "train")
    for text in answered(find(question), out, seeds=seeds, n=n).values():
        typer.echo(text)


def answered(asked: Mapping[str, Question], out: Path, *, seeds: int, n: int) -> dict[str, str]:
    """Run the steps of some questions; return the tables of each as Markdown."""
    from layerswap.study.journal import StudyJournal
    from layerswap.study.runner import run_graph
    from research.answering import ANSWER, write_answer
    from research.pairs import make_base, score_pair
    from research.questions import plan

    graph = plan(asked, seeds=seeds, n=n)
    functions = {"base": make_base, "pair": score_pair, "answer": write_answer}
    if run_graph(graph, out, functions, log=lambda line: typer.echo(line, err=True)).failed:
        raise typer.Exit(1)
    folders = {name: StudyJournal(out, graph).folder(f"answer/{name}") for name in asked}
    return {
        name: (folder / ANSWER).with_suffix(".md").read_text("utf-8")
        for name, folder in folders.items()
    }


if __name__ == "__main__":
    app()
