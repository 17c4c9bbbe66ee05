"""Tidy tables on disk: Parquet, written whole or not at all, one row per dataclass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from layerswap.errors import EvaluationError

Row = TypeVar("Row")


def write_rows(path: Path, rows: Sequence[Any], kind: type) -> None:
    """Write rows of a dataclass, a column for each of its fields."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [one.name for one in fields(kind)]
    told = [asdict(row) for row in rows]
    draft = path.with_name(f".{path.name}")
    pq.write_table(pa.table({name: [row[name] for row in told] for name in names}), draft)
    draft.replace(path)


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """The rows that `write_rows` wrote.

    Raises:
        EvaluationError: the file cannot be read, or has other columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        why = " ".join(str(error).split())[:160]
        raise EvaluationError(f"{path}: cannot be read ({why})") from None
    wanted: Any = kind
    if rows and set(rows[0]) != {one.name for one in fields(wanted)}:
        raise EvaluationError(f"{path}: not a table of `layerswap eval`")
    return [kind(**row) for row in rows]
