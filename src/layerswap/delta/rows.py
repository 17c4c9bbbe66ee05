"""Rows of a tensor: which elements make one, and sums over them.

A row of the papers is an input feature (see docs/method.md): for a weight stored `[out, in]` the
elements of one column. A stack of matrices is taken matrix by matrix, and a vector is one row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Axis = Literal["input", "output"]
LINES = 256
"""Lines that are added up in float32 before they join sums in float64."""


@dataclass(frozen=True)
class Rows:
    """How the rows of a tensor lie in it.

    Attributes:
        width: elements of a stored line.
        height: lines of a matrix.
        matrices: matrices in the tensor.
        lines: whether a row is a stored line, and not a column.
    """

    width: int
    height: int
    matrices: int
    lines: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], axis: Axis = "input", *, transposed: bool = False) -> Rows:
        """The rows of a tensor of this shape; `transposed` where matrices are stored [in, out]."""
        if len(shape) < 2:
            return cls(max(1, math.prod(shape)), 1, 1, lines=True)
        return cls(
            shape[-1], shape[-2], math.prod(shape[:-2]), lines=(axis == "input") == transposed
        )

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.matrices * (self.height if self.lines else self.width)

    @property
    def length(self) -> int:
        """Elements of a row."""
        return self.width if self.lines else self.height

    def add(self, sums: torch.Tensor, start: int, values: torch.Tensor) -> None:
        """Add whole lines of the tensor to the sums of their rows.

        Args:
            sums: one per row, float64.
            start: position of the first value in the tensor, at the beginning of a line.
            values: whole lines, as a vector.
        """
        import torch

        table = values.view(-1, self.width)
        line = start // self.width
        if self.lines:
            sums[line : line + len(table)] += table.sum(dim=1)
            return
        done = 0
        while done < len(table):  # lines of one matrix after the other
            matrix = (line + done) // self.height
            stop = min(len(table), (matrix + 1) * self.height - line, done + LINES)
            # A product with ones: adds in float32 as sum does, in a fraction of its time.
            part = torch.mv(table[done:stop].T, torch.ones(stop - done))
            sums[matrix * self.width : (matrix + 1) * self.width] += part
            done = stop

    def spread(self, kept: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """What a vector with one value per row says of elements [start, stop) of the tensor."""
        first, last = start // self.width, math.ceil(stop / self.width)
        if self.lines:
            table = kept[first:last, None].expand(-1, self.width)
        else:
            matrix = [line // self.height for line in range(first, last)]
            table = kept.view(self.matrices, self.width)[matrix]
        return table.reshape(-1)[start - first * self.width : stop - first * self.width]
