"""Loads a plan as a model in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.loading import (
    empty_model,
    load_adapter,
    load_causal_lm,
    load_config,
    load_generation_config,
    load_tokenizer,
    load_weights,
)
from layerswap.checkpoint.read import as_torch
from layerswap.compose.blend import Operation
from layerswap.errors import MergeError
from layerswap.merge.layout import OutputTensor
from layerswap.merge.lazy_tensors import Thresholds
from layerswap.merge.lora import AdapterMergePlan, write_adapter
from layerswap.merge.metadata import tokenizer_folder, write_configuration
from layerswap.merge.plan import MergePlan, check_unchanged
from layerswap.merge.writer import compute_tensor, measure_model
from layerswap.versions import need_extras

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel


def load_model(plan: MergePlan) -> PreTrainedModel:
    """The merged model on the CPU, in evaluation mode, bit-equal to what `plan.save` writes.

    Raises:
        CheckpointError: transformers has no class for the architecture, or PEFT is not installed.
        MergeError: the model lacks or adds tensors, or a source changed since the plan was made.
    """
    need_extras("a model in memory", "models")
    plan = plan.downloaded()
    check_unchanged(plan.stamps)
    if isinstance(plan, AdapterMergePlan):
        return _load_adapter(plan)
    thresholds = measure_model(plan.tensors)
    return build_model(plan, {t.name: load_tensor(t, thresholds) for t in plan.tensors})


def load_tensor(
    tensor: OutputTensor, thresholds: Mapping[Operation, Thresholds] | None = None
) -> torch.Tensor:
    """One output tensor as a torch tensor on the CPU, bit-equal to what `plan.save` writes.

    Raises:
        MergeError: a blend gave NaN or infinity.
    """
    return as_torch(compute_tensor(tensor, thresholds), tensor.dtype)


def build_model(
    plan: MergePlan, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A plan's model around tensors that are already there, which it shares where it can.

    Args:
        plan: gives configuration and generation configuration.
        weights: every tensor of the plan by name, on the CPU.
        dtype: dtype of the model; the configuration's when None.

    Raises:
        LayerswapError: as `load_model`.
    """
    config, generation = _configurations(plan)
    model, loading = load_weights(config, weights, dtype)
    _check_loading(loading)
    if generation is not None:
        model.generation_config = generation
    return model


def build_empty_model(plan: MergePlan) -> PreTrainedModel:
    """A plan's model without data, on torch's `meta` device, for what its configuration says.

    Raises:
        CheckpointError: transformers has no class for the architecture.
    """
    config, generation = _configurations(plan)
    model = empty_model(config)
    if generation is not None:
        model.generation_config = generation
    return model


def _configurations(plan: MergePlan) -> tuple[PreTrainedConfig, GenerationConfig | None]:
    # transformers reads a configuration from a folder, and upgrades older ones on the way.
    with tempfile.TemporaryDirectory() as folder:
        write_configuration(Path(folder), plan)
        config = load_config(folder, named=plan.reference.source)
        return config, load_generation_config(folder, named=plan.reference.source)


def plan_tokenizer(plan: MergePlan) -> Any:
    """The tokenizer that a plan's output has.

    Raises:
        CheckpointError: it cannot be loaded.
    """
    return load_tokenizer(tokenizer_folder(plan), named=plan.tokenizer_owner.source)


def _load_adapter(plan: AdapterMergePlan) -> PreTrainedModel:
    """The base with the merged adapter on it, as a PEFT model."""
    assert plan.base is not None, "adapters are opened with their base"
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder), plan, allow_non_finite=False)
        where = plan.base.source if plan.base.revision else str(plan.base.folder)
        return load_adapter(load_causal_lm(where, revision=plan.base.revision), folder)


def _check_loading(loading: Any) -> None:
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = loading.get(key)
        if names:
            raise MergeError(f"transformers found {key.replace('_', ' ')}: {sorted(names)[:3]}")
