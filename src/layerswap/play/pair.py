"""Compositions of two experts as short texts, which addresses, requests and files hold.

swap.2.1.0.0.blend   bottom 2, top 1, transitions 0 and 0, outside blended
partition.A          a partition of the second paper
soup                 both experts blended everywhere
task, language       one expert alone
given                the recipe that the page was opened with
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from layerswap.checkpoint.remote import local_name
from layerswap.compose import Zones, default_zones, zone_grid
from layerswap.compose.composition import stack_rows
from layerswap.compose.recipe import check_recipe
from layerswap.compose.schema import PartitionMethod, SwapMethod
from layerswap.errors import RecipeError, visible
from layerswap.merge import Plan, make_plan
from layerswap.report.stack import stack_zones

GIVEN = "given"
OUTSIDES = ("blend", "language", "task")
PARTITIONS = ("A", "B", "C")
METHODS = ("swap", "soup", "partition", "merge", "instruct", "mergekit", "places")
"""Keys of a recipe that say the composition; `weights` say the blends of all."""
FLAGS = {"task": "task-expert", "language": "language-expert", "name": "partition"}
"""Options of the command line whose names differ from those of recipes."""
WIDEST = 8
"""Most layers of a zone on the map."""
ZONES = ("bottom", "top", "bottom_transition", "top_transition")


@dataclass(frozen=True)
class Pair:
    """Two experts that a plan composes.

    Attributes:
        plan: the plan, which writes checkpoints in its own form.
        task: name of the task expert in the plan's recipe.
        language: name of the language expert.
    """

    plan: Plan
    task: str
    language: str

    @classmethod
    def of(cls, plan: Plan) -> Pair:
        """The two experts of a plan; a RecipeError if its method has another number of experts."""
        if plan.format.name == "gguf":
            raise RecipeError(
                "GGUF files alone have no configuration for a model in memory; give --base as "
                "safetensors, and they are dequantised"
            )
        method = plan.recipe.method
        if isinstance(method, SwapMethod | PartitionMethod):
            return cls(plan, method.task, method.language)
        names = list(getattr(method, "experts", ()))
        if len(names) != 2:
            raise RecipeError(
                f"the page composes two experts; this is {plan.recipe}. Give a swap, a partition, "
                "or a merge of two"
            )
        return cls(plan, *names)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.plan.composition.layers

    @cached_property
    def in_memory(self) -> Plan:
        """The plan of full weights on the disk, of which a model can be made."""
        plan = self.plan
        if plan.format.name == "adapter":
            plan = make_plan(plan.recipe.model_copy(update={"bake": True}))
        return plan.downloaded()

    @cached_property
    def start(self) -> str:
        """The composition of the plan, as text."""
        swap, along = self.plan.recipe.swap, self.plan.recipe.partition
        if self.plan.recipe.places or self.plan.recipe.stack:
            return GIVEN
        if swap is not None:
            return self._swap_key(swap.zones(self.layers), swap.outside)
        if along is not None and along.name in PARTITIONS and along.outside is None:
            return f"partition.{along.name}"
        return "soup" if self.plan.recipe.soup else GIVEN

    @staticmethod
    def _swap_key(zones: Zones, outside: str = "blend") -> str:
        """The text of a swap."""
        return ".".join(["swap", *(str(vars(zones)[name]) for name in ZONES), outside])

    @property
    def presets(self) -> dict[str, str]:
        """Compositions to begin with, by their labels."""
        given = {"as given": GIVEN} if self.start == GIVEN else {}
        return {
            **given,
            "the paper's default": self._swap_key(default_zones(self.layers)),
            **{f"partition {name}": f"partition.{name}" for name in PARTITIONS},
            "soup": "soup",
            "task expert": "task",
            "language expert": "language",
        }

    def grid(self, key: str) -> list[str]:
        """The swaps of the map around a composition: the default first, then bottom by bottom."""
        swap = read_swap(key)
        if swap is None:
            raise RecipeError(f"{key[:80]!r} is no swap, which a map is around")
        zones, outside = swap
        inner = {name: getattr(zones, name) for name in ZONES[2:]}
        sizes = range(min(WIDEST, self.layers) + 1)
        across = zone_grid(self.layers - sum(inner.values()), bottom=sizes, top=sizes)
        fitting = [replace(one, **inner) for one in across]
        default = default_zones(self.layers)
        fitting.sort(key=lambda one: (one.bottom, one.top) != (default.bottom, default.top))
        return [self._swap_key(one, outside) for one in fitting]

    # --- one composition ---

    def recipe(self, key: str) -> dict[str, Any]:
        """The recipe of a composition, as plain data."""
        given = self.plan.recipe.model_dump(mode="json", exclude_defaults=True)
        given["experts"] = {name: _brief(one) for name, one in given["experts"].items()}
        given |= {"base": _brief(given["base"])} if "base" in given else {}
        if key == GIVEN:
            return given
        shared = {name: value for name, value in given.items() if name not in METHODS}
        name, *rest = key.split(".")
        both = {"task": self.task, "language": self.language}
        names = {kind: one for kind, one in both.items() if kind != one}
        if (swap := read_swap(key)) is not None:
            zones, outside = swap
            sizes = {size: count for size, count in vars(zones).items()
                     if count or size in ("bottom", "top")}  # fmt: skip
            placed = {} if outside == "blend" else {"outside": outside}
            return {**shared, "swap": {**names, **sizes, **placed}}
        if key == "soup":
            return {**shared, "soup": {"experts": [*both.values()]}}
        shared.pop("weights", None)
        if name == "partition" and len(rest) == 1 and rest[0] in PARTITIONS:
            return {**shared, "partition": {"name": rest[0], **names}}
        if key in both:
            return {**shared, "soup": {"experts": [both[key]]}}
        raise RecipeError(f"{key[:80]!r} is no composition; one is swap.2.1.0.0.blend")

    def plan_of(self, key: str, *, in_memory: bool = False) -> Plan:
        """The plan of a composition; a RecipeError if it does not fit."""
        start = self.in_memory if in_memory else self.plan
        recipe = {**self.recipe(key), **({"bake": True} if start.recipe.bake else {})}
        return start.with_recipe(check_recipe(recipe, where="composition"))

    def words(self, key: str) -> str:
        """A composition in a few words, such as `bottom 2, top 1`."""
        if (swap := read_swap(key)) is None:
            labels = {text: label for label, text in self.presets.items()}
            return labels.get(key, key.replace(".", " "))
        zones, outside = swap
        return str(zones) + ("" if outside == "blend" else f", outside {outside}")

    def describe(self, key: str) -> dict[str, Any]:
        """All that the page shows of a composition: its rows, its words, and how to take it home.

        A row of the stack has parts; a part has roles and the share of every expert.
        """
        composition = self.plan_of(key).composition
        rows, (command, python) = stack_rows(composition), self._lines(key)
        zones, outside = read_swap(key) or (None, None)
        return {
            "key": key,
            "words": self.words(key),
            "zones": zones and vars(zones),
            "outside": outside,
            "rows": [
                {"label": row.label,
                 "parts": [{"roles": roles, "shares": dict(blend.shares)}
                           for roles, blend in row.blends]}
                for row in rows
            ],
            "sentence": "; ".join(z.words for z in stack_zones(rows, self.layers, self.labels)),
            "recipe": yaml.safe_dump(self.recipe(key), sort_keys=False, allow_unicode=True),
            "command": command,
            "python": python,
        }  # fmt: skip

    @property
    def labels(self) -> dict[str, str]:
        """Display names of the experts, the pair first."""
        own = {self.task: "task expert", self.language: "language expert"}
        return own | {name: visible(name) for name in self.plan.experts if name not in own}

    @property
    def sources(self) -> dict[str, str]:
        """The last part of the source of each expert, for people."""
        found = {name: one.source for name, one in self.plan.recipe.experts.items() if one.source}
        return {name: visible(local_name(Path(source))) for name, source in found.items()}

    def _lines(self, key: str) -> tuple[str, str]:
        """The command line that writes a composition, and the Python line that plans it."""
        recipe, sources = self.recipe(key), self._sources_alone
        command = "layerswap merge recipe.yaml --out merged"
        if sources is None or key == GIVEN:
            return command, 'plan = ls.make_plan("recipe.yaml")'
        if "soup" in recipe:
            own = {self.task: sources["task"], self.language: sources["language"]}
            experts = {name: own[name] for name in recipe["soup"]["experts"]}
            return command, f"plan = ls.soup({experts!r})"
        method = "swap" if "swap" in recipe else "partition"
        options = {**sources, **recipe[method], **sources}
        words = [f"--{FLAGS.get(name, name).replace('_', '-')} {shlex.quote(str(value))}"
                 for name, value in options.items()]  # fmt: skip
        label = options.pop("name", None)
        given = [repr(label)] if label else []
        given += [f"{name}={value!r}" for name, value in options.items()]
        return (
            f"layerswap merge {' '.join(words)} --out merged",
            f"plan = ls.{method}({', '.join(given)})",
        )

    @property
    def _sources_alone(self) -> dict[str, str] | None:
        """The sources of both experts and the base; None where a recipe says more than these."""
        recipe = self.plan.recipe
        sources = {"task": recipe.experts[self.task], "language": recipe.experts[self.language]}
        sources |= {"base": recipe.base} if recipe.base else {}
        alone = all(one.model_fields_set <= {"source"} and one.source for one in sources.values())
        more = set(recipe.model_dump(exclude_defaults=True)) - {"experts", "base", *METHODS}
        if more or len(recipe.experts) > 2 or not alone:
            return None
        return {kind: str(one.source) for kind, one in sources.items()}


def _brief(expert: dict[str, Any]) -> Any:
    """The source alone of an expert that has nothing else."""
    return expert["source"] if set(expert) == {"source"} else expert


def read_swap(key: str) -> tuple[Zones, str] | None:
    """The zones and `outside` of the text of a swap; None if it is another composition."""
    name, *parts = key.split(".")
    if name != "swap":
        return None
    *counts, outside = parts or [""]
    if len(counts) != 4 or outside not in OUTSIDES:
        raise RecipeError(f"{key[:80]!r} is no swap; one is swap.2.1.0.0.blend")
    if not all(count.isascii() and count.isdigit() and len(count) < 5 for count in counts):
        raise RecipeError(f"{key[:80]!r}: a zone is a number of layers")
    return Zones(**dict(zip(ZONES, map(int, counts), strict=True))), outside
