"""Reads tables and texts as they lie on a disk or on the Hub, with the reader of data mixes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerswap.errors import DataError, LayerswapError
from layerswap.training.mix.schema import Origin
from layerswap.training.mix.sources import open_rows

LOOK = 100_000
"""Largest number of rows that are read of one file."""
TABLES = (".tsv", ".csv", ".jsonl", ".json", ".parquet")
_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")


@dataclass(frozen=True)
class Table:
    """Rows, and the keys of a mix's source that reads them."""

    name: str  # as the user gave it
    columns: list[str]
    rows: list[dict[str, Any]]
    keys: dict[str, Any]  # paths are absolute

    def source(self, folder: Path) -> dict[str, Any]:
        """The keys of a source of a mix in `folder`."""
        keys = dict(self.keys)
        if "path" in keys:
            keys["path"] = os.path.relpath(keys["path"], folder)
        if "parallel" in keys:
            keys["parallel"] = {k: os.path.relpath(v, folder) for k, v in keys["parallel"].items()}
        return keys


def read_table(given: str, *, split: str = "train") -> Table:
    """Read a table: a file, or a Hub data set as `OWNER/NAME` or `OWNER/NAME:CONFIG`."""
    path, hub = Path(given).expanduser(), _HUB.fullmatch(given)
    if hub and not path.exists() and path.suffix.lower() not in (*TABLES, ".txt"):
        config = {"config": hub[2]} if hub[2] else {}
        return _read(given, {"id": hub[1], **config, "split": split})
    keys: dict[str, Any] = {"path": _absolute(given)}
    if path.suffix.lower() == ".csv":
        header = path.read_bytes().partition(b"\n")[0].decode("utf-8", "replace")
        delimiter = max(",;\t", key=header.count)
        keys |= {"delimiter": delimiter} if delimiter != "," else {}
    return _read(given, keys)


def read_texts(given: str) -> Table:
    """Read texts: a table with a column `text`, or plain text by lines or by paragraphs."""
    path = Path(given).expanduser()
    if path.suffix.lower() in TABLES or ("/" in given and not path.exists() and not path.suffix):
        table = read_table(given)
        if "text" not in table.columns:
            raise DataError(f"{given}: has no column `text`; it has {', '.join(table.columns)}")
        return table
    lines = Path(_absolute(given)).read_bytes().split(b"\n")
    blank = sum(not line.strip() for line in lines[:-1])
    paragraphs = blank > len(lines) / 10
    form = "paragraphs" if paragraphs else "text"
    return _read(given, {"path": _absolute(given), "format": form})


def read_parallel(files: tuple[str, str], names: tuple[str, str]) -> Table:
    """Read two files whose lines translate each other; columns are the two languages."""
    paths = map(_absolute, files)
    return _read(" and ".join(files), {"parallel": dict(zip(names, paths, strict=True))})


def _absolute(given: str) -> str:
    path = Path(given).expanduser()
    if not path.is_file():
        raise DataError(f"{given}: no such file")
    return str(path.absolute())


def _read(given: str, keys: dict[str, Any]) -> Table:
    try:
        rows = open_rows(Origin(**keys), folder=Path()).rows
    except LayerswapError as error:
        here = any(part in str(error) for part in given.split(" and "))
        raise error if here else error.within(given) from None
    return Table(given, rows.column_names, rows.select(range(min(LOOK, len(rows)))).to_list(), keys)
