"""Opens the rows of a source: from the Hub, a downloaded copy, or local files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from layerswap.ground.errors import DataError, LayerswapError, one_line
from layerswap.ground.system import sorted_paths
from layerswap.ground.yaml_file import nearest
from layerswap.training.mix.files import (
    check_text,
    format_of,
    holds_objects,
    read_json,
    read_paragraphs,
    read_parallel,
    read_table,
    unpacked,
)  # fmt: skip

if TYPE_CHECKING:
    from datasets import Dataset

    from layerswap.training.mix.schema import Origin

_KINDS = {
    str: "a text", int: "a number", float: "a number", bool: "true or false", list: "a list",
    dict: "an object", bytes: "bytes",
}  # fmt: skip
_ADDRESSES = ("https://", "http://", "hf://")


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
            columns = {name: matching_files(folder, path) for name, path in origin.parallel.items()}
            return Opened(read_parallel(columns, count), origin.named)
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


def check_texts(values: Iterable[Any], column: str) -> None:
    """Refuse objects, lists and mixed types in a column of texts or numbers; nulls pass."""
    usual, first = "", 0
    for row, value in enumerate(values, start=1):
        kind = _KINDS.get(type(value), type(value).__name__)
        if value is None:
            continue
        if isinstance(value, list | dict | bytes):
            raise DataError(f"row {row}: {column} is {kind}, not a text")
        usual, first = usual or kind, first or row
        if kind != usual:
            raise DataError(f"row {row}: {column} is {kind}, but {usual} in row {first}")


def where_filter(origin: Origin, rows: Dataset) -> Callable[[dict[str, Any]], bool]:
    """Make a filter of rows from the values that `where` allows."""
    check_columns(origin.where, rows.column_names, "where")
    allowed = {  # the values of a table are texts
        column: [*values, *map(str, values),
                 *(str(one).lower() for one in values if isinstance(one, bool))]
        for column, values in origin.where.items()
    }  # fmt: skip
    return lambda row: all(row[column] in values for column, values in allowed.items())


def matching_files(folder: Path, pattern: str) -> list[str]:
    """List the files that match a path or a pattern, sorted."""
    path = (folder / Path(pattern).expanduser()).absolute()
    if path.is_file():
        return [str(path)]
    root = Path(path.anchor)
    matching = root.glob(str(path.relative_to(root)))
    files = sorted_paths(file for file in matching if file.is_file())
    if not files:
        raise DataError(f"{path}: no such file")
    return [str(file) for file in files]


def _read_copy(copy: Path, origin: Origin, count: int | None) -> Dataset:
    if origin.files:
        patterns = [
            file.rpartition("/")[2] if file.startswith(_ADDRESSES) else file
            for file in origin.files
        ]
        known = sorted_paths(file for file in copy.rglob("*") if file.is_file())
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
    kind = origin.format or format_of(files[0])
    options: dict[str, Any] = {"data_files": files}
    if kind == "csv":
        tabs = origin.delimiter == "," and unpacked(files[0]).suffix.lower() == ".tsv"
        options |= {
            "sep": "\t" if tabs else origin.delimiter,
            # Words such as "NA" and "null" are texts here, not missing numbers.
            "keep_default_na": False,
            "quoting": 0 if origin.quotes else 3,
        }
        if origin.header is not None:
            options |= {"names": origin.header, "header": None}
    if any(file.startswith(_ADDRESSES) for file in files):
        return _load("json" if kind == "jsonl" else kind, origin, count, split="train", **options)
    if kind == "jsonl" or (kind == "json" and all(map(holds_objects, files))):
        return read_json(files, count)
    if kind == "csv" and len(options["sep"]) == 1:
        return read_table(files, origin, options["sep"], count)
    if kind == "paragraphs":
        return read_paragraphs(files, count)
    if kind == "text":
        for file in files:
            check_text(file)
        options["encoding"] = "utf-8-sig"
    return _load(kind, origin, count, split="train", **options)


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
