"""Opens the rows of a source: from the Hub, a downloaded copy, or local files."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from layerswap.compose.yaml_file import nearest
from layerswap.errors import DataError, LayerswapError, one_line

if TYPE_CHECKING:
    from datasets import Dataset

    from layerswap.training.mix.schema import Origin

_FORMATS = {
    ".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
    ".txt": "text",
}  # fmt: skip
_PACKED = (".gz", ".zst", ".xz", ".bz2")
_ADDRESSES = ("https://", "http://", "hf://")
_KINDS = {
    str: "a text", int: "a number", float: "a number", bool: "true or false", list: "a list",
    dict: "an object", type(None): "null",
}  # fmt: skip
LONGEST_FIELD = 200
"""Lines that a quoted field may have; a longer one began with a lone quotation mark."""


class Opened(NamedTuple):
    """The rows of an origin, memory-mapped, and its name for the card (Hub id or files)."""

    rows: Dataset
    origin: str


def open_rows(
    origin: Origin, *, folder: Path, local: Path | None = None, limit: int | None = None
) -> Opened:
    """Open the rows of an origin, at most its `read` and `limit`.

    Paths are relative to `folder`. `local` holds downloaded data sets, as `<owner>/<name>` or
    `<name>`; the others come from the Hub.
    """
    count = min((n for n in (origin.read, limit) if n is not None), default=None)
    copies = (
        [local / origin.id, local / origin.id.rpartition("/")[2]] if local and origin.id else []
    )
    copy = next((one for one in copies if one.is_dir()), None)
    try:
        if origin.path is not None:
            files = matching_files(folder, origin.path)
            return Opened(_read_files(files, origin, count), origin.named)
        if origin.parallel:
            return Opened(_read_parallel(origin, folder, count), origin.named)
        if copy is not None:
            return Opened(_read_copy(copy, origin, count), f"{origin.id} (local copy)")
        at = f"@{origin.revision}" if origin.revision else ""
        return Opened(_read_hub(origin, count), f"{origin.id}{at}")
    except LayerswapError:
        raise
    except Exception as error:  # the readers and the transports share no class of error
        if origin.paths or copy is not None:
            reason = f"cannot be read ({type(error).__name__}: {one_line(error, 120)})"
        else:
            missing = f"; {local} has no copy of it" if local is not None else ""
            reason = f"{_hub_reason(error)}{missing}; {_how_to_download(origin)}"
        raise DataError(reason) from None


def check_columns(names: Iterable[str], columns: list[str], key: str) -> None:
    """Refuse names that are not columns; the error names `key` and the nearest column."""
    for name in sorted(set(names) - set(columns)):
        raise DataError(f"{key}: no column {name!r}{nearest(name, columns)}")


def where_filter(origin: Origin, rows: Dataset) -> Callable[[dict[str, Any]], bool]:
    """Make a filter of rows from the values that `where` allows."""
    check_columns(origin.where, rows.column_names, "where")
    return lambda row: all(row[column] in values for column, values in origin.where.items())


def matching_files(folder: Path, pattern: str) -> list[str]:
    """List the files that match a path or a pattern, sorted."""
    path = (folder / Path(pattern).expanduser()).absolute()
    if path.is_file():
        return [str(path)]
    root = Path(path.anchor)
    files = sorted(file for file in root.glob(str(path.relative_to(root))) if file.is_file())
    if not files:
        raise DataError(f"{path}: no such file")
    return [str(file) for file in files]


def _read_copy(copy: Path, origin: Origin, count: int | None) -> Dataset:
    if origin.files:
        patterns = [
            file.rpartition("/")[2] if file.startswith(_ADDRESSES) else file
            for file in origin.files
        ]
        known = sorted(file for file in copy.rglob("*") if file.is_file())
        names = [file.relative_to(copy).as_posix() for file in known]
        names = _select_files(names, patterns, origin.without, place=copy)
        return _read_files([str(copy / name) for name in names], origin, count)
    card = copy / "README.md"
    declared = card.is_file() and "config_name:" in card.read_text("utf-8", errors="replace")
    if origin.config is None or declared:
        return _load(str(copy), origin, count, name=origin.config)
    # Without a card that declares the configurations, each one has its own folder.
    inner = copy / origin.config
    return _load(str(inner if inner.is_dir() else copy), origin, count)


def _read_hub(origin: Origin, count: int | None) -> Dataset:
    assert origin.id is not None, "an origin without path has an id"
    if not origin.files:
        return _load(origin.id, origin, count, name=origin.config, revision=origin.revision)
    files = [file for file in origin.files if file.startswith(_ADDRESSES)]
    patterns = [file for file in origin.files if not file.startswith(_ADDRESSES)]
    if patterns:
        from huggingface_hub import list_repo_files

        known = list_repo_files(origin.id, repo_type="dataset", revision=origin.revision)
        at = f"@{origin.revision}" if origin.revision else ""
        files += [
            f"hf://datasets/{origin.id}{at}/{file}"
            for file in _select_files(sorted(known), patterns, origin.without, place=origin.id)
        ]
    return _read_files(files, origin, count)


def _select_files(
    known: list[str], patterns: list[str], without: list[str], *, place: object
) -> list[str]:
    """Select the files that match one of `patterns` and none of `without`, each once."""
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    selected: dict[str, None] = {}
    for pattern in patterns:
        files = list(filter_repo_objects(known, allow_patterns=pattern, ignore_patterns=without))
        if not files:
            raise DataError(f"files: {place} has no file like {pattern!r}")
        selected |= dict.fromkeys(files)
    return list(selected)


def _read_files(files: list[str], origin: Origin, count: int | None) -> Dataset:
    kind = origin.format or _format_of(files[0])
    options: dict[str, Any] = {"data_files": files}
    if kind == "csv":
        tabs = origin.delimiter == "," and _unpacked(files[0]).suffix == ".tsv"
        options |= {
            "sep": "\t" if tabs else origin.delimiter,
            # Words such as "NA" and "null" are texts here, not missing numbers.
            "keep_default_na": False,
            "quoting": 0 if origin.quotes else 3,
        }
        if origin.header is not None:
            options |= {"names": origin.header, "header": None}
    local = [file for file in files if not file.startswith(_ADDRESSES)]
    if kind == "csv" and len(options["sep"]) == 1:
        for file in local:
            _check_table(file, origin, options["sep"], count)
    elif kind in ("jsonl", "text", "paragraphs"):
        for file in local:
            _check_text(file)
    if kind == "paragraphs":
        return _generate(_paragraphs, files, count)
    if kind == "text":
        options["encoding"] = "utf-8-sig"
    builder = "json" if kind == "jsonl" else kind
    try:
        return _load(builder, origin, count, split="train", **options)
    except Exception:
        for file in local if kind == "jsonl" else ():
            _find_broken(file)
        raise


def _read_parallel(origin: Origin, folder: Path, count: int | None) -> Dataset:
    """Read line-aligned files into rows with a column for each; refuse different lengths."""
    files = {column: matching_files(folder, path) for column, path in origin.parallel.items()}
    lengths = {one[0]: sum(map(_check_text, one)) for one in files.values()}
    short, long = (pick(lengths, key=lengths.__getitem__) for pick in (min, max))
    if lengths[short] < lengths[long]:
        raise DataError(
            f"{long}, line {lengths[short] + 1}: has no partner in {short} ({lengths[short]:,} "
            f"of {lengths[long]:,} lines); parallel files are aligned by line"
        )
    return _generate(_aligned, files, count)


def _aligned(files: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    """Yield the rows of parallel files; a row with an empty line in one of them is left out."""
    columns = [chain.from_iterable(map(_lines, one)) for one in files.values()]
    for texts in zip(*columns, strict=True):
        if all(text.strip() for text in texts):
            yield dict(zip(files, texts, strict=True))


def _paragraphs(files: list[str]) -> Iterator[dict[str, str]]:
    for file in files:
        for is_text, lines in groupby(_lines(file), key=lambda line: bool(line.strip())):
            if is_text:
                yield {"text": "\n".join(lines)}


def _generate(
    rows: Callable[[Any], Iterator[dict[str, str]]], files: Any, count: int | None
) -> Dataset:
    """Write the rows of files to the cache of `datasets`, or take the first `count` of them."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    taken = list(islice(rows(files), count or 1))
    if not taken:
        raise DataError("has no rows")
    if count is not None:
        return Dataset.from_list(taken)
    names = chain.from_iterable(files.values()) if isinstance(files, dict) else files
    found = [Path(name).stat() for name in names if not name.startswith(_ADDRESSES)]
    # The stamp is a part of the cache's key: a changed file is read again.
    stamp = str([(one.st_size, one.st_mtime_ns) for one in found])
    made: Dataset = Dataset.from_generator(
        _stamped, gen_kwargs={"rows": rows, "files": files, "stamp": stamp}
    )
    return made


