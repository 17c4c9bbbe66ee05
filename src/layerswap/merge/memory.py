"""A plan as a model in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.errors import MergeError
from layerswap.merge.documents import write_configuration
from layerswap.merge.engine import compute_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from layerswap.merge.plan import Plan


def load_model(plan: Plan) -> PreTrainedModel:
    """The merged model on the CPU, in evaluation mode, bit-equal to what `plan.save` writes.

    Raises:
        MergeError: transformers has no class for the architecture, or its model lacks or adds
            tensors.
    """
    import torch
    from transformers import AutoConfig, GenerationConfig

    weights = {tensor.name: compute_tensor(tensor) for tensor in plan.tensors}
    # transformers reads a configuration from a folder, and upgrades older ones on the way.
    with tempfile.TemporaryDirectory() as folder:
        write_configuration(Path(folder), plan)
        config = AutoConfig.from_pretrained(folder)
        generation = (
            GenerationConfig.from_pretrained(folder)
            if (Path(folder) / "generation_config.json").is_file()
            else None
        )
    dtype = next((w.dtype for w in weights.values() if w.is_floating_point()), torch.float32)
    model, loading = _model_class(config).from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    _check_loading(loading)
    if generation is not None:
        model.generation_config = generation
    return model.eval()  # type: ignore[no-any-return]


def _model_class(config: PreTrainedConfig) -> Any:
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
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
