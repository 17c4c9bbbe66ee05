"""The one family of exceptions that layerswap raises on purpose."""

from __future__ import annotations

from unicodedata import category


class LayerswapError(Exception):
    """Something the user can mend: the message is one clear line, without a traceback.

    The text says what is wrong, where, and what to do. Inner code raises the bare fact;
    the function at the room's boundary adds the context once, with `within`.

    Args:
        lines: the message; several for several mistakes. What no line can hold, such as a line
            break in a name from a file, is escaped, so that no text forges another line.
    """

    def __init__(self, *lines: object) -> None:
        super().__init__(*(visible(str(line)) for line in lines))

    def __str__(self) -> str:
        return "\n".join(self.args)

    def within(self, context: str) -> LayerswapError:
        """The same error with `context` in front, of the same class.

        Example: `raise error.within(f"{folder}") from None` gives `"merged: disk is full"`.
        """
        return type(self)(f"{context}: {self.args[0] if self.args else ''}", *self.args[1:])


class CheckpointError(LayerswapError):
    """A checkpoint that cannot be read safely, or does not say what it is."""


class RecipeError(LayerswapError):
    """A recipe, or a command line, that asks for something impossible."""


class MergeError(LayerswapError):
    """Checkpoints that do not fit together, or an output that cannot be written."""


class EvaluationError(LayerswapError):
    """A model, a request or a setting that cannot be evaluated."""


class DataError(LayerswapError):
    """Training data that cannot be had, or is not what a mix says that it is."""


class TrainingError(LayerswapError):
    """Training that cannot be begun or gone on with."""


class StudyError(LayerswapError):
    """A study that cannot be planned, or whose folder is not its own."""


BIDI_CONTROLS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def visible(text: str) -> str:
    r"""`text` with control characters escaped, so that a name cannot forge a line or a colour.

    Escapes control characters, line separators, lone surrogates and changes of direction. Letters
    of every script stay as they are.

    Example: `visible("a\nb")` gives `"a\\nb"`.
    """
    return "".join(
        c.encode("unicode_escape").decode()
        if category(c) in ("Cc", "Cs", "Zl", "Zp") or c in BIDI_CONTROLS
        else c
        for c in text
    )
