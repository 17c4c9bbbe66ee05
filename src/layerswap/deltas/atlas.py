"""Where two experts changed the same things: the numbers behind interference in merges."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from html import escape
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

from layerswap._types import Advance, PathLike
from layerswap.checkpoint import Checkpoint, Place, open_checkpoint, open_expert, read_json_object
from layerswap.checkpoint.places import Pattern, alias
from layerswap.checkpoint.read import READ_DTYPES
from layerswap.deltas.measure import Sums, TensorChange, measure_tensor
from layerswap.deltas.routing import Routing, routing_divergence
from layerswap.errors import CheckpointError, RecipeError
from layerswap.methods.rows import Axis
from layerswap.versions import need_extras

TOP_ROWS = 0.1
"""The share of a matrix's rows, those with the largest MAV, that are compared."""


@dataclass(frozen=True)
class Conflict:
    """The conflict of two experts in one place, or in one tensor.

    Attributes:
        sums: what cosine and sign disagreement are computed from.
        top: rows of its matrices that count as most changed, for each expert.
        common: rows that are among the most changed of both.
    """

    sums: Sums
    top: int
    common: int

    @property
    def cosine(self) -> float:
        """Cosine between the two deltas; 0 where one of them is zero."""
        return self.sums.cosine

    @property
    def disagreement(self) -> float:
        """Share of the elements that both changed in which the signs are opposite."""
        return self.sums.disagreement

    @property
    def overlap(self) -> float | None:
        """Share of one expert's most changed rows that are also the other's; None without rows.

        Experts that have nothing to do with each other overlap by the share of rows compared.
        """
        return self.common / self.top if self.top else None

    @property
    def jaccard(self) -> float | None:
        """Most changed rows of both over those of either; None without rows."""
        return self.common / (2 * self.top - self.common) if self.top else None

    def __add__(self, other: Conflict) -> Conflict:
        return Conflict(self.sums + other.sums, self.top + other.top, self.common + other.common)


def tensor_conflict(
    atlas: Atlas, first: str, second: str, tensor: str, share: float = TOP_ROWS
) -> Conflict:
    """The conflict of two experts of an atlas in one tensor; a vector has no rows to compare."""
    rows = atlas.changes[first, tensor].rows, atlas.changes[second, tensor].rows
    sums = _sums(atlas, first, second)[tensor]
    if len(rows[0]) < 2:
        return Conflict(sums, 0, 0)
    return Conflict(sums, *common_rows(*rows, share))


def conflicts(
    atlas: Atlas, first: str, second: str, *, share: float = TOP_ROWS
) -> dict[Place, Conflict]:
    """The conflict of two experts at every place, over all tensors that lie there.

    Args:
        atlas: of both experts.
        first: an expert.
        second: another.
        share: how many rows of each matrix count as most changed.
    """
    found: dict[Place, Conflict] = {}
    for tensor in _sums(atlas, first, second):
        place, conflict = atlas.places[tensor], tensor_conflict(atlas, first, second, tensor, share)
        found[place] = found[place] + conflict if place in found else conflict
    return found


def common_rows(first: Any, second: Any, share: float) -> tuple[int, int]:
    """How many rows count as most changed, and how many of these two experts have in common.

    Args:
        first: MAV of every row.
        second: MAV of every row of the other expert.
        share: the share of rows to compare, at least one row; equal rows count from the first.
    """
    import numpy as np

    count = max(1, round(share * len(first)))
    one, two = (np.argsort(-rows, kind="stable")[:count] for rows in (first, second))
    return count, len(np.intersect1d(one, two, assume_unique=True))


def _sums(atlas: Atlas, first: str, second: str) -> Any:
    return atlas.sums.get((first, second)) or atlas.sums[second, first]


