"""Opening the rows of a source: from the Hub, from a downloaded copy, or from a local file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from layerswap.compose.mistakes import nearest
from layerswap.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

    from layerswap.train.mix_schema import Origin

_FORMATS = {
    ".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
    ".txt": "text",
}  # fmt: skip
_PACKED = (".gz", ".zst", ".xz", ".bz2")
_ADDRESSES = ("https://", "http://", "hf://")


class Opened(NamedTuple):
    """Rows that can be read.

    Attributes:
        rows: the rows; in memory only as far as they are read.
        origin: for the card: the Hub id with its revision, or the files.
    """

    rows: Dataset
    origin: str


def open_rows(
    origin: Origin, *, folder: Path, local: Path | None = None, limit: int | None = None
) -> Opened:
    """The rows of an origin, whole or as many as it wants.

    Args:
        origin: a Hub data set or local files.
        folder: what relative paths are relative to.
        local: a folder with downloaded data sets, as `<owner>/<name>` or `<name>`; what is not
            there is taken from the Hub.
        limit: read no more rows than this.

    Raises:
        DataError: no such file, a format that is not known, a data set that is not to be had.
    """
    wanted = min((n for n in (origin.read, limit) if n is not None), default=None)
    if origin.path is not None:
        files = _matching(folder, origin.path)
        return Opened(_read_files(files, origin, wanted), origin.path)
    assert origin.id is not None, "the schema lets no origin without id and path through"
    copy = _local_copy(origin.id, local)
    if copy is not None:
        return Opened(_read_copy(copy, origin, wanted), f"{origin.id} (local copy)")
    return _read_hub(origin, wanted, local)


def keep_where(origin: Origin, rows: Dataset) -> Callable[[dict[str, Any]], bool]:
    """Whether a row has the values that the origin's `where` wants.

    Raises:
        DataError: `where` names a column that is not there.
    """
    for column in origin.where:
        if column not in rows.column_names:
            raise DataError(f"where: no column {column!r}{nearest(column, rows.column_names)}")
    wanted = {column: set(values) for column, values in origin.where.items()}
    return lambda row: all(row[column] in values for column, values in wanted.items())


def _local_copy(name: str, local: Path | None) -> Path | None:
    if local is None:
        return None
    if not local.is_dir():
        raise DataError(f"--local {local}: no such folder")
    for folder in (local / name, local / name.split("/")[-1]):
        if folder.is_dir():
            return folder
    return None


def _read_copy(copy: Path, origin: Origin, wanted: int | None) -> Dataset:
    if origin.files:
        patterns = [_basename(file) for file in origin.files]
        files = [file for pattern in patterns for file in _matching(copy, pattern)]
        left_out = [pattern for pattern in origin.without]
        kept = [
            file for file in dict.fromkeys(files)
            if not any(fnmatch(str(Path(file).relative_to(copy)), out) for out in left_out)
        ]  # fmt: skip
        return _read_files(kept, origin, wanted)
    return _load(str(copy), origin, wanted, name=_config_of(copy, origin))


def _config_of(copy: Path, origin: Origin) -> str | None:
    """The configuration to ask for: None where it is simply a folder of the copy."""
    card = copy / "README.md"
    declared = card.is_file() and "config_name:" in card.read_text("utf-8", errors="replace")
    return origin.config if declared else None


def _read_files(files: list[str], origin: Origin, wanted: int | None) -> Dataset:
    if not files:
        raise DataError("`without` leaves no file")
    kind = origin.format or _format_of(files[0])
    options: dict[str, Any] = {"data_files": files}
    if kind == "csv":
        delimiter = "\t" if origin.delimiter == "," and _stem(files[0]).suffix == ".tsv" else None
        options |= {
            "sep": delimiter or origin.delimiter,
            # Words such as "NA" and "null" are texts here, not missing numbers.
            "keep_default_na": False,
            "quoting": 0 if origin.quotes else 3,
        }
        if origin.header is not None:
            options |= {"names": origin.header, "header": None}
    builder = "json" if kind == "jsonl" else kind
    return _load(builder, origin, wanted, split="train", **options)


def _read_hub(origin: Origin, wanted: int | None, local: Path | None) -> Opened:
    import datasets

    assert origin.id is not None
    revision = origin.revision
    name = f"{origin.id}@{revision}" if revision else origin.id
    try:
        if origin.files:
            files = list(_hub_files(origin))
            return Opened(_read_files(files, origin, wanted), name)
        return Opened(_load(origin.id, origin, wanted, name=origin.config, revision=revision), name)
    except datasets.exceptions.DatasetNotFoundError as error:
        gated = "gated" in str(error)
        why = (
            "the data set is gated; accept its terms on the Hub and log in with `hf auth login`"
            if gated
            else "no such data set on the Hub (or it is private)"
        )
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        why = "the data set is a loading script, which the datasets library no longer runs"
    except (ConnectionError, OSError) as error:
        why = f"the Hub cannot be had ({type(error).__name__}: {_short(error)})"
    where = f"; {local} has no copy of it" if local is not None else ""
    raise DataError(f"{why}{where}; {_how_to_download(origin.id)}")


def _how_to_download(name: str) -> str:
    return (
        f"download it where you can (`hf download --repo-type dataset {name} "
        f"--local-dir DIR/{name}`) and pass --local DIR"
    )


def _hub_files(origin: Origin) -> Iterator[str]:
    """Addresses of the files that the patterns of an origin mean on the Hub."""
    patterns = [file for file in origin.files if not file.startswith(_ADDRESSES)]
    yield from (file for file in origin.files if file.startswith(_ADDRESSES))
    if not patterns:
        return
    from huggingface_hub import list_repo_files

    assert origin.id is not None
    known = sorted(list_repo_files(origin.id, repo_type="dataset", revision=origin.revision))
    at = f"@{origin.revision}" if origin.revision else ""
    for pattern in patterns:
        found = [
            file for file in known
            if fnmatch(file, pattern) and not any(fnmatch(file, out) for out in origin.without)
        ]  # fmt: skip
        if not found:
            raise DataError(f"files: {origin.id} has no file like {pattern!r}")
        yield from (f"hf://datasets/{origin.id}{at}/{file}" for file in found)


def _load(
    path: str, origin: Origin, wanted: int | None, *, split: str | None = None, **options: Any
) -> Dataset:
    from datasets import Dataset, disable_progress_bars, load_dataset

    disable_progress_bars()
    split = split or origin.split
    try:
        if wanted is None:
            return load_dataset(path, split=split, **options)
        stream = load_dataset(path, split=split, streaming=True, **options)
        return Dataset.from_list(list(stream.take(wanted)))
    except (ValueError, KeyError) as error:
        raise DataError(f"cannot be read ({_short(error)})") from None
    except Exception as error:
        cause = error.__cause__
        if type(error).__name__.startswith("DatasetGeneration") and cause is not None:
            raise DataError(f"cannot be read ({type(cause).__name__}: {_short(cause)})") from None
        raise


def _matching(folder: Path, pattern: str) -> list[str]:
    """The files that a path or a pattern means, sorted, so that no listing order matters."""
    path = folder / Path(pattern).expanduser()
    if not has_magic(str(path)):
        if not path.is_file():
            raise DataError(f"{path}: no such file")
        return [str(path)]
    found = sorted(file for file in glob(str(path), recursive=True) if Path(file).is_file())
    if not found:
        raise DataError(f"{path}: no file matches")
    return found


def _basename(file: str) -> str:
    """Where a file of the Hub, or behind an address, lies in a downloaded copy."""
    return file.rsplit("/", 1)[-1] if file.startswith(_ADDRESSES) else file


def _stem(file: str) -> Path:
    path = Path(file)
    return path.with_suffix("") if path.suffix in _PACKED else path


def _format_of(file: str) -> str:
    suffix = _stem(file).suffix
    if suffix not in _FORMATS:
        raise DataError(
            f"{file}: its format cannot be told; give format, one of jsonl, json, csv, parquet, text"
        )
    return _FORMATS[suffix]


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
