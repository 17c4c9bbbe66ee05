"""Compositions of two experts as short texts, which addresses, requests and files hold.

swap.2.1.0.0.blend   bottom 2, top 1, transitions 0 and 0, outside blended
partition.A          a partition of the second paper
soup                 both experts blended everywhere
task, language       one expert alone
given                the recipe that the page was opened with
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

from layerswap.checkpoint.hub import local_name
from layerswap.compose.composition import stack_rows
from layerswap.compose.presets import Zones, default_zones
from layerswap.compose.recipe import check_recipe
from layerswap.compose.schema import PartitionMethod, SwapMethod
from layerswap.ground.errors import RecipeError, visible
from layerswap.ground.yaml_file import dump_yaml
from layerswap.merge.api import make_plan
from layerswap.merge.plan import Plan
from layerswap.report.stack import stack_zones

SWAP = re.compile(r"swap\.(\d{1,4})\.(\d{1,4})\.(\d{1,4})\.(\d{1,4})\.(blend|language|task)", re.A)
PARTITION = re.compile(r"partition\.([ABC])")
GIVEN = "given"
METHODS = ("swap", "soup", "partition", "merge", "instruct", "mergekit", "places")
"""Keys of a recipe that say the composition; `weights` say the blends of all."""


class Pair:
    """Two experts that a plan composes; `start` is the plan's own composition, as text."""

    def __init__(self, plan: Plan) -> None:
        if plan.format.name == "gguf":
            raise RecipeError(
                "GGUF files alone lack the configuration to load a model; give --base as "
                "safetensors, and they are dequantised"
            )
        recipe, method = plan.recipe, plan.recipe.method
        names = list(getattr(method, "experts", ()))
        if isinstance(method, SwapMethod | PartitionMethod):
            names = [method.task, method.language]
        if len(names) != 2:
            raise RecipeError(
                f"the page composes two experts; this is a recipe: {recipe}. Give a swap, a "
                "partition, or a merge of two"
            )
        self.plan, self.layers = plan, plan.composition.layers
        self.experts = {"task": names[0], "language": names[1]}
        self.start = GIVEN
        if recipe.places:
            return
        if recipe.swap is not None:
            self.start = swap_key(recipe.swap.zones(self.layers), recipe.swap.outside)
        elif recipe.partition is not None and recipe.partition.outside is None:
            key = f"partition.{recipe.partition.name}"
            self.start = key if PARTITION.fullmatch(key) else GIVEN
        elif recipe.soup:
            self.start = "soup"

    @cached_property
    def in_memory(self) -> Plan:
        """Return the plan with full weights on the disk, ready to load."""
        plan = self.plan
        if plan.format.name == "adapter":
            plan = make_plan(plan.recipe.model_copy(update={"bake": True}))
        return plan.downloaded()

    @property
    def presets(self) -> dict[str, str]:
        """Compositions to begin with, by their labels."""
        return {
            **({"as given": GIVEN} if self.start == GIVEN else {}),
            "the paper's default": swap_key(default_zones(self.layers), "blend"),
            **{f"partition {name}": f"partition.{name}" for name in "ABC"},
            "soup": "soup",
            "task expert": "task",
            "language expert": "language",
        }

    # --- one composition ---

    def recipe(self, key: str) -> dict[str, Any]:
        """The recipe of a composition, as plain data."""
        given = self.plan.recipe.model_dump(mode="json", exclude_defaults=True)
        given["experts"] = {name: _brief(source) for name, source in given["experts"].items()}
        given |= {"base": _brief(given["base"])} if "base" in given else {}
        if key == GIVEN:
            return given
        shared = {name: value for name, value in given.items() if name not in METHODS}
        names = {role: name for role, name in self.experts.items() if role != name}
        if (swap := read_swap(key)) is not None:
            sizes = {size: count for size, count in vars(swap[0]).items()
                     if count or size in ("bottom", "top")}  # fmt: skip
            outside = {} if swap[1] == "blend" else {"outside": swap[1]}
            return {**shared, "swap": {**names, **sizes, **outside}}
        if key == "soup":
            return {**shared, "soup": {"experts": [*self.experts.values()]}}
        shared.pop("weights", None)
        if match := PARTITION.fullmatch(key):
            return {**shared, "partition": {"name": match[1], **names}}
        if key in self.experts:
            return {**shared, "soup": {"experts": [self.experts[key]]}}
        raise RecipeError(f"{key[:80]!r} is not a composition such as swap.2.1.0.0.blend")

    def plan_of(self, key: str, *, in_memory: bool = False) -> Plan:
        """The plan of a composition; a RecipeError if it does not fit."""
        start = self.in_memory if in_memory else self.plan
        recipe = {**self.recipe(key), **({"bake": True} if start.recipe.bake else {})}
        return start.with_recipe(check_recipe(recipe, where="composition"))

    def words(self, key: str) -> str:
        """A composition in a few words, such as `bottom 2, top 1`."""
        if (swap := read_swap(key)) is None:
            return next((label for label, preset in self.presets.items() if preset == key), key)
        return str(swap[0]) + ("" if swap[1] == "blend" else f", outside {swap[1]}")

    def describe(self, key: str) -> dict[str, Any]:
        """Return the rows, words and recipe of a composition for the page.

        A row of the stack has parts; a part has roles and the share of every expert.
        """
        plan, swap = self.plan_of(key), read_swap(key)
        rows = stack_rows(plan.composition)
        return {
            "words": self.words(key),
            "zones": swap and vars(swap[0]),
            "outside": swap and swap[1],
            "rows": [
                {"label": row.label,
                 "parts": [{"roles": roles, "shares": dict(blend.shares)}
                           for roles, blend in row.blends]}
                for row in rows
            ],
            "sentence": "; ".join(z.words for z in stack_zones(rows, self.layers, self.labels)),
            "recipe": dump_yaml(self.recipe(key)),
        }  # fmt: skip

    @property
    def labels(self) -> dict[str, str]:
        """Display names of the experts, the pair first."""
        labels = {name: f"{role} expert" for role, name in self.experts.items()}
        return labels | {name: visible(name) for name in self.plan.experts if name not in labels}

    @property
    def sources(self) -> dict[str, str]:
        """Short names of the experts' sources."""
        sources = {
            name: expert.source
            for name, expert in self.plan.recipe.experts.items()
            if expert.source
        }
        return {name: visible(local_name(Path(source))) for name, source in sources.items()}


def _brief(expert: dict[str, Any]) -> Any:
    """Shorten an expert with only a source to that source."""
    return expert["source"] if set(expert) == {"source"} else expert


def swap_key(zones: Zones, outside: str) -> str:
    """The text of a swap."""
    return ".".join(["swap", *map(str, vars(zones).values()), outside])


def read_swap(key: str) -> tuple[Zones, str] | None:
    """Parse the text of a swap into zones and `outside`; None for another text."""
    match = SWAP.fullmatch(key)
    return match and (Zones(*map(int, match.groups()[:4])), match[5])