ATLAS = "atlas.json"


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
        routing: how differently each two models route, the base among them; none without mixtures.

    Example:
        >>> import layerswap as ls
        >>> atlas = ls.delta("base", "math-expert")
        >>> atlas.fraction("math-expert", "model.layers.1.mlp.up_proj.weight", 1e-5)
        1.0
        >>> atlas.save("atlas")
        >>> ls.Atlas.load("atlas").experts
        ('math-expert',)
    """

    base: str
    experts: tuple[str, ...]
    axis: Axis
    places: Mapping[str, Place]
    changes: Mapping[tuple[str, str], TensorChange]
    sums: Mapping[tuple[str, str], Mapping[str, Sums]]
    routing: tuple[Routing, ...] = ()

    @property
    def layers(self) -> int:
        """Number of layers."""
        return 1 + max(place.layer for place in self.places.values() if place.layer is not None)

    def check_expert(self, name: str) -> None:
        """Refuse a name that no expert has.

        Raises:
            RecipeError: naming those that there are.
        """
        if name not in self.experts:
            raise RecipeError(f"no expert {name!r} in the atlas; it has {', '.join(self.experts)}")

    def change(self, expert: str, tensor: str) -> TensorChange:
        """The change of one tensor of one expert.

        Raises:
            RecipeError: the expert or the tensor is not in the atlas.
        """
        self.check_expert(expert)
        if tensor not in self.places:
            raise RecipeError(f"no tensor {tensor!r} in the atlas")
        return self.changes[expert, tensor]

    def fraction(self, expert: str, tensor: str, threshold: float) -> float:
        """The share of a tensor's rows whose MAV is above the threshold (paper 1, Figure 2).

        Raises:
            RecipeError: the expert or the tensor is not in the atlas.
        """
        return float((self.change(expert, tensor).rows > threshold).mean())

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

    def threshold(self, expert: str, share: float = 0.15) -> float:
        """The row MAV that this share of the rows of an expert's layers is above.

        By default 15%: about as many as in the first paper's maps (13% and 15%).
        """
        return rows_threshold(self, [expert], share)

    def lost(self, expert: str) -> float:
        """How much of an expert's whole delta rounding to bfloat16 takes away (`Change.lost`)."""
        norm = math.hypot(*(change.norm for change in self.of(expert)))
        return math.hypot(*(c.lost * c.norm for c in self.of(expert))) / norm if norm else 0.0

    def lost_at_most(self, expert: str) -> float:
        """The bound on it over all tensors that changed (`Change.lost_at_most`)."""
        totals = [(c.mean * c.elements, c.lost_at_most) for c in self.of(expert)]
        half_steps = sum(total * bound / (1 - bound) for total, bound in totals)
        return half_steps / (sum(total for total, _ in totals) + half_steps) if half_steps else 0.0

    def of(self, expert: str) -> list[TensorChange]:
        """All changes of one expert."""
        return [change for (name, _), change in self.changes.items() if name == expert]

    def conflict(self, first: str, second: str, share: float = 0.1) -> dict[Place, Conflict]:
        """The conflict of two experts at every place; `share` of the rows count as most changed."""
        return conflicts(self, first, second, share=share)

    def overlap(self, first: str, second: str, tensor: str, share: float = 0.1) -> float:
        """The share of one expert's most changed rows that are also the other's.

        Args:
            first: an expert.
            second: another.
            tensor: a matrix.
            share: how many rows count as most changed; independent experts overlap by as much.

        Raises:
            RecipeError: an expert or the tensor is not in the atlas.
        """
        one, other = (self.change(name, tensor).rows for name in (first, second))
        top, common = common_rows(one, other, share)
        return common / top

    def _repr_html_(self) -> str:
        """A small table for notebooks: what each expert changed, over all its tensors."""
        lines = []
        for name in self.experts[:12]:
            changes, total = self.of(name), sum(c.elements for c in self.of(name)) or 1
            norm = math.hypot(*(change.norm for change in changes))
            mean = sum(change.mean * change.elements for change in changes) / total
            same = sum(change.unchanged * change.elements for change in changes) / total
            lines.append(
                f"<tr><td>{escape(name[-60:])}</td><td>{norm:.4g}</td><td>{mean:.3g}</td>"
                f"<td>{same:.1%}</td><td>{self.lost(name):.1%}</td></tr>"
            )
        head = ["expert", "norm of the delta", "mean |delta|", "unchanged", "lost to bfloat16"]
        cells = "".join(f"<th>{title}</th>" for title in head)
        return f"<table><tr>{cells}</tr>{''.join(lines)}</table>"

    def save(self, folder: PathLike) -> None:
        """Write the tables and `atlas.json` into a folder, created where missing.

        `rows.parquet`, `tensors.parquet`, and for two and more experts `conflict.parquet` (by
        place) and `conflict_by_tensor.parquet`; of mixtures `routing.parquet`. JSON Lines where
        pyarrow is not installed.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_tables(self, folder)
        head = {"base": self.base, "experts": list(self.experts), "axis": self.axis}
        (folder / ATLAS).write_text(json.dumps(head, indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: PathLike) -> Atlas:
        """The atlas that `save` wrote; no checkpoint is read.

        Raises:
            CheckpointError: the folder holds none, or a damaged one.
        """
        folder = Path(folder)
        if not (folder / ATLAS).is_file():
            raise CheckpointError(f"{folder}: no {ATLAS}; layerswap delta did not write it")
        head = read_json_object(folder / ATLAS)
        try:
            experts = tuple(map(str, head["experts"]))
            axis: Axis = "output" if head["axis"] == "output" else "input"
            places, changes, sums = read_tables(folder)
            routing = tuple(Routing(**row) for row in _read_table(folder, ROUTING, optional=True))
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise CheckpointError(f"{folder}: damaged ({error})") from None
        return cls(str(head["base"]), experts, axis, places, changes, sums, routing)


def measure_delta(
    base: PathLike,
    *experts: PathLike | Mapping[str, PathLike],
    axis: Axis = "input",
    patterns: Sequence[Pattern] = (),
    threads: int | None = None,
    progress: Advance | None = None,
) -> Atlas:
    """Measure what fine-tuning changed, reading every checkpoint once (paper 1, section 3.2).

    Args:
        base: a folder or a Hub id.
        experts: folders or Hub ids of full checkpoints or adapters, or mappings that name them.
            Without a name, an expert is called by the last part of its source.
        axis: `input` (the papers' rows) or `output`.
        patterns: places of tensors that no built-in layout knows.
        threads: tensors measured at a time; the number of usable processors when None.
        progress: called with the number of bytes just read.

    Raises:
        CheckpointError: a checkpoint cannot be opened, does not fit the base, or holds NaN.

    Example:
        >>> import layerswap as ls
        >>> atlas = ls.delta("base", {"math": "math-expert", "swahili": "swahili-expert"})
        >>> atlas.layers, len(atlas.conflict("math", "swahili"))
        (3, 12)
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
            if info.dtype in READ_DTYPES and all(name in e.tensors for e in self.experts.values())
        ]


