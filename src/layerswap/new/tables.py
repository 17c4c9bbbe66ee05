"""Reads tables and texts from a disk or the Hub, and recognises a task by its columns."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from unicodedata import normalize

from layerswap.evaluation.languages import language_name, standard_tag
from layerswap.ground.errors import DataError, EvaluationError, LayerswapError, error_context
from layerswap.ground.yaml_file import parse_yaml, read_text
from layerswap.reading.files import FORMATS, evenly_spaced, lines_of, unpacked
from layerswap.reading.origins import (
    Origin,
    check_texts,
    matching_files,
    only,
    open_rows,
    where_filter,
    where_for,
)
from layerswap.training.mix.examples import PROMPT_COLUMN
from layerswap.training.mix.templates import text_of

LOOK = 100_000
"""Largest number of texts that are held in memory, evenly spaced over their file."""
FOLD = re.compile(r"(?i)(k_?|cv_?)?folds?|split|subset|partition")
"""Matches the name of a column that divides a table in parts; numbers name none of them."""
_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")

Kind = Literal["messages", "pairs", "choices", "passages", "prompts", "answers", "labels"]
_FILE = Path(__file__).with_name("columns.yaml")
RULES: dict[str, Any] = parse_yaml(read_text(_FILE), str(_FILE))[0]
"""Names of columns, kinds of tasks and their prompts; the file describes each part."""
NAMES: dict[str, list[str]] = RULES["names"]
KINDS: dict[Kind, list[str]] = RULES["kinds"]
PROMPT_PARTS = re.compile(
    r"input|context|passage|paragraph|article|background|story"
    r"|(?:opt(?:ion)?|choice|ending|mc_answer)[_ ]?[a-e1-5]|[a-e]",
    re.IGNORECASE,
)
"""Column names of prompt parts in published tables (Alpaca, SQuAD, MMLU)."""


@dataclass(frozen=True)
class Table:
    """Rows, and the keys of a mix's source that reads them."""

    name: str  # as the user gave it
    columns: list[str]
    rows: list[dict[str, Any]]  # all of a task; of texts at most LOOK
    keys: dict[str, Any]  # paths are absolute
    count: int = 0  # rows of the file
    fields: Mapping[str, str] = field(default_factory=dict)  # of the file, by the table's columns

    @property
    def kept(self) -> list[str]:
        """Remarks on the part of the rows that was read; empty if all rows were."""
        where: dict[str, list[Any]] = self.keys.get("where", {})
        return [f"only rows with {column}: {', '.join(map(str, where[column]))}"
                if column in where else f"all parts of {column}" for column in self.columns
                if column in where or FOLD.fullmatch(column)]  # fmt: skip

    def source(self, folder: Path) -> dict[str, Any]:
        """The keys of a source of a mix in `folder`."""
        keys = dict(self.keys)
        if "path" in keys:
            keys["path"] = os.path.relpath(keys["path"], folder)
        if "parallel" in keys:
            keys["parallel"] = {k: os.path.relpath(v, folder) for k, v in keys["parallel"].items()}
        return keys

    def template(self, text: str) -> str:
        """Replace the table's column names in a template by the file's field names."""
        return re.sub(r"{(.*?)}", lambda name: f"{{{self.fields.get(name[1], name[1])}}}", text)


def read_table(given: str, *, split: str = "train", most: int | None = None) -> Table:
    """Read `most` rows of a file, or of a Hub data set (`OWNER/NAME` or `OWNER/NAME:CONFIG`)."""
    path, hub = Path(given).expanduser(), _HUB.fullmatch(given)
    if hub and not path.exists() and ending(given) not in FORMATS:
        config = {"config": hub[2]} if hub[2] else {}
        return _read(given, {"id": hub[1], **config, "split": split}, most, split)
    return _read(given, {"path": _absolute(given)}, most, split)


def read_texts(given: str, code: str = "en", columns: Mapping[str, str] | None = None) -> Table:
    """Read texts in a language: a column of a table, or plain text by lines or by paragraphs.

    `columns` names columns by language.
    """
    path = Path(given).expanduser()
    if is_table(given) or ("/" in given and not path.exists() and not path.suffix):
        table = read_table(given, most=LOOK)
        return _with_texts(_choose(table, {"text": code}, columns or {}))
    files = matching_files(Path(), given)
    blank = [not line.strip() for file in files for line in lines_of(file)]
    paragraphs = sum(blank) > len(blank) / 10
    form = "paragraphs" if paragraphs else "text"
    return _with_texts(_read(given, {"path": _absolute(given), "format": form}, LOOK))


def is_table(given: str) -> bool:
    """True if a file's ending is that of a table or of JSON."""
    return FORMATS.get(ending(given), "text") != "text"


