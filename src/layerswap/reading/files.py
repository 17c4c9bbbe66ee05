"""Readers of local text, JSON and table files; errors name the file and the line.

Every command reads texts and tables here, so that line ends, encodings and quotation marks mean
the same everywhere. Only line feeds end lines (and carriage returns in a file without line feeds):
a form feed, U+0085 or U+2028 belongs to its text.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, combinations, dropwhile, groupby, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from layerswap.ground.errors import CheckpointError, DataError, one_line
from layerswap.ground.strict_json import mistaken, unique_pairs
from layerswap.reading.encodings import damage_of, to_utf8

if TYPE_CHECKING:
    from datasets import Dataset, Features

RowT = TypeVar("RowT")

FORMATS = {
    ".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
    ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
"""Format by file extension."""
_SAMPLE = 1 << 16
"""Bytes of a file by which its kind and its encoding are guessed."""
_DAMAGED = 0.1
"""Share of lines with damaged letters above which a text is refused."""
_UNWRITABLE = re.compile(r"[\ud800-\udfff]|(?<!\\)\\u0000")
_FAILED = {"#NAME?", "#N/A", "#REF!", "#VALUE!", "#DIV/0!", "#NULL!", "#NUM!", "#ERROR!"}
"""Values of failed formulas in a spreadsheet; a text that begins with `=` becomes a formula."""
LONGEST_FIELD = 200
"""Lines that a quoted field may have; a longer one began with a lone quotation mark."""
RATIO, FLOOR = 100, 1 << 26
"""Limits of an unpacked file: bytes for each compressed byte, and bytes that are always allowed."""
_PACKED = (".gz", ".zst", ".xz", ".bz2")
_SHEET = "save it as CSV or plain text in UTF-8"
_REMEDIES = {".zip": "unpack the archive", **dict.fromkeys((".xlsx", ".xls", ".ods"), _SHEET)}
_BINARY = {
    b"PK\x03\x04": f"this is a zip archive or a file of Excel or Word; unpack it, or {_SHEET}",
    b"\xd0\xcf\x11\xe0": f"this is a file of Excel or Word; {_SHEET}",
    b"%PDF": "this is a PDF; save its text as plain text in UTF-8",
    b"{\\rtf": "this is rich text (RTF); save it as plain text in UTF-8",
    b"\x1f\x8b": "this is compressed by gzip; add .gz to its name",
    b"\x28\xb5\x2f\xfd": "this is compressed by zstd; add .zst to its name",
    b"PAR1": "this is a Parquet file; name it *.parquet",
}  # fmt: skip
"""Binary kinds of files and their remedies, by first bytes."""


class Layout(NamedTuple):
    """The form of a table."""

    delimiter: str = ","
    header: list[str] | None = None  # column names of a table without a header line
    quotes: bool = True  # false: quotation marks are ordinary characters


def unpacked(file: str | Path) -> Path:
    """Return the path without its compression extension, such as `.gz`."""
    path = Path(file)
    return path.with_suffix("") if path.suffix.lower() in _PACKED else path


def format_of(file: str) -> str:
    """Return the format that the file's extension names; refuse an unknown extension."""
    suffix = unpacked(file).suffix
    if suffix.lower() not in FORMATS:
        named = "give format: jsonl, json, csv, parquet, arrow, text or paragraphs"
        raise DataError(
            f"{file}: unknown format {suffix or 'without an extension'!r}; "
            f"{_REMEDIES.get(suffix.lower(), named)}"
        )
    return FORMATS[suffix.lower()]


def names_in(line: str) -> list[str]:
    """Split names at commas; a name with a comma stands in quotation marks, as in CSV."""
    names = next(csv.reader([line], skipinitialspace=True), [])
    return [name.strip() for name in names if name.strip()]