def open_subjects(
    base: PathLike, *experts: PathLike | Mapping[str, PathLike], patterns: Sequence[Pattern] = ()
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
    progress: Advance | None = None,
) -> Atlas:
    """The atlas of checkpoints that are open already; see `measure_delta`."""
    import numpy as np

    base, order = subjects.base, list(subjects.experts)
    changes: dict[tuple[str, str], TensorChange] = {}
    sums: dict[tuple[str, str], dict[str, Sums]] = {
        (a, b): {} for i, a in enumerate(order) for b in order[i + 1 :]
    }

    # The largest first, so that no worker is left with one at the end.
    names = sorted(subjects.tensors, key=lambda name: -base.tensors[name].elements)

    def work(name: str) -> tuple[list[TensorChange], dict[tuple[int, int], Sums]]:
        experts = list(subjects.experts.values())
        with np.errstate(all="ignore"):  # what is not finite is looked for in the result
            found = measure_tensor(base, experts, name, axis=axis, transposed=base.transposes(name))
        if progress is not None:
            progress(base.tensors[name].nbytes * (1 + len(order)))
        return found

    workers = threads or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(workers, thread_name_prefix="delta") as pool:
        measured = dict(zip(names, pool.map(work, names), strict=True))
    for name in subjects.tensors:
        found, pairs = measured[name]
        changes.update({(e, name): c for e, c in zip(order, found, strict=True)})
        for (i, j), value in pairs.items():
            sums[order[i], order[j]][name] = value
    places = {name: base.places[name] for name in subjects.tensors}
    models = [("base", base), *subjects.experts.items()]
    routing = tuple(r for pair in combinations(models, 2) for r in routing_divergence(*pair))
    return Atlas(base.identity, tuple(order), axis, places, changes, sums, routing)


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
    rows = np.concatenate([atlas.change(e, tensor).rows for e in experts for tensor in cells])
    return float(np.quantile(rows, 1 - share))


def _names(experts: Sequence[PathLike | Mapping[str, PathLike]]) -> dict[str, str]:
    if not experts:
        raise CheckpointError("give an expert to compare with the base")
    named: dict[str, str] = {}
    for expert in experts:
        if isinstance(expert, Mapping):
            named |= {name: os.fspath(source) for name, source in expert.items()}
            continue
        source = os.fspath(expert)
        name = Path(source.partition("@")[0]).name or source
        named[name if name not in named else source] = source
    return named


def _heads(checkpoint: Checkpoint) -> set[str]:
    """Heads, which one of two tied checkpoints may store and the other not."""
    return {name for name, place in checkpoint.places.items() if place.role == "head"}


ROWS, TENSORS = "rows", "tensors"
CONFLICT, CONFLICT_BY_TENSOR, ROUTING = "conflict", "conflict_by_tensor", "routing"
"""Names of the tables; `.parquet` follows, or `.jsonl` where pyarrow is not installed."""
_SUMS = ("dot", "first", "second", "opposed", "both")


def write_tables(atlas: Atlas, folder: Path) -> None:
    """Write the rows, the summaries and the conflicts of an atlas."""
    where = _where(atlas)
    rows, tensors = [], []
    for (expert, tensor), change in atlas.changes.items():
        head = {"expert": expert, **where[tensor]}
        rows.append({**head, "row_mav": change.rows})
        tensors.append({**head, **_summary(change)})
    _write_table(folder, ROWS, rows)
    _write_table(folder, TENSORS, tensors)
    if atlas.sums:
        by_place, by_tensor = _conflicts(atlas, where)
        _write_table(folder, CONFLICT, by_place)
        _write_table(folder, CONFLICT_BY_TENSOR, by_tensor)
    if atlas.routing:
        _write_table(folder, ROUTING, [asdict(row) for row in atlas.routing])


