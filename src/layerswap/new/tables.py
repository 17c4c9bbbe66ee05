"""Reads tables and texts as they lie on a disk: text, TSV, CSV, JSON, JSON Lines, Parquet, Hub."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from layerswap.errors import DataError

Rows = list[dict[str, Any]]
LOOK = 100_000
"""Largest number of rows that are read of one file."""
TEXTS = (".txt", ".text", ".md", "")
KNOWN = "txt, tsv, csv, json, jsonl or parquet"
_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")


@dataclass(frozen=True)
class Table:
    """Rows of a file or of a Hub data set, and the keys of a mix's source that read the same."""

    name: str  # as the user gave it
    columns: list[str]
    rows: Rows
    keys: dict[str, Any]  # `path` is absolute

    def source(self, folder: Path) -> dict[str, Any]:
        """The keys of a mix's source, for a mix in `folder`."""
        path = self.keys.get("path")
        return {**self.keys, **({"path": os.path.relpath(path, folder)} if path else {})}


def read_table(given: str, *, split: str = "train") -> Table:
    """Read a table: a file, or a Hub data set as `OWNER/NAME` or `OWNER/NAME:CONFIG`."""
    path = Path(given).expanduser()
    hub = _HUB.fullmatch(given)
    if hub and not path.exists() and not path.suffix:
        return _from_hub(given, hub[1], hub[2], split)
    suffix, keys = path.suffix.lower(), {"path": str(path.absolute())}
    if suffix not in _READERS:
        raise DataError(f"{given}: unknown format {suffix or 'without an extension'!r}; give a "
                        f"{KNOWN} file")  # fmt: skip
    text = None if suffix == ".parquet" else read_text(given)
    try:
        rows, more = _READERS[suffix](path, text or "")
    except DataError as error:
        raise error.within(given) from None
    if not rows:
        raise DataError(f"{given}: has no rows")
    # What the mix needs to be told: the format is known by the file's name.
    return Table(given, list(rows[0]), rows, {**keys, **more})


def read_text(given: str) -> str:
    """The whole text of a file; refuses one that is missing, empty or not UTF-8."""
    path = Path(given).expanduser()
    if not path.is_file():
        raise DataError(f"{given}: no such file")
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{given}, line {line}: is not UTF-8 text; convert the file, for example with "
            f"`iconv -f LATIN1 -t UTF-8 {path.name} > utf8-{path.name}`"
        ) from None
    if not text.strip():
        raise DataError(f"{given}: is empty")
    return text


def read_documents(given: str) -> Table:
    """Read plain text: a document on each line, or paragraphs if blank lines separate them."""
    lines = _lines(read_text(given))
    blank = sum(not line.strip() for line in lines)
    paragraphs = blank > len(lines) / 10
    if paragraphs:
        texts = [" ".join(block.split()) for block in re.split(r"\n\s*\n", "\n".join(lines))]
    else:
        texts = [line.strip() for line in lines]
    rows: Rows = [{"text": text} for text in texts if text][:LOOK]
    keys = {"path": str(Path(given).expanduser().absolute()),
            "format": "paragraphs" if paragraphs else "text"}  # fmt: skip
    return Table(given, ["text"], rows, keys)


def read_parallel(files: tuple[str, str], names: tuple[str, str]) -> Table:
    """Read two files whose lines are translations of each other; columns are the two languages."""
    sides = [_lines(read_text(given)) for given in files]
    if len(sides[0]) != len(sides[1]):
        raise DataError(
            f"{files[0]} has {len(sides[0]):,} lines and {files[1]} has {len(sides[1]):,}; "
            "parallel files need the same number, each line the translation of the other"
        )
    rows = [dict(zip(names, pair, strict=True)) for pair in zip(*sides, strict=True)]
    paths = [str(Path(given).expanduser().absolute()) for given in files]
    return Table(" and ".join(files), [*names], rows,
                 {"parallel": dict(zip(names, paths, strict=True))})  # fmt: skip


def _lines(text: str) -> list[str]:
    """The lines of a text as files are read: other line separators of Unicode do not end one."""
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]


def _csv(path: Path, text: str) -> tuple[Rows, dict[str, Any]]:
    header = text.partition("\n")[0]
    tabs = path.suffix.lower() == ".tsv"
    delimiter = "\t" if tabs else max(",;\t|", key=header.count)
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows = []
    for row in islice(reader, LOOK):
        if None in row or None in row.values():
            raise DataError(
                f"line {reader.line_num}: has other columns than the header "
                f"({', '.join(reader.fieldnames or ())}); quote fields that hold the delimiter"
            )
        rows.append(row)
    usual = "\t" if tabs else ","
    return cast("Rows", rows), {"delimiter": delimiter} if delimiter != usual else {}


def _jsonl(path: Path, text: str) -> tuple[Rows, dict[str, Any]]:
    return list(islice(_objects(text), LOOK)), {}


def _objects(text: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_lines(text), start=1):
        if line.strip():
            yield _object(line, f"line {number}")


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: is not an object with named columns")
    return value


def _json(path: Path, text: str) -> tuple[Rows, dict[str, Any]]:
    try:
        rows = json.loads(text)
    except ValueError:
        return _jsonl(path, text)
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise DataError("is not a list of objects with named columns")
    return rows[:LOOK], {}


def _parquet(path: Path, text: str) -> tuple[Rows, dict[str, Any]]:
    from pyarrow import ArrowException, parquet

    if not path.is_file():
        raise DataError("no such file")
    try:
        return parquet.read_table(path).slice(0, LOOK).to_pylist(), {}
    except (ArrowException, OSError) as error:
        raise DataError(f"is not a Parquet file ({' '.join(str(error).split())[:80]})") from None


_READERS: dict[str, Callable[[Path, str], tuple[Rows, dict[str, Any]]]] = {
    ".tsv": _csv, ".csv": _csv, ".jsonl": _jsonl, ".json": _json, ".parquet": _parquet,
}  # fmt: skip


def _from_hub(given: str, name: str, config: str | None, split: str) -> Table:
    from layerswap.training.mix.schema import Origin
    from layerswap.training.mix.sources import open_rows

    keys = {"id": name, **({"config": config} if config else {}), "split": split}
    try:
        rows = open_rows(Origin(**keys), folder=Path(), limit=LOOK).rows
    except DataError as error:
        raise error.within(f"{given}: no such file, and on the Hub") from None
    return Table(given, rows.column_names, rows.to_list(), keys)
