"""Proposing a composition from what fine-tuning changed, before anything is evaluated.

Each layer's share of all that an expert changed says how much of that expert's learning lives
there. A composition keeps, of each layer, one expert's share and loses the other's, and where the
source changes from one layer to the next, two layers meet that were not trained together. The
score of a composition is what it gains over the task expert alone:

    score(w) = sum_l w_l (g_l - t_l - price) - sum_l |w_l - w_(l-1)| seam_l

with w_l the language expert's weight in layer l (1, 0, or a half where blended), t_l and g_l the
task and the language expert's shares, the price half of the mean of g_l - t_l over the layers where
it is positive, and seam_l the mean of the four shares on both sides of it. A layer that the task
expert left exactly as it was, as partial training does, costs no price: nothing is lost by taking
it. See docs/delta.md for the argument.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerswap._types import PathLike
from layerswap.compose import Zones, zone_grid
from layerswap.deltas.atlas import Atlas, rows_threshold
from layerswap.deltas.measure import Sums
from layerswap.errors import RecipeError

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
        RecipeError: the atlas has no expert of that name.

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
        if name not in atlas.experts:
            known = ", ".join(atlas.experts)
            raise RecipeError(f"no expert {name!r} in the atlas; it has {known}")
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
    return gain - seams


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


def write_proposal(path: Path, zones: Zones, *, base: str, task: str, language: str) -> None:
    """Write a proposal as a recipe that `layerswap merge` takes.

    Raises:
        RecipeError: the file cannot be written.
    """
    import yaml

    data = {
        "base": base,
        "experts": {"task": task, "language": language},
        "swap": asdict(zones),
    }
    try:
        path.write_text(yaml.safe_dump(data, sort_keys=False), "utf-8")
    except OSError as error:
        raise RecipeError(f"{path}: cannot be written ({error.strerror})") from None
