"""Reads the tables of an earlier release, `scores.parquet` and `samples.parquet`, as answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

OLD_TABLE, OLD_SAMPLES = "scores.parquet", "samples.parquet"


def read_old(
    folder: Path, read_table: Callable[[Path], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Read the rows of a folder, with the columns of the answers table."""
    rows = read_table(folder / OLD_TABLE)
    if rows and {"split", "composition"} <= set(rows[0]):
        return _swept(rows)
    path = folder / OLD_SAMPLES
    texts = {_place(row): row for row in (read_table(path) if path.is_file() else [])}
    return [{**row, **(texts.get(_place(row), {}) if row.get("main") else {})} for row in rows]


def _place(row: Mapping[str, Any]) -> str:
    return repr([row.get(name) for name in ("model", "task", "document")])


def _swept(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a sweep, with a task's first metric as the headline."""
    first: dict[str, tuple[Any, Any]] = {}
    return [
        {**row, "model": row["composition"], "benchmark": row.get("task"),
         "main": first.setdefault(str(row.get("task")), measure) == measure}
        for row in rows
        for measure in [(row.get("metric"), row.get("filter"))]
    ]  # fmt: skip


def remove_old(folder: Path) -> None:
    """Remove the tables of an earlier release, which the answers table replaces."""
    for name in (OLD_TABLE, OLD_SAMPLES):
        (folder / name).unlink(missing_ok=True)
