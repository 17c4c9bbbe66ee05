"""Rows of a tensor: their layout, and sums over them.

A row of the papers is an input feature (see docs/method.md): for a weight stored as [out, in] the
elements of one column. A stack of matrices is taken matrix by matrix, and a vector is one row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from layerswap.methods.method import Array

Axis = Literal["input", "output"]
LINES = 256
"""Lines that are added in float32 before their sum is added in float64."""


@dataclass(frozen=True)
class Rows:
    """The layout of the rows of a tensor.

    Attributes:
        width: elements of a stored line.
        height: lines of a matrix.
        matrices: matrices in the tensor.
        lines: True if a row is a stored line, False if it is a column.

    Example: a weight `[3, 5]` stored as [out, in] has 5 rows of 3 elements along the input axis.
    """

    width: int
    height: int
    matrices: int
    lines: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], axis: Axis = "input", *, transposed: bool = False) -> Rows:
        """The rows of a tensor of this shape; `transposed` if matrices are stored [in, out]."""
        if len(shape) < 2:
            return cls(max(1, math.prod(shape)), 1, 1, lines=True)
        lines = (axis == "input") == transposed
        return cls(shape[-1], shape[-2], math.prod(shape[:-2]), lines=lines)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.matrices * (self.height if self.lines else self.width)

    @property
    def length(self) -> int:
        """Elements of a row."""
        return self.width if self.lines else self.height

    def add(self, sums: Array, start: int, values: Array) -> None:
        """Add whole lines of the tensor to the sums of their rows."""
        table = values.reshape(-1, self.width)
        line = start // self.width
        if self.lines:
            sums[line : line + len(table)] += table.sum(axis=1)
            return
        done = 0
        while done < len(table):  # one matrix after the other
            matrix = (line + done) // self.height
            stop = min(len(table), (matrix + 1) * self.height - line, done + LINES)
            sums[matrix * self.width : (matrix + 1) * self.width] += table[done:stop].sum(axis=0)
            done = stop

    def spread(self, values: Array, start: int, stop: int) -> Array:
        """Return the row's value for each of the elements [start, stop) of the tensor."""
        import numpy as np

        first, last = start // self.width, math.ceil(stop / self.width)
        if self.lines:
            table = np.broadcast_to(values[first:last, None], (last - first, self.width))
        else:
            matrix = [line // self.height for line in range(first, last)]
            table = values.reshape(self.matrices, self.width)[matrix]
        return table.reshape(-1)[start - first * self.width : stop - first * self.width]