def _stamped(
    rows: Callable[[Any], Iterator[dict[str, str]]], files: Any, stamp: str
) -> Iterator[dict[str, str]]:
    return rows(files)


def _lines(file: str) -> Iterator[str]:
    """Yield the lines of a file, compressed or not, without their ends; refuse all but UTF-8."""
    import fsspec

    with fsspec.open(file, "rb", compression="infer") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise DataError(
                    f"{file}, line {number}: is not UTF-8 text; save the file as UTF-8"
                ) from None
            yield text.rstrip("\r\n")


def _check_text(file: str) -> int:
    """Count the lines of a text file; refuse an empty one, and any but UTF-8.

    The library would fail on a row much later, without its line.
    """
    count, written = 0, False
    for count, line in enumerate(_lines(file), start=1):  # noqa: B007
        written = written or bool(line.strip())
    if not written:
        raise DataError(f"{file}: is empty")
    return count


def _find_broken(file: str) -> None:
    """Name the first line that is not like the others; the library counts from a block's start."""
    kinds: dict[str, str] = {}
    for number, line in enumerate(_lines(file), start=1):
        try:
            row = json.loads(line.strip() or "{}")
        except ValueError as error:
            raise DataError(f"{file}, line {number}: is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise DataError(f"{file}, line {number}: is {_KINDS[type(row)]}, not a JSON object")
        for key, value in row.items():
            kind = _KINDS[type(value)]
            if value is not None and kinds.setdefault(key, kind) != kind:
                raise DataError(f"{file}, line {number}: {key} is {kind}, and {kinds[key]} above")


def _check_table(file: str, origin: Origin, delimiter: str, count: int | None) -> None:
    """Refuse a table that the csv module cannot split into rows of the header's length.

    The library would shift the fields of a long row to other columns, and end a field that begins
    with a lone quotation mark many lines later.
    """
    limit = csv.field_size_limit(1 << 30)  # whole articles, and a swallowed rest of a file
    rule: Literal[0, 3] = csv.QUOTE_MINIMAL if origin.quotes else csv.QUOTE_NONE
    lines = (f"{line}\n" for line in _lines(file))
    rows = csv.reader(lines, delimiter=delimiter, quoting=rule, strict=True)
    width, start = len(origin.header or ()), 1
    try:
        for row in islice(rows, None if count is None else count + 1):
            if rows.line_num - start >= LONGEST_FIELD:
                raise csv.Error(f"a quoted field has more than {LONGEST_FIELD} lines")
            width = width or len(row)
            # Published tables without a header may leave out fields at the end of a row.
            if len(row) > width or (0 < len(row) < width and origin.header is None):
                raise DataError(
                    f"{file}, line {start}: the number of fields is {len(row)}, not {width} as "
                    "in the header"
                )
            start = rows.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{file}, line {start}: {error}; if quotation marks are ordinary characters in this "
            "file, write quotes: false"
        ) from None
    finally:
        csv.field_size_limit(limit)  # of the whole process
    if not width:
        raise DataError(f"{file}: is empty")


