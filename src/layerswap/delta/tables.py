"""An atlas as Parquet tables, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Place
from layerswap.delta.conflict import TOP_ROWS, Conflict, conflicts, tensor_conflict
from layerswap.delta.measure import Change, Sums

if TYPE_CHECKING:
    from layerswap.delta.atlas import Atlas

ROWS, TENSORS = "rows.parquet", "tensors.parquet"
CONFLICT, CONFLICT_BY_TENSOR = "conflict.parquet", "conflict_by_tensor.parquet"
_SUMS = ("dot", "first", "second", "opposed", "both")


def write_tables(atlas: Atlas, folder: Path) -> None:
    """Write the rows, the summaries and the conflicts of an atlas."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = _where(atlas)
    rows, tensors = [], []
    for (expert, tensor), change in atlas.changes.items():
        head = {"expert": expert, **where[tensor]}
        rows.append({**head, "row_mav": change.rows})
        tensors.append({**head, **_summary(change)})
    schema = pa.schema([*_head(pa), ("row_mav", pa.list_(pa.float32()))])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / ROWS)
    pq.write_table(pa.Table.from_pylist(tensors), folder / TENSORS)
    if atlas.sums:
        by_place, by_tensor = _conflicts(atlas, where)
        pq.write_table(pa.Table.from_pylist(by_place), folder / CONFLICT)
        pq.write_table(pa.Table.from_pylist(by_tensor), folder / CONFLICT_BY_TENSOR)


def read_tables(
    folder: Path,
) -> tuple[
    dict[str, Place], dict[tuple[str, str], Change], dict[tuple[str, str], Mapping[str, Sums]]
]:
    """What `write_tables` wrote: places, changes and sums."""
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
        changes[key] = Change(
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
    if (folder / CONFLICT_BY_TENSOR).is_file():
        for row in pq.read_table(folder / CONFLICT_BY_TENSOR).to_pylist():
            values = (row[f"sum_{key}"] for key in _SUMS)
            sums.setdefault((row["expert"], row["other"]), {})[row["tensor"]] = Sums(*values)
    return places, changes, dict(sums)


def _head(pa: Any) -> list[tuple[str, Any]]:
    text = pa.string()
    return [("expert", text), ("tensor", text), ("layer", pa.int32()), ("role", text),
            ("matrix", text)]  # fmt: skip


def _where(atlas: Atlas) -> dict[str, dict[str, Any]]:
    from layerswap.delta.atlas import matrix_name

    return {
        tensor: {
            "tensor": tensor,
            "layer": place.layer,
            "role": place.role,
            "matrix": matrix_name(tensor) if place.layer is not None else None,
        }
        for tensor, place in atlas.places.items()
    }


def _summary(change: Change) -> dict[str, Any]:
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
