"""Contact with the inside of lm-eval; a test of its own holds each promise."""

from typing import Any


def runs_code(task: Any) -> bool:
    """True if lm-eval runs answers to a task as code, which it does only if that is allowed."""
    return bool(getattr(task, "UNSAFE_CODE", False))


def is_too_long(error: AssertionError) -> bool:
    """True if a text does not fit into a model's context: this has no error class of its own."""
    return "maximum sequence length" in str(error)


def shows_scored_documents(task: Any) -> bool:
    """True if exemplars come from the scored documents, so that one may show its own answer."""
    exemplars = getattr(task, "fewshot_cfg", None)
    if exemplars is None or exemplars.split is not None or exemplars.samples is not None:
        return False
    return not (task.has_training_docs() or task.has_validation_docs())


def exemplars_of(task: Any) -> int | None:
    """Number of documents that one prompt may take its exemplars from; None if unknown."""
    pool = getattr(getattr(task, "sampler", None), "df", None)
    exemplars = getattr(task, "fewshot_cfg", None)
    if exemplars is None or not isinstance(pool, list):
        return None
    return len(pool) - int(exemplars.split == task.config.test_split)
