"""layerswap: recompose fine-tuned language models layer by layer.

    import layerswap as ls
    plan = ls.swap(task="math-expert", language="swahili-expert", bottom=5, top=2)
    print(plan)              # the stack, drawn
    plan.save("merged")      # a checkpoint that transformers and vLLM load
    model = plan.load()      # or the same model in memory

Importing this package is cheap: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from layerswap.checkpoint import Checkpoint, Place, open_checkpoint
    from layerswap.compose import Blend, Composition, Recipe, Zones, partition, read_recipe
    from layerswap.delta import Atlas, measure_delta, suggest
    from layerswap.delta import measure_delta as delta
    from layerswap.errors import LayerswapError
    from layerswap.evaluate import Sampling, Sweep
    from layerswap.evaluate.fisher import estimate_fisher
    from layerswap.merge import Plan, make_plan, revert, soup, swap, verify

__all__ = [
    "Atlas",
    "Blend",
    "Checkpoint",
    "Composition",
    "LayerswapError",
    "Place",
    "Plan",
    "Recipe",
    "Sampling",
    "Sweep",
    "Zones",
    "__version__",
    "delta",
    "estimate_fisher",
    "make_plan",
    "measure_delta",
    "open_checkpoint",
    "partition",
    "read_recipe",
    "revert",
    "soup",
    "suggest",
    "swap",
    "verify",
]

_ROOMS = {
    "checkpoint": ("Checkpoint", "Place", "open_checkpoint"),
    "compose": ("Blend", "Composition", "Recipe", "Zones", "partition", "read_recipe"),
    "delta": ("Atlas", "measure_delta", "suggest"),
    "errors": ("LayerswapError",),
    "evaluate": ("Sampling", "Sweep"),
    "evaluate.fisher": ("estimate_fisher",),
    "merge": ("Plan", "make_plan", "revert", "soup", "swap", "verify"),
}


def __getattr__(name: str) -> Any:
    if name == "delta":  # the room itself, which can be called
        return importlib.import_module("layerswap.delta")
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(importlib.import_module(f"layerswap.{room}"), name)
    raise AttributeError(f"module 'layerswap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
