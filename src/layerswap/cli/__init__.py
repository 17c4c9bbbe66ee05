"""The command line: one module per group of commands, no logic of its own.

Exit codes: 0 done, 2 the user's mistake (one clear line on standard error), 1 ours (a traceback),
130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Annotated

import typer

from layerswap.cli import (
    evaluate,
    lab,
    measure,
    merge,
    options,
    output,
    recipe,
    study,
    sweep,
    training,
)
from layerswap.errors import LayerswapError, visible

app = typer.Typer(
    name="layerswap",
    cls=options.PlainGroup,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
options.command(app, "quickstart")(lab.quickstart)
options.command(app, "merge", json=True)(merge.merge)
options.command(app, "adapters", json=True)(merge.adapters)
options.command(app, "plan", json=True)(merge.plan)
options.command(app, "instruct", json=True)(merge.instruct)
options.command(app, "data")(training.data)
options.command(app, "train")(training.train)
options.command(app, "select")(training.select)
options.command(app, "freeze-or-revert")(training.freeze_or_revert)
options.command(app, "sweep", json=True)(sweep.sweep)
options.command(app, "eval", json=True)(evaluate.evaluate)
options.command(app, "compare", json=True)(evaluate.compare)
options.command(app, "composability")(measure.composability)
options.command(app, "verify", json=True)(merge.verify)
options.command(app, "fisher")(measure.fisher)
options.command(app, "delta", json=True)(measure.delta)
options.command(app, "linearity")(measure.linearity)
options.command(app, "revert")(merge.revert)
app.add_typer(recipe.app, name="recipe")
app.add_typer(study.app, name="study")
app.add_typer(lab.app, name="lab")


INTERRUPTED = 130
"""What Typer exits with after Ctrl-C, as shells do."""


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
    # Pydantic would read the metadata of every installed package, in search of its plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        code = app(prog_name="layerswap", standalone_mode=False)
        if code == INTERRUPTED:
            typer.echo("interrupted", err=True)
        sys.exit(code)
    except LayerswapError as error:
        if output.settings.verbose:
            traceback.print_exc()
        _fail(*error.args)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) and error.filename is None:
            # Python would try once more to write what is left, on its way out.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _fail(f"standard output cannot be written ({error.strerror}); files may be complete")
        if error.errno != errno.ENAMETOOLONG:
            raise
        from layerswap.checkpoint.strict_json import clipped

        _fail(f"{clipped(str(error.filename))}: the name is too long for a file")
    except Exception as error:
        # A wrong option or argument; Typer would draw a box of several lines around it.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # whose message is the help
            typer.echo(describe(), err=True)
            sys.exit(2)
        text = " ".join(describe().split()).rstrip(".")
        more = " See" if text.endswith("?") else "; see"
        _fail(f"{text}{more} layerswap --help")


def _fail(*lines: str) -> None:
    for line in lines:
        typer.echo(f"error: {visible(line)}", err=True)
    sys.exit(2)
