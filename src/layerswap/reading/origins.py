"""Opens the rows of a source: from the Hub, a downloaded copy, or local files."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from glob import escape
from os.path import normpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from layerswap.ground.errors import DataError, LayerswapError, one_line
from layerswap.ground.strict import Strict
from layerswap.ground.system import sorted_paths
from layerswap.ground.yaml_file import nearest, scalar
from layerswap.reading.datasets_inside import needs_script
from layerswap.reading.files import (
    Layout,
    check_start,
    delimiter_of,
    format_of,
    read_json,
    read_parallel,
    read_table,
    read_texts,
)

if TYPE_CHECKING:
    from datasets import Dataset

NonEmpty = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(gt=0, le=10**15)]
"""A number of rows."""
_END = r"([_\d-][\w-]*|[ .]?(set|split|data|csv|tsv|jsonl?|txt))?"
PARTS = {"train": re.compile(f"(?i)tra?i?n(ing)?{_END}"),
         "dev": re.compile(f"(?i)(dev|val|eval)[a-z]*{_END}"),
         "test": re.compile(f"(?i)te?st(ing)?{_END}")}  # fmt: skip
"""Patterns of the values that mark rows as a part of a data set."""
JUDGED = {"accept": re.compile("(?i)accept|true"), "not": re.compile("(?i)reject|ignore|false")}
"""Patterns of the values of Prodigy's `answer`, and of the `label` of TRL's KTO trainer."""
_FLAG = re.compile(r"(?i)(?:is|in|for)(?:_|(?=[A-Z]))")
"""Begins the name of a column that marks one part by true and false, such as `is_test`."""
_KINDS = {
    str: "a text", int: "a number", float: "a number", bool: "true or false", list: "a list",
    dict: "an object", bytes: "bytes",
}  # fmt: skip
PARQUET_COPY = "refs/convert/parquet"
_ADDRESSES = ("https://", "http://", "hf://")


def _as_lists(where: dict[str, Any]) -> dict[str, list[Any]]:
    lists = {key: value if isinstance(value, list) else [value] for key, value in where.items()}
    for key, values in lists.items():
        if not values or not all(isinstance(value, str | int | float) for value in values):
            raise ValueError(f"{key}: write a value, or a list of values, to keep")
    return lists


class Origin(Strict):
    """Origin of rows: a Hub data set (`id`) or local files (`path`, `parallel`)."""

    id: NonEmpty | None = None  # owner/name
    config: NonEmpty | None = None
    split: NonEmpty = "train"
    revision: NonEmpty | None = None
    path: NonEmpty | None = None  # a file or a pattern of files, relative to the mix's folder
    # Files aligned by line, by the column that holds their lines: {ig: news.ig, en: news.en}
    parallel: dict[NonEmpty, NonEmpty] = {}
    files: list[NonEmpty] = []  # patterns or URLs, in place of the data set's own choice of files
    without: list[NonEmpty] = []  # patterns of files to exclude from `files`
    # None: by file name; text: a row for each line; paragraphs: separated by blank lines
    format: Literal["jsonl", "json", "csv", "parquet", "arrow", "text", "paragraphs"] | None = None
    delimiter: NonEmpty | None = None  # of a csv; None: the most frequent in its header
    header: list[NonEmpty] | None = None  # column names of a csv without a header line
    quotes: bool = True  # false: quotation marks in a csv are ordinary characters
    where: Annotated[dict[NonEmpty, Any], AfterValidator(_as_lists)] = {}  # allowed values
    read: Count | None = None  # number of rows, from the start; None: all

    @property
    def paths(self) -> list[str]:
        """The local files, or patterns of files; empty for a Hub data set."""
        return [self.path] if self.path is not None else list(self.parallel.values())

    @property
    def named(self) -> str:
        """The name for messages and the card."""
        return self.id or ", ".join(self.paths)


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
    copy = next((path for path in copies if path.is_dir()), None)
    try:
        if origin.path is not None:
            files = matching_files(folder, origin.path)
            return Opened(read_files(files, origin, count), origin.named)
        if origin.parallel:
            columns = {name: matching_files(folder, path) for name, path in origin.parallel.items()}
            return Opened(read_parallel(columns, count), origin.named)
        if copy is not None:
            return Opened(_read_copy(copy, origin, count), f"{origin.id} (local copy)")
        at = f"@{origin.revision}" if origin.revision else ""
        return Opened(read_hub(origin, count), f"{origin.id}{at}")
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


def only(value: Any) -> Any:
    """Unwrap a list of one item, as annotation tools write labels; None for an empty list."""
    return (value or [None])[0] if isinstance(value, list) and len(value) < 2 else value


def check_texts(values: Iterable[Any], column: str) -> None:
    """Refuse objects, lists and mixed types in a column of texts or numbers; nulls pass."""
    usual, first = "", 0
    for row, value in enumerate(values, start=1):
        value = only(value)  # noqa: PLW2901
        kind = _KINDS.get(type(value), type(value).__name__)
        if value is None:
            continue
        if isinstance(value, list | dict | bytes):
            kind += f" of {len(value)}" * isinstance(value, list)
            raise DataError(
                f"row {row}: {column} is {kind}, not a text; write one text in each row"
            )
        usual, first = usual or kind, first or row
        if kind != usual:
            raise DataError(f"row {row}: {column} is {kind}, but {usual} in row {first}")


def where_for(rows: Dataset, part: str) -> dict[str, list[Any]]:
    """Find the values of `where` that keep the rows of a part: train, dev or test.

    A column marks parts if each of its values names one, or if it is called as `is_test` and its
    values are true and false. A column of verdicts marks the rows with good answers: `answer` of
    Prodigy beside several labels, and `label` beside a completion.
    """
    from datasets import Value

    where: dict[str, list[Any]] = {}
    for column, feature in rows.features.items():
        if not isinstance(feature, Value):
            continue
        beside = {"answer": ("label", "accept"), "label": ("completion",)}.get(column, ())
        judged = any(len({*map(str, rows[name])}) > 1 for name in beside if name in rows.features)
        known = JUDGED if judged else PARTS
        flagged = _part_named(_FLAG.sub("", column), PARTS) if _FLAG.match(column) else None
        wanted = [part, "accept"] if flagged in (None, part) else ["other"]
        # The first rows show most columns to be others.
        for few in (rows.select(range(min(len(rows), 100))), rows):
            values = [value for value in few.unique(column) if value not in (None, "")]
            by = {value: _part_named(str(value), known, flagged) for value in values}
            if None in by.values():
                break
        else:
            kept = [value for value in values if by[value] in wanted]
            where |= {column: kept} if 0 < len(kept) < len(values) else {}
    return where


def _part_named(
    text: str, known: Mapping[str, re.Pattern[str]], flagged: str | None = None
) -> str | None:
    """Find the part that a text names; in a column of flags, `flagged` if true, else `other`."""
    text = text.strip()
    if flagged is None:
        return next((name for name, pattern in known.items() if pattern.fullmatch(text)), None)
    truth = scalar(text.removesuffix(".0"))
    return (flagged if truth else "other") if truth in (0, 1) else None


def where_filter(origin: Origin, rows: Dataset) -> Callable[[dict[str, Any]], bool]:
    """Make a filter of rows from the values that `where` allows."""
    check_columns(origin.where, rows.column_names, "where")

    # A text matches what YAML reads in its place, such as true for yes.
    def keeps(value: Any, allowed: list[Any]) -> bool:
        read = scalar(value) if isinstance(value, str) else value
        return value in allowed or repr(read) in map(repr, allowed)

    return lambda row: all(keeps(row[column], values) for column, values in origin.where.items())


def matching_files(folder: Path, pattern: str) -> list[str]:
    """List the files that match a path or a pattern, sorted."""
    path = (folder / Path(pattern).expanduser()).absolute()
    if path.is_file():
        return [str(path)]
    root = Path(path.anchor)
    matching = root.glob(str(path.relative_to(root)))
    # The datasets library writes its caches beside the files of save_to_disk.
    files = sorted_paths(
        file for file in matching if file.is_file() and not file.match("cache-*.arrow")
    )
    if not files:
        path = Path(normpath(path))
        shards = sorted(path.rglob("data-*.arrow"), key=lambda file: "train" not in file.parts)
        saved = [*shards, *path.glob("*.txt"), path / "x.parquet"][0]
        inside = f"is a folder; give the files of one split, such as {saved.with_stem('*')}"
        raise DataError(f"{path}: {inside if path.is_dir() else 'no such file'}")
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
        return read_files([str(copy / name) for name in names], origin, count)
    card = copy / "README.md"
    declared = card.is_file() and "config_name:" in card.read_text("utf-8", errors="replace")
    if origin.config is None or declared:
        return _load(str(copy), origin, count, name=origin.config)
    # Without a card that declares the configurations, each one has its own folder.
    inner = copy / origin.config
    return _load(str(inner if inner.is_dir() else copy), origin, count)


def read_hub(origin: Origin, count: int | None = None) -> Dataset:
    """Read the rows of a data set of the Hub."""
    assert origin.id is not None, "an origin without path has an id"
    if not origin.files:
        return _load(origin.id, origin, count, name=origin.config, revision=origin.revision)
    files = [file for file in origin.files if file.startswith(_ADDRESSES)]
    patterns = [file for file in origin.files if not file.startswith(_ADDRESSES)]
    if patterns:
        from huggingface_hub import hf_hub_download, list_repo_files

        known = list_repo_files(origin.id, repo_type="dataset", revision=origin.revision)
        names = _select_files(sorted(known), patterns, origin.without, place=origin.id)
        at = f"@{origin.revision}" if origin.revision else ""
        if count is not None or (origin.format or format_of(names[0])) == "parquet":
            files += [f"hf://datasets/{origin.id}{at}/{name}" for name in names]
        else:  # whole files are read more than once
            files += [
                hf_hub_download(origin.id, name, repo_type="dataset", revision=origin.revision)
                for name in names
            ]
    return read_files(files, origin, count)


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


def read_files(files: list[str], origin: Origin, count: int | None = None) -> Dataset:
    """Read the rows of files, in the format that the origin names."""
    form = origin.format or format_of(files[0])
    if form in ("jsonl", "json"):
        return read_json(files, count)
    if form == "csv":
        delimiter = origin.delimiter or delimiter_of(files[0])
        quotes = origin.quotes and len(delimiter) == 1
        return read_table(files, Layout(delimiter, origin.header, quotes), count)
    if form in ("text", "paragraphs"):
        return read_texts(files, count, paragraphs=form == "paragraphs")
    for file in files:
        check_start(file, binary=True)
    named = [file if "://" in file else escape(file) for file in files]
    return _load(form, origin, count, split="train", data_files=named)


def _load(
    path: str, origin: Origin, count: int | None, *, split: str | None = None, **options: Any
) -> Dataset:
    """Load rows with the `datasets` library; name the causes that it wraps or hides."""
    from datasets import Dataset, disable_progress_bars, load_dataset
    from datasets import logging as their_logging

    disable_progress_bars()
    their_logging.set_verbosity(logging.CRITICAL)  # it logs what it raises, too
    split = split or origin.split
    try:
        if count is None:
            rows = load_dataset(path, split=split, **options)
        else:
            stream = load_dataset(path, split=split, streaming=True, **options)
            rows = Dataset.from_list(list(stream.take(count)), features=stream.features)
    except (ValueError, KeyError) as error:
        raise DataError(f"cannot be read ({one_line(error, 120)})") from None
    except Exception as error:
        cause = error.__cause__
        if isinstance(error, StopIteration) or isinstance(cause, StopIteration):
            raise DataError("has no rows") from None
        if needs_script(error):
            if options.get("revision", "") is None:
                # The Hub keeps a Parquet copy of every data set that is a script.
                return _load(path, origin, count, **options | {"revision": PARQUET_COPY})
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
    return _with_names(rows)


def _with_names(rows: Dataset) -> Dataset:
    """Replace the numbers of labels by their names; every file may number them in its own order.

    A number without a name, such as -1 for a hidden label, becomes a missing value.
    """
    import pyarrow as pa
    from datasets import ClassLabel, Dataset

    order = rows.column_names
    for column, feature in rows.features.items():
        if isinstance(feature, ClassLabel):
            numbers = Dataset.with_format(rows, "arrow")[column][:]
            known = [n if n is not None and n >= 0 else None for n in numbers.to_pylist()]
            texts = pa.array(feature.names).take(pa.array(known, pa.int64()))
            rows = rows.remove_columns(column).add_column(column, texts.to_pylist())
    return rows.select_columns(order)


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
