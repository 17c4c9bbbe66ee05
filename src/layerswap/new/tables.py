"""Reads tables and texts from a disk or the Hub, and recognises a task by its columns."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from layerswap.ground.errors import DataError, LayerswapError, error_context
from layerswap.reading.files import FORMATS, delimiter_of, evenly_spaced, lines_of, unpacked
from layerswap.reading.origins import Origin, check_texts, open_rows
from layerswap.training.mix.templates import text_of

LOOK = 100_000
"""Largest number of texts that are held in memory, evenly spaced over their file."""
_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")

Kind = Literal["messages", "pairs", "choices", "prompts", "answers", "labels"]
NAMES: dict[str, tuple[str, ...]] = {
    "text": ("text", "sentence", "headline", "title", "tweet", "review", "content", "utterance"),
    "label": ("label", "category", "topic", "sentiment", "class", "intent"),
    "prompt": ("prompt", "instruction"),
    "question": ("question", "problem", "query", "inputs"),
    "answer": ("answer", "completion", "response", "output", "solution", "targets", "answerkey",
               "answer_key"),
    "messages": ("messages", "conversation", "conversations"),
    "premise": ("premise", "sentence1"),
    "hypothesis": ("hypothesis", "sentence2"),
    "choices": ("choices", "options", "endings"),
}  # fmt: skip
"""Names of a column, by its role."""
KINDS: dict[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "pairs": ("premise", "hypothesis", "label"),
    "choices": ("question", "choices", "answer"),
    "prompts": ("prompt", "answer"),
    "answers": ("question", "answer"),
    "labels": ("text", "label"),
}
"""Roles of the columns of each kind of task; the first kind that a table has is its own."""
PROMPT_PARTS = re.compile(
    r"input|context|passage|paragraph|article|background|story"
    r"|(?:opt(?:ion)?|choice|ending|mc_answer)[_ ]?[a-e1-5]|[a-e]",
    re.IGNORECASE,
)
"""Column names of prompt parts in published tables (Alpaca, SQuAD, MMLU)."""
SHOWN = 70
"""Characters of a column that an example shows."""


@dataclass(frozen=True)
class Table:
    """Rows, and the keys of a mix's source that reads them."""

    name: str  # as the user gave it
    columns: list[str]
    rows: list[dict[str, Any]]  # all of a task; of texts at most LOOK
    keys: dict[str, Any]  # paths are absolute
    count: int = 0  # rows of the file

    def source(self, folder: Path) -> dict[str, Any]:
        """The keys of a source of a mix in `folder`."""
        keys = dict(self.keys)
        if "path" in keys:
            keys["path"] = os.path.relpath(keys["path"], folder)
        if "parallel" in keys:
            keys["parallel"] = {k: os.path.relpath(v, folder) for k, v in keys["parallel"].items()}
        return keys


def read_table(given: str, *, split: str = "train", most: int | None = None) -> Table:
    """Read `most` rows of a file, or of a Hub data set (`OWNER/NAME` or `OWNER/NAME:CONFIG`)."""
    path, hub = Path(given).expanduser(), _HUB.fullmatch(given)
    if hub and not path.exists() and _ending(given) not in FORMATS:
        config = {"config": hub[2]} if hub[2] else {}
        return _read(given, {"id": hub[1], **config, "split": split}, most)
    keys: dict[str, Any] = {"path": _absolute(given)}
    if _ending(given) in (".tsv", ".csv"):
        if len([*islice(filter(str.strip, lines_of(keys["path"])), 2)]) == 1:
            raise DataError(f"{given}: has a header and no rows")
        if _ending(given) == ".csv" and (delimiter := delimiter_of(keys["path"])) != ",":
            keys["delimiter"] = delimiter
    return _read(given, keys, most)


def read_texts(given: str) -> Table:
    """Read texts: a table with a column `text`, or plain text by lines or by paragraphs."""
    path = Path(given).expanduser()
    is_table = FORMATS.get(_ending(given), "text") != "text"
    if is_table or ("/" in given and not path.exists() and not path.suffix):
        table = read_table(given, most=LOOK)
        if "text" not in table.columns:
            raise DataError(f"{given}: has no column `text`; it has {', '.join(table.columns)}")
        return _with_texts(table)
    blank = [not line.strip() for line in lines_of(_absolute(given))]
    paragraphs = sum(blank) > len(blank) / 10
    form = "paragraphs" if paragraphs else "text"
    return _with_texts(_read(given, {"path": _absolute(given), "format": form}, LOOK))


def read_parallel(files: tuple[str, str], names: tuple[str, str]) -> Table:
    """Read two files whose lines translate each other; columns are the two languages."""
    paths = map(_absolute, files)
    return _read(" and ".join(files), {"parallel": dict(zip(names, paths, strict=True))}, LOOK)


