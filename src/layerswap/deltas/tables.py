"""The tables of an atlas on disk: Parquet, or JSON Lines without pyarrow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from layerswap.checkpoint import Place
from layerswap.checkpoint.places import alias
from layerswap.deltas.conflict import TOP_ROWS, Conflict, by_place, tensor_conflict
from layerswap.deltas.measure import Sums, TensorChange
from layerswap.versions import need_extras

ROWS, TENSORS = "rows", "tensors"
CONFLICT, CONFLICT_BY_TENSOR = "conflict", "conflict_by_tensor"
"""Names of the tables, without their suffix."""
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
_SUMS = ("dot", "first", "second", "opposed", "both")


class Tables(NamedTuple):
    """The content of the tables.

    Attributes:
        places: of every tensor.
        changes: by expert and tensor.
        sums: by pair of experts and tensor.
    """

    places: Mapping[str, Place]
    changes: Mapping[tuple[str, str], TensorChange]
    sums: Mapping[tuple[str, str], Mapping[str, Sums]]

    def conflicts(self, first: str, second: str, share: float) -> dict[str, Conflict]:
        """The conflict of two experts in every tensor."""
        sums = self.sums.get((first, second)) or self.sums[second, first]
        return {
            tensor: tensor_conflict(
                both, [self.changes[one, tensor].rows for one in (first, second)], share
            )
            for tensor, both in sums.items()
        }


def matrix_name(tensor: str) -> str:
    """The papers' name for a matrix, or its own words within the layer."""
    known = alias(tensor)
    if known is not None:
        return known
    words = [word for word in tensor.removesuffix(".weight").split(".") if not word.isdecimal()]
    return ".".join(words[-2:])


def write_tables(content: Tables, folder: Path) -> None:
    """Write the rows, the summaries and the conflicts."""
    located = {
        tensor: {
            "tensor": tensor,
            "layer": place.layer,
            "role": place.role,
            "matrix": matrix_name(tensor) if place.layer is not None else None,
        }
        for tensor, place in content.places.items()
    }
    rows, tensors = [], []
    for (expert, tensor), change in content.changes.items():
        head = {"expert": expert, **located[tensor]}
        rows.append({**head, "row_mav": change.rows})
        summary = {column: getattr(change, name) for column, name in SUMMARY.items()}
        sizes = {"rows": len(change.rows), "elements": change.elements}
        tensors.append({**head, **sizes, **summary})
    _write_table(folder, ROWS, rows)
    _write_table(folder, TENSORS, tensors)
    if not content.sums:
        return
    place_rows: list[dict[str, Any]] = []
    tensor_rows: list[dict[str, Any]] = []
    for first, second in content.sums:
        pair = {"expert": first, "other": second}
        conflicts = content.conflicts(first, second, TOP_ROWS)
        tensor_rows += [{**pair, **located[one], **_columns(c)} for one, c in conflicts.items()]
        places = by_place(conflicts, content.places)
        place_rows += [{**pair, **one._asdict(), **_columns(c)} for one, c in places.items()]
    _write_table(folder, CONFLICT, place_rows)
    _write_table(folder, CONFLICT_BY_TENSOR, tensor_rows)


def _columns(conflict: Conflict) -> dict[str, Any]:
    return {
        "cosine": conflict.cosine,
        "sign_disagreement_share": conflict.disagreement,
        "top_rows_compared_share": TOP_ROWS,
        "top_rows_in_common_share": conflict.overlap,
        "top_rows_jaccard": conflict.jaccard,
        **{f"sum_{key}": getattr(conflict.sums, key) for key in _SUMS},
    }


def read_tables(folder: Path) -> Tables:
    """Read what `write_tables` wrote."""
    import numpy as np

    places: dict[str, Place] = {}
    vectors: dict[tuple[str, str], Any] = {}
    for row in _read_table(folder, ROWS):
        places[row["tensor"]] = Place(row["layer"], row["role"])
        vectors[row["expert"], row["tensor"]] = np.array(row["row_mav"], dtype=np.float32)
    changes = {}
    for row in _read_table(folder, TENSORS):
        key = row["expert"], row["tensor"]
        summary = {name: row[column] for column, name in SUMMARY.items()}
        changes[key] = TensorChange(rows=vectors[key], elements=row["elements"], **summary)
    sums: dict[tuple[str, str], dict[str, Sums]] = {}
    if len({expert for expert, _ in changes}) > 1:
        for row in _read_table(folder, CONFLICT_BY_TENSOR):
            values = (row[f"sum_{key}"] for key in _SUMS)
            sums.setdefault((row["expert"], row["other"]), {})[row["tensor"]] = Sums(*values)
    return Tables(places, changes, sums)


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


def _read_table(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = folder / f"{name}.jsonl"
    if lines.is_file():
        return [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    need_extras(f"{folder / name}.parquet", "report")
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(folder / f"{name}.parquet").to_pylist()
    return rows
