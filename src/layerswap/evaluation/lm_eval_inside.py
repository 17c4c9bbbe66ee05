"""Contact with the inside of lm-eval; a test of its own holds each promise."""

from typing import Any


def runs_code(task: Any) -> bool:
    """True if lm-eval runs answers to a task as code, which it does only if that is allowed."""
    return bool(getattr(task, "UNSAFE_CODE", False))


def is_too_long(error: AssertionError) -> bool:
    """True if a text does not fit into a model's context: this has no error class of its own."""
    return "maximum sequence length" in str(error)
