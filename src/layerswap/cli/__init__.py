"""The command line: one module per group of commands, no logic of its own.

Exit codes: 0 done, 2 the user's mistake (one clear line on standard error), 1 ours (a traceback),
130 interrupted.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import signal
import sys
import threading
import traceback
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from layerswap.cli import commands, output
from layerswap.ground import system
from layerswap.ground.errors import LayerswapError, visible
from layerswap.versions import missing_import

if TYPE_CHECKING:
    from collections.abc import Callable
    from sys import UnraisableHookArgs


START, TRY, MERGE, TRAIN = "Start here", "Try it", "Merge experts", "Train experts"
EVALUATE, ANALYSE = "Choose and evaluate", "Analyse and experiment"
COMMANDS = {
    "quickstart": ("lab:quickstart", TRY, False),
    "new": ("new:new", START, False),
    "play": ("play:play", TRY, False),
    "plan": ("merge:plan", MERGE, True),
    "merge": ("merge:merge", START, True),
    "instruct": ("merge:instruct", MERGE, True),
    "revert": ("merge:revert", MERGE, False),
    "verify": ("merge:verify", MERGE, True),
    "deploy": ("deploy:deploy", START, True),
    "data": ("training:data", TRAIN, False),
    "train": ("training:train", TRAIN, False),
    "sweep": ("evaluate:sweep", EVALUATE, True),
    "eval": ("evaluate:evaluate", START, True),
    "compare": ("evaluate:compare", EVALUATE, True),
    "delta": ("analyse:delta", ANALYSE, True),
    "bases": ("bases:bases", ANALYSE, True),
}
"""Module and function, panel of the help, and `--json` of every command outside the groups."""
ANALYSES = ("linearity", "composability", "fisher", "freeze_or_revert", "select")


def application(only: str | None = None) -> typer.Typer:
    """The command line; with one command alone, if `only` names one, because each costs time."""
    app = typer.Typer(
        name="layerswap",
        cls=commands.PlainGroup,
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in [only] if only in COMMANDS else COMMANDS:
        where, panel, json = COMMANDS[name]
        module, _, function = where.partition(":")
        run = getattr(import_module(f"layerswap.cli.{module}"), function)
        commands.command(app, name, panel=panel, json=json)(run)
    if only not in COMMANDS:
        from layerswap.cli import analyse, ask, lab, study

        app.add_typer(ask.app, name="ask", rich_help_panel=START)
        app.add_typer(study.app, name="study", rich_help_panel=START)
        app.add_typer(lab.app, name="lab", rich_help_panel=TRY)
        analyses = commands.group("Run the papers' analyses of experts and merges.")
        app.add_typer(analyses, name="analyse", rich_help_panel=ANALYSE)
        for name in ANALYSES:
            commands.command(analyses, name.replace("_", "-"))(getattr(analyse, name))
    return app


def __getattr__(name: str) -> typer.Typer:
    if name != "app":
        raise AttributeError(name)
    globals()[name] = app = application()
    return app


INTERRUPTED = 130
"""Typer's exit code after Ctrl-C, as in shells."""


def _version(asked: bool) -> None:
    if asked:
        from layerswap.versions import __version__

        typer.echo(f"layerswap {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Compose fine-tuned language models layer by layer: task in the middle, language outside."""


def _interrupt_again(dropped: UnraisableHookArgs) -> None:
    """Repeat an interrupt that Python dropped because a finaliser was running."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        again = threading.Timer(0.1, system.interrupt_main)
        again.daemon = True
        again.start()
    else:
        sys.__unraisablehook__(dropped)


def main(loaded: Callable[[], object] = lambda: None) -> None:
    """Run the `layerswap` command; `loaded` is called when its modules are there."""
    # Pydantic would read the metadata of every installed package, in search of its plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # Threads that spin while they wait cost a third of the speed beside one other busy process, and
    # gain nothing without it (bench/RESULTS.md); read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Searching for cycles, at the end once more, takes a fifth of the time of a short command.
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)
    sys.unraisablehook = _interrupt_again
    warnings.showwarning = lambda message, *_, **__: output.log(f"warning: {message}")
    system.open_console()
    system.interrupt_on(signal.SIGTERM)
    try:
        app = application(next(iter(sys.argv[1:]), None))
        loaded()
        code = app(prog_name="layerswap", standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except LayerswapError as error:
        if output.settings.verbose:
            traceback.print_exc()
        _fail(*error.args)
    except ModuleNotFoundError as error:
        missing = missing_import(error)
        if missing is None or output.settings.verbose:
            raise
        _fail(*missing.args)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) and error.filename is None:
            # Python would write the remaining output again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            why = f"standard output or a file cannot be written ({error.strerror})"
            _fail(f"{why}; make room and run it again")
        if error.errno != errno.ENAMETOOLONG:
            raise
        from layerswap.ground.strict_json import clipped

        _fail(f"{clipped(str(error.filename))}: the name is too long for a file")
    except Exception as error:
        # A wrong option or argument; Typer would draw a box of several lines around it.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # whose message is the help
            typer.echo(describe(), err=True)
            sys.exit(2)
        # Pydantic, by which Typer reads a choice, begins its reason with these words.
        text = " ".join(describe().replace("Value error, ", "").split()).rstrip(".")
        more = " See" if text.endswith("?") else "; see"
        where = getattr(getattr(error, "ctx", None), "command_path", "layerswap")
        _fail(f"{text}{more} {where} --help")


def _fail(*lines: str) -> None:
    for line in lines:
        typer.echo(f"error: {visible(line)}", err=True)
    sys.exit(2)
