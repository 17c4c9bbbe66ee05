"""Where models run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import torch


def pick_device(device: str | None) -> str:
    """The device that was asked for; a GPU if there is one, or the CPU, when None."""
    if device is not None:
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def open_device(device: str | torch.device) -> torch.device:
    """A device with its index: `cuda` is `cuda:0`.

    Raises:
        EvaluationError: torch knows no such device, or it is not there.
    """
    import torch

    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        why = str(error).split("\n")[0]
        raise EvaluationError(f"device {str(device)!r} cannot be used ({why})") from None
