"""Proposing a composition from what fine-tuning changed, before anything is evaluated.

Each layer's share of all that an expert changed says how much of that expert's learning lives
there. A composition keeps, of each layer, one expert's share and loses the other's, and where the
source changes from one layer to the next, two layers meet that were not trained together. The
score of a composition is what it gains over the task expert alone:

    score(w) = sum_l w_l (g_l - t_l - price) - sum_l |w_l - w_(l-1)| seam_l - prior(w)

with w_l the language expert's weight in layer l (1, 0, or a half where blended), t_l and g_l the
task and the language expert's shares, the price half of the mean of g_l - t_l over the layers where
it is positive, and seam_l the mean of the four shares on both sides of it. A layer that the task
expert left exactly as it was, as partial training does, costs no price: nothing is lost by taking
it.

The prior is half of an average layer's share for every layer by which the zones leave the range
that the first paper found effective (bottom 3 to 5 and top 0 to 2 of 32 layers, section 4.2), so
that only clear evidence proposes deeper zones. See docs/delta.md for the argument.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, floor
from pathlib import Path
from typing import Any, Literal

from layerswap._types import PathLike
from layerswap.checkpoint.places import Place
from layerswap.compose import LAYER_ROLES, Blend, Composition, Zones, swap, zone_grid
from layerswap.compose.composition import all_places, changed_places
from layerswap.compose.presets import DEFAULT_DEPTH
from layerswap.compose.yaml_file import write_text
from layerswap.deltas.atlas import Atlas, rows_threshold
from layerswap.deltas.measure import Sums
from layerswap.errors import RecipeError

EFFECTIVE_BOTTOM, EFFECTIVE_TOP = (3, 5), 2
"""Layers of 32 that the first paper found effective at the bottom, and the most at the top."""
TOP_ROWS = 0.15
"""The share of an expert's rows that count as changed; as many as in the first paper's maps."""


@dataclass(frozen=True)
class Evidence:
    """What is known of one layer.

    Attributes:
        layer: its index.
        task: the layer's share of what the task expert changed; shares sum to 1 over layers.
        language: the same of the language expert.
        overlap: share of the task expert's most changed rows that are also the language
            expert's; None without the rows.
        cosine: cosine between the two deltas; None without the checkpoints.
        untouched: whether the task expert left the layer exactly as it is in the base.
    """

    layer: int
    task: float
    language: float
    overlap: float | None = None
    cosine: float | None = None
    untouched: bool = False

    @property
    def excess(self) -> float:
        """How much larger the language expert's share is than the task expert's."""
        return self.language - self.task


@dataclass(frozen=True)
class Suggestion:
    """A proposed composition and why.

    Attributes:
        zones: the proposal, the swap with the largest score.
        evidence: one entry per layer, from the input.
        ranked: compositions to try, best first, each with its score: what it gains over the task
            expert alone, in shares of an expert's whole change.
    """

    zones: Zones
    evidence: tuple[Evidence, ...]
    ranked: tuple[tuple[Zones, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """What `layerswap suggest --json` prints."""
        return {
            "zones": asdict(self.zones),
            "evidence": [{**asdict(layer), "excess": layer.excess} for layer in self.evidence],
            "ranked": [{**asdict(zones), "score": value} for zones, value in self.ranked],
        }


def suggest(
    atlas: Atlas | PathLike, task: str, language: str, *, candidates: Iterable[Zones] | None = None
) -> Suggestion:
    """Propose zones from an atlas of both experts.

    An expert's changed rows are the 15% of its rows that changed most, so that learning rates,
    which scale all changes alike, do not matter.

    Args:
        atlas: what both experts changed, or the folder of a saved atlas; no checkpoint is read.
        task: the task expert's name in the atlas.
        language: the language expert's.
        candidates: compositions to rank; all that leave the task expert a layer when None.

    Raises:
        RecipeError: the atlas has no expert of that name, or an expert's training changed nothing.

    Example:
        >>> import layerswap as ls
        >>> atlas = ls.delta("base", "math-expert", "swahili-expert")
        >>> proposal = ls.suggest(atlas, "math-expert", "swahili-expert")
        >>> proposal.zones
        Zones(bottom=0, top=0, bottom_transition=0, top_transition=0)
    """
    if not isinstance(atlas, Atlas):
        atlas = Atlas.load(atlas)
    for name in (task, language):
        atlas.check_expert(name)
        if not any(change.relative_norm for change in atlas.of(name)):
            raise RecipeError(
                f"{name} has the weights of its base: there is nothing to propose from"
            )
    fractions = {
        expert: _fractions(atlas, expert, rows_threshold(atlas, [expert], TOP_ROWS))
        for expert in (task, language)
    }
    return suggest_from(
        fractions[task],
        fractions[language],
        overlaps=_overlaps(atlas, task, language),
        cosines=_cosines(atlas, task, language),
        untouched=_untouched(atlas, task),
        candidates=candidates,
    )


def suggest_from(
    task: Sequence[float],
    language: Sequence[float],
    *,
    overlaps: Mapping[int, float] | None = None,
    cosines: Mapping[int, float] | None = None,
    untouched: Collection[int] = (),
    candidates: Iterable[Zones] | None = None,
) -> Suggestion:
    """Propose zones from how much each expert changed each layer, in any unit.

    Args:
        task: per layer from the input, such as the mean of a published map's row.
        language: the same of the language expert.
        overlaps: per layer, shown as evidence.
        cosines: per layer, shown as evidence.
        untouched: layers that the task expert left exactly as they are in the base.
        candidates: compositions to rank; when None, all that leave the task expert a layer, with
            transition zones of no or one layer.

    Raises:
        RecipeError: the experts differ in their number of layers, or a candidate does not fit.
    """
    layers = len(task)
    if layers != len(language) or not layers:
        raise RecipeError(f"{layers} layers of one expert, {len(language)} of the other")
    shares = [[value / (sum(values) or 1) for value in values] for values in (task, language)]
    evidence = tuple(
        Evidence(
            layer, t, g, (overlaps or {}).get(layer), (cosines or {}).get(layer), layer in untouched
        )
        for layer, (t, g) in enumerate(zip(*shares, strict=True))
    )
    swaps = _all_zones(layers, (0,))
    tried = _all_zones(layers, (0, 1)) if candidates is None else list(candidates)
    return Suggestion(_rank(swaps, evidence)[0][0], evidence, tuple(_rank(tried, evidence)))


def score(zones: Zones, evidence: Sequence[Evidence]) -> float:
    """What a composition gains over the task expert alone, by the formula of this module.

    Raises:
        RecipeError: the zones do not fit.
    """
    layers = len(evidence)
    zones.check(layers)
    leaning = [layer.excess for layer in evidence if layer.excess > 0]
    price = sum(leaning) / len(leaning) / 2 if leaning else 0.0
    weights = _weights(zones, layers)
    gain = sum(
        w * (layer.excess - (0 if layer.untouched else price))
        for w, layer in zip(weights, evidence, strict=True)
    )
    change = [layer.task + layer.language for layer in evidence]
    seams = sum(
        abs(weights[i] - weights[i - 1]) * (change[i - 1] + change[i]) / 4 for i in range(1, layers)
    )
    return gain - seams - _prior(zones, evidence)


def _prior(zones: Zones, evidence: Sequence[Evidence]) -> float:
    """What leaving the paper's effective range costs, in shares of an expert's whole change.

    Layers of a shallow model carry more of the change each, and cost no more than those of 32.
    Layers that the task expert left untouched are free.
    """
    layers = len(evidence)
    least, most = (bound * layers / DEFAULT_DEPTH for bound in EFFECTIVE_BOTTOM)
    top = ceil(EFFECTIVE_TOP * layers / DEFAULT_DEPTH)
    outer = [*range(ceil(most), zones.bottom), *range(layers - zones.top, layers - top)]
    outside = max(0, floor(least) - zones.bottom)
    outside += sum(not evidence[layer].untouched for layer in outer)
    return outside / (2 * max(layers, DEFAULT_DEPTH))


def _rank(tried: Iterable[Zones], evidence: Sequence[Evidence]) -> list[tuple[Zones, float]]:
    """Best first; of equal scores, the one that takes less from the language expert."""
    scored = [(zones, score(zones, evidence)) for zones in tried]
    return sorted(
        scored,
        # Rounded, so that the order of additions does not decide between equals.
        key=lambda pair: (-round(pair[1], 12), sum(_weights(pair[0], len(evidence)))),
    )


def _all_zones(layers: int, transitions: Sequence[int]) -> list[Zones]:
    grid = zone_grid(
        layers,
        bottom=range(layers),
        top=range(layers),
        bottom_transition=transitions,
        top_transition=transitions,
    )
    # A transition lies between the two experts: there is none where a zone is empty.
    return [
        zones
        for zones in grid
        if sum(vars(zones).values()) < layers
        and zones.bottom >= zones.bottom_transition
        and zones.top >= zones.top_transition
    ]


def _weights(zones: Zones, layers: int) -> list[float]:
    """How much of each layer is the language expert's: 1, 0, or a half where blended."""
    middle = layers - sum(vars(zones).values())
    return [
        *[1.0] * zones.bottom,
        *[0.5] * zones.bottom_transition,
        *[0.0] * middle,
        *[0.5] * zones.top_transition,
        *[1.0] * zones.top,
    ]


