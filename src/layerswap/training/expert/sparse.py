"""Composable sparse fine-tuning (Ansell et al., 2022): trains only the elements in masks.

A first training finds the elements that change most; their masks are kept, the weights are not. A
second training, from the base again, changes only these elements.

Imports torch when it is imported; import this module inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

Tensors = Mapping[str, torch.Tensor]


def most_changed(before: Tensors, after: Tensors, keep: float) -> dict[str, torch.Tensor]:
    """Return masks of the largest changes, over all parameters together.

    The k-th largest |delta| is exact; ties with it are kept, so a mask can hold slightly more than
    `keep` of the elements. It never holds an element that did not change.

    Args:
        before: parameters by name, of any float dtype.
        after: the same parameters after a training.
        keep: fraction of all elements, in (0, 1).
    """
    deltas = {name: (after[name] - before[name]).float().abs() for name in before}
    values = torch.cat([delta.flatten().cpu() for delta in deltas.values()])
    smaller = len(values) - max(1, round(keep * len(values)))
    threshold = values.kthvalue(smaller + 1).values.item()
    return {name: (delta >= threshold) & (delta > 0) for name, delta in deltas.items()}


def save_masks(masks: Tensors, path: Path) -> None:
    """Write masks atomically as safetensors: uint8 tensors of 0 and 1."""
    draft = path.with_name(f".{path.name}")
    save_file({name: mask.to(torch.uint8).contiguous() for name, mask in masks.items()}, draft)
    draft.replace(path)


def load_masks(path: Path) -> dict[str, torch.Tensor]:
    """Load the masks that `save_masks` wrote."""
    return {name: mask.bool() for name, mask in load_file(path).items()}


class Masked(TrainerCallback):
    """Restricts a training to the elements in masks: bool tensors by name of a parameter.

    Gradients are masked before clipping, and weight decay of the other elements is undone after
    every step.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], masks: Tensors) -> None:
        self.held = [
            (p, masks[name].to(p.device), p.detach().clone()) for name, p in parameters.items()
        ]
        for parameter, mask, _ in self.held:
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(_gradient_mask(mask))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Undo weight decay outside the masks, right after the optimiser has stepped."""
        if not args.weight_decay:
            return
        with torch.no_grad():
            for parameter, mask, start in self.held:
                parameter.copy_(torch.where(mask, parameter, start))


def _gradient_mask(mask: torch.Tensor) -> Callable[[torch.nn.Parameter], None]:
    def hook(parameter: torch.nn.Parameter) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(mask)

    return hook
