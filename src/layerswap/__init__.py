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
    from layerswap.errors import LayerswapError
    from layerswap.evaluate import Sampling, Sweep
    from layerswap.merge import Plan, make_plan, soup, swap

__all__ = [
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
    "make_plan",
    "open_checkpoint",
    "partition",
    "read_recipe",
    "soup",
    "swap",
]

_ROOMS = {
    "checkpoint": ("Checkpoint", "Place", "open_checkpoint"),
    "compose": ("Blend", "Composition", "Recipe", "Zones", "partition", "read_recipe"),
    "errors": ("LayerswapError",),
    "evaluate": ("Sampling", "Sweep"),
    "merge": ("Plan", "make_plan", "soup", "swap"),
}


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(importlib.import_module(f"layerswap.{room}"), name)
    raise AttributeError(f"module 'layerswap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
