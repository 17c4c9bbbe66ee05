"""Checks devices and dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerswap.checkpoint.read import FLOAT_NAMES
from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import torch


def pick_device(device: str | None) -> str:
    """The given device; when None, a GPU if there is one, else the CPU."""
    if device is not None:
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def open_device(device: str | torch.device) -> torch.device:
    """The device with its index: `cuda` is `cuda:0`.

    Raises:
        EvaluationError: torch does not know the device, or it is not available.
    """
    import torch

    try:
        found = torch.zeros(1, device=device)
        found.item()  # `meta` has no values, and no model runs there
        return found.device
    except (RuntimeError, AssertionError) as error:
        why = str(error).split("\n")[0]
        raise EvaluationError(f"device {str(device)!r} cannot be used ({why})") from None


def check_dtype(dtype: str | None) -> None:
    """Refuse a dtype that models do not run in; None, the dtype of their files, is accepted.

    Raises:
        EvaluationError: it is not one of float32, bfloat16 and float16.
    """
    if dtype is not None and dtype not in FLOAT_NAMES:
        raise EvaluationError(f"no dtype {dtype!r}; there are {', '.join(FLOAT_NAMES)}")
