"""Readers of local text, JSON and table files; errors name the file and the line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, groupby, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from layerswap.ground.errors import DataError, one_line

if TYPE_CHECKING:
    from datasets import Dataset, Features

    from layerswap.training.mix.schema import Origin

FORMATS = {
    ".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
    ".txt": "text",
}  # fmt: skip
"""Format by file extension."""
LONGEST_FIELD = 200
"""Lines that a quoted field may have; a longer one began with a lone quotation mark."""
_PACKED = (".gz", ".zst", ".xz", ".bz2")


class QuotingError(DataError):
    """A table whose quotation marks the csv module cannot pair."""


def unpacked(file: str | Path) -> Path:
    """Return the path without its compression extension, such as `.gz`."""
    path = Path(file)
    return path.with_suffix("") if path.suffix.lower() in _PACKED else path


def format_of(file: str) -> str:
    """Return the format that the file's extension names; refuse an unknown extension."""
    suffix = unpacked(file).suffix
    if suffix.lower() not in FORMATS:
        raise DataError(
            f"{file}: unknown format {suffix or 'without an extension'!r}; "
            "give format: jsonl, json, csv, parquet, text or paragraphs"
        )
    return FORMATS[suffix.lower()]


def lines_of(file: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, plain or compressed, without line ends."""
    import fsspec

    number = 0
    try:
        with fsspec.open(file, "rb", compression="infer") as lines:
            for number, line in enumerate(lines, start=1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise DataError(
            f"{file}, line {number}: is not UTF-8 text; save the file as UTF-8"
        ) from None
    except Exception as error:  # each compression has its own errors
        reason = f"{type(error).__name__}: {one_line(error, 120)}"
        raise DataError(f"{file}: cannot be read ({reason})") from None


def check_text(file: str) -> int:
    """Count the lines of a plain text file; refuse an empty file, JSON and tables."""
    by_name = FORMATS.get(unpacked(file).suffix.lower(), "text")
    count, written = 0, False
    for line in lines_of(file):
        if not written and line.strip():
            written, named = True, _json_of(line) or by_name
            if named != "text":
                hint = f"--set format={named}" if by_name != "text" else f"name it *.{named}"
                how = f"give format: {named}, or {hint}"
                raise DataError(f"{file}: is {named}, not plain text; {how}")
        count += 1
    if not written:
        raise DataError(f"{file}: is empty")
    return count


def _json_of(line: str) -> str | None:
    """Return `json` or `jsonl` if a file with this first line has that format, else None."""
    if line.strip() in ("[", "{") or line.lstrip().startswith("[{"):
        return "json"
    try:
        return "jsonl" if isinstance(json.loads(line), dict) else None
    except ValueError:
        return None


def read_paragraphs(files: list[str], count: int | None) -> Dataset:
    """Read texts between blank lines into a column `text`."""
    for file in files:
        check_text(file)
    return _generate(_paragraphs, files, count)


def _paragraphs(files: list[str]) -> Iterator[dict[str, str]]:
    for file in files:
        for is_text, lines in groupby(lines_of(file), key=lambda line: bool(line.strip())):
            if is_text:
                yield {"text": "\n".join(lines)}


def read_parallel(files: dict[str, list[str]], count: int | None) -> Dataset:
    """Read line-aligned files into rows with a column for each; refuse different lengths."""
    lengths = {one[0]: sum(map(check_text, one)) for one in files.values()}
    short, long = (pick(lengths, key=lengths.__getitem__) for pick in (min, max))
    if lengths[short] < lengths[long]:
        raise DataError(
            f"{long}, line {lengths[short] + 1}: has no partner in {short} ({lengths[short]:,} "
            f"of {lengths[long]:,} lines); parallel files are aligned by line"
        )
    return _generate(_aligned, files, count)


def _aligned(files: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    """Yield the rows of parallel files; a row with an empty line in one of them is left out."""
    columns = [chain.from_iterable(map(lines_of, one)) for one in files.values()]
    for texts in zip(*columns, strict=True):
        if all(text.strip() for text in texts):
            yield dict(zip(files, texts, strict=True))


def read_json(files: list[str], count: int | None) -> Dataset:
    """Read JSON Lines, or files of one array of objects, without changing values.

    The `datasets` library infers types from the first ten megabytes, refuses later rows of other
    types, and parses dates.
    """
    from datasets import Json

    features = _features(islice(_objects(files), count))
    if not features:
        raise DataError("has no columns")
    as_json = {name: isinstance(feature, Json) for name, feature in features.items()}
    return _generate(partial(_encoded, as_json=as_json), files, count, features)


def _encoded(files: list[str], as_json: dict[str, bool]) -> Iterator[dict[str, Any]]:
    """Yield rows with all columns; JSON columns are encoded, as the library decodes "5" to 5."""
    for row in _objects(files):
        values = ((name, row.get(name), coded) for name, coded in as_json.items())
        yield {
            name: json.dumps(value) if coded and value is not None else value
            for name, value, coded in values
        }


def holds_objects(file: str) -> bool:
    """True if a file holds JSON Lines, or one array of objects."""
    start = next((line for line in lines_of(file) if line.strip()), "").lstrip()
    return start.startswith("[") or _json_of(start) == "jsonl"


def _objects(files: list[str]) -> Iterator[dict[str, Any]]:
    for file in files:
        for where, text in _values(file):
            try:
                value = json.loads(text, parse_int=_integer)
                if "\\u" in text:
                    json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise DataError(f"{where}: has a lone surrogate (\\ud800-\\udfff)") from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: is not JSON ({error})") from None
            for row in value if where == file else [value]:
                if not isinstance(row, dict):
                    raise DataError(f"{where}: {row!s:.40} is not a JSON object")
                yield row


def _integer(digits: str) -> int | str:
    """Return a number of at most 64 bits; a longer one stays the text of its digits."""
    number = int(digits) if len(digits) < 21 else 1 << 63
    return number if -(1 << 63) <= number < 1 << 63 else digits


def _values(file: str) -> Iterator[tuple[str, str]]:
    """Yield each JSON value of a file and its place: the lines, or an array whole."""
    lines = ((number, line) for number, line in enumerate(lines_of(file), 1) if line.strip())
    number, first = next(lines, (0, ""))
    if not number:
        raise DataError(f"{file}: is empty")
    if first.lstrip().startswith("["):
        yield file, "\n".join([first, *(line for _, line in lines)])
        return
    yield f"{file}, line {number}", first
    for number, line in lines:
        yield f"{file}, line {number}", line


def _features(rows: Iterator[dict[str, Any]]) -> Features:
    """Infer the type of each column; a column with objects, lists or mixed types is JSON."""
    from datasets import Features, Json, Value

    kinds: dict[str, set[type]] = {}
    for row in rows:
        for name, value in row.items():
            kinds.setdefault(name, set()).add(type(value))
    names = {frozenset({type(None)}): "null"}
    for kind, name in {str: "string", int: "int64", float: "float64", bool: "bool"}.items():
        names |= dict.fromkeys((frozenset({kind}), frozenset({kind, type(None)})), name)
    found = {column: names.get(frozenset(one)) for column, one in kinds.items()}
    return Features({column: Value(name) if name else Json() for column, name in found.items()})


def _generate(
    rows: Callable[[Any], Iterator[dict[str, Any]]], files: Any, count: int | None,
    features: Features | None = None,
) -> Dataset:  # fmt: skip
    """Write the rows of files to the cache of `datasets`, or take the first `count` of them."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    taken = list(islice(rows(files), count or 1))
    if not taken:
        raise DataError("has no rows")
    if count is not None:
        return Dataset.from_list(taken, features=features)
    names = chain.from_iterable(files.values()) if isinstance(files, dict) else files
    found = [Path(name).stat() for name in names]
    # The stamp is a part of the cache's key: a changed file is read again.
    stamp = str([(one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino) for one in found])
    made: Dataset = Dataset.from_generator(
        _stamped, features=features, gen_kwargs={"rows": rows, "files": files, "stamp": stamp}
    )
    return made


def _stamped(
    rows: Callable[[Any], Iterator[dict[str, Any]]], files: Any, stamp: str
) -> Iterator[dict[str, Any]]:
    return rows(files)


def read_table(files: list[str], origin: Origin, delimiter: str, count: int | None) -> Dataset:
    """Read CSV or TSV without inferring types: every value is a string.

    Refuses a table that the csv module cannot split into rows of the header's length. The library
    would shift the fields of a long row, end a field that begins with a lone quotation mark many
    lines later, and read 07 as the number 7.
    """
    rows = partial(_table_rows, origin=origin, delimiter=delimiter)
    for _ in islice(rows(files), count):
        pass  # an error in the library's generator would lose its words
    return _generate(rows, files, count)


def _table_rows(files: list[str], *, origin: Origin, delimiter: str) -> Iterator[dict[str, str]]:
    limit = csv.field_size_limit(1 << 30)  # whole articles, and a swallowed rest of a file
    usual: list[str] = []
    try:
        for file in files:
            for row in _rows_of(file, origin, delimiter):
                usual = usual or list(row)
                if row.keys() != set(usual):
                    raise DataError(f"{file}: columns differ from {files[0]}")
                yield row
    finally:
        csv.field_size_limit(limit)  # of the whole process


def _rows_of(file: str, origin: Origin, delimiter: str) -> Iterator[dict[str, str]]:
    rule: Literal[0, 3] = csv.QUOTE_MINIMAL if origin.quotes else csv.QUOTE_NONE
    lines = (f"{line}\n" for line in lines_of(file))
    rows = csv.reader(lines, delimiter=delimiter, quoting=rule, strict=True)
    names, start = _column_names(origin.header or []), 1
    try:
        for row in rows:
            if rows.line_num - start >= LONGEST_FIELD:
                raise csv.Error(f"a quoted field has more than {LONGEST_FIELD} lines")
            # Published tables without a header may leave out fields at the end of a row.
            if names and (
                len(row) > len(names) or (0 < len(row) < len(names) and origin.header is None)
            ):
                raise DataError(
                    f"{file}, line {start}: the number of fields is {len(row)}, not {len(names)} "
                    "as in the header"
                )
            if row and not names:
                names = _column_names(row)
            elif row:
                yield dict(zip_longest(names, row, fillvalue=""))
            start = rows.line_num + 1
    except csv.Error as error:
        raise QuotingError(
            f"{file}, line {start}: {error}; if quotation marks are ordinary characters in this "
            "file, write quotes: false"
        ) from None
    if not names:
        raise DataError(f"{file}: is empty")


def _column_names(names: list[str]) -> list[str]:
    """Replace empty names by positions, and number repeated names, as pandas does."""
    given = [name or f"Unnamed: {i}" for i, name in enumerate(names)]
    counts = [given[:i].count(name) for i, name in enumerate(given)]
    return [f"{name}.{n}" if n else name for name, n in zip(given, counts, strict=True)]
