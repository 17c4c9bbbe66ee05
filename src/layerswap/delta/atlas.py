"""The atlas: what fine-tuning changed in every tensor of one or several experts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layerswap.checkpoint import Checkpoint, Place, open_checkpoint, open_expert, read_json_object
from layerswap.checkpoint.places import Pattern, alias
from layerswap.checkpoint.read import FLOAT_DTYPES
from layerswap.delta.measure import Change, Sums, measure_tensor
from layerswap.delta.rows import Axis
from layerswap.errors import CheckpointError

if TYPE_CHECKING:
    from layerswap.delta.conflict import Conflict

ATLAS = "atlas.json"
Source = str | os.PathLike[str]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Atlas:
    """What fine-tuning changed, tensor by tensor.

    Attributes:
        base: what to call the base.
        experts: the experts' names, in order.
        axis: what a row is: an input feature, as in the papers, or an output feature.
        places: the place of every tensor measured.
        changes: by expert and tensor.
        sums: what conflicts are computed from, by pair of experts and tensor.

    Example:
        atlas = measure_delta("base", "math-expert", "swahili-expert")
        atlas.fraction("math-expert", "model.layers.3.mlp.up_proj.weight", 1e-5)
    """

    base: str
    experts: tuple[str, ...]
    axis: Axis
    places: Mapping[str, Place]
    changes: Mapping[tuple[str, str], Change]
    sums: Mapping[tuple[str, str], Mapping[str, Sums]]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return 1 + max(place.layer for place in self.places.values() if place.layer is not None)

    def fraction(self, expert: str, tensor: str, threshold: float) -> float:
        """The share of a tensor's rows whose MAV is above the threshold (paper 1, Figure 2)."""
        return float((self.changes[expert, tensor].rows > threshold).mean())

    def matrices(self) -> dict[tuple[int, str], list[str]]:
        """The tensors behind each cell of the map, by layer and matrix.

        A matrix is called by the papers' name (wq, wk, wv, wo, w1, w3, w2) where it has one, and
        by its own otherwise; the experts of a mixture share a cell.
        """
        cells: dict[tuple[int, str], list[str]] = {}
        for tensor, place in self.places.items():
            # A vector is one row.
            if place.layer is None or len(self.changes[self.experts[0], tensor].rows) < 2:
                continue
            cells.setdefault((place.layer, matrix_name(tensor)), []).append(tensor)
        return cells

    def threshold(self, share: float = 0.15) -> float:
        """The row MAV that this share of the rows of all experts' layers is above.

        By default 15%: about as many as in the first paper's maps (13% and 15%).
        """
        return rows_threshold(self, self.experts, share)

    def lost(self, expert: str) -> float:
        """How much of an expert's whole delta rounding to bfloat16 takes away (`Change.lost`)."""
        norm = math.hypot(*(change.norm for change in self.of(expert)))
        return math.hypot(*(c.lost * c.norm for c in self.of(expert))) / norm if norm else 0.0

    def lost_at_most(self, expert: str) -> float:
        """The bound on it over all tensors that changed (`Change.lost_at_most`)."""
        totals = [(c.mean * c.elements, c.lost_at_most) for c in self.of(expert)]
        half_steps = sum(total * bound / (1 - bound) for total, bound in totals)
        return half_steps / (sum(total for total, _ in totals) + half_steps) if half_steps else 0.0

    def of(self, expert: str) -> list[Change]:
        """All changes of one expert."""
        return [change for (name, _), change in self.changes.items() if name == expert]

    def conflict(self, first: str, second: str, share: float = 0.1) -> dict[Place, Conflict]:
        """The conflict of two experts at every place; `share` of the rows count as most changed."""
        from layerswap.delta.conflict import conflicts

        return conflicts(self, first, second, share=share)

    def overlap(self, first: str, second: str, tensor: str, share: float = 0.1) -> float:
        """The share of one expert's most changed rows that are also the other's.

        Args:
            first: an expert.
            second: another.
            tensor: a matrix.
            share: how many rows count as most changed; independent experts overlap by as much.
        """
        from layerswap.delta.conflict import common_rows

        one, other = (self.changes[name, tensor].rows for name in (first, second))
        top, common = common_rows(one, other, share)
        return common / top

    def save(self, folder: Path) -> None:
        """Write the tables, in Parquet, and `atlas.json`.

        `rows.parquet`, `tensors.parquet`, and for two and more experts `conflict.parquet` (by
        place) and `conflict_by_tensor.parquet`.
        """
        from layerswap.delta.tables import write_tables

        write_tables(self, folder)
        head = {"base": self.base, "experts": list(self.experts), "axis": self.axis}
        (folder / ATLAS).write_text(json.dumps(head, indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> Atlas:
        """The atlas that `save` wrote; no checkpoint is read.

        Raises:
            CheckpointError: the folder holds none, or a damaged one.
        """
        from layerswap.delta.tables import read_tables

        if not (folder / ATLAS).is_file():
            raise CheckpointError(f"{folder}: no {ATLAS}; layerswap delta did not write it")
        head = read_json_object(folder / ATLAS)
        try:
            experts = tuple(map(str, head["experts"]))
            axis: Axis = "output" if head["axis"] == "output" else "input"
            places, changes, sums = read_tables(folder)
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise CheckpointError(f"{folder}: damaged ({error})") from None
        return cls(str(head["base"]), experts, axis, places, changes, sums)


def measure_delta(
    base: Source,
    *experts: Source | Mapping[str, Source],
    axis: Axis = "input",
    patterns: Sequence[Pattern] = (),
    threads: int | None = None,
    progress: Progress | None = None,
) -> Atlas:
    """Measure what fine-tuning changed, reading every checkpoint once (paper 1, section 3.2).

    Args:
        base: a folder or a Hub id.
        experts: folders or Hub ids of full checkpoints or adapters; or one mapping that names
            them. Without names, an expert is called by the last part of its source.
        axis: `input` (the papers' rows) or `output`.
        patterns: places of tensors that no built-in layout knows.
        threads: tensors measured at a time; the number of usable processors when None.
        progress: called with the number of bytes just read.

    Raises:
        CheckpointError: a checkpoint cannot be opened, does not fit the base, or holds NaN.
    """
    subjects = open_subjects(base, *experts, patterns=patterns)
    return measure(subjects, axis=axis, threads=threads, progress=progress)


@dataclass(frozen=True)
class Subjects:
    """Checkpoints that fit together, opened: the base, and the experts by name."""

    base: Checkpoint
    experts: Mapping[str, Checkpoint]

    @property
    def nbytes(self) -> int:
        """Bytes that measuring reads."""
        return sum(self.base.tensors[name].nbytes for name in self.tensors) * (
            1 + len(self.experts)
        )

    @property
    def tensors(self) -> list[str]:
        """The tensors that can be measured: of floating-point dtype, and in every checkpoint."""
        return [
            name
            for name, info in self.base.tensors.items()
            if info.dtype in FLOAT_DTYPES and all(name in e.tensors for e in self.experts.values())
        ]


def open_subjects(
    base: Source, *experts: Source | Mapping[str, Source], patterns: Sequence[Pattern] = ()
) -> Subjects:
    """Open the base and the experts, and check that they have the same tensors.

    See `measure_delta`.
    """
    opened = open_checkpoint(os.fspath(base), patterns=patterns)
    named = {
        name: open_expert(source, opened, patterns=patterns)
        for name, source in _names(experts).items()
    }
    for name, expert in named.items():
        differing = set(opened.tensors) ^ set(expert.tensors)
        if differing - _heads(opened) - _heads(expert):
            raise CheckpointError(
                f"{name} and the base have different tensors: {min(differing)!r}"
                + (f" and {len(differing) - 1} more" if len(differing) > 1 else "")
            )
    return Subjects(opened, named)


def measure(
    subjects: Subjects,
    *,
    axis: Axis = "input",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Atlas:
    """The atlas of checkpoints that are open already; see `measure_delta`."""
    import torch

    base, order = subjects.base, list(subjects.experts)
    changes: dict[tuple[str, str], Change] = {}
    sums: dict[tuple[str, str], dict[str, Sums]] = {
        (a, b): {} for i, a in enumerate(order) for b in order[i + 1 :]
    }

    # The largest first, so that no worker is left with one at the end.
    names = sorted(subjects.tensors, key=lambda name: -base.tensors[name].elements)

    def work(name: str) -> tuple[list[Change], dict[tuple[int, int], Sums]]:
        experts = list(subjects.experts.values())
        found = measure_tensor(base, experts, name, axis=axis, transposed=base.transposes(name))
        if progress is not None:
            progress(base.tensors[name].nbytes * (1 + len(order)))
        return found

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    workers = threads or len(os.sched_getaffinity(0))
    try:
        with ThreadPoolExecutor(workers, thread_name_prefix="delta") as pool:
            measured = dict(zip(names, pool.map(work, names), strict=True))
    finally:
        torch.set_num_threads(before)
    for name in subjects.tensors:
        found, pairs = measured[name]
        changes.update({(e, name): c for e, c in zip(order, found, strict=True)})
        for (i, j), value in pairs.items():
            sums[order[i], order[j]][name] = value
    places = {name: base.places[name] for name in subjects.tensors}
    return Atlas(base.identity, tuple(order), axis, places, changes, sums)


def matrix_name(tensor: str) -> str:
    """The papers' name for a matrix, or its own words within the layer."""
    known = alias(tensor)
    if known is not None:
        return known
    words = [w for w in tensor.removesuffix(".weight").split(".") if not w.isdecimal()]
    return ".".join(words[-2:])


def rows_threshold(atlas: Atlas, experts: Sequence[str], share: float) -> float:
    """The MAV above which this share of the rows of these experts' layers lies."""
    import numpy as np

    cells = [tensor for group in atlas.matrices().values() for tensor in group]
    rows = np.concatenate([atlas.changes[e, tensor].rows for e in experts for tensor in cells])
    return float(np.quantile(rows, 1 - share))


def _names(experts: Sequence[Source | Mapping[str, Source]]) -> dict[str, str]:
    if len(experts) == 1 and isinstance(experts[0], Mapping):
        return {name: os.fspath(source) for name, source in experts[0].items()}
    sources = [os.fspath(e) for e in experts if not isinstance(e, Mapping)]
    if not sources:
        raise CheckpointError("give an expert to compare with the base")
    named: dict[str, str] = {}
    for source in sources:
        name = Path(source.partition("@")[0]).name or source
        named[name if name not in named else source] = source
    return named


def _heads(checkpoint: Checkpoint) -> set[str]:
    """Heads, which one of two tied checkpoints may store and the other not."""
    return {name for name, place in checkpoint.places.items() if place.role == "head"}
