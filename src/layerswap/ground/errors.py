"""The exceptions that layerswap raises for mistakes that a user can fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unicodedata import category

LONGEST_LINE = 4000
"""Most characters of a line; names in files can have megabytes."""
BIDI_CONTROLS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class LayerswapError(Exception):
    """An error that the user can fix, shown as one clear line without a traceback.

    The message says what is wrong, where, and what to do. Inner code raises the bare fact, and the
    function at the room's boundary adds the context once, with `within` or `error_context`.

    Args:
        lines: the message; several lines for several mistakes. Line breaks and control characters
            in a line are escaped, so that no name from a file forges another line. Very long lines
            lose their middle.
    """

    def __init__(self, *lines: object) -> None:
        super().__init__(*(visible(_clipped(str(line))) for line in lines))

    def __str__(self) -> str:
        return "\n".join(self.args)

    def within(self, context: str) -> LayerswapError:
        """Return the same error with `context` in front, of the same class.

        Example: `raise error.within(f"{folder}") from None` gives `"merged: disk is full"`.
        """
        return type(self)(f"{context}: {self.args[0] if self.args else ''}", *self.args[1:])


@contextmanager
def error_context(context: str) -> Iterator[None]:
    """Put `context` in front of the errors that the block raises; see `LayerswapError.within`."""
    try:
        yield
    except LayerswapError as error:
        raise error.within(context) from None


class CheckpointError(LayerswapError):
    """A checkpoint that is unsafe to read, or contradicts itself."""


class RecipeError(LayerswapError):
    """A recipe, or a command line, that asks for something impossible."""


class MergeError(LayerswapError):
    """Checkpoints that do not fit together, or an output that cannot be written."""


class EvaluationError(LayerswapError):
    """A model, a request or a setting that cannot be evaluated."""


class DataError(LayerswapError):
    """Texts or tables that cannot be read, or differ from their description."""


class TrainingError(LayerswapError):
    """A training that cannot start or resume."""


class StudyError(LayerswapError):
    """A study that cannot be planned, or a folder of another study."""


def _clipped(line: str) -> str:
    half = LONGEST_LINE // 2
    return line if len(line) <= LONGEST_LINE else f"{line[:half]} … {line[-half:]}"


def one_line(error: object, limit: int = 200) -> str:
    """Return the message of a library's error on one line, of at most `limit` characters."""
    return " ".join(str(error).split())[:limit]


def visible(text: str) -> str:
    r"""Escape control characters, line separators, lone surrogates and changes of direction.

    Letters of every script stay as they are. No name can then forge a line or a colour.

    Example: `visible("a\nb")` gives `"a\\nb"`.
    """
    return "".join(
        c.encode("unicode_escape").decode()
        if category(c) in ("Cc", "Cs", "Zl", "Zp") or c in BIDI_CONTROLS
        else c
        for c in text
    )


def shortened(value: object) -> str:
    """Write a value on one line of at most 60 characters."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return visible(text if len(text) <= 60 else text[:57] + "...")