def _fractions(atlas: Atlas, expert: str, threshold: float) -> list[float]:
    """Per layer, the mean over its matrices of the share of rows above the threshold."""
    cells: dict[int, list[float]] = {layer: [] for layer in range(atlas.layers)}
    for (layer, _), tensors in atlas.matrices().items():
        found = [atlas.fraction(expert, tensor, threshold) for tensor in tensors]
        cells[layer].append(sum(found) / len(found))
    return [sum(values) / max(1, len(values)) for values in cells.values()]


def _untouched(atlas: Atlas, expert: str) -> set[int]:
    changed: dict[int, bool] = dict.fromkeys(range(atlas.layers), False)
    for tensor, place in atlas.places.items():
        if place.layer is not None and atlas.changes[expert, tensor].norm:
            changed[place.layer] = True
    return {layer for layer, moved in changed.items() if not moved}


def _overlaps(atlas: Atlas, task: str, language: str) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for (layer, _), tensors in atlas.matrices().items():
        found.setdefault(layer, []).extend(
            atlas.overlap(task, language, tensor, TOP_ROWS) for tensor in tensors
        )
    return {layer: sum(values) / len(values) for layer, values in found.items()}


def _cosines(atlas: Atlas, task: str, language: str) -> dict[int, float]:
    if not atlas.sums:
        return {}
    totals: dict[int, Sums] = {}
    for place, conflict in atlas.conflict(task, language).items():
        if place.layer is not None:
            totals[place.layer] = totals.get(place.layer, Sums()) + conflict.sums
    return {layer: sums.cosine for layer, sums in totals.items()}


