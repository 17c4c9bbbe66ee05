"""The engine's contact with the inside of transformers; a test of its own holds each promise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any, Protocol

from layerswap.checkpoint.loading import without_progress_bars

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_MAKING = RLock()


class LayerCache(Protocol):
    """Keys and values that a layer's attention reads and extends; `length` counts padding too."""

    length: int

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """Take new keys and values, `[rows, heads, tokens, width]` each, and return all."""


@contextmanager
def cache_of_model(cache: LayerCache, layers: int) -> Iterator[None]:
    """Let a model with this many layers use `cache` wherever it makes a `DynamicCache` for itself.

    So no argument has to be named by which a model takes a cache, hands it to its layers and
    returns it: these names change between versions and differ between models.
    """
    from transformers import Cache, DynamicCache

    original, thread = DynamicCache.__init__, get_ident()

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        if get_ident() != thread:
            original(self, *args, **kwargs)
        else:
            Cache.__init__(self, [_cache_layer_class()(cache, index) for index in range(layers)])

    with _MAKING:
        DynamicCache.__init__ = make  # type: ignore[method-assign]
        try:
            yield
        finally:
            DynamicCache.__init__ = original  # type: ignore[method-assign]


@lru_cache
def _cache_layer_class() -> Any:
    """Define the class on first use, since transformers is imported only where it is needed."""
    from transformers import DynamicLayer

    class CacheLayer(DynamicLayer):  # type: ignore[no-untyped-call]
        def __init__(self, cache: LayerCache, index: int) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self._cache, self._index = cache, index

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            return self._cache.update(self._index, key_states, value_states)

        def get_seq_length(self) -> int:
            return self._cache.length

    return CacheLayer


# --- weights and attention ---


def convert(
    model: PreTrainedModel, weights: Mapping[str, torch.Tensor], targets: Sequence[str]
) -> tuple[torch.Tensor, ...]:
    """Let transformers compute parameters from stored tensors; the model then holds them.

    The model has the dtype of the targets.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    mapping: Any = get_model_conversion_mapping(model)
    plan = model._get_dtype_plan(model.dtype)
    config = LoadStateDictConfig(dtype=model.dtype, dtype_plan=plan, weight_mapping=mapping)
    with without_progress_bars():
        convert_and_load_state_dict_in_model(model, dict(weights), config)
    state = model.state_dict(keep_vars=True)
    return tuple(state[name] for name in targets)


def holds_attention_scores(model: PreTrainedModel) -> bool:
    """True if attention is computed in steps, with the scores of all heads in memory."""
    return bool(model.config.get_text_config()._attn_implementation == "eager")
