"""The one family of exceptions that layerswap raises on purpose."""

from __future__ import annotations


class LayerswapError(Exception):
    """Something the user can mend: the message is one clear line, without a traceback.

    The text says what is wrong, where, and what to do. Inner code raises the bare fact;
    the function at the room's boundary adds the context once, with `within`.
    """

    def within(self, context: str) -> LayerswapError:
        """The same error with `context` in front, of the same class.

        Example: `raise error.within(f"{folder}") from None` gives `"merged: disk is full"`.
        """
        return type(self)(f"{context}: {self}")


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
