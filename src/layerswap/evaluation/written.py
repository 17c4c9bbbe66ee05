"""Evaluates a merged folder with one of lm-eval's own models."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from layerswap.evaluation.settings import EvaluationSettings, parse_arguments
from layerswap.ground.errors import EvaluationError, one_line
from layerswap.merge.folder import plan_tokenizer
from layerswap.merge.plan import Plan

BATCH = 1024
"""Requests for vLLM at a time: with lm-eval's `auto` it divides by zero where bars are off."""
Run = Callable[[Any], dict[str, Any]]


def with_folder(
    name: str, plan: Plan, settings: EvaluationSettings, scratch: Path | None, run: Run
) -> dict[str, Any]:
    """Write a composition into `scratch`, open it as lm-eval's model `name`, and run that.

    The folder shares blocks with the experts where the filesystem can. It is removed afterwards,
    and the model is freed, since the next one needs its memory.
    """
    from lm_eval.api.registry import get_model

    if plan.format.name != "safetensors":
        raise EvaluationError(f"the engine {name} needs full weights; add bake: true to the recipe")
    # Its log lines would be among the results on standard output.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    tokenizer = settings.with_chat_template(plan_tokenizer(plan))
    size = BATCH if settings.batch_size == "auto" else settings.batch_size
    arguments = {"dtype": settings.dtype or "auto", "batch_size": size}
    arguments |= parse_arguments(settings.engine_args) | {"trust_remote_code": False}
    with TemporaryDirectory(prefix="merged-", dir=scratch) as folder:
        merged = plan.save(Path(folder) / "merged")
        if settings.apply_chat_template:
            tokenizer.save_pretrained(merged)
        try:
            model = get_model(name)(pretrained=str(merged), **arguments)
        except ImportError as error:
            why = f"needs vLLM ({error}), in an environment as in docs/evaluation.md"
            raise EvaluationError(f"the engine {name} {why}") from None
        except (ValueError, RuntimeError, TypeError) as error:
            why = one_line(error, 300)
            raise EvaluationError(f"the engine {name} does not start: {why}") from None
        try:
            return run(model)
        finally:
            del model
            gc.collect()
