"""The arithmetic of merging, on one chunk of one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def blend(parts: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The weighted sum of tensors (paper 1, Algorithm 1, line 8, with weights summing to 1).

    Args:
        parts: tensors of one shape, of any floating dtypes.
        weights: one weight per part.

    Returns:
        A new tensor, accumulated in float32 (float64 if a part is float64); the caller rounds
        it once into the output dtype.
    """
    import torch

    wide = torch.float64 if any(p.dtype == torch.float64 for p in parts) else torch.float32
    total = parts[0].to(wide, copy=True).mul_(weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        # Two steps, because `alpha` fuses them where the processor can: other bits elsewhere.
        total.add_(part.to(wide, copy=True).mul_(weight))
    return total


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    import torch

    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))
