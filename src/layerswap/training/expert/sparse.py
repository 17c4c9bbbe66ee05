"""Masks for composable sparse fine-tuning (Ansell et al., 2022).

Imports torch when it is imported; import this module inside functions only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from layerswap.merge.thresholds import Stream, magnitude_thresholds

Tensors = Mapping[str, torch.Tensor]


def most_changed(before: Tensors, after: Tensors, keep: float) -> dict[str, torch.Tensor]:
    """Masks of the largest changes, over all parameters together.

    The k-th largest |delta| is exact; ties with it are kept, so a mask can hold slightly more than
    `keep` of the elements. It never holds an element that did not change.

    Args:
        before: parameters by name, of any float dtype.
        after: the same parameters after a training.
        keep: fraction of all elements, in (0, 1).

    Returns:
        bool tensors of the parameters' shapes.
    """
    deltas = {name: (after[name] - before[name]).float().abs() for name in before}
    total = sum(delta.numel() for delta in deltas.values())
    streams = [_stream(delta.flatten()) for delta in deltas.values()]
    threshold = magnitude_thresholds(streams, 1, [max(1, round(keep * total))])[0][0]
    return {name: (delta >= threshold) & (delta > 0) for name, delta in deltas.items()}


def save_masks(masks: Tensors, path: Path) -> None:
    """Write masks, uint8 tensors of 0 and 1, as safetensors."""
    from safetensors.torch import save_file

    save_file({name: mask.to(torch.uint8).contiguous() for name, mask in masks.items()}, path)


def load_masks(path: Path) -> dict[str, torch.Tensor]:
    """The masks that `save_masks` wrote."""
    from safetensors.torch import load_file

    return {name: mask.bool() for name, mask in load_file(path).items()}


class Masked(TrainerCallback):
    """Restricts a training to the elements in masks.

    Gradients are masked before clipping, and weight decay of the other elements is undone after
    every step.

    Args:
        parameters: the trained parameters, by name.
        masks: bool tensors of their shapes.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], masks: Tensors) -> None:
        self.held = [
            (p, masks[name].to(p.device), p.detach().clone()) for name, p in parameters.items()
        ]
        for parameter, mask, _ in self.held:
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(_masking(mask))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Right after the optimiser has stepped."""
        if not args.weight_decay:
            return
        with torch.no_grad():
            for parameter, mask, start in self.held:
                parameter.copy_(torch.where(mask, parameter, start))


def _masking(mask: torch.Tensor) -> Any:
    def hook(parameter: torch.nn.Parameter) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(mask)

    return hook


def _stream(values: torch.Tensor) -> Stream:
    size = 1 << 22

    def part(start: int, stop: int) -> list[Any]:
        return [values[start:stop].cpu().numpy()]

    def chunks() -> Any:
        return (part(start, start + size) for start in range(0, len(values), size))

    return Stream(len(values), chunks, part)
