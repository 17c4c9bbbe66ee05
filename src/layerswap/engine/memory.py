"""Estimates the memory of a sweep, and the largest batch that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.engine.scoring import LOGIT_BYTES
from layerswap.engine.trie import LayerCounts
from layerswap.engine.virtual import VirtualModel
from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LOGIT_COPIES = 3
"""Logits, their log-softmax and what it works in."""
STREAMS = 8
"""Tensors as wide as the hidden state that a layer holds at a time: residual, norms, q, k, v."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a sweep holds at its peak.

    Attributes:
        experts: the experts' tensors that some composition takes verbatim, each once.
        made: blended and merged tensors, as far as their bound lets them stay.
        states: hidden states of open branches.
        layer: what one layer works in.
        logits: logits at the positions asked for.
        cache: keys and values, when generating.
    """

    experts: int
    made: int
    states: int = 0
    layer: int = 0
    logits: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.experts + self.made + self.states + self.layer + self.logits + self.cache

    def __str__(self) -> str:
        parts = {name.replace("_", " "): value for name, value in vars(self).items() if value}
        listed = ", ".join(f"{name} {_human(value)}" for name, value in parts.items())
        return f"about {_human(self.total)} of memory ({listed})"


def estimate_scoring(
    virtual: VirtualModel, counts: LayerCounts, rows: int, tokens: int
) -> MemoryEstimate:
    """Memory for scoring batches of `rows` rows of `tokens` tokens."""
    experts, made = _weights(virtual)
    per_row = _state_bytes(virtual, tokens)
    return MemoryEstimate(
        experts,
        made,
        states=rows * per_row * (counts.open + 1),
        layer=rows * _layer_bytes(virtual, tokens, tokens),
        logits=_logit_bytes(virtual, rows * tokens),
    )


def estimate_generating(
    virtual: VirtualModel,
    counts: LayerCounts,
    *,
    members: int,
    prompts: int,
    tokens: int,
    new_tokens: int,
) -> MemoryEstimate:
    """Memory for `members` compositions answering `prompts` prompts of `tokens` tokens.

    As if no two compositions wrote the same, so that no lane was shared.
    """
    experts, made = _weights(virtual)
    rows = members * prompts
    config = virtual.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * heads * width * config.num_hidden_layers * _itemsize(virtual)
    prefill = _layer_bytes(virtual, tokens, tokens)
    decode = _layer_bytes(virtual, 1, tokens + new_tokens)
    return MemoryEstimate(
        experts,
        made,
        states=prompts * _state_bytes(virtual, tokens) * (counts.open + 1),
        layer=max(prompts * prefill, rows * decode),
        logits=_logit_bytes(virtual, rows),
        # Room for a quarter more, and for the copies while one layer's room grows.
        cache=int(1.25 * rows * cached * (tokens + new_tokens)),
    )


def largest_fitting(budget: int, estimate: Any, what: str) -> int:
    """The largest power of two for which an estimate stays within a budget.

    Powers of two, because the shape of a batch decides the last bits of its results: a little
    more or less memory must not.

    Args:
        budget: bytes.
        estimate: from a size to a `MemoryEstimate`.
        what: the unit of the size, for the message.

    Raises:
        EvaluationError: not even one fits.
    """
    if estimate(1).total > budget:
        raise EvaluationError(
            f"one {what} at a time needs {estimate(1)}, but there are {_human(budget)}; evaluate "
            "fewer compositions at a time, bound max_made_bytes, or take a smaller dtype"
        )
    size = 1
    while size < 1 << 16 and estimate(2 * size).total <= budget:
        size *= 2
    return size


def _weights(virtual: VirtualModel) -> tuple[int, int]:
    stays, made = virtual.weight_bytes()
    return stays, min(made, virtual.pool.max_made_bytes)


def _state_bytes(virtual: VirtualModel, tokens: int) -> int:
    config = virtual.model.config.get_text_config()
    return int(tokens * config.hidden_size * _itemsize(virtual))


def _layer_bytes(virtual: VirtualModel, queries: int, keys: int) -> int:
    """What one layer works in for one row."""
    config = virtual.model.config.get_text_config()
    size = _itemsize(virtual)
    wide = 3 * _inner_width(config) + STREAMS * config.hidden_size
    # A mask, at most; and the scores of all heads where attention is spelt out.
    scores = size * queries * keys
    if config._attn_implementation == "eager":
        scores += 3 * 4 * config.num_attention_heads * queries * keys
    return int(queries * wide * size + scores)


def _inner_width(config: PreTrainedConfig) -> int:
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    found: list[int] = [w for name in names if isinstance(w := getattr(config, name, None), int)]
    return found[0] if found else 4 * int(config.hidden_size)


def _logit_bytes(virtual: VirtualModel, positions: int) -> int:
    vocabulary = virtual.model.config.get_text_config().vocab_size
    return LOGIT_COPIES * min(LOGIT_BYTES, 4 * int(vocabulary) * positions)


def _itemsize(virtual: VirtualModel) -> int:
    return int(virtual.model.dtype.itemsize)


def _human(count: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