def _write_table(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    if find_spec("pyarrow") is None:
        lines = (json.dumps(row, default=lambda vector: vector.tolist()) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines), "utf-8")
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = None
    if name == ROWS:
        text = pa.string()
        fields = [("expert", text), ("tensor", text), ("layer", pa.int32()), ("role", text)]
        schema = pa.schema([*fields, ("matrix", text), ("row_mav", pa.list_(pa.float32()))])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / f"{name}.parquet")


def _read_table(folder: Path, name: str, *, optional: bool = False) -> list[dict[str, Any]]:
    lines = folder / f"{name}.jsonl"
    if optional and not lines.is_file() and not (folder / f"{name}.parquet").is_file():
        return []
    if lines.is_file():
        return [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    need_extras(f"{folder / name}.parquet", "report")
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(folder / f"{name}.parquet").to_pylist()
    return rows


def read_tables(
    folder: Path,
) -> tuple[
    dict[str, Place], dict[tuple[str, str], TensorChange], dict[tuple[str, str], Mapping[str, Sums]]
]:
    """What `write_tables` wrote: places, changes and sums."""
    import numpy as np

    places: dict[str, Place] = {}
    vectors: dict[tuple[str, str], Any] = {}
    for row in _read_table(folder, ROWS):
        places[row["tensor"]] = Place(row["layer"], row["role"])
        vectors[row["expert"], row["tensor"]] = np.array(row["row_mav"], dtype=np.float32)
    changes = {}
    for row in _read_table(folder, TENSORS):
        key = row["expert"], row["tensor"]
        changes[key] = TensorChange(
            rows=vectors[key],
            mean=row["mean_abs_delta"],
            median=row["median_abs_delta_sampled"],
            largest=row["max_abs_delta"],
            norm=row["delta_norm"],
            relative_norm=row["delta_norm_per_base_norm"],
            unchanged=row["unchanged_share"],
            lost=row["lost_to_bf16_per_delta_norm"],
            lost_is_measured=row["lost_to_bf16_is_measured"],
            lost_at_most=row["lost_to_bf16_at_most_share"],
            elements=row["elements"],
        )
    sums: dict[tuple[str, str], dict[str, Sums]] = {}
    if len({expert for expert, _ in changes}) > 1:
        for row in _read_table(folder, CONFLICT_BY_TENSOR):
            values = (row[f"sum_{key}"] for key in _SUMS)
            sums.setdefault((row["expert"], row["other"]), {})[row["tensor"]] = Sums(*values)
    return places, changes, dict(sums)


def _where(atlas: Atlas) -> dict[str, dict[str, Any]]:

    return {
        tensor: {
            "tensor": tensor,
            "layer": place.layer,
            "role": place.role,
            "matrix": matrix_name(tensor) if place.layer is not None else None,
        }
        for tensor, place in atlas.places.items()
    }


def _summary(change: TensorChange) -> dict[str, Any]:
    return {
        "rows": len(change.rows),
        "elements": change.elements,
        "mean_abs_delta": change.mean,
        "median_abs_delta_sampled": change.median,
        "max_abs_delta": change.largest,
        "delta_norm": change.norm,
        "delta_norm_per_base_norm": change.relative_norm,
        "unchanged_share": change.unchanged,
        "lost_to_bf16_per_delta_norm": change.lost,
        "lost_to_bf16_is_measured": change.lost_is_measured,
        "lost_to_bf16_at_most_share": change.lost_at_most,
    }


def _conflicts(
    atlas: Atlas, where: Mapping[str, Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The records of both tables of conflicts."""
    by_place, by_tensor = [], []
    for (first, second), sums in atlas.sums.items():
        pair = {"expert": first, "other": second}
        for place, found in conflicts(atlas, first, second).items():
            by_place.append({**pair, **place._asdict(), **_conflict(found)})
        for tensor in sums:
            found = tensor_conflict(atlas, first, second, tensor)
            by_tensor.append({**pair, **where[tensor], **_conflict(found)})
    return by_place, by_tensor


def _conflict(found: Conflict) -> dict[str, Any]:
    return {
        "cosine": found.cosine,
        "sign_disagreement_share": found.disagreement,
        "top_rows_compared_share": TOP_ROWS,
        "top_rows_in_common_share": found.overlap,
        "top_rows_jaccard": found.jaccard,
        **{f"sum_{key}": getattr(found.sums, key) for key in _SUMS},
    }
