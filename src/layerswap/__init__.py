"""layerswap: recompose fine-tuned language models layer by layer.

    import layerswap as ls
    plan = ls.swap(task="math-expert", language="swahili-expert", bottom=5, top=2)
    print(plan)              # the stack, drawn
    plan.save("merged")      # a checkpoint that transformers and vLLM load
    model = plan.load()      # or the same model in memory

Importing this package is cheap: names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerswap.ground.types import lazy_names
from layerswap.versions import __version__

if TYPE_CHECKING:  # so that editors and type checkers know the names
    from layerswap.checkpoint import Checkpoint, Place, open_checkpoint  # noqa: F401
    from layerswap.compose.blend import Blend  # noqa: F401
    from layerswap.compose.composition import Composition  # noqa: F401
    from layerswap.compose.presets import Zones  # noqa: F401
    from layerswap.compose.recipe import Recipe, parse_recipe, read_recipe  # noqa: F401
    from layerswap.deltas.atlas import Atlas  # noqa: F401
    from layerswap.deltas.atlas import measure_delta as delta  # noqa: F401
    from layerswap.engine import Sampling, Sweep  # noqa: F401
    from layerswap.evaluation.fisher import estimate_fisher  # noqa: F401
    from layerswap.experiment.evaluations import evaluate  # noqa: F401
    from layerswap.experiment.runs import compare  # noqa: F401
    from layerswap.experiment.sweeps import sweep  # noqa: F401
    from layerswap.ground.errors import LayerswapError  # noqa: F401
    from layerswap.merge.api import instruct, make_plan, partition, revert, soup, swap  # noqa: F401
    from layerswap.merge.compare import verify_against  # noqa: F401
    from layerswap.merge.plan import Plan  # noqa: F401
    from layerswap.merge.verification import verify  # noqa: F401
    from layerswap.play import play  # noqa: F401
    from layerswap.training.expert.trainer import train  # noqa: F401

_HOME = {
    "Atlas": "deltas.atlas",
    "Blend": "compose.blend",
    "Checkpoint": "checkpoint",
    "Composition": "compose.composition",
    "LayerswapError": "ground.errors",
    "Place": "checkpoint",
    "Plan": "merge.plan",
    "Recipe": "compose.recipe",
    "Sampling": "engine",
    "Sweep": "engine",
    "Zones": "compose.presets",
    "compare": "experiment.runs",
    "delta": "deltas.atlas:measure_delta",
    "estimate_fisher": "evaluation.fisher",
    "evaluate": "experiment.evaluations",
    "instruct": "merge.api",
    "make_plan": "merge.api",
    "open_checkpoint": "checkpoint",
    "parse_recipe": "compose.recipe",
    "partition": "merge.api",
    "play": "play",
    "read_recipe": "compose.recipe",
    "revert": "merge.api",
    "soup": "merge.api",
    "swap": "merge.api",
    "sweep": "experiment.sweeps",
    "train": "training.expert.trainer",
    "verify": "merge.verification",
    "verify_against": "merge.compare",
}
"""The room of every public name, and its name there where it is another."""

__all__ = ["__version__", *_HOME]  # noqa: PLE0604


if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
