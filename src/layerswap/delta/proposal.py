"""Proposing a composition from what fine-tuning changed, before anything is evaluated.

Each layer's share of all that an expert changed says how much of that expert's learning lives
there. From the input upwards, and from the output downwards, layers go to the language expert as
long as its shares are larger than the task expert's; where neither clearly is, the layer is
blended. Shares are smoothed over neighbours, because a layer is only as good as what it reads:
one quiet layer does not end a zone. See docs/delta.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerswap.compose import Zones, zone_grid
from layerswap.delta.atlas import Atlas, rows_threshold
from layerswap.delta.measure import Sums
from layerswap.errors import RecipeError

WINDOW = 3
"""Layers that a share is smoothed over in a model of 32; scaled with depth, always odd."""
CLOSE = 0.05
"""Two shares that differ by less than this, relative to their sum, favour neither expert."""
TOP_ROWS = 0.15
"""The share of an expert's rows that count as changed; as many as in the first paper's maps."""


@dataclass(frozen=True)
class Evidence:
    """What is known of one layer.

    Attributes:
        layer: its index.
        task: the layer's share of what the task expert changed; shares sum to 1 over layers.
        language: the same of the language expert.
        task_smoothed: `task` smoothed over neighbouring layers.
        language_smoothed: the same of `language`.
        overlap: share of the task expert's most changed rows that are also the language
            expert's; None without the rows.
        cosine: cosine between the two deltas; None without the checkpoints.
    """

    layer: int
    task: float
    language: float
    task_smoothed: float
    language_smoothed: float
    overlap: float | None = None
    cosine: float | None = None

    @property
    def lean(self) -> float:
        """From -1, all the task expert's, to 1, all the language expert's."""
        total = self.task_smoothed + self.language_smoothed
        return (self.language_smoothed - self.task_smoothed) / total if total else 0.0


@dataclass(frozen=True)
class Suggestion:
    """A proposed composition and why.

    Attributes:
        zones: the proposal.
        evidence: one entry per layer, from the input.
        ranked: compositions to try, best first, each with the evidence against it: the summed
            difference in share at the layers where it departs from the proposal.
    """

    zones: Zones
    evidence: tuple[Evidence, ...]
    ranked: tuple[tuple[Zones, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """What `layerswap suggest --json` prints."""
        return {
            "zones": asdict(self.zones),
            "evidence": [{**asdict(layer), "lean": layer.lean} for layer in self.evidence],
            "ranked": [{**asdict(zones), "against": value} for zones, value in self.ranked],
        }


def suggest(
    atlas: Atlas, task: str, language: str, *, candidates: Iterable[Zones] | None = None
) -> Suggestion:
    """Propose zones from an atlas of both experts.

    An expert's changed rows are the 15% of its rows that changed most, so that learning rates,
    which scale all changes alike, do not matter.

    Args:
        atlas: what both experts changed.
        task: the task expert's name in the atlas.
        language: the language expert's.
        candidates: compositions to rank; a grid around the proposal when None.
    """
    fractions = {
        expert: _fractions(atlas, expert, rows_threshold(atlas, [expert], TOP_ROWS))
        for expert in (task, language)
    }
    return suggest_from(
        fractions[task],
        fractions[language],
        overlaps=_overlaps(atlas, task, language),
        cosines=_cosines(atlas, task, language),
        candidates=candidates,
    )


def suggest_from(
    task: Sequence[float],
    language: Sequence[float],
    *,
    overlaps: Mapping[int, float] | None = None,
    cosines: Mapping[int, float] | None = None,
    candidates: Iterable[Zones] | None = None,
) -> Suggestion:
    """Propose zones from how much each expert changed each layer, in any unit.

    Args:
        task: per layer from the input, such as the mean of a published map's row.
        language: the same of the language expert.
        overlaps: per layer, shown as evidence.
        cosines: per layer, shown as evidence.
        candidates: compositions to rank; a grid around the proposal when None.
    """
    layers = len(task)
    shares = [[value / (sum(values) or 1) for value in values] for values in (task, language)]
    smooth = [_smooth(values, _window(layers)) for values in shares]
    evidence = tuple(
        Evidence(
            layer,
            task=shares[0][layer],
            language=shares[1][layer],
            task_smoothed=smooth[0][layer],
            language_smoothed=smooth[1][layer],
            overlap=(overlaps or {}).get(layer),
            cosine=(cosines or {}).get(layer),
        )
        for layer in range(layers)
    )
    zones = _zones(evidence)
    tried = list(_around(zones, layers) if candidates is None else candidates)
    against = [(other, _against(other, zones, evidence)) for other in tried]
    ranked = sorted(against, key=lambda pair: (pair[1], _departures(pair[0], zones, layers)))
    return Suggestion(zones, evidence, tuple(ranked))


def _fractions(atlas: Atlas, expert: str, threshold: float) -> list[float]:
    """Per layer, the mean over its matrices of the share of rows above the threshold."""
    cells: dict[int, list[float]] = {layer: [] for layer in range(atlas.layers)}
    for (layer, _), tensors in atlas.matrices().items():
        found = [atlas.fraction(expert, tensor, threshold) for tensor in tensors]
        cells[layer].append(sum(found) / len(found))
    return [sum(values) / max(1, len(values)) for values in cells.values()]


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
    for place, sums in atlas.conflict(task, language).items():
        if place.layer is not None:
            totals[place.layer] = totals.get(place.layer, Sums()) + sums
    return {layer: sums.cosine for layer, sums in totals.items()}


def _window(layers: int) -> int:
    """Layers to smooth over: 3 of 32, by depth, always odd."""
    half = round((WINDOW - 1) / 2 * layers / 32)
    return 2 * half + 1


def _smooth(values: Sequence[float], window: int) -> list[float]:
    half = window // 2
    found = []
    for i in range(len(values)):
        part = values[max(0, i - half) : i + half + 1]
        found.append(sum(part) / len(part))
    return found


def _zones(evidence: Sequence[Evidence]) -> Zones:
    bottom, bottom_transition = _run(evidence)
    top, top_transition = _run(evidence[::-1])
    # Where the language expert leads everywhere there would be no middle: halve what is too much.
    while bottom + bottom_transition + top + top_transition >= len(evidence):
        bottom, top = bottom // 2, top // 2
        bottom_transition, top_transition = bottom_transition // 2, top_transition // 2
    return Zones(bottom, top, bottom_transition, top_transition)


def _run(evidence: Sequence[Evidence]) -> tuple[int, int]:
    """Layers from one end that lean to the language expert, and those after it that do not lean."""
    zone = 0
    while zone < len(evidence) and evidence[zone].lean > CLOSE:
        zone += 1
    stop = zone
    while stop < len(evidence) and abs(evidence[stop].lean) <= CLOSE:
        stop += 1
    return zone, stop - zone


def _around(zones: Zones, layers: int) -> Iterable[Zones]:
    """Compositions near the proposal: zones a few layers longer or shorter, transitions or none."""
    reach = max(1, round(3 * layers / 32))
    transitions = sorted({0, 1, zones.bottom_transition, zones.top_transition})
    return zone_grid(
        layers,
        bottom=range(max(0, zones.bottom - reach), zones.bottom + reach + 1),
        top=range(max(0, zones.top - reach), zones.top + reach + 1),
        bottom_transition=transitions,
        top_transition=transitions,
    )


def _sources(zones: Zones, layers: int) -> list[float]:
    """How much of each layer is the language expert's: 1, 0, or a half where blended."""
    return [
        1.0
        if i < zones.bottom or i >= layers - zones.top
        else 0.5
        if i < zones.bottom + zones.bottom_transition
        or i >= layers - zones.top - zones.top_transition
        else 0.0
        for i in range(layers)
    ]


def _against(zones: Zones, proposal: Zones, evidence: Sequence[Evidence]) -> float:
    pairs = zip(_sources(zones, len(evidence)), _sources(proposal, len(evidence)), strict=True)
    return sum(
        abs(a - b) * abs(layer.language_smoothed - layer.task_smoothed)
        for (a, b), layer in zip(pairs, evidence, strict=True)
    )


def _departures(zones: Zones, proposal: Zones, layers: int) -> float:
    pairs = zip(_sources(zones, layers), _sources(proposal, layers), strict=True)
    return sum(abs(a - b) for a, b in pairs)


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
