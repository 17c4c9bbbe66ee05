"""Conditions: the models that an experiment compares, and the contenders of every composition."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

from layerswap.compose import Blend, Composition, Zones, default_zones
from layerswap.compose.recipe import check_recipe
from layerswap.merge import Plan

OWN_KEYS = ("swap", "places", "weights")
"""Keys of a recipe that say how a swap is composed, and nothing about its contenders."""

_SIZES = tuple(one.name for one in fields(Zones))


@dataclass(frozen=True)
class Condition:
    """One of the models that are compared.

    Conditions print themselves as tables name them, and sort by pair, method and the rest. On
    disk they are their fields (`to_dict`): nothing reads a name back.

    Attributes:
        method: such as `swap`, `task expert`, `soup`, `ties`, `partition`, `joint` or `base`.
        variant: which one of its method, such as `default`, `density 0.5`, `C`, `reverted C` or
            `chosen on development`.
        zones: of a composition of a grid.
        outside: what the places outside the layers take, where conditions differ by it.
        regime: how its experts were trained, where conditions differ by it, such as `LoRA`.
        pair: which pair of experts it is made of; empty for what all pairs share.

    Example:
        str(Condition("swap", zones=Zones(5, 2)))  # swap 5,2,0,0
        str(Condition("ties", "density 0.2"))      # ties, density 0.2
        str(Condition("partition", "C", regime="LoRA", pair="0-1"))  # 0-1: partition C, LoRA
    """

    method: str
    variant: str = ""
    zones: Zones | None = None
    outside: str = ""
    regime: str = ""
    pair: str = ""

    def __str__(self) -> str:
        zones = "" if self.zones is None else ",".join(map(str, astuple(self.zones)))
        # What a partition or a composition is of reads as part of its name: "partition C".
        joined = self.variant if self.method == "partition" else zones
        name = f"{self.method} {joined}".rstrip()
        outside = f"outside {self.outside}" if self.outside else ""
        variant = "" if joined == self.variant else self.variant
        parts = [name, variant, outside, self.regime]
        return f"{self.pair}: " * bool(self.pair) + ", ".join(part for part in parts if part)

    def __lt__(self, other: Condition) -> bool:
        return self._key < other._key

    @property
    def _key(self) -> tuple[Any, ...]:
        zones = (-1,) if self.zones is None else astuple(self.zones)
        return self.pair, self.method, self.regime, self.outside, zones, self.variant

    @property
    def treatment(self) -> Condition:
        """The same of whichever pair."""
        return replace(self, pair="")

    def to_dict(self) -> dict[str, str | int | None]:
        """Its fields as columns of a table; the four counts of its zones are None without zones."""
        sizes = vars(self.zones) if self.zones else dict.fromkeys(_SIZES)
        texts = {name: value for name, value in vars(self).items() if name != "zones"}
        return {**texts, **sizes}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Condition:
        """What `to_dict` gave; further keys are ignored."""
        sizes = {name: data.get(name) for name in _SIZES}
        zones = None if sizes["bottom"] is None else Zones(**sizes)  # type: ignore[arg-type]
        texts = {one.name: data[one.name] for one in fields(cls) if one.name in data}
        return cls(**{**texts, "zones": zones})


BASE = Condition("base")
TASK_EXPERT, LANGUAGE_EXPERT = Condition("task expert"), Condition("language expert")
SOUP, MAGNITUDE_SOUP = Condition("soup"), Condition("magnitude soup")
JOINT = Condition("joint")
"""One model trained on the data of both experts."""
DEFAULT = Condition("swap", "default")
CHOSEN = Condition("swap", "chosen on development")
"""The swap whose zones were chosen on the development documents."""
FLATTERED = Condition("swap", "best (flattered)")
"""The swap that is best on the test documents: chosen by what it is reported on."""


def ties(density: float) -> Condition:
    """TIES with this share of every delta kept."""
    return Condition("ties", f"density {density}")


def partition_of(name: str) -> Condition:
    """The composition of one of the second paper's partitions."""
    return Condition("partition", name)


TUNED = ("weighted soup", "task arithmetic", "ties")
"""Methods with a setting that can be chosen on development documents."""