def _load(
    path: str, origin: Origin, count: int | None, *, split: str | None = None, **options: Any
) -> Dataset:
    """Load rows with the `datasets` library; name the causes that it wraps or hides."""
    from datasets import Dataset, disable_progress_bars, load_dataset
    from datasets.utils.logging import set_verbosity

    disable_progress_bars()
    set_verbosity(logging.CRITICAL)  # it logs what it raises, too
    split = split or origin.split
    try:
        if count is None:
            rows = load_dataset(path, split=split, **options)
        else:
            stream = load_dataset(path, split=split, streaming=True, **options)
            rows = Dataset.from_list(list(stream.take(count)))
    except (ValueError, KeyError) as error:
        raise DataError(f"cannot be read ({one_line(error, 120)})") from None
    except Exception as error:
        cause = error.__cause__
        if isinstance(error, StopIteration) or isinstance(cause, StopIteration):
            raise DataError("has no rows") from None
        if "scripts are no longer supported" in str(error):
            raise DataError(
                "is a loading script, which the datasets library no longer runs; "
                "name its data files in `files`"
            ) from None
        if type(error).__name__.startswith("DatasetGeneration") and cause is not None:
            raise DataError(
                f"cannot be read ({type(cause).__name__}: {one_line(cause, 120)})"
            ) from None
        raise
    if not len(rows):
        raise DataError("has no rows")
    return rows


def _hub_reason(error: Exception) -> str:
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if not isinstance(error, GatedRepoError | RepositoryNotFoundError | DatasetNotFoundError):
        return f"cannot be downloaded ({type(error).__name__}: {one_line(error, 120)})"
    if "gated" in f"{type(error).__name__} {error}".lower():
        return "the data set is gated; accept its terms on the Hub and log in with `hf auth login`"
    return "no such data set on the Hub (or it is private)"


def _how_to_download(origin: Origin) -> str:
    addresses = [file for file in origin.files if file.startswith(_ADDRESSES)]
    if addresses:
        return f"save {' and '.join(addresses)} in DIR/{origin.id} and pass --local DIR"
    return (
        f"download it where you can (`hf download --repo-type dataset {origin.id} "
        f"--local-dir DIR/{origin.id}`) and pass --local DIR"
    )


def _unpacked(file: str) -> Path:
    path = Path(file)
    return path.with_suffix("") if path.suffix in _PACKED else path


def _format_of(file: str) -> str:
    suffix = _unpacked(file).suffix
    if suffix not in _FORMATS:
        raise DataError(
            f"{file}: unknown format {suffix or 'without an extension'!r}; "
            "give format: jsonl, json, csv, parquet, text or paragraphs"
        )
    return _FORMATS[suffix]
