"""Opens the rows of a source: from the Hub, a downloaded copy, or local files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from layerswap.errors import DataError, LayerswapError
from layerswap.training.mix.schema import check_columns

if TYPE_CHECKING:
    from datasets import Dataset

    from layerswap.training.mix.schema import Origin

_FORMATS = {
    ".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
    ".txt": "text",
}  # fmt: skip
_PACKED = (".gz", ".zst", ".xz", ".bz2")
_ADDRESSES = ("https://", "http://", "hf://")


class Opened(NamedTuple):
    """The rows of an origin, memory-mapped, and its name for the card (Hub id or files)."""

    rows: Dataset
    origin: str


def open_rows(
    origin: Origin, *, folder: Path, local: Path | None = None, limit: int | None = None
) -> Opened:
    """The rows of an origin, all or as many as its `read` allows.

    Args:
        origin: a Hub data set or local files.
        folder: base of relative paths.
        local: a folder with downloaded data sets, as `<owner>/<name>` or `<name>`; the others come
            from the Hub.
        limit: maximum number of rows.

    Raises:
        DataError: no such file, an unknown format, or a data set that is not available.
    """
    wanted = min((n for n in (origin.read, limit) if n is not None), default=None)
    try:
        if origin.path is not None:
            files = matching_files(folder, origin.path)
            return Opened(_read_files(files, origin, wanted), origin.path)
        assert origin.id is not None, "the schema lets no origin without id and path through"
        copies = [local / origin.id, local / origin.id.rsplit("/", 1)[-1]] if local else []
        copy = next((copy for copy in copies if copy.is_dir()), None)
        if copy is not None:
            return Opened(_read_copy(copy, origin, wanted), f"{origin.id} (local copy)")
    except LayerswapError:
        raise
    except Exception as error:  # the readers of the formats share no class of error
        raise DataError(f"cannot be read ({type(error).__name__}: {_short(error)})") from None
    return _read_hub(origin, wanted, local)


def keep_where(
    origin: Origin, rows: Dataset, *, also: Iterable[str] = ()
) -> Callable[[dict[str, Any]], bool]:
    """A function that is true for a row with the values that the origin's `where` allows.

    Raises:
        DataError: `where`, or `also` as a list of columns, names a column that does not exist.
    """
    check_columns(set(origin.where), rows.column_names, "where")
    check_columns(set(also), rows.column_names, "columns")
    return lambda row: all(row[column] in values for column, values in origin.where.items())


def _read_copy(copy: Path, origin: Origin, wanted: int | None) -> Dataset:
    if origin.files:
        found = [
            file for pattern in origin.files for file in matching_files(copy, _basename(pattern))
        ]
        kept = [
            file for file in dict.fromkeys(found)
            if not any(fnmatch(str(Path(file).relative_to(copy)), out) for out in origin.without)
        ]  # fmt: skip
        return _read_files(kept, origin, wanted)
    card = copy / "README.md"
    declared = card.is_file() and "config_name:" in card.read_text("utf-8", errors="replace")
    if origin.config is None or declared:
        return _load(str(copy), origin, wanted, name=origin.config)
    # Without a card that declares the configurations, each one has its own folder.
    inner = copy / origin.config
    return _load(str(inner if inner.is_dir() else copy), origin, wanted)


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
    if kind == "jsonl":
        _check_utf8(file for file in files if not file.startswith(_ADDRESSES))
    builder = "json" if kind == "jsonl" else kind
    return _load(builder, origin, wanted, split="train", **options)


def _check_utf8(files: Iterable[str]) -> None:
    """Refuse files that are not UTF-8: Arrow reads them, and fails on a row much later."""
    import fsspec

    for file in files:
        with fsspec.open(file, "rb", compression="infer") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    line.decode("utf-8")
                except UnicodeDecodeError:
                    raise DataError(f"{file}, line {number}: is not UTF-8 text") from None


def _read_hub(origin: Origin, wanted: int | None, local: Path | None) -> Opened:
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    assert origin.id is not None, "only data sets of the Hub come here"
    name = f"{origin.id}@{origin.revision}" if origin.revision else origin.id
    try:
        if origin.files:
            rows = _read_files(list(_hub_files(origin)), origin, wanted)
        else:
            rows = _load(origin.id, origin, wanted, name=origin.config, revision=origin.revision)
        return Opened(rows, name)
    except LayerswapError:
        raise
    except (GatedRepoError, RepositoryNotFoundError, DatasetNotFoundError) as error:
        gated = "gated" in f"{type(error).__name__} {error}".lower()
        why = (
            "the data set is gated; accept its terms on the Hub and log in with `hf auth login`"
            if gated
            else "no such data set on the Hub (or it is private)"
        )
    except Exception as error:
        # A proxy, no network, a broken transfer: the transports share no class of error.
        why = f"cannot be downloaded ({type(error).__name__}: {_short(error)})"
    where = f"; {local} has no copy of it" if local is not None else ""
    raise DataError(f"{why}{where}; {_how_to_download(origin)}") from None


def _how_to_download(origin: Origin) -> str:
    addresses = [file for file in origin.files if file.startswith(_ADDRESSES)]
    if addresses:
        return f"save {' and '.join(addresses)} in DIR/{origin.id} and pass --local DIR"
    return (
        f"download it where you can (`hf download --repo-type dataset {origin.id} "
        f"--local-dir DIR/{origin.id}`) and pass --local DIR"
    )


def _hub_files(origin: Origin) -> Iterator[str]:
    """URLs of the files that match the patterns of an origin on the Hub."""
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
            rows = load_dataset(path, split=split, **options)
        else:
            stream = load_dataset(path, split=split, streaming=True, **options)
            rows = Dataset.from_list(list(stream.take(wanted)))
    except (ValueError, KeyError) as error:
        raise DataError(f"cannot be read ({_short(error)})") from None
    except StopIteration:
        raise DataError("has no rows") from None
    except RuntimeError as error:
        if isinstance(error.__cause__, StopIteration):
            raise DataError("has no rows") from None
        if "scripts are no longer supported" not in str(error):
            raise
        raise DataError(
            "is a loading script, which the datasets library no longer runs; "
            "name its data files in `files`"
        ) from None
    except Exception as error:
        cause = error.__cause__
        if type(error).__name__.startswith("DatasetGeneration") and cause is not None:
            raise DataError(f"cannot be read ({type(cause).__name__}: {_short(cause)})") from None
        raise
    if not len(rows):
        raise DataError("has no rows")
    return rows


def matching_files(folder: Path, pattern: str) -> list[str]:
    """The files that match a path or a pattern, sorted."""
    path = (folder / Path(pattern).expanduser()).absolute()
    if not has_magic(str(path)):
        if not path.is_file():
            raise DataError(f"{path}: no such file")
        return [str(path)]
    root = Path(path.anchor)
    found = sorted(file for file in root.glob(str(path.relative_to(root))) if file.is_file())
    if not found:
        raise DataError(f"{path}: no file matches")
    return [str(file) for file in found]


def _basename(file: str) -> str:
    """Path of a file in a downloaded copy of its data set."""
    return file.rsplit("/", 1)[-1] if file.startswith(_ADDRESSES) else file


def _stem(file: str) -> Path:
    path = Path(file)
    return path.with_suffix("") if path.suffix in _PACKED else path


def _format_of(file: str) -> str:
    suffix = _stem(file).suffix
    if suffix not in _FORMATS:
        raise DataError(
            f"{file}: its name does not tell its format; "
            "give format: jsonl, json, csv, parquet or text"
        )
    return _FORMATS[suffix]


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:120]
