"""Contact with the inside of lm-eval; a test of its own holds each promise."""

import os
from collections.abc import Mapping
from typing import Any

from layerswap.ground.errors import EvaluationError


def refuse_programs(marks: Mapping[str, Any]) -> None:
    """Refuse tasks whose answers lm-eval runs as programs, by the key `unsafe_code` of each.

    A task without the key is refused too, because a library that renames it would run programs.
    """
    os.environ["HF_ALLOW_CODE_EVAL"] = "0"  # without it the metric `code_eval` runs no answer
    for name, mark in marks.items():
        if mark is None:
            raise EvaluationError(f"{name}: this lm-eval does not tell which tasks run programs")
        if mark:
            raise EvaluationError(
                f"{name}: lm-eval runs the programs that a model writes outside the sandbox, so it "
                "is not evaluated here; --suite mbpp --allow-code runs MBPP's in it"
            )
