"""The command line: one module per command, no logic of its own.

Exit codes: 0 done, 2 the user's mistake (one clear line on standard error), 1 ours (a traceback).
"""

from __future__ import annotations

import errno
import sys
import traceback
from typing import Annotated

import typer

from layerswap.checkpoint.strict_json import clipped
from layerswap.cli import (
    adapters,
    composability,
    data,
    delta,
    evaluate,
    fisher,
    freeze_or_revert,
    instruct,
    lab,
    linearity,
    merge,
    options,
    output,
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
from layerswap.errors import LayerswapError, visible

app = typer.Typer(
    name="layerswap",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
options.command(app, "quickstart")(quickstart.quickstart)
options.command(app, "merge", json=True)(merge.merge)
options.command(app, "adapters", json=True)(adapters.adapters)
options.command(app, "plan", json=True)(plan.plan)
options.command(app, "instruct", json=True)(instruct.instruct)
options.command(app, "data")(data.data)
options.command(app, "train")(train.train)
options.command(app, "select")(select.select)
options.command(app, "freeze-or-revert")(freeze_or_revert.freeze_or_revert)
options.command(app, "sweep", json=True)(sweep.sweep)
options.command(app, "eval", json=True)(evaluate.evaluate)
options.command(app, "compare", json=True)(evaluate.compare)
options.command(app, "report")(report.report)
options.command(app, "composability")(composability.composability)
options.command(app, "verify", json=True)(verify.verify)
options.command(app, "fisher")(fisher.fisher)
options.command(app, "delta", json=True)(delta.delta)
options.command(app, "linearity")(linearity.linearity)
options.command(app, "revert")(revert.revert)
options.command(app, "suggest", json=True)(suggest.suggest)
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
    """Compose fine-tuned language models layer by layer: task in the middle, language outside."""


def main() -> None:
    """Entry point of the `layerswap` command."""
    try:
        sys.exit(app(prog_name="layerswap", standalone_mode=False))
    except LayerswapError as error:
        if output.settings.verbose:
            traceback.print_exc()
        _fail(str(error))
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        _fail(f"{clipped(str(error.filename))}: the name is too long for a file")
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
        typer.echo(f"error: {visible(line)}", err=True)
    sys.exit(2)
