"""What an expert gives for one tensor: stored bytes, an adapter over them, or aligned rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layerswap.checkpoint import LowRank, TensorInfo
from layerswap.checkpoint.read import read_elements

if TYPE_CHECKING:
    import torch

    Factors = dict[LowRank, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Adapted:
    """A stored tensor and what an adapter adds to it."""

    stored: TensorInfo
    low_rank: LowRank

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.stored.shape

    @property
    def dtype(self) -> str:
        """The dtype that it is stored in, before the adapter."""
        return self.stored.dtype


@dataclass(frozen=True)
class Run:
    """Neighbouring rows of an aligned tensor that come from neighbouring rows of one tensor."""

    source: TensorInfo | Adapted
    first: int
    count: int


@dataclass(frozen=True)
class Gathered:
    """An embedding or a head whose rows were brought to another vocabulary.

    Attributes:
        name: the tensor's name.
        shape: its shape in the other vocabulary, `[tokens, ...]`.
        dtype: safetensors dtype of the expert's own tensor.
        runs: its rows in order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    runs: tuple[Run, ...]


Source = TensorInfo | Adapted | Gathered


def stored(source: Source) -> Iterator[TensorInfo]:
    """Every stored tensor that a source is read from."""
    if isinstance(source, TensorInfo):
        yield source
    elif isinstance(source, Adapted):
        yield from (source.stored, source.low_rank.a, source.low_rank.b)
    else:
        for inner in dict.fromkeys(run.source for run in source.runs):
            yield from stored(inner)


def elements(
    source: Source, handles: Mapping[Path, int], start: int, stop: int, factors: Factors
) -> torch.Tensor:
    """Elements [start, stop) of a source, as a vector.

    Args:
        source: what to read.
        handles: its files, open.
        start: first element, in row-major order.
        stop: one past the last element.
        factors: adapters' matrices that were read already; filled as they are read.

    Returns:
        In the stored dtype; float32 where an adapter adds to it or sources of two dtypes meet.
    """
    import torch

    if isinstance(source, TensorInfo):
        return read_elements(handles[source.file], source, start, stop)
    if isinstance(source, Adapted):
        low = source.low_rank
        if low not in factors:
            factors[low] = low.factors()
        base = read_elements(handles[source.stored.file], source.stored, start, stop)
        return base.float().add_(low.elements(factors[low], start, stop))
    parts = [elements(*piece, factors) for piece in _pieces(source, handles, start, stop)]
    if len({part.dtype for part in parts}) > 1:
        parts = [part.float() for part in parts]
    return torch.cat(parts) if parts else torch.empty(0)


def _pieces(
    source: Gathered, handles: Mapping[Path, int], start: int, stop: int
) -> Iterator[tuple[Source, Mapping[Path, int], int, int]]:
    width = math.prod(source.shape[1:])
    row = 0
    for run in source.runs:
        # Elements of this run within the output, and where they lie in its own tensor.
        begin, end = max(start, row * width), min(stop, (row + run.count) * width)
        if begin < end:
            shift = (run.first - row) * width
            yield run.source, handles, begin + shift, end + shift
        row += run.count
