"""Loads tokenizers, configurations and models with transformers, never running a checkpoint's code.

Every `from_pretrained` of the package is here: transformers would ask on the terminal whether a
checkpoint's own Python may run, and without `trust_remote_code=False` a yes runs it. The devices
and dtypes that a model is loaded for are checked here too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.header import is_gguf
from layerswap.checkpoint.read import FLOAT_NAMES
from layerswap.errors import CheckpointError, EvaluationError

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

    from layerswap._types import PathLike


def pick_device(device: str | None) -> str:
    """The given device; when None, a GPU if there is one, else the CPU."""
    if device is not None:
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def open_device(device: str | torch.device) -> torch.device:
    """The device with its index: `cuda` is `cuda:0`.

    Raises:
        EvaluationError: torch does not know the device, or it is not available.
    """
    import torch

    try:
        found = torch.zeros(1, device=device)
        found.item()  # `meta` has no values, and no model runs there
        return found.device
    except (RuntimeError, AssertionError) as error:
        why = str(error).split("\n")[0]
        raise EvaluationError(
            f"device {str(device)!r} cannot be used ({why}); 'cpu' always can"
        ) from None


def check_dtype(dtype: str | None) -> None:
    """Refuse a dtype that models do not run in; None, the dtype of their files, is accepted.

    Raises:
        EvaluationError: it is not one of float32, bfloat16 and float16.
    """
    if dtype is not None and dtype not in FLOAT_NAMES:
        raise EvaluationError(f"no dtype {dtype!r}; there are {', '.join(FLOAT_NAMES)}")


def load_tokenizer(source: PathLike, *, named: str | None = None) -> Any:
    """The tokenizer in a folder or on the Hub.

    Args:
        source: the folder or Hub id.
        named: what the user calls it; the source when None.

    Raises:
        CheckpointError: it cannot be loaded, or needs code of its own.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # what the Hub and the tokenizers raise shares no class
        raise _refusal(named or os.fspath(source), "its tokenizer", error) from None


IMPLEMENTATIONS = {
    "_attn_implementation": ("eager", "sdpa", "flex_attention"),
    "_experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
"""What a configuration may ask for: of others, transformers fetches a kernel and runs its code."""


def load_config(
    source: PathLike, *, revision: str | None = None, named: str | None = None
) -> PreTrainedConfig:
    """The configuration in a folder or on the Hub, upgraded by transformers where it is older.

    It asks for no kernel from the Hub, whatever its file says.

    Args:
        source: the folder or Hub id.
        revision: the Hub commit.
        named: what the user calls it; the source when None.

    Raises:
        CheckpointError: transformers cannot read it, or it needs code of its own.
    """
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
        _forget_kernels(config)
    except Exception as error:  # a configuration of odd values raises whatever it likes
        raise _refusal(named or os.fspath(source), "its configuration", error) from None
    return config


def _forget_kernels(config: PreTrainedConfig) -> None:
    for key, known in IMPLEMENTATIONS.items():
        if getattr(config, key, None) not in (None, *known):
            setattr(config, key, None)
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None:
            _forget_kernels(part)


def load_generation_config(
    folder: PathLike, *, named: str | None = None
) -> GenerationConfig | None:
    """The generation configuration in a folder; None where there is none.

    Raises:
        CheckpointError: transformers cannot read it, or what ends a text is no token.
    """
    from transformers import GenerationConfig

    if not (Path(folder) / "generation_config.json").is_file():
        return None
    try:
        found = GenerationConfig.from_pretrained(folder)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(found, key)
            if not all(
                type(i) is int for i in (value if isinstance(value, list) else [value or 0])
            ):
                raise ValueError(f"{key} is {value!r}, no token and no list of tokens")
    except Exception as error:  # its checks raise whatever odd values make them
        what = "its generation configuration"
        raise _refusal(named or os.fspath(folder), what, error) from None
    return found


def load_causal_lm(
    source: PathLike,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    named: str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """The causal language model in a folder or on the Hub, on the CPU, in evaluation mode.

    Args:
        source: the folder or Hub id.
        revision: the Hub commit.
        dtype: of the weights; as stored for `auto`.
        named: what the user calls it; the source when None.
        options: passed on to `from_pretrained`, such as `quantization_config`.

    Raises:
        CheckpointError: transformers cannot load it, or it needs code of its own.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(source, revision=revision, named=named)
    try:
        with without_progress_bars():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                revision=revision,
                dtype=dtype,
                trust_remote_code=False,
                **options,
            )
    except Exception as error:  # a configuration of odd values raises whatever it likes
        raise _refusal(named or os.fspath(source), "the model", error) from None
    return model


def load_weights(
    config: PreTrainedConfig, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, Any]:
    """A model around tensors that are already there, which it shares where it can.

    Args:
        config: names the architecture.
        weights: every tensor by name, on the CPU.
        dtype: of the model; that of the weights when None.

    Returns:
        The model, and transformers' record of missing and unexpected tensors.

    Raises:
        CheckpointError: transformers has no class for the architecture.
    """
    with without_progress_bars():
        model, loading = _model_class(config).from_pretrained(
            None,
            config=config,
            state_dict=dict(weights),
            dtype="auto" if dtype is None else dtype,
            output_loading_info=True,
            trust_remote_code=False,
        )
    return model, loading


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model without data, on torch's `meta` device.

    Raises:
        CheckpointError: transformers has no class for the architecture.
    """
    import torch

    with torch.device("meta"):
        model: PreTrainedModel = _model_class(config)(config)
    return model


def load_adapter(model: PreTrainedModel, folder: PathLike) -> PreTrainedModel:
    """A model with a PEFT adapter on it.

    Raises:
        CheckpointError: PEFT is not installed.
    """
    try:
        from peft import PeftModel
    except ImportError:
        raise CheckpointError(
            'loading an adapter needs PEFT: pip install "layerswap[train]"'
        ) from None
    with without_progress_bars():
        adapted: Any = PeftModel.from_pretrained(model, os.fspath(folder))
    return adapted.eval()  # type: ignore[no-any-return]


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing a bar of its own for every model it loads or saves."""
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
    raise CheckpointError(
        f"transformers has no model class {config.architectures}; save the plan "
        "and load the folder with the library that has it"
    )


def _refusal(named: str, what: str, error: Exception) -> CheckpointError:
    """One line for whatever transformers raised; its advice to trust the code is left out."""
    if is_gguf(named):
        return CheckpointError(f"{named}: a GGUF file, where a transformers checkpoint is needed")
    reason = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in reason:
        reason = "it needs Python code of its own, which layerswap never runs"
    return CheckpointError(f"{named}: {what} cannot be loaded ({reason[:200]})")
