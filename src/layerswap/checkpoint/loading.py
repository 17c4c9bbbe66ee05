"""Loads tokenizers, configurations and models with transformers, without a checkpoint's own code.

Every `from_pretrained` of the package is here. Without `trust_remote_code=False`, transformers
would ask on the terminal whether a checkpoint's own Python may run, and run it. Devices and dtypes
of models are checked here too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.header import is_gguf
from layerswap.checkpoint.names import canonical, class_of
from layerswap.checkpoint.read import FLOAT_NAMES
from layerswap.ground.errors import CheckpointError, EvaluationError, LayerswapError
from layerswap.versions import install

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

    from layerswap.ground.types import PathLike

SWITCH = "enable_thinking"
"""The variable of chat templates that lets a model think (Qwen3, SmolLM3, GLM-4.5)."""
IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")
"""Values of `CHOICES` in a configuration; for others, transformers fetches a kernel from the Hub
and runs its code."""
CHOICES = ("attn_implementation", "experts_implementation")
SPELLINGS = {name for choice in CHOICES for name in (choice, f"_{choice}", f"_{choice}_internal")}
"""Names of `CHOICES` in files of configurations, and in the attributes of their classes."""

PEFT_TASKS = {
    "CAUSAL_LM": ("CausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    "SEQ_2_SEQ_LM": ("Seq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    "SEQ_CLS": ("SequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"),
    "TOKEN_CLS": ("TokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING"),
    "QUESTION_ANS": ("QuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING"),
    "FEATURE_EXTRACTION": ("FeatureExtraction", "MODEL_MAPPING"),
}
"""For each `task_type`, the end of PEFT's Auto class, and the classes that it opens."""


def pick_device(device: str | None) -> str:
    """Return the given device; when None, a GPU if available, else the CPU."""
    if device is not None:
        return device
    import torch

    return str(torch.accelerator.current_accelerator(check_available=True) or "cpu")


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to float64; on the CPU if the tensor's device has no float64 (mps)."""
    try:
        return tensor.double()
    except TypeError:
        return tensor.cpu().double()


def open_device(device: str | torch.device) -> torch.device:
    """Check that a device works; return it with its index (`cuda` becomes `cuda:0`)."""
    import torch

    try:
        probe = torch.zeros(1, device=device)
        probe.item()  # `meta` has no values, and no model runs there
        return probe.device
    except (RuntimeError, AssertionError) as error:
        why = str(error).split("\n")[0]
        raise EvaluationError(
            f"device {str(device)!r} cannot be used ({why}); 'cpu' always works"
        ) from None


def check_dtype(dtype: str | None) -> None:
    """Refuse dtypes that models cannot run in; None means the dtype of their files."""
    if dtype is not None and dtype not in FLOAT_NAMES:
        raise EvaluationError(f"no dtype {dtype!r}; there are {', '.join(FLOAT_NAMES)}")


@contextmanager
def _refusing(
    source: PathLike, named: str | None, part: str, *, gguf: bool = False
) -> Iterator[None]:
    """Reduce transformers' errors to one line, without the advice to trust remote code."""
    try:
        yield
    except (LayerswapError, MemoryError):
        raise
    except Exception as error:  # the Hub, tokenizers and odd configurations: no common class
        name = named or os.fspath(source)
        if is_gguf(name) and not gguf:
            message = "a GGUF file, where a transformers checkpoint is needed"
            raise CheckpointError(f"{name}: {message}") from None
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, KeyError | ZeroDivisionError):  # which say no more than a value
            reason = f"{type(error).__name__}: {reason}"
        if "trust_remote_code" in reason:
            reason = "it needs Python code of its own, which layerswap never runs"
        raise CheckpointError(f"{name}: {part} cannot be loaded ({reason[:200]})") from None


