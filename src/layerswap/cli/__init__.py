"""The command line: one module per command, no logic of its own.

Exit codes: 0 done, 2 the user's mistake (one clear line on standard error), 1 ours (a traceback).
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from layerswap.cli import (
    composability,
    data,
    delta,
    evaluate,
    fisher,
    freeze_or_revert,
    lab,
    linearity,
    merge,
    plan,
    quickstart,
    recipe,
    report,
    revert,
    select,
    study,
    suggest,
    sweep,
    train,
    verify,
)
from layerswap.errors import LayerswapError

app = typer.Typer(
    name="layerswap",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("quickstart")(quickstart.quickstart)
app.command("merge")(merge.merge)
app.command("plan")(plan.plan)
app.command("data")(data.data)
app.command("train")(train.train)
app.command("select")(select.select)
app.command("freeze-or-revert")(freeze_or_revert.freeze_or_revert)
app.command("sweep")(sweep.sweep)
app.command("eval")(evaluate.evaluate)
app.command("compare")(evaluate.compare)
app.command("report")(report.report)
app.command("composability")(composability.composability)
app.command("verify")(verify.verify)
app.command("fisher")(fisher.fisher)
app.command("delta")(delta.delta)
app.command("linearity")(linearity.linearity)
app.command("revert")(revert.revert)
app.command("suggest")(suggest.suggest)
app.add_typer(recipe.app, name="recipe")
app.add_typer(study.app, name="study")
app.add_typer(lab.app, name="lab")


def _version(asked: bool) -> None:
    if asked:
        from layerswap.versions import __version__

        typer.echo(f"layerswap {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Recompose fine-tuned language models layer by layer: task in the middle, language outside."""


def main() -> None:
    """Entry point of the `layerswap` command."""
    try:
        sys.exit(app(standalone_mode=False))
    except LayerswapError as error:
        _fail(str(error))
    except Exception as error:
        # A wrong option or argument; Typer would draw a box of several lines around it.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        # Without arguments the help has been shown, and nothing is left to say.
        text = " ".join(describe().split()).rstrip(".")
        _fail(f"{text}; see layerswap --help" if text else "")


def _fail(message: str) -> None:
    for line in message.splitlines():
        typer.echo(f"error: {line}", err=True)
    sys.exit(2)
