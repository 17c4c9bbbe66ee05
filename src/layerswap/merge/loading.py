"""Parts of a plan's model in memory: its tensors, its configuration and its tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.loading import (
    empty_model,
    load_config,
    load_generation_config,
    load_tokenizer,
    load_weights,
)
from layerswap.checkpoint.read import as_torch
from layerswap.errors import MergeError
from layerswap.merge.evaluate import ModelFacts
from layerswap.merge.layout import OutputTensor
from layerswap.merge.metadata import tokenizer_folder, write_configuration
from layerswap.merge.plan import Plan
from layerswap.merge.sources import check_unchanged
from layerswap.merge.writer import compute_tensor
from layerswap.versions import need_extras

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel


def checked_for_loading(plan: Plan) -> Plan:
    """The plan with its sources on the disk and unchanged, if the extras for models are there."""
    need_extras("a model in memory", "models")
    plan = plan.downloaded()
    check_unchanged(plan.stamps)
    return plan


def load_tensor(tensor: OutputTensor, facts: ModelFacts | None = None) -> torch.Tensor:
    """One output tensor as a torch tensor on the CPU, bit-equal to what `Plan.save` writes.

    Args:
        tensor: the tensor.
        facts: result of `measure_tensors` for all tensors of the plan.
    """
    return as_torch(compute_tensor(tensor, facts), tensor.dtype)


def build_model(
    plan: Plan, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A plan's model around given tensors, which it shares where it can.

    Args:
        plan: gives configuration and generation configuration.
        weights: every tensor of the plan by name, on the CPU.
        dtype: dtype of the model; the configuration's when None.

    Raises:
        CheckpointError: transformers has no class for the architecture.
        MergeError: the model lacks or adds tensors.
    """
    config, generation = _configurations(plan)
    model, loading = load_weights(config, weights, dtype)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := loading.get(key):
            raise MergeError(f"transformers found {key.replace('_', ' ')}: {sorted(names)[:3]}")
    if generation is not None:
        model.generation_config = generation
    return model


def build_empty_model(plan: Plan) -> PreTrainedModel:
    """A plan's model without data, on torch's `meta` device, for its configuration."""
    config, generation = _configurations(plan)
    model = empty_model(config)
    if generation is not None:
        model.generation_config = generation
    return model


def _configurations(plan: Plan) -> tuple[PreTrainedConfig, GenerationConfig | None]:
    # transformers reads a configuration from a folder, and upgrades older ones on the way.
    with tempfile.TemporaryDirectory() as folder:
        write_configuration(Path(folder), plan)
        config = load_config(folder, named=plan.reference.source)
        return config, load_generation_config(folder, named=plan.reference.source)


def plan_tokenizer(plan: Plan) -> Any:
    """The tokenizer of a plan's output."""
    return load_tokenizer(tokenizer_folder(plan), named=plan.tokenizer_owner.source)