def load_tokenizer(source: PathLike, *, named: str | None = None, gguf: str | None = None) -> Any:
    """Load the tokenizer of a folder or of the Hub. Errors call its source `named`.

    `gguf` names a file in the folder whose header has the tokenizer.
    """
    from transformers import AutoTokenizer

    options = {"gguf_file": gguf} if gguf else {}
    with _refusing(source, named, "its tokenizer", gguf=gguf is not None):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    # Every use has its own limit of length, so the note of transformers counts as written.
    noted = getattr(tokenizer, "deprecation_warnings", {})
    noted["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def with_thinking(template: str, think: str, *, default: bool = False) -> str:
    """Return a chat template that is told to think (`on`, `cut`) or not (`off`).

    With `default`, callers of the template can still choose.
    """
    if SWITCH not in template:
        raise LayerswapError(
            f"think: {think}: the chat template has no switch ({SWITCH}); leave think out"
        )
    setting = f"{{% set {SWITCH} = {'false' if think == 'off' else 'true'} %}}"
    return (
        f"{{% if {SWITCH} is not defined %}}{setting}{{% endif %}}{template}"
        if default
        else setting + template
    )


def load_config(
    source: PathLike, *, revision: str | None = None, named: str | None = None
) -> PreTrainedConfig:
    """Load a configuration, upgraded by transformers if it is older, without kernels of the Hub."""
    from transformers import AutoConfig

    with _refusing(source, named, "its configuration"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
        _check_kernels()
        _forget_kernels(config)
    return config


def filled_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Fill in the missing settings of a configuration with the defaults of its class.

    None if transformers is not installed, has no such class, or refuses the values.
    """
    with suppress(Exception), _without_report():  # odd configurations: no common class
        return dict(_own_config(config).to_dict())
    return None


def _own_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Read a configuration with its class, without its quantisation."""
    from transformers import CONFIG_MAPPING

    given = {key: value for key, value in config.items() if key != "quantization_config"}
    own_class: type[PreTrainedConfig] = CONFIG_MAPPING[str(config.get("model_type"))]
    return own_class.from_dict(deepcopy(given))


def _forget_kernels(config: PreTrainedConfig) -> None:
    for key, value in list(vars(config).items()):
        if key in SPELLINGS and value not in IMPLEMENTATIONS:
            setattr(config, key, None)
        elif key in config.sub_configs and value is not None:
            _forget_kernels(value)


def _check_kernels() -> None:
    """Refuse a transformers that keeps the names of kernels where they are not forgotten."""
    from transformers import PreTrainedConfig

    config = PreTrainedConfig(**dict.fromkeys(CHOICES, "owner/kernel"))  # type: ignore[arg-type]
    unknown = vars(config).keys() & CHOICES
    _forget_kernels(config)
    if unknown or "owner/kernel" in vars(config).values():
        raise CheckpointError(
            "this version of transformers may run kernels that a configuration names; use a "
            "version that docs/support.md names"
        )


def load_generation_config(
    folder: PathLike, *, named: str | None = None
) -> GenerationConfig | None:
    """Load the generation configuration in a folder; None if there is none."""
    from transformers import GenerationConfig

    if not (Path(folder) / "generation_config.json").is_file():
        return None
    with _refusing(folder, named, "its generation configuration"):
        config = GenerationConfig.from_pretrained(folder)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(config, key)
            tokens = value if isinstance(value, list) else [value or 0]
            if not all(type(token) is int for token in tokens):
                raise ValueError(f"{key} is {value!r}, not a token id or a list of token ids")
    return config


def load_causal_lm(
    source: PathLike,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    named: str | None = None,
    gguf: str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Load a causal language model on the CPU, in evaluation mode.

    `gguf` names a file in the folder that has configuration and weights. Further options go to
    `from_pretrained`, such as `quantization_config`.
    """
    from transformers import AutoModelForCausalLM

    if gguf:
        options |= {"gguf_file": gguf}
    config = None if gguf else load_config(source, revision=revision, named=named)
    refusing = _refusing(source, named, "the model", gguf=gguf is not None)
    with refusing, without_progress_bars():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            revision=revision,
            dtype=dtype,
            trust_remote_code=False,
            **options,
        )
    return model


def load_weights(
    config: PreTrainedConfig,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    *,
    named: str | None = None,
    device: str | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Build a model that shares tensors in memory; return it and transformers' loading record.

    The record lists missing, unexpected and mismatched tensors, which is no error here. On the
    `meta` device the model takes no memory.
    """
    refusing = _refusing(config.name_or_path or "", named, "the model")
    with refusing, without_progress_bars(), _without_report():
        model, loading = model_class_of(config).from_pretrained(
            None,
            config=config,
            state_dict=dict(weights),
            dtype="auto" if dtype is None else dtype,
            device_map=device,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    return model, loading


def missing_tensors(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> set[str] | None:
    """Find the tensors of a model that are not given, which transformers would initialise.

    None if transformers is not installed or does not know the class.
    """
    with suppress(Exception), _without_report():  # odd configurations: no common class
        import torch

        known = _own_config(config)
        _forget_kernels(known)
        empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        _, loading = load_weights(known, empty, device="meta")
        return {str(name) for name in loading["missing_keys"]}
    return None


def opened_classes(
    config: Mapping[str, Any], adapter: Mapping[str, Any]
) -> list[tuple[str, str, dict[str, str]]]:
    """Return classes that may open an adapter over a base: name, module, names of tensors.

    First the class of PEFT's `task_type` or `auto_mapping`, if it fits the base; then the base's.
    Canonical names map to those of the class. Empty if transformers is not installed.
    """
    classes = []
    with suppress(Exception):  # odd configurations: no common class
        import transformers

        kind, task = type(_own_config(config)), PEFT_TASKS.get(str(adapter.get("task_type")))
        named = (adapter.get("auto_mapping") or {}).get("base_model_class")
        given = getattr(transformers, str(named), None)
        if task is not None:
            given = getattr(transformers, task[1]).get(kind, None)
        elif getattr(given, "config_class", None) is not kind:
            given = None
        given = given[0] if isinstance(given, tuple) else given
        for name in filter(None, (getattr(given, "__name__", None), class_of(config))):
            tensors = missing_tensors({**config, "architectures": [name]}, {})
            if tensors:
                module = getattr(transformers, name).__module__
                classes.append((name, module, {canonical(tensor): tensor for tensor in tensors}))
    return classes


def load_adapter(model: PreTrainedModel, folder: PathLike) -> PreTrainedModel:
    """Add a PEFT adapter to a model."""
    try:
        from peft import PeftModel
    except ImportError:
        raise CheckpointError(f"loading an adapter needs PEFT; {install('train')}") from None
    with without_progress_bars():
        adapted: Any = PeftModel.from_pretrained(model, os.fspath(folder))
    return adapted.eval()  # type: ignore[no-any-return]


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide the bars that transformers draws for every model it loads or saves."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def _without_report() -> Iterator[None]:
    """Silence transformers' table of missing and mismatched tensors."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)


def model_class_of(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that a configuration names."""
    import transformers

    for name in config.architectures or ():
        model_class = getattr(transformers, name, None)
        # The name comes from a file: it must not reach anything but a model class.
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            return model_class
    raise CheckpointError(
        f"transformers has no model class {config.architectures}; save the plan "
        "and load the folder with the library that has it"
    )
