"""Rows of what a model computes for some lanes, for some others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from layerswap.evaluate.stack import Call, Entry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


class Narrower:
    """Cuts what the model calls a layer with, for all first lanes, down to those of a group.

    Masks, positions and the like have a row per first lane, or several rows per first lane (ALiBi
    has one per head), or one for all. Results are kept for one step: most layers are called with
    the same tensors, and neighbouring layers have the same groups.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._known: dict[tuple[bytes, int], Any] = {}

    def __call__(self, call: Call, first: npt.NDArray[np.int64]) -> Call:
        """The call for lanes that began in these first lanes."""
        import numpy as np

        if len(first) == self._rows and np.array_equal(first, np.arange(self._rows)):
            return call
        index = first.tobytes()
        args = tuple(self._narrow(value, first, index) for value in call.args)
        kwargs = {name: self._narrow(v, first, index) for name, v in call.kwargs.items()}
        return Call(args, kwargs, call.keyword)

    def _narrow(self, value: Any, first: npt.NDArray[np.int64], index: bytes) -> Any:
        import torch

        if isinstance(value, tuple | list):
            return type(value)(self._narrow(part, first, index) for part in value)
        if isinstance(value, dict):
            return {name: self._narrow(part, first, index) for name, part in value.items()}
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape[0] % self._rows:
            return value
        if self._rows == 1 and value.shape[0] == 1:
            return value  # one row for all, whether it is the lane's or everybody's
        known = index, id(value)
        if known not in self._known:
            by_lane = value.reshape(self._rows, -1, *value.shape[1:])
            taken = by_lane[torch.from_numpy(first).to(value.device)]
            self._known[known] = taken.reshape(-1, *value.shape[1:])
        return self._known[known]


def merged(
    entries: Sequence[tuple[int, int, Entry]], lanes: int
) -> tuple[torch.Tensor, Sequence[Call]]:
    """What enters the layers, where compositions differ before them.

    Args:
        entries: first lane, one past the last, and what enters the layers if all lanes had the
            weights of these.
        lanes: how many first lanes there are.
    """
    if len(entries) == 1:
        return entries[0][2].hidden, entries[0][2].calls
    bounds = [(start, stop) for start, stop, _ in entries]

    def merge(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, tuple | list):
            return type(first)(merge(parts) for parts in zip(*values, strict=True))
        if isinstance(first, dict):
            return {name: merge([value[name] for value in values]) for name in first}
        if not hasattr(first, "ndim") or first.ndim == 0 or first.shape[0] % lanes:
            return first
        each = first.shape[0] // lanes  # several rows per lane, as ALiBi has
        pairs = zip(values, bounds, strict=True)
        return joined([value[a * each : b * each] for value, (a, b) in pairs])

    parts = [entry for _, _, entry in entries]
    calls = []
    for same_layer in zip(*(part.calls for part in parts), strict=True):
        kwargs = merge([dict(call.kwargs) for call in same_layer])
        calls.append(Call(merge([c.args for c in same_layer]), kwargs, same_layer[0].keyword))
    return merge([part.hidden for part in parts]), calls


def taken(hidden: torch.Tensor, lanes: npt.NDArray[np.int64]) -> torch.Tensor:
    """Rows of a tensor; the tensor itself where that is all of them in order."""
    import numpy as np
    import torch

    if len(lanes) == len(hidden) and np.array_equal(lanes, np.arange(len(lanes))):
        return hidden
    return hidden[torch.from_numpy(lanes).to(hidden.device)]


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors one after the other; a single one as it is."""
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