def with_third(
    composition: Composition,
    atlas: Atlas,
    third: str,
    *,
    threshold: float = 0.001,
    share: float = 0.5,
    by: Literal["role", "layer"] = "role",
) -> Composition:
    """Let a third expert, such as one for safety, into a composition where it changed more.

    The rule of 2601.22620: the relative change of a module is `|delta| / |base|` over its
    matrices, and its share is that over the sum of all modules. Where the third expert's share is
    larger than the composition's by more than `threshold` the third expert is taken, where it is
    smaller by more than that the composition stays, and between them both are blended, as outside
    the layers. Over a composition of one expert this is the paper's rule for two.

    Args:
        composition: of experts in the atlas.
        atlas: what the experts and the third one changed.
        third: the third expert's name in the atlas.
        threshold: tau, a difference of shares.
        share: alpha, the third expert's weight in a blend.
        by: decide for attention and mlp apart, or for whole layers.

    Raises:
        RecipeError: an expert is not in the atlas, or another number of layers.
    """
    for name in (*composition.experts, third):
        atlas.check_expert(name)
    if composition.layers != atlas.layers:
        raise RecipeError(f"{composition.layers} layers composed, {atlas.layers} in the atlas")
    roles = [("attention",), ("mlp", "router")] if by == "role" else [LAYER_ROLES]
    modules = [[Place(layer, r) for r in part] for layer in range(atlas.layers) for part in roles]
    relative = {name: _relative(atlas, name, by) for name in (*composition.experts, third)}
    theirs = [sum(relative[third].get(place, 0.0) for place in module) for module in modules]
    ours = [
        sum(
            weight * relative[name].get(place, 0.0)
            for place in module
            for name, weight in composition[place].shares.items()
        )
        for module in modules
    ]
    changes = {
        place: Blend.nested({Blend.of(third): share, composition[place]: 1 - share})
        for place in all_places(composition.layers)
        if place.layer is None
    }
    for module, new, old in zip(modules, theirs, ours, strict=True):
        gap = new / (sum(theirs) or 1) - old / (sum(ours) or 1)
        for place in module if gap >= -threshold else ():
            weights = {Blend.of(third): share, composition[place]: 1 - share}
            changes[place] = Blend.of(third) if gap > threshold else Blend.nested(weights)
    return composition.replace(changes)


def _relative(atlas: Atlas, expert: str, by: str) -> dict[Place, float]:
    """The relative change of attention and mlp in each layer, over the matrices."""
    found: dict[Place, list[float]] = {}
    for tensors in atlas.matrices().values():
        for tensor in tensors:
            if atlas.places[tensor].role in ("attention", "mlp", "router"):
                change = atlas.changes[expert, tensor].relative_norm
                found.setdefault(atlas.places[tensor], []).append(change)
    # As the authors' code: roots of squares for a module, sums for a layer.
    total = math.hypot if by == "role" else lambda *values: sum(values)
    return {place: float(total(*values)) for place, values in found.items()}


def write_proposal(
    path: Path,
    zones: Zones,
    *,
    base: str,
    task: str,
    language: str,
    third: tuple[str, Composition] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a proposal as a recipe that `layerswap merge` takes.

    Args:
        path: the file.
        zones: of the swap.
        base: checkpoint of the base.
        task: that of the task expert.
        language: that of the language expert.
        third: that of a third expert, called `third`, and what `with_third` made of the swap.
        overwrite: replace a file that is there.

    Raises:
        RecipeError: the file is there, or cannot be written.
    """
    import yaml

    data: dict[str, Any] = {
        "base": base,
        "experts": {"task": task, "language": language},
        "swap": asdict(zones),
    }
    if third is not None:
        data["experts"]["third"], composition = third
        plain = swap(composition.layers, zones=zones)
        data["places"] = [
            {
                "layers": "outside" if place.layer is None else place.layer,
                "roles": [place.role],
                "take": {str(member): weight for member, weight in blend.weights},
            }
            for place, blend in changed_places(plain, composition).items()
        ]
    write_text(path, yaml.safe_dump(data, sort_keys=False), overwrite=overwrite)
