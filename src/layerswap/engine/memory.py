"""Memory of a sweep: the pool of weights with its bound, and estimates for batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NewType

from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

Tensors = tuple["torch.Tensor", ...]
ContentId = NewType("ContentId", int)
"""Number of a content, the sources of some tensors. Equal numbers mean equal bytes."""
FREE_SHARE = 0.5
"""Share of the free memory for computed tensors, where the user sets no bound."""
LOGIT_BYTES = 1 << 28
"""Bytes of float32 logits to compute at a time."""
LOGIT_COPIES = 3
"""Logits, their log-softmax, and its workspace."""
STREAMS = 8
"""Tensors as wide as the hidden state that a layer holds at a time: residual, norms, q, k, v."""


class WeightPool:
    """Tensors by the number of their content.

    An expert's own tensors are read once and stay at `home`. Computed tensors (blends, merge
    methods) stay within a bound in bytes (None for half of the memory that is free at the first
    need): the least recently used are dropped, and computed again when needed. If the experts stay
    in CPU memory, their copies on the device count among the computed tensors.
    """

    def __init__(
        self, max_made_bytes: int | None, device: torch.device, home: torch.device
    ) -> None:
        self.device, self.home = device, home
        self._bound = max_made_bytes
        self._experts: dict[ContentId, Tensors] = {}
        self._bounded: OrderedDict[ContentId, Tensors] = OrderedDict()
        self.made_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tensors that stay."""
        return _nbytes(tuple(tensor for tensors in self._experts.values() for tensor in tensors))

    @property
    def max_made_bytes(self) -> int:
        """The bound on computed tensors, in bytes."""
        if self._bound is None:
            self._bound = int(free_bytes(self.device) * FREE_SHARE)
        return self._bound

    def get(self, content: ContentId) -> Tensors | None:
        """Return the tensors of a content on the device; None if they must be computed."""
        if content in self._bounded:
            self._bounded.move_to_end(content)
            return self._bounded[content]
        at_home = self._experts.get(content)
        if at_home is None or self.device == self.home:
            return at_home
        copies = {id(tensor): moved(tensor, self.device) for tensor in at_home}
        tensors = tuple(copies[id(tensor)] for tensor in at_home)  # tied ones stay one tensor
        self._put_bounded(content, tensors)
        return tensors

    def put(self, content: ContentId, tensors: Tensors, *, stays: bool) -> None:
        """Keep tensors: an expert's own, at home, for good; computed ones, on the device."""
        if stays:
            self._experts[content] = tensors
        else:
            self._put_bounded(content, tensors)

    def _put_bounded(self, content: ContentId, tensors: Tensors) -> None:
        self._bounded[content] = tensors
        self.made_bytes += _nbytes(tensors)
        while self.made_bytes > self.max_made_bytes and len(self._bounded) > 1:
            _, dropped = self._bounded.popitem(last=False)
            self.made_bytes -= _nbytes(dropped)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, a parameter as a parameter."""
    from torch.nn import Parameter

    if tensor.device == device:
        return tensor
    there = tensor.detach().to(device)
    return Parameter(there, requires_grad=False) if isinstance(tensor, Parameter) else there


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free on a device, in bytes."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        # With the file cache, which the system gives back on demand.
        words = Path("/proc/meminfo").read_text("ascii").split()
        return int(words[words.index("MemAvailable:") + 1]) << 10
    except (ValueError, OSError):  # not on every system; then an amount that a laptop has
        return 4 << 30


def _nbytes(tensors: Tensors) -> int:
    # Tied parameters are one tensor under several names.
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct)


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory of a sweep, in bytes."""

    experts: int  # tensors that some composition takes unchanged, each once
    blends: int  # blended and merged tensors, within their bound
    states: int = 0  # hidden states of open branches
    layer: int = 0  # workspace of one layer
    logits: int = 0  # logits at the positions that are needed
    cache: int = 0  # keys and values, when generating

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(vars(self).values())

    def __str__(self) -> str:
        parts = [f"{name} {_human(count)}" for name, count in vars(self).items() if count]
        return f"about {_human(self.total)} of memory ({', '.join(parts)})"


class MemoryModel:
    """Memory estimates for batches of one model, with `open_states` hidden states at a time."""

    def __init__(
        self, model: PreTrainedModel, *, experts: int, blends: int, open_states: int
    ) -> None:
        self._config = model.config.get_text_config()
        self._itemsize = int(model.dtype.itemsize)
        self._experts, self._blends, self._open_states = experts, blends, open_states

    def scoring(self, rows: int, tokens: int) -> MemoryEstimate:
        """Estimate the memory for scoring batches of `rows` rows of `tokens` tokens."""
        return MemoryEstimate(
            self._experts,
            self._blends,
            states=rows * self._state(tokens) * (self._open_states + 1),
            layer=rows * self._layer(tokens, tokens),
            logits=self._logits(rows * tokens),
        )

    def generating(
        self, members: int, prompts: int, tokens: int, new_tokens: int
    ) -> MemoryEstimate:
        """Estimate the memory for `members` compositions that answer `prompts` prompts.

        The estimate assumes that no two compositions write the same, so that no cache is shared.
        """
        config, rows = self._config, members * prompts
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        per_token = 2 * heads * head_dim * config.num_hidden_layers * self._itemsize
        prefill, decode = self._layer(tokens, tokens), self._layer(1, tokens + new_tokens)
        return MemoryEstimate(
            self._experts,
            self._blends,
            states=prompts * self._state(tokens) * (self._open_states + 1),
            layer=max(prompts * prefill, rows * decode),
            logits=self._logits(rows),
            # A quarter more: spare room, and the copies while one layer's cache grows.
            cache=int(1.25 * rows * per_token * (tokens + new_tokens)),
        )

    def _state(self, tokens: int) -> int:
        return int(tokens * self._config.hidden_size * self._itemsize)

    def _layer(self, queries: int, keys: int) -> int:
        """Workspace of one layer for one row."""
        config = self._config
        wide = 3 * _inner_width(config) + STREAMS * config.hidden_size
        # A mask at most; with eager attention also the scores of all heads.
        scores = self._itemsize * queries * keys
        if config._attn_implementation == "eager":
            scores += 3 * 4 * config.num_attention_heads * queries * keys
        return int(queries * wide * self._itemsize + scores)

    def _logits(self, positions: int) -> int:
        return LOGIT_COPIES * min(LOGIT_BYTES, 4 * int(self._config.vocab_size) * positions)


def _inner_width(config: PreTrainedConfig) -> int:
    """Width of the feed-forward part."""
    keys = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    widths = (getattr(config, key, None) for key in keys)
    return next((w for w in widths if isinstance(w, int)), 4 * int(config.hidden_size))


def largest_fitting(budget: int, estimate: Callable[[int], MemoryEstimate], unit: str) -> int:
    """Return the largest power of two whose estimate stays within a budget in bytes.

    Powers of two, because the shape of a batch decides the last bits of its results, and a little
    more or less free memory must not. `unit` names the size in the message.
    """
    if estimate(1).total > budget:
        raise EvaluationError(
            f"one {unit} at a time needs {estimate(1)}, but there are {_human(budget)}; evaluate "
            "fewer compositions at a time, set max_made_bytes, or use a smaller dtype"
        )
    size = 1
    while size < 1 << 16 and estimate(2 * size).total <= budget:
        size *= 2
    return size


def _human(count: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
