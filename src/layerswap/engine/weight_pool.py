"""The tensors of many compositions: those of the experts once each, made ones while they fit."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerswap.compose.blend import Operation
from layerswap.merge.layout import OutputTensor
from layerswap.merge.lazy_tensors import MergedTensor, Term, Thresholds
from layerswap.merge.planner import Plan
from layerswap.merge.writer import compute_tensor, measure_model

if TYPE_CHECKING:
    import torch

Tensors = tuple["torch.Tensor", ...]
FREE_SHARE = 0.5
"""Share of the free memory that made tensors may take where the user sets no bound."""


@dataclass(frozen=True)
class WeightSource:
    """All that one tensor of one composition is made of: equal sources make equal bytes.

    Attributes:
        tensor: what is read, and how it is weighed.
        thresholds: what its operations know of the whole model; see `merge.engine.measure_model`.
    """

    tensor: OutputTensor
    thresholds: tuple[tuple[Operation, Thresholds], ...] = ()

    def compute(self) -> torch.Tensor:
        """The tensor on the CPU, bit for bit what `Plan.load` and `Plan.save` give it."""
        return compute_tensor(self.tensor, dict(self.thresholds))


class Measurements:
    """Thresholds of operations that rank a whole model, measured once for equal sets of tensors."""

    def __init__(self) -> None:
        self._found: dict[frozenset[OutputTensor], dict[Operation, Thresholds]] = {}

    def sources(self, plan: Plan) -> dict[str, WeightSource]:
        """The source of every tensor of a plan, by the tensor's name."""
        derived = frozenset(tensor for tensor in plan.tensors if not tensor.linear)
        if derived not in self._found:
            self._found[derived] = measure_model(plan.tensors) if derived else {}
        found = self._found[derived]
        return {tensor.name: _source(tensor, found) for tensor in plan.tensors}


class WeightPool:
    """Tensors by the number of what they are made of.

    Those that are an expert's own bytes are read once and stay. Made ones (blends, merge methods)
    stay up to a bound in bytes; the least recently used go first, and are made again when needed.
    Where the experts' stay in the memory of the CPU, their copies on the device come and go so.

    Args:
        max_made_bytes: the bound; None for half of the memory that is free on first need.
        device: where tensors are needed.
        home: where the experts' tensors stay.
    """

    def __init__(
        self, max_made_bytes: int | None, device: torch.device, home: torch.device
    ) -> None:
        self.device, self.home = device, home
        self._bound = max_made_bytes
        self._kept: dict[int, Tensors] = {}
        self._made: OrderedDict[int, Tensors] = OrderedDict()
        self.made_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tensors that stay."""
        return sum(_nbytes(tensors) for tensors in self._kept.values())

    @property
    def max_made_bytes(self) -> int:
        """The bound on made tensors, in bytes."""
        if self._bound is None:
            self._bound = int(free_bytes(self.device) * FREE_SHARE)
        return self._bound

    def get(self, number: int) -> Tensors | None:
        """The tensors of this number, None where they are not at hand."""
        if number in self._made:
            self._made.move_to_end(number)
            return self._made[number]
        kept = self._kept.get(number)
        if kept is None or self.device == self.home:
            return kept
        copies = {id(tensor): moved(tensor, self.device) for tensor in kept}  # tied ones stay one
        tensors = tuple(copies[id(tensor)] for tensor in kept)
        self._keep_bounded(number, tensors)
        return tensors

    def put(self, number: int, tensors: Tensors, *, stays: bool) -> None:
        """Keep tensors, for ever or for as long as they fit.

        Args:
            number: of what they are made of.
            tensors: at home if they stay, on the device otherwise.
            stays: whether they are an expert's own.
        """
        if stays:
            self._kept[number] = tensors
        else:
            self._keep_bounded(number, tensors)

    def _keep_bounded(self, number: int, tensors: Tensors) -> None:
        self._made[number] = tensors
        self.made_bytes += _nbytes(tensors)
        while self.made_bytes > self.max_made_bytes and len(self._made) > 1:
            _, dropped = self._made.popitem(last=False)
            self.made_bytes -= _nbytes(dropped)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device, a parameter as a parameter."""
    from torch.nn import Parameter

    if tensor.device == device:
        return tensor
    there = tensor.detach().to(device)
    return Parameter(there, requires_grad=False) if isinstance(tensor, Parameter) else there


def free_bytes(device: torch.device) -> int:
    """Memory that could be taken on a device now, in bytes."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not every system tells; then a bound that suits a laptop
        return 4 << 30


def _source(tensor: OutputTensor, thresholds: dict[Operation, Thresholds]) -> WeightSource:
    if tensor.linear or not thresholds:
        return WeightSource(tensor)
    used = _operations([term for term, _ in tensor.inputs])
    known = [(operation, thresholds[operation]) for operation in used if operation in thresholds]
    return WeightSource(tensor, tuple(known))


def _operations(terms: Sequence[Term]) -> list[Operation]:
    found: dict[Operation, None] = {}
    for term in terms:
        if isinstance(term, MergedTensor):
            found[term.operation] = None
            for part in (*term.inputs, *((term.base,) if term.base else ())):
                found.update(dict.fromkeys(_operations([inner for inner, _ in part])))
    return list(found)


def _nbytes(tensors: Tensors) -> int:
    # Tied parameters are one tensor under several names.
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct)
