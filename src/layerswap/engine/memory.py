"""Memory of a sweep: the pool of weights with its bound, and estimates for batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.engine.transformers_inside import holds_attention_scores
from layerswap.ground import system

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Tensors = tuple["torch.Tensor", ...]
FREE_SHARE = 0.5
"""Share of the free memory for computed tensors if the user sets no bound."""
LOGIT_BYTES = 1 << 28
"""Bytes of float32 logits to compute at a time."""
LOGIT_COPIES = 3
"""Logits, their log-softmax, and its workspace."""
STREAMS = 8
"""Tensors as wide as the hidden state that a layer holds at a time: residual, norms, q, k, v."""


class WeightPool:
    """Cache of tensors by content.

    An expert's own tensors are read once and stay. Computed tensors (blends, merge methods) stay
    within a bound in bytes (None for half of the memory that is free at the first need): the least
    recently used are dropped, and computed again when needed.
    """

    def __init__(self, max_made_bytes: int | None, device: torch.device) -> None:
        self.device = device
        self._bound = max_made_bytes
        self._experts: dict[Hashable, Tensors] = {}
        self._bounded: OrderedDict[Hashable, Tensors] = OrderedDict()
        self.made_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of the permanent tensors."""
        return _nbytes(tuple(tensor for tensors in self._experts.values() for tensor in tensors))

    @property
    def max_made_bytes(self) -> int:
        """The bound on computed tensors, in bytes."""
        if self._bound is None:
            self._bound = int(free_bytes(self.device) * FREE_SHARE)
        return self._bound

    def get(self, content: Hashable) -> Tensors | None:
        """Return the tensors of a content on the device; None if they must be computed."""
        if content in self._bounded:
            self._bounded.move_to_end(content)
            return self._bounded[content]
        return self._experts.get(content)

    def put(self, content: Hashable, tensors: Tensors, *, stays: bool) -> None:
        """Store tensors: an expert's permanently, computed ones within the bound."""
        if stays:
            self._experts[content] = tensors
            return
        self._bounded[content] = tensors
        self.made_bytes += _nbytes(tensors)
        while self.made_bytes > self.max_made_bytes and len(self._bounded) > 1:
            _, dropped = self._bounded.popitem(last=False)
            self.made_bytes -= _nbytes(dropped)


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free on a device, in bytes."""
    import torch

    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "mem_get_info"):  # not of devices that share the main memory
        return int(module.mem_get_info(device)[0])
    if hasattr(module, "recommended_max_memory"):  # mps may take only a share
        share = module.recommended_max_memory() - module.driver_allocated_memory()
        return max(0, min(int(share), system.free_memory()))
    return system.free_memory()


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this process has had on a device, in bytes."""
    import torch

    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "max_memory_allocated"):
        return int(module.max_memory_allocated(device))
    return system.peak_memory()


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
        from rich.filesize import decimal

        parts = [f"{name} {decimal(count)}" for name, count in vars(self).items() if count]
        return f"about {decimal(self.total)} of memory ({', '.join(parts)})"


def estimate_memory(
    model: PreTrainedModel,
    *,
    experts: int,
    blends: int,
    open_states: int,
    members: int,
    rows: int,
    tokens: int,
    new_tokens: int,
) -> MemoryEstimate:
    """Estimate the memory of scoring `rows` rows of `tokens` tokens, or of generating after them.

    `experts` and `blends` are bytes of weights, and `open_states` hidden states are held at a time.
    The estimate of generation assumes that no two of the `members` compositions write the same, so
    that no cache is shared.
    """
    config, itemsize = model.config.get_text_config(), int(model.dtype.itemsize)
    heads = config.num_attention_heads
    inner = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    widths = (getattr(config, key, None) for key in inner)
    widest = next((w for w in widths if isinstance(w, int)), 4 * int(config.hidden_size))

    def layer(queries: int, keys: int) -> int:
        """Workspace of one layer for one row."""
        # A mask at most; with eager attention also the scores of all heads.
        scores = itemsize * queries * keys
        if holds_attention_scores(model):
            scores += 3 * 4 * heads * queries * keys
        return int(queries * (3 * widest + STREAMS * config.hidden_size) * itemsize + scores)

    workspace, positions, cache = rows * layer(tokens, tokens), rows * tokens, 0
    if new_tokens:
        positions = members * rows
        workspace = max(workspace, positions * layer(1, tokens + new_tokens))
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        per_token = 2 * kv_heads * head_dim * config.num_hidden_layers * itemsize
        # A quarter more: spare room, and the copies while one layer's cache grows.
        cache = int(1.25 * positions * per_token * (tokens + new_tokens))
    return MemoryEstimate(
        experts,
        blends,
        states=rows * tokens * int(config.hidden_size) * itemsize * (open_states + 1),
        layer=workspace,
        logits=LOGIT_COPIES * min(LOGIT_BYTES, 4 * int(config.vocab_size) * positions),
        cache=cache,
    )
