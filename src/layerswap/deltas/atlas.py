"""The atlas: the changes of fine-tuning in every tensor of one expert or several."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerswap.checkpoint import Checkpoint, Place, open_checkpoint, open_expert, read_json_object
from layerswap.checkpoint.places import Pattern, alias
from layerswap.checkpoint.read import READ_DTYPES
from layerswap.deltas.measure import TensorChange, measure_tensor
from layerswap.ground import system
from layerswap.ground.errors import CheckpointError, RecipeError
from layerswap.ground.types import Advance, PathLike, listed
from layerswap.methods.rows import Axis
from layerswap.versions import need_extras

ATLAS = "atlas.json"
ROWS, TENSORS = "rows.parquet", "tensors.parquet"
SUMMARY = {
    "mean_abs_delta": "mean",
    "median_abs_delta_sampled": "median",
    "max_abs_delta": "largest",
    "delta_norm": "norm",
    "delta_norm_per_base_norm": "relative_norm",
    "unchanged_share": "unchanged",
    "lost_to_bf16_per_delta_norm": "lost",
    "lost_to_bf16_is_measured": "lost_is_measured",
    "lost_to_bf16_at_most_share": "lost_at_most",
}
"""Columns of the table of tensors, and the attributes of `TensorChange` that they hold."""
Changes = dict[tuple[str, str], TensorChange]
"""Changes by expert and tensor."""
Experts = PathLike | Mapping[str, PathLike] | Sequence[PathLike]
"""One expert or several; a mapping names them."""


@dataclass(frozen=True)
class Atlas:
    """The changes of every tensor of one expert or several.

    Attributes:
        base: name of the base.
        experts: the experts' names, in order.
        axis: features that count as rows: input, as in the papers, or output.
        places: the place of every tensor measured.
        changes: by expert and tensor.

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

    @property
    def layers(self) -> int:
        """Number of layers."""
        return 1 + max(place.layer for place in self.places.values() if place.layer is not None)

    def change(self, expert: str, tensor: str) -> TensorChange:
        """The change of one tensor of one expert.

        Raises:
            RecipeError: the expert or the tensor is not in the atlas.
        """
        if expert not in self.experts:
            raise RecipeError(
                f"no expert {expert!r} in the atlas; it has {', '.join(self.experts)}"
            )
        if tensor not in self.places:
            raise RecipeError(f"no tensor {tensor!r} in the atlas")
        return self.changes[expert, tensor]

    def fraction(self, expert: str, tensor: str, threshold: float) -> float:
        """The share of a tensor's rows with a MAV above the threshold (paper 1, Figure 2).

        Raises:
            RecipeError: the expert or the tensor is not in the atlas.
        """
        return float((self.change(expert, tensor).rows > threshold).mean())

    def matrices(self) -> dict[tuple[int, str], list[str]]:
        """The tensors of each cell of the map, by layer and matrix.

        A matrix has the papers' name (wq, wk, wv, wo, w1, w3, w2) or, without one, its own. The
        experts of a mixture share a cell.
        """
        cells: dict[tuple[int, str], list[str]] = {}
        for tensor, place in self.places.items():
            # A vector is one row.
            if place.layer is None or len(self.changes[self.experts[0], tensor].rows) < 2:
                continue
            cells.setdefault((place.layer, matrix_name(tensor)), []).append(tensor)
        return cells

    def threshold(self, expert: str, share: float = 0.15) -> float:
        """The row MAV that this share of the rows of an expert's layers exceeds.

        The first paper's maps show 13% and 15% of the rows.
        """
        import numpy as np

        cells = [tensor for group in self.matrices().values() for tensor in group]
        rows = np.concatenate([self.change(expert, tensor).rows for tensor in cells])
        return float(np.quantile(rows, 1 - share))

    def changed(self, expert: str, share: float = 0.15) -> list[float]:
        """The share of each layer's rows with a MAV above `threshold(expert, share)`."""
        import numpy as np

        limit = self.threshold(expert, share)
        above: dict[int, list[Any]] = {}
        for (layer, _), tensors in self.matrices().items():
            rows = [self.change(expert, tensor).rows > limit for tensor in tensors]
            above.setdefault(layer, []).extend(rows)
        return [float(np.concatenate(above[layer]).mean()) for layer in sorted(above)]

    def lost(self, expert: str) -> float:
        """The share of an expert's delta that bfloat16 loses; see `TensorChange.lost`."""
        norm = math.hypot(*(change.norm for change in self.of(expert)))
        return math.hypot(*(c.lost * c.norm for c in self.of(expert))) / norm if norm else 0.0

    def lost_at_most(self, expert: str) -> float:
        """Upper bound of `lost`; see `TensorChange.lost_at_most`."""
        totals = [(c.mean * c.elements, c.lost_at_most) for c in self.of(expert)]
        half_steps = sum(total * bound / (1 - bound) for total, bound in totals)
        return half_steps / (sum(total for total, _ in totals) + half_steps) if half_steps else 0.0

    def of(self, expert: str) -> list[TensorChange]:
        """All changes of one expert."""
        return [change for (name, _), change in self.changes.items() if name == expert]

    def __repr__(self) -> str:
        return f"Atlas of {', '.join(self.experts)} against {self.base}: {len(self.places)} tensors"

    def save(self, folder: PathLike) -> None:
        """Write `rows.parquet`, `tensors.parquet` and `atlas.json` into a folder.

        A missing folder is created.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _write_tables(self, folder)
        head = {"base": self.base, "experts": list(self.experts), "axis": self.axis}
        (folder / ATLAS).write_bytes((json.dumps(head, indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: PathLike) -> Atlas:
        """Load the atlas that `save` wrote; no checkpoint is read.

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
            tables = _read_tables(folder)
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise CheckpointError(f"{folder}: damaged ({error})") from None
        return cls(str(head["base"]), experts, axis, *tables)