def evenly_spaced(rows: Sequence[RowT], count: int) -> Sequence[RowT]:
    """Return at most `count` rows, evenly spaced from the first one on."""
    if len(rows) <= count:
        return rows
    return [rows[i * len(rows) // count] for i in range(count)]


def check_start(file: str | Path, *, binary: bool) -> None:
    """Refuse a Git LFS pointer or a web page; unless `binary`, also a binary file and XML."""
    path = Path(file)
    if not path.is_file():  # a pipe can be read once
        return
    with path.open("rb") as stream:
        start = stream.read(_SAMPLE)
    what = None
    if not binary:
        what = next((why for magic, why in _BINARY.items() if start.startswith(magic)), None)
        text = start.decode("utf-8-sig", "replace")
        if text.startswith("<"):
            from layerswap.reading.markup import markup_of

            lines = text.splitlines()
            cut = len(start) == _SAMPLE and len(lines) > 1
            what = markup_of(lines[:-1] if cut else lines)
    if what := what or mistaken(start):
        raise DataError(f"{file}: {what}")


def lines_of(file: str | Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, plain or compressed, without line ends.

    Refuses other encodings and other kinds of files by name.
    """
    import fsspec

    try:
        packed = unpacked(file) != Path(file)
        check_start(file, binary=packed)
        if packed and fsspec.utils.infer_compression(str(file)) is None:
            raise DataError(f"{file}: needs the package zstandard; install it, or unpack the file")
        opened = fsspec.open(str(file), "rb", compression="infer")
        size = opened.fs.size(opened.path) if packed else None
        left = max(FLOOR, RATIO * size) if size else sys.maxsize  # pipes and some servers have none
        with opened as stream:
            whole = io.BufferedReader(stream) if packed else None
            lines = iter(lambda: whole.readline(left), b"") if whole else stream
            start = b""
            for number, line in enumerate(lines, start=1):
                left -= len(line)
                if left <= 0:
                    raise DataError(f"{file}: unpacks to {RATIO} times its size; unpack it first")
                start += line if len(start) < _SAMPLE else b""
                body = line.rstrip(b"\r\n")
                # An old Mac's file is one line to everybody else.
                only_returns = number == 1 and not line.endswith(b"\n") and b"\r" in body
                for part in body.split(b"\r") if only_returns else [body]:
                    try:
                        text = part.decode("utf-8-sig" if number == 1 else "utf-8")
                        byte = 0
                    except UnicodeDecodeError as error:
                        text, byte = "\0", part[error.start]
                    if "\0" in text or "\x1b$" in text:  # ISO 2022 is ASCII with escapes
                        rest = (whole or stream).read(_SAMPLE)
                        why = to_utf8(line + rest, byte, (start + rest)[:_SAMPLE])
                        raise DataError(f"{file}, line {number}: is not UTF-8 text but {why}")
                    yield text
    except DataError:
        raise
    except Exception as error:  # each compression has its own errors
        if "://" in str(file):
            raise
        reason = (
            getattr(error, "strerror", None) or f"{type(error).__name__}: {one_line(error, 120)}"
        )
        raise DataError(f"{file}: cannot be read ({reason})") from None


def check_text(file: str) -> None:
    """Refuse an empty file, and JSON, tables and markup in place of plain text."""
    from layerswap.reading.markup import markup_of

    by_name = FORMATS.get(unpacked(file).suffix.lower(), "text")
    lines = dropwhile(lambda line: not line.strip(), lines_of(file))
    first = next(lines, None)
    if first is None:
        raise DataError(f"{file}: is empty")
    named = _json_of(first) or by_name
    if named != "text":
        hint = f"--set format={named}" if by_name != "text" else f"name it *.{named}"
        raise DataError(f"{file}: is {named}, not plain text; give format: {named}, or {hint}, or "
                        "save its texts alone")  # fmt: skip
    if why := markup_of(chain([first], lines)):
        raise DataError(f"{file}: {why}")
    if damage := damage_of(lines_of(file)):
        if damage[1] > _DAMAGED:
            raise DataError(f"{file}: {damage[0]}")
        warnings.warn(f"{file}: {damage[0]}", stacklevel=2)


def _json_of(line: str) -> str | None:
    """Return `json` or `jsonl` if a file with this first line has that format, else None."""
    if line.strip() in ("[", "{") or line.lstrip().startswith("[{"):
        return "json"
    try:
        return "jsonl" if isinstance(json.loads(line), dict) else None
    except ValueError:
        return None


def read_texts(files: list[str], count: int | None, *, paragraphs: bool) -> Dataset:
    """Read lines, or the texts between blank lines, into a column `text`."""
    for file in files:
        check_text(file)
    return _generate(_paragraphs if paragraphs else _lines, files, count)


def _lines(files: list[str]) -> Iterator[dict[str, str]]:
    return ({"text": line} for file in files for line in lines_of(file))


def _paragraphs(files: list[str]) -> Iterator[dict[str, str]]:
    for file in files:
        for is_text, lines in groupby(lines_of(file), key=lambda line: bool(line.strip())):
            if is_text:
                yield {"text": "\n".join(lines)}


def read_parallel(files: dict[str, list[str]], count: int | None) -> Dataset:
    """Read line-aligned files into rows with a column for each; refuse different lengths."""
    for name in chain.from_iterable(files.values()):
        check_text(name)
    for (one, first), (other, second) in combinations(files.items(), 2):
        if first == second:
            raise DataError(f"{one} and {other} are one file, {first[0]}; give the translation")
    lengths = {
        names[0]: sum(1 for name in names for _ in lines_of(name)) for names in files.values()
    }
    short, long = (pick(lengths, key=lengths.__getitem__) for pick in (min, max))
    if lengths[short] < lengths[long]:
        raise DataError(
            f"{long}, line {lengths[short] + 1}: has no partner in {short} ({lengths[short]:,} "
            f"of {lengths[long]:,} lines); parallel files are aligned by line"
        )
    return _generate(_aligned, files, count)


def _aligned(files: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    """Yield the rows of parallel files; a row with an empty line in one of them is left out."""
    columns = [chain.from_iterable(map(lines_of, paths)) for paths in files.values()]
    for texts in zip(*columns, strict=True):
        if all(text.strip() for text in texts):
            yield dict(zip(files, texts, strict=True))


def rows_of(file: str | Path, layout: Layout | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of one file of JSON or of a table, without a data set of them."""
    name = str(file)
    if layout is None and format_of(name) != "csv":
        return objects([name])
    return _table_rows([name], layout=layout or Layout(delimiter_of(name)))


def delimiter_of(file: str) -> str:
    """Return a table's delimiter: a tab for `.tsv`, otherwise the most frequent in its header."""
    if unpacked(file).suffix.lower() == ".tsv":
        return "\t"
    header = next((line for line in lines_of(file) if line.strip()), "")
    return max(",;\t|", key=re.sub('"[^"]*"', "", header).count)


def read_json(files: list[str], count: int | None) -> Dataset:
    """Read JSON Lines, or files of one array of objects, without changing values.

    The `datasets` library infers types from the first ten megabytes, refuses later rows of other
    types, and parses dates.
    """
    from datasets import Json

    features = _features(islice(objects(files), count))
    if not features:
        raise DataError("has no columns")
    as_json = {name: isinstance(feature, Json) for name, feature in features.items()}
    return _generate(partial(_encoded, as_json=as_json), files, count, features)


def _encoded(files: list[str], as_json: dict[str, bool]) -> Iterator[dict[str, Any]]:
    """Yield rows with all columns; JSON columns are encoded, as the library decodes "5" to 5."""
    for row in objects(files):
        values = ((name, row.get(name), coded) for name, coded in as_json.items())
        yield {
            name: json.dumps(value) if coded and value is not None else value
            for name, value, coded in values
        }


def objects(files: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of files of JSON Lines, or of one array each.

    A list of objects in place of an object is a conversation, in `messages`.
    """
    for file in files:
        for where, text in _values(file):
            try:
                rows = [*_decoded(text)]
                if "\\u" in text and _UNWRITABLE.search(json.dumps(rows, ensure_ascii=False)):
                    raise DataError(f"{where}: has NUL or a lone surrogate (\\ud800-\\udfff)")
            except CheckpointError as error:
                raise DataError(f"{where}: {error}") from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: is not JSON ({error})") from None
            for row in _rows_in(rows, file) if where == file else rows:
                if not (isinstance(row, dict) or _are_objects(row)):
                    raise DataError(f"{where}: {row!s:.40} is not a JSON object")
                yield row if isinstance(row, dict) else {"messages": row}


def _decoded(text: str) -> Iterator[Any]:
    """Decode JSON values with nothing but white space between."""
    decoder, at = json.JSONDecoder(parse_int=_integer, object_pairs_hook=unique_pairs), 0
    while rest := re.compile(r"\S").search(text, at):
        value, at = decoder.raw_decode(text, rest.start())
        yield value


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _rows_in(values: list[Any], file: str) -> list[Any]:
    """Return the rows of a whole file: of its array, or of the one array in its object."""
    whole = values[0] if len(values) == 1 else values
    if isinstance(whole, list):
        return whole
    if not isinstance(whole, dict):
        return values
    inner = [value for value in whole.values() if isinstance(value, list | dict)]
    lists = [value for value in inner if _are_objects(value)]
    if inner and len(lists) != 1:
        raise DataError(
            f"{file}: is one object ({', '.join(whole):.60}), not a list of rows; save a list of "
            "objects, in pandas by `to_json(FILE, orient='records')`, and each split in its file"
        )
    return [*lists[0]] if lists else values


def _integer(digits: str) -> int | str:
    """Return a number of at most 64 bits; a longer one stays the text of its digits."""
    number = int(digits) if len(digits) < 21 else 1 << 63
    return number if -(1 << 63) <= number < 1 << 63 else digits


def _values(file: str) -> Iterator[tuple[str, str]]:
    """Yield the JSON of each line of a file and its place, or the file whole."""
    lines = ((number, line) for number, line in enumerate(lines_of(file), 1) if line.strip())
    (number, first), second = next(lines, (0, "")), next(lines, None)
    if not number:
        raise DataError(f"{file}: is empty")
    by_line = first.startswith("{") and unpacked(file).suffix.lower() != ".json"
    with suppress(ValueError, RecursionError):
        by_line = by_line or (second is not None and json.loads(first) is not None)
    ahead = [(number, first), *([second] if second else [])]
    if not by_line or first.strip() == "{":
        yield file, "\n".join(line for _, line in chain(ahead, lines))
        return
    for number, line in chain(ahead, lines):
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
    dtypes = {column: names.get(frozenset(types)) for column, types in kinds.items()}
    return Features({column: Value(name) if name else Json() for column, name in dtypes.items()})


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
    if features is None:
        for _ in rows(files):
            pass  # an error in the library's generator would lose its words
    names = chain.from_iterable(files.values()) if isinstance(files, dict) else files
    local = [Path(name).stat() for name in names if "://" not in name]
    # The stamp is a part of the cache's key: a changed file is read again.
    stamp = str([(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for stat in local])
    made: Dataset = Dataset.from_generator(
        _stamped, features=features, gen_kwargs={"rows": rows, "files": files, "stamp": stamp}
    )
    return made


def _stamped(
    rows: Callable[[Any], Iterator[dict[str, Any]]], files: Any, stamp: str
) -> Iterator[dict[str, Any]]:
    return rows(files)


def read_table(files: list[str], layout: Layout, count: int | None) -> Dataset:
    """Read CSV or TSV without inferring types: every value is a string.

    Refuses a table whose rows have not the header's number of fields. The library would shift the
    fields of a long row, and read 07 as the number 7.
    """
    return _generate(partial(_table_rows, layout=layout), files, count)


def _table_rows(files: list[str], *, layout: Layout) -> Iterator[dict[str, str]]:
    usual: list[str] = []
    for file in files:
        for row in _rows_of(file, layout):
            usual = usual or list(row)
            if row.keys() != set(usual):
                raise DataError(f"{file}: columns differ from {files[0]}")
            yield row


def _rows_of(file: str, layout: Layout) -> Iterator[dict[str, str]]:
    names = _column_names(layout.header or [])
    for number, row in _records(file, layout, len(names)):
        # Published tables without a header may leave out fields at the end of a row.
        if names and (len(row) > len(names) or (len(row) < len(names) and layout.header is None)):
            raise DataError(
                f"{file}, line {number}: the number of fields is {len(row)}, not {len(names)} "
                "as in the header"
            )
        if not names:
            names = _column_names(row)
        elif [name.strip("\ufeff ").casefold() for name in row] != [*map(str.casefold, names)]:
            cells = ["" if cell in _FAILED else cell for cell in row]
            yield dict(zip_longest(names, cells, fillvalue=""))  # no header of a further file
    if not names:
        raise DataError(f"{file}: is empty")


def _records(file: str, layout: Layout, width: int) -> Iterator[tuple[int, list[str]]]:
    """Split the lines of a table into fields; yield each record with the number of its first line.

    A quotation mark that begins a field quotes it by the rules of csv, over several lines if need
    be. It is an ordinary character where those rules fail but the line alone has all fields, and
    where every line of such a quotation has all fields: there it would swallow rows. Excel's first
    line `sep=;` is no record.
    """
    numbered = enumerate(lines_of(file), start=1)
    lines = (pair for pair in numbered if pair != (1, f"sep={layout.delimiter}"))
    ahead: list[tuple[int, str]] = []
    while ahead or (ahead := [*islice(lines, 1)]):
        number, line = ahead[0]
        plain = line.split(layout.delimiter)
        width = width or len(plain)
        row, taken, why = plain, 1, ""
        if layout.quotes and '"' in line:
            row, taken, why = _quoted(ahead, lines, layout.delimiter)
            swallowed = taken > (1 if layout.delimiter == "\t" else 2) and width > 1
            fields = (text.count(layout.delimiter) + 1 for _, text in ahead[:taken])
            if (why and len(plain) == width) or (swallowed and all(n == width for n in fields)):
                row, taken, why = plain, 1, ""
        if why:
            raise DataError(
                f"{file}, line {number}: {why}; if quotation marks are ordinary characters in "
                "this file, write quotes: false"
            )
        ahead = ahead[taken:]
        if line or taken > 1:
            yield number, row


def _quoted(
    ahead: list[tuple[int, str]], lines: Iterator[tuple[int, str]], delimiter: str
) -> tuple[list[str], int, str]:
    """Read a record by the rules of csv: its fields, its number of lines, or why it is none.

    Lines that it looks at are added to `ahead`.
    """
    taken = 0

    def wanted() -> Iterator[str]:
        nonlocal taken
        while True:
            if taken == len(ahead):
                ahead.extend(islice(lines, 1))
            if taken == len(ahead):
                return
            if taken == LONGEST_FIELD:
                raise csv.Error(f"a quoted field has more than {LONGEST_FIELD} lines")
            taken += 1
            yield ahead[taken - 1][1] + "\n"

    csv.field_size_limit(1 << 30)  # for the whole process; a field may be as long as an article
    fields = csv.reader(wanted(), delimiter=delimiter, strict=True, skipinitialspace=True)
    try:
        # The reader asks for a further line only within a quoted field.
        return next(fields), taken, ""
    except csv.Error as error:
        return [], 1, str(error)


def _column_names(names: list[str]) -> list[str]:
    """Strip names, replace empty ones by positions, and number repeated ones, as pandas does."""
    given = [name.strip() or f"Unnamed: {i}" for i, name in enumerate(names)]
    counts = [given[:i].count(name) for i, name in enumerate(given)]
    return [f"{name}.{n}" if n else name for name, n in zip(given, counts, strict=True)]
