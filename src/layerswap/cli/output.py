"""Prints results on standard output and the rest on standard error, as the options ask."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from layerswap.errors import visible

SCHEMA = 1
"""Version of the JSON that commands print; see docs/reference/json.md."""


@dataclass
class Settings:
    """The output options of the command that runs.

    Attributes:
        quiet: print errors only.
        verbose: print what libraries log, and the traceback of an error.
        json: print one JSON document on standard output, and nothing else there.
    """

    quiet: bool = False
    verbose: bool = False
    json: bool = False


settings = Settings()


def say(text: object) -> None:
    """Print a result for people; nothing with --quiet or --json.

    Args:
        text: one line, in which line breaks are escaped; or what is drawn over several lines and
            escapes its own parts, such as a table or a plan.
    """
    if not settings.quiet and not settings.json:
        _echo(text)


def log(text: str) -> None:
    """Print a line of progress or a note on standard error; nothing with --quiet."""
    if not settings.quiet:
        _echo(text, err=True)


def finish(command: str, facts: Mapping[str, Any], texts: Sequence[object] = ()) -> None:
    """Print the result of a command: as JSON with --json, else as text, if it has any.

    Args:
        command: its name, such as `study status`.
        facts: plain data; each command's keys are those of docs/reference/json.md.
        texts: the same for people, as `say` takes it.
    """
    if settings.json:
        from layerswap.versions import __version__

        head = {"command": command, "schema": SCHEMA, "layerswap_version": __version__}
        typer.echo(json.dumps({**head, **facts}, indent=2, ensure_ascii=False))
    else:
        for text in texts:
            say(text)


def choose(*, quiet: bool, verbose: bool, as_json: bool) -> None:
    """Set the output options before a command runs."""
    settings.quiet, settings.verbose, settings.json = quiet, verbose, as_json
    if not verbose:
        # The bars of lm-eval, datasets and their like: the commands show their own progress.
        os.environ.setdefault("TQDM_DISABLE", "1")
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")


def _echo(text: object, *, err: bool = False) -> None:
    lines = [text] if isinstance(text, str) else str(text).split("\n")
    typer.echo("\n".join(map(visible, lines)), err=err)