def _choose(table: Table, codes: Mapping[str, str], given: Mapping[str, str]) -> Table:
    """Select the column of texts for each role and language; keys of objects count as columns."""
    cells = table.rows[0].items()
    inner = [f"{name}[{key}]" for name, cell in cells if isinstance(cell, dict) for key in cell]
    fields = [*table.columns, *inner]
    chosen: dict[str, str] = {}
    for role, code in codes.items():
        named = [name for name in fields if name.casefold() in NAMES.get(role, ())]
        ends = {name: name.rpartition("[")[2].strip("]") for name in fields}
        spoken = [name for name, end in ends.items() if code_of(end, code) == code]
        found = [role] if role in fields else named or spoken
        found = [given[code]] if code in given else found
        numbers = code not in given and any(map(str.isdecimal, fields))
        if numbers or len(found) != 1 or found[0] not in fields:
            raise DataError(
                f"{table.name}: no rule finds its texts in {code} among {', '.join(fields):.200}; "
                f"give --columns {code}=COLUMN, or add a header line if these are the first row"
            )
        column = found[0] if found[0] in table.columns else found[0].partition("[")[0]
        if re.search(r"[][{}:!]", column):
            raise DataError(
                f"{table.name}: column {column!r} cannot be used in a template; rename it with "
                "letters, digits and underscores"
            )
        chosen[role] = found[0]

    def cell_of(row: dict[str, Any], name: str) -> Any:
        column, _, key = name.partition("[")
        return (row[column] or {}).get(key[:-1]) if key else row[column]

    rows = [{role: cell_of(row, name) for role, name in chosen.items()} for row in table.rows]
    return replace(table, columns=[*chosen], rows=rows, fields=chosen)


def read_parallel(
    files: tuple[str, str], names: tuple[str, str], columns: Mapping[str, str] | None = None
) -> Table:
    """Read two files whose lines translate each other, or one table that is given twice.

    Columns are the two languages; `columns` names those of a table.
    """
    if files[0] == files[1] and is_table(files[0]):
        return _choose(
            read_table(files[0], most=LOOK), dict(zip(names, names, strict=True)), columns or {}
        )
    paths = map(_absolute, files)
    return _read(" and ".join(files), {"parallel": dict(zip(names, paths, strict=True))}, LOOK)


def _with_texts(table: Table) -> Table:
    """Refuse a table with fewer than two different texts: one is held out for validation."""
    _check_texts(table, "text")
    count = len({text_of(row["text"], "text") for row in table.rows} - {""})
    if count < 2:
        raise DataError(f"{table.name}: has {'one text' if count else 'no text'}; give more")
    return table


def ending(given: str) -> str:
    """Return the extension of a file, without that of a compression."""
    return unpacked(given).suffix.lower()


def _check_texts(table: Table, column: str) -> None:
    with error_context(table.name):
        check_texts((row[column] for row in table.rows), column)


def _absolute(given: str) -> str:
    matching_files(Path(), given)
    return str(Path(given).expanduser().absolute())


def _read(given: str, keys: dict[str, Any], most: int | None, part: str = "") -> Table:
    try:
        rows = open_rows(Origin(**keys), folder=Path()).rows
        if part and (where := where_for(rows, part)):
            keys = {**keys, "where": where}
            rows = rows.filter(where_filter(Origin(**keys), rows))
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
    listed = f"its columns are {', '.join(table.columns):.400}"
    own = {normalize("NFC", column): column for column in table.columns}
    given = {role: own.get(normalize("NFC", column), column) for role, column in given.items()}
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
        raise DataError(
            f"{table.name}: has no columns for {wanted} as the task has; {listed}; its first line "
            f"must name the columns {wanted}"
        )
    raise DataError(f"{table.name}: {_unrecognised(table)}")


def _unrecognised(table: Table) -> str:
    apart = [name for name in table.columns if isinstance(only(table.rows[0][name]), dict | list)]
    flags = [name for name in table.columns
             if {str(row[name]) for row in table.rows} <= {*"01", "True", "False"}]  # fmt: skip
    where = f"objects or lists ({', '.join(apart)})" if apart else f"columns ({', '.join(flags)})"
    hint = (f"; texts and labels in {where:.200} are not read: export the table as CSV, or write a "
            "column with the text, and one with the label or answer of each row")  # fmt: skip
    header = ", or add a header line" * any(name.count(" ") > 2 for name in table.columns)
    return (
        f"no rule recognises its columns; its columns are {', '.join(table.columns):.400}"
        f"{hint * bool(apart or len(flags) > 1)}. "
        "Name them, such as --columns text=COLUMN,label=COLUMN or --columns question=COLUMN,"
        f"answer=COLUMN{header}"
    )


def _check_parts(table: Table, shape: Shape) -> None:
    """Refuse a table with an unused column whose name is that of a prompt part."""
    for column in table.columns:
        is_part = shape.kind != "messages" and PROMPT_PARTS.fullmatch(column)
        if column in shape.columns.values() or not (is_part or PROMPT_COLUMN.fullmatch(column)):
            continue
        if any(row[column] not in (None, "", [], "[]") for row in table.rows):
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


def tag_of(name: str) -> str | None:
    """Return the standard code of a language from its code or name; None for an unknown one."""
    try:
        return standard_tag(name)
    except EvaluationError:
        return None


def code_of(given: str, code: str) -> str | None:
    """Return the language code at the end of a file's name, None without one.

    Examples: `news.ig`, `news.ig.txt`, `en.txt`, `news_en.txt`, `ibo_Latn.devtest` or `igbo.txt`.
    """
    name = re.sub(r"(\.(txt|gz|dev|devtest|test|train))+$", "", Path(given).name)
    stem = re.sub(r"_[A-Z][a-z]{3}$", "", name)
    word = re.split(r"[._-]", stem)[-1].casefold()
    if word == language_name(code).casefold():
        return code
    tag = tag_of(word) if len(word) in (2, 3) or word == "english" else None
    if tag is not None and tag.partition("-")[0] == code.partition("-")[0]:
        return code  # `pt` is a `pt-BR`
    # Words of three letters such as `old` and `new` are codes too, so `texts_new` has no language.
    alone = stem[: -len(word)][-1:] in ("", ".")
    return tag if len(word) == 2 or stem != name or alone or tag == "en" else None