def measure_delta(
    base: PathLike,
    *experts: Experts,
    axis: Axis = "input",
    patterns: Sequence[Pattern] = (),
    threads: int | None = None,
    progress: Advance | None = None,
) -> Atlas:
    """Measure the changes of fine-tuning, reading every checkpoint once (paper 1, section 3.2).

    Args:
        base: a folder or a Hub id.
        experts: folders or Hub ids of full checkpoints or adapters, one by one or in lists, or
            mappings that name them. The default name is the last part of the source.
        axis: features that count as rows: `input` (the papers') or `output`.
        patterns: places of tensors that no built-in layout knows.
        threads: tensors measured at a time; the number of usable processors when None.
        progress: called with the number of bytes just read.

    Raises:
        CheckpointError: a checkpoint cannot be opened, does not fit the base, or holds NaN.

    Example:
        >>> import layerswap as ls
        >>> atlas = ls.delta("base", {"math": "math-expert", "swahili": "swahili-expert"})
        >>> atlas.layers, atlas.experts
        (3, ('math', 'swahili'))
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
        """Floating-point tensors that all checkpoints have."""
        return [
            name
            for name, info in self.base.tensors.items()
            if info.dtype in READ_DTYPES and all(name in e.tensors for e in self.experts.values())
        ]


def open_subjects(base: PathLike, *experts: Experts, patterns: Sequence[Pattern] = ()) -> Subjects:
    """Open the base and the experts, and check that they have the same tensors."""
    opened = open_checkpoint(os.fspath(base), patterns=patterns)
    named = {
        name: open_expert(source, opened, patterns=patterns)
        for name, source in _names(experts).items()
    }
    for name, expert in named.items():
        differing = set(opened.tensors) ^ set(expert.tensors)
        differing -= opened.ignored | expert.ignored
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
    """Measure checkpoints that are open; see `measure_delta`."""
    import numpy as np

    base, order = subjects.base, list(subjects.experts)
    changes: Changes = {}
    # The largest first, so that no worker is left with a large tensor at the end.
    names = sorted(subjects.tensors, key=lambda name: -base.tensors[name].elements)

    def work(name: str) -> list[TensorChange]:
        experts = list(subjects.experts.values())
        with np.errstate(all="ignore"):  # `measure_tensor` looks for NaN in the result
            result = measure_tensor(
                base, experts, name, axis=axis, transposed=base.transposes(name)
            )
        if progress is not None:
            progress(base.tensors[name].nbytes * (1 + len(order)))
        return result

    workers = threads or system.processors()
    with ThreadPoolExecutor(workers, thread_name_prefix="delta") as pool:
        measured = dict(zip(names, pool.map(work, names), strict=True))
    for name in subjects.tensors:
        changes.update({(e, name): c for e, c in zip(order, measured[name], strict=True)})
    places = {name: base.places[name] for name in subjects.tensors}
    return Atlas(base.identity, tuple(order), axis, places, changes)


def _names(experts: Sequence[Experts]) -> dict[str, str]:
    given = [expert for several in experts for expert in listed(several)]
    if not given:
        raise CheckpointError("give an expert to compare with the base")
    named: dict[str, str] = {}
    for expert in given:
        if isinstance(expert, Mapping):
            named |= {name: os.fspath(source) for name, source in expert.items()}
            continue
        source = os.fspath(expert)
        name = Path(source.partition("@")[0]).name or source
        named[name if name not in named else source] = source
    return named


def _heads(checkpoint: Checkpoint) -> set[str]:
    """Names of the heads, which not every checkpoint with tied embeddings stores."""
    return {name for name, place in checkpoint.places.items() if place.role == "head"}


# --- the tables on disk ---


def matrix_name(tensor: str) -> str:
    """The papers' name for a matrix, or its last two words."""
    matrix = alias(tensor)
    if matrix is not None:
        return matrix
    words = [word for word in tensor.removesuffix(".weight").split(".") if not word.isdecimal()]
    return ".".join(words[-2:])


