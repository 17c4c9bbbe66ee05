"""Loads a plan as a model in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from layerswap.checkpoint.preconditions import check_unchanged
from layerswap.errors import MergeError
from layerswap.merge.lora import AdapterMergePlan, write_adapter
from layerswap.merge.metadata import write_configuration
from layerswap.merge.plan import MergePlan
from layerswap.merge.writer import compute_tensor, measure_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


def load_model(plan: MergePlan) -> PreTrainedModel:
    """The merged model on the CPU, in evaluation mode, bit-equal to what `plan.save` writes.

    Raises:
        MergeError: transformers has no class for the architecture, or its model lacks or adds
            tensors; or a source changed since the plan was made.
    """
    check_unchanged(plan.stamps)
    if isinstance(plan, AdapterMergePlan):
        return _load_adapter(plan)
    thresholds = measure_model(plan.tensors)
    return build_model(plan, {t.name: compute_tensor(t, thresholds) for t in plan.tensors})


def build_model(
    plan: MergePlan, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A plan's model around tensors that are already there, which it shares where it can.

    Args:
        plan: gives configuration and generation configuration.
        weights: every tensor of the plan by name, on the CPU.
        dtype: dtype of the model; the configuration's when None.

    Raises:
        MergeError: as `load_model`.
    """
    from transformers import AutoConfig, GenerationConfig

    # transformers reads a configuration from a folder, and upgrades older ones on the way.
    with tempfile.TemporaryDirectory() as folder:
        write_configuration(Path(folder), plan)
        try:
            config = AutoConfig.from_pretrained(folder)
        except (KeyError, ValueError) as error:
            why = (str(error).strip() or "no reason given").splitlines()[0]
            raise MergeError(f"transformers cannot read the configuration ({why})") from None
        generation = (
            GenerationConfig.from_pretrained(folder)
            if (Path(folder) / "generation_config.json").is_file()
            else None
        )
    with without_progress_bars():
        model, loading = _model_class(config).from_pretrained(
            None,
            config=config,
            state_dict=dict(weights),
            dtype="auto" if dtype is None else dtype,
            output_loading_info=True,
        )
    _check_loading(loading)
    if generation is not None:
        model.generation_config = generation
    return model.eval()  # type: ignore[no-any-return]


def _load_adapter(plan: AdapterMergePlan) -> PreTrainedModel:
    """The base with the merged adapter on it, as a PEFT model."""
    try:
        from peft import PeftModel
    except ImportError:
        raise MergeError('loading an adapter needs PEFT: pip install "layerswap[train]"') from None
    from transformers import AutoModelForCausalLM

    assert plan.base is not None, "adapters are opened with their base"
    with tempfile.TemporaryDirectory() as folder, without_progress_bars():
        write_adapter(Path(folder), plan, allow_non_finite=False)
        where = plan.base.source if plan.base.revision else str(plan.base.folder)
        model = AutoModelForCausalLM.from_pretrained(
            where, revision=plan.base.revision, dtype="auto"
        )
        adapted = PeftModel.from_pretrained(model, folder).eval()
    return cast("PreTrainedModel", adapted)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keeps transformers from drawing a bar of its own for every model it loads or saves."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _model_class(config: PreTrainedConfig) -> Any:
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        # The name comes from a file: it must not reach anything but a model class.
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    raise MergeError(
        f"transformers has no model class {config.architectures}; save the plan "
        "and load the folder with the library that has it"
    )


def _check_loading(loading: Any) -> None:
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = loading.get(key)
        if names:
            raise MergeError(f"transformers found {key.replace('_', ' ')}: {sorted(names)[:3]}")