def _with_texts(table: Table) -> Table:
    """Refuse a table with fewer than two different texts: one is held out for validation."""
    _check_texts(table, "text")
    count = len({text_of(row["text"], "text") for row in table.rows} - {""})
    if count < 2:
        raise DataError(f"{table.name}: has {'one text' if count else 'no text'}; give more")
    return table


def _check_name(table: Table, column: str, kind: Kind) -> None:
    """Refuse a column that the templates of the kind cannot name."""
    if re.search(r"[][{}:!]", column) or (kind == "choices" and not column.isidentifier()):
        raise DataError(
            f"{table.name}: column {column!r} cannot be used in a template; rename it with "
            "letters, digits and underscores"
        )


def _ending(given: str) -> str:
    return unpacked(given).suffix.lower()


def _check_texts(table: Table, column: str) -> None:
    with error_context(table.name):
        check_texts((row[column] for row in table.rows), column)


def _absolute(given: str) -> str:
    path = Path(given).expanduser()
    if not path.is_file():
        raise DataError(f"{given}: {'a folder, not a file' if path.is_dir() else 'no such file'}")
    return str(path.absolute())


def _read(given: str, keys: dict[str, Any], most: int | None) -> Table:
    try:
        rows = open_rows(Origin(**keys), folder=Path()).rows
    except LayerswapError as error:
        here = any(part in str(error) for part in given.split(" and "))
        raise error if here else error.within(given) from None
    look = rows.select(evenly_spaced(range(len(rows)), most or len(rows)))
    return Table(given, rows.column_names, look.to_list(), keys, len(rows))


@dataclass(frozen=True)
class Shape:
    """A kind of task, and its columns in a table by role."""

    kind: Kind
    columns: Mapping[str, str]


def recognise(table: Table, given: Mapping[str, str], kind: Kind | None = None) -> Shape:
    """Recognise the kind of a table, or find the columns of a known kind.

    `given` names columns by role, as `--columns` does. An error lists the table's columns.
    """
    listed = f"its columns are {', '.join(table.columns)}"
    for role, column in given.items():
        if role not in NAMES:
            raise DataError(f"--columns: no role {role!r}; there are {', '.join(NAMES)}")
        if column not in table.columns and kind is None:
            raise DataError(f"{table.name}: has no column {column!r}; {listed}")
    unclear: dict[str, list[str]] = {}
    for candidate in [kind] if kind else KINDS:
        roles = KINDS[candidate]
        if kind is None and not set(given) <= set(roles):
            continue
        columns = {role: _candidates(table, role, given) for role in roles}
        if all(len(names) == 1 for names in columns.values()):
            shape = Shape(candidate, {role: names[0] for role, names in columns.items()})
            for role, column in shape.columns.items():
                _check_name(table, column, candidate)
                if role not in ("choices", "messages"):
                    _check_texts(table, column)
            if set(given) != set(roles):
                _check_parts(table, shape)
            return shape
        if all(columns.values()):
            unclear |= {role: names for role, names in columns.items() if len(names) > 1}
    if unclear:
        role, names = next(iter(unclear.items()))
        raise DataError(
            f"{table.name}: {' and '.join(names)} may both be the {role}; choose one, such as "
            f"--columns {role}={names[0]}"
        )
    if kind:
        wanted = " and ".join(KINDS[kind])
        raise DataError(f"{table.name}: has no columns for {wanted} as the task has; {listed}")
    raise DataError(
        f"{table.name}: no rule recognises its columns; {listed}. Name them, such as "
        "--columns text=COLUMN,label=COLUMN or --columns question=COLUMN,answer=COLUMN"
    )


def _check_parts(table: Table, shape: Shape) -> None:
    """Refuse a table with an unused column whose name is that of a prompt part."""
    for column in table.columns:
        if column in shape.columns.values() or not PROMPT_PARTS.fullmatch(column):
            continue
        if shape.kind != "messages" and any(row[column] not in (None, "") for row in table.rows):
            own = ",".join(f"{role}={name}" for role, name in shape.columns.items())
            raise DataError(
                f"{table.name}: column {column!r} seems a part of the prompt, which would be "
                f"{shape.columns[KINDS[shape.kind][0]]!r} alone; join them in one column, or leave "
                f"it out by --columns {own}"
            )


def _candidates(table: Table, role: str, given: Mapping[str, str]) -> list[str]:
    if given.get(role) in table.columns:
        return [given[role]]
    names = [name for name in table.columns if name.casefold() in NAMES[role]]
    if role == "label":  # `label_text` has the names of numbered labels
        names = [f"{name}_text" if f"{name}_text" in table.columns else name for name in names]
    return [name for name in names if name not in given.values()]


def examples(table: Table, shape: Shape, count: int = 2) -> list[str]:
    """The first rows of a table by role, a line each."""
    return [
        ", ".join(f"{role} {short(row[column])!r}" for role, column in shape.columns.items())
        for row in table.rows[:count]
    ]


def short(value: Any) -> str:
    """A value on one line, clipped."""
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
