"""Sizes of the base and of the data of a study, from which its costs are estimated."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from layerswap.checkpoint import open_checkpoint
from layerswap.compose.composition import LAYER_ROLES, all_places
from layerswap.compose.presets import partition
from layerswap.errors import RecipeError
from layerswap.study.inputs import files_of
from layerswap.study.spec import StudySpec, TrainingRun
from layerswap.training.mix.card import CARD

ADAPTER = 0.02
"""Share of the parameters that an adapter of a usual rank trains."""
LAYERS, OUTSIDE, ATTENTION = 32, 0.1, 0.3
"""Assumed layers of a base of unknown shape, and shares of its parameters outside the layers and in
attention."""
IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z])", re.IGNORECASE)
"""A number of parameters in a model's name, such as `8B` or `135M`."""
UNKNOWN = 8.0
"""Assumed billions of parameters of a base of unknown size."""


@dataclass(frozen=True)
class Size:
    """The size of a base.

    Attributes:
        billions: parameters.
        shares: share of the parameters by layer (None outside) and role.
        known_by: the source of this knowledge, in words.
    """

    billions: float
    shares: Mapping[tuple[int | None, str], float]
    known_by: str

    @property
    def layers(self) -> int:
        """Number of layers."""
        return 1 + max(layer for layer, _ in self.shares if layer is not None)

    def trained(self, run: TrainingRun) -> float:
        """The share of the parameters that a training changes."""
        if run.lora:
            return ADAPTER
        chosen = run.train
        if chosen is None:
            return 1.0
        places = set(all_places(self.layers))
        try:
            if chosen.places:
                places = {place for where in chosen.places for place in where.places(self.layers)}
        except RecipeError:
            return 1.0  # the depth of a base that was not read is a guess
        if chosen.partition is not None and chosen.part is not None:
            parts = partition(chosen.partition, self.layers, outside=chosen.outside)
            places = {one for one in places if chosen.part in parts[one].experts}
        return sum(self.shares.get((place.layer, place.role), 0.0) for place in places)


def size_of(spec: StudySpec, base: str) -> Size:
    """The size of a study's base: as the study says, by its header, or by its name.

    Args:
        spec: the study.
        base: a local folder, whose headers are read, or a Hub id; nothing is fetched.
    """
    if Path(base).is_dir():
        opened = open_checkpoint(base)
        counts: dict[tuple[int | None, str], int] = {}
        for name, tensor in opened.tensors.items():
            place = opened.places[name]
            key = (place.layer, place.role)
            counts[key] = counts.get(key, 0) + prod(tensor.shape)
        total = sum(counts.values()) or 1
        shares = {key: count / total for key, count in counts.items()}
        return Size(spec.billions or total / 1e9, shares, "its header")
    inside = {"attention": ATTENTION, "mlp": 1 - ATTENTION}
    shares = {
        (layer, role): (1 - OUTSIDE) / LAYERS * inside.get(role, 0)
        for layer in range(LAYERS)
        for role in LAYER_ROLES
    }
    shares[None, "embedding"] = OUTSIDE
    named = IN_NAME.search(base.rpartition("/")[2])
    if spec.billions is not None:
        return Size(spec.billions, shares, "the study")
    if named is None:
        return Size(UNKNOWN, shares, "a guess; give `billions`")
    return Size(float(named[1]) / (1000 if named[2] in "mM" else 1), shares, "its name")


class DataSize(NamedTuple):
    """The size of a data set.

    Attributes:
        rows: number of training rows.
        tokens: mean tokens of a row.
    """

    rows: int
    tokens: int


def data_size(given: Any, usual: DataSize) -> DataSize:
    """The size of data that exist: by the card of a mix, or by lines of JSON.

    Args:
        given: a folder of a built mix, or files by their part.
        usual: the size where neither is known.
    """
    if isinstance(given, str):
        card = Path(given) / CARD
        try:
            facts = json.loads(card.read_text("utf-8"))
            rows = int(facts["rows"]["train"])
            kept = [one for one in facts["sources"].values() if one["kept"]]
            characters = sum(
                one["kept"] * (one["mean_prompt_characters"] + one["mean_completion_characters"])
                for one in kept
            ) / sum(one["kept"] for one in kept)
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, AttributeError):
            return usual
        return DataSize(rows, _tokens(characters))
    files = [file for file in files_of(Path(given["train"])) if file.suffix == ".jsonl"]
    rows = sum(map(lines_of, files))
    if not rows:
        return usual
    return DataSize(rows, _tokens(sum(file.stat().st_size for file in files) / rows))


def mix_size(text: str, folder: Path, usual: DataSize) -> DataSize:
    """The size of a mix that is not built yet: its `total`, and its `row_tokens`.

    Args:
        text: the mix.
        folder: its paths are relative to this folder.
        usual: the size where it is in neither the mix nor local JSON Lines of all its sources.
    """
    mix = yaml.safe_load(text)
    rows = mix.get("total") or usual.rows
    tokens = mix.get("row_tokens") or _row_tokens(mix.get("sources"), folder) or usual.tokens
    return DataSize(rows, tokens) if isinstance(rows, int) and isinstance(tokens, int) else usual


def _row_tokens(sources: Any, folder: Path) -> int | None:
    """Mean tokens of the rows of local sources, with all their columns; None if one is remote."""
    found = []
    for source in sources.values() if isinstance(sources, dict) else ():
        path = source.get("path") if isinstance(source, dict) else None
        size = data_size({"train": str(folder / str(path))}, DataSize(0, 0)) if path else None
        if size is None or not size.rows:
            return None
        found.append(size.tokens)
    return round(sum(found) / len(found)) if found else None


def lines_of(file: Path) -> int:
    """The number of lines of a file that are not empty."""
    with file.open("rb") as rows:
        return sum(bool(row.strip()) for row in rows)


def _tokens(characters: float) -> int:
    """Tokens of a text, at about three characters each, as in most tokenizers and languages."""
    return max(1, round(characters / 3))