def _write_tables(atlas: Atlas, folder: Path) -> None:
    """Write the rows and the summaries."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    located = {
        tensor: {
            "tensor": tensor,
            "layer": place.layer,
            "role": place.role,
            "matrix": matrix_name(tensor) if place.layer is not None else None,
        }
        for tensor, place in atlas.places.items()
    }
    rows, tensors = [], []
    for (expert, tensor), change in atlas.changes.items():
        head = {"expert": expert, **located[tensor]}
        rows.append({**head, "row_mav": change.rows})
        summary = {column: getattr(change, name) for column, name in SUMMARY.items()}
        sizes = {"rows": len(change.rows), "elements": change.elements}
        tensors.append({**head, **sizes, **summary})
    text = pa.string()
    fields = [("expert", text), ("tensor", text), ("layer", pa.int32()), ("role", text)]
    schema = pa.schema([*fields, ("matrix", text), ("row_mav", pa.list_(pa.float32()))])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / ROWS)
    pq.write_table(pa.Table.from_pylist(tensors), folder / TENSORS)


def _read_tables(folder: Path) -> tuple[dict[str, Place], Changes]:
    """Read places and changes of an atlas."""
    need_extras(f"{folder / ROWS}", "report")
    import numpy as np
    import pyarrow.parquet as pq

    places: dict[str, Place] = {}
    vectors: dict[tuple[str, str], Any] = {}
    for row in pq.read_table(folder / ROWS).to_pylist():
        places[row["tensor"]] = Place(row["layer"], row["role"])
        vectors[row["expert"], row["tensor"]] = np.array(row["row_mav"], dtype=np.float32)
    changes = {}
    for row in pq.read_table(folder / TENSORS).to_pylist():
        key = row["expert"], row["tensor"]
        summary = {name: row[column] for column, name in SUMMARY.items()}
        changes[key] = TensorChange(rows=vectors[key], elements=row["elements"], **summary)
    return places, changes