def methods(
    baselines: Collection[str] = ("experts", "soup"),
    *,
    task: str = "task",
    language: str = "language",
    densities: Sequence[float] = (),
    shares: Sequence[float] = (),
    scales: Sequence[float] = (),
    partitions: Sequence[str] = (),
    outside: str | None = None,
) -> Iterator[tuple[Condition, dict[str, Any]]]:
    """The contenders of a swap: of each the part of a recipe that says how it is composed.

    The default swap comes first, then every partition, then the baselines in the order given.

    Args:
        baselines: of `experts`, `soup`, `weighted soup`, `magnitude soup`, `task arithmetic`,
            `ties` and `reverted` (experts reverted outside a partition); others are ignored.
        task: name of the task expert in the recipe.
        language: name of the language expert in the recipe.
        densities: of TIES, a contender for each.
        shares: of the task expert in weighted soups, a contender for each.
        scales: of both deltas in task arithmetic, a contender for each.
        partitions: names of partitions, each a contender; experts are reverted outside of them.
        outside: who gets the places outside the layers of a partition.
    """
    both = {"task": task, "language": language}

    def part(name: str, **experts: str) -> dict[str, Any]:
        return {"partition": {"name": name, "outside": outside, **both, **experts}}

    yield DEFAULT, {"swap": dict(both)}
    for name in partitions:
        yield partition_of(name), part(name)
    experts = list(both.values())
    known: dict[str, list[tuple[Condition, dict[str, Any]]]] = {
        "experts": [(TASK_EXPERT, {"soup": {"experts": [task]}}),
                    (LANGUAGE_EXPERT, {"soup": {"experts": [language]}})],
        "soup": [(SOUP, {"soup": {"experts": experts}})],
        "magnitude soup": [(MAGNITUDE_SOUP, {"soup": {"experts": experts},
                                             "weights": "magnitude"})],
        "weighted soup": [
            (Condition("weighted soup", f"task {share}"),
             {"soup": {"experts": experts}, "weights": {task: share, language: 1 - share}})
            for share in shares
        ],
        "task arithmetic": [
            (Condition("task arithmetic", f"scale {scale}"),
             {"merge": {"method": "task_arithmetic", "experts": dict.fromkeys(experts, scale)}})
            for scale in scales
        ],
        "ties": [
            (ties(density), {"merge": {"method": "ties", "experts": experts, "density": density}})
            for density in densities
        ],
        "reverted": [
            (Condition(f"{kind} expert", f"reverted {name}"), part(name, **{other: "base"}))
            for name in partitions
            for kind, other in (("task", "language"), ("language", "task"))
        ],
    }  # fmt: skip
    for baseline in baselines:
        yield from known.get(baseline, ())


def contenders(
    start: Plan,
    baselines: Collection[str] = ("experts", "soup"),
    *,
    densities: Sequence[float] = (),
) -> dict[Condition, Plan]:
    """Plans of the models that a swap is compared with, over its own checkpoints.

    Args:
        start: a swap.
        baselines: see `methods`; the base itself is added where the recipe names it.
        densities: of TIES, which needs the base.
    """
    method, layers = start.recipe.swap, start.composition.layers
    assert method is not None, "only a swap has contenders"
    found: dict[Condition, Plan] = {}
    if start.base is not None:
        base = Composition.build(layers, lambda place: Blend.of("base"))
        found[BASE] = start.with_composition(base)
    wanted = [*baselines, *(["ties"] if start.base is not None else [])]
    for condition, part in methods(
        wanted, task=method.task, language=method.language, densities=densities
    ):
        if condition == DEFAULT:
            continue
        data = start.recipe.model_dump(exclude_defaults=True)
        shared = {key: value for key, value in data.items() if key not in OWN_KEYS}
        recipe = check_recipe({**shared, **part}, where=str(condition))
        found[condition] = start.with_recipe(recipe)
    return {**found, DEFAULT: swapped(start, default_zones(layers))}


def swapped(start: Plan, zones: Zones, outside: str = "") -> Plan:
    """The swap with these zones, and with another outside where one is given."""
    method = start.recipe.swap
    assert method is not None, "only a swap has zones"
    changes = {**vars(zones), **({"outside": outside} if outside else {})}
    recipe = start.recipe.model_copy(update={"swap": method.model_copy(update=changes)})
    return start.with_recipe(recipe)
