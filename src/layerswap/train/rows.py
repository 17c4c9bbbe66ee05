"""The rows that an expert is trained on: a built mix, or files of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.errors import DataError, LayerswapError
from layerswap.merge.documents import fingerprint
from layerswap.train.data_card import load_saved
from layerswap.train.expert_schema import Data, Files
from layerswap.train.mix_file import ready_recipes
from layerswap.train.mix_schema import Origin
from layerswap.train.sources import matching_files, open_rows

if TYPE_CHECKING:
    from datasets import Dataset

FORMS = (("prompt", "completion"), ("messages",), ("text",))
"""Columns of the rows that TRL's SFTTrainer takes."""


@dataclass(frozen=True)
class Rows:
    """One data set, ready for the trainer.

    Attributes:
        name: for messages and the card.
        train: with the columns of one of `FORMS`.
        validation: of the same columns; None where there is none.
        fingerprints: of its files, by name.
    """

    name: str
    train: Dataset
    validation: Dataset | None
    fingerprints: dict[str, str]

    @property
    def form(self) -> str:
        """The first of the columns: `prompt`, `messages` or `text`."""
        return str(next(form[0] for form in FORMS if form[0] in self.train.column_names))

    @property
    def conversational(self) -> bool:
        """Whether rows are lists of messages, which need a chat template."""
        return isinstance(self.train[0][self.form], list)


def load_rows(data: Data, *, folder: Path, limit: int | None = None) -> Rows:
    """Training and validation rows.

    Args:
        data: a folder that `layerswap data` wrote, or files.
        folder: what relative paths are relative to.
        limit: most training rows.

    Raises:
        DataError: it cannot be read, or has other columns than a trainer takes.
    """
    rows = _from_files(data, folder) if isinstance(data, Files) else _from_folder(data, folder)
    if limit is not None and limit < len(rows.train):
        rows = Rows(rows.name, rows.train.select(range(limit)), rows.validation, rows.fingerprints)
    return rows


def equal_parts(sets: list[Dataset]) -> list[Dataset]:
    """As many rows of each as the smallest has: a fair validation set (paper 2, section 4.5)."""
    smallest = min(len(rows) for rows in sets)
    return [rows.select(range(smallest)) for rows in sets]


def _from_folder(data: str, folder: Path) -> Rows:
    path = folder / Path(data).expanduser()
    if not path.is_dir():
        if data in ready_recipes():
            raise DataError(
                f"data: {data} is a ready recipe; build it first: "
                f"layerswap data {data} --out data/{data}"
            )
        raise DataError(f"data: {path}: no such folder; for files write `train: FILE` under data")
    mix, train, validation = load_saved(path)
    files = [file for file in ("train.parquet", "validation.parquet") if (path / file).is_file()]
    prints = {file: fingerprint(path / file) for file in files}
    return Rows(mix.name, train, validation, prints)


def _from_files(data: Files, folder: Path) -> Rows:
    sets: dict[str, Any] = {"train": None, "validation": None}
    prints: dict[str, str] = {}
    for key, pattern in (("train", data.train), ("validation", data.validation)):
        if pattern is None:
            continue
        try:
            opened = open_rows(Origin(path=pattern), folder=folder)
            sets[key] = _known_columns(opened.rows)
            prints |= {Path(f).name: fingerprint(Path(f)) for f in matching_files(folder, pattern)}
        except LayerswapError as error:
            raise error.within(f"data.{key}: {pattern}") from None
    name = Path(data.train).stem
    rows = Rows(name, sets["train"], sets["validation"], prints)
    if rows.validation is not None and rows.validation.column_names != rows.train.column_names:
        raise DataError("data.validation: its columns are not those of the training rows")
    return rows


def _known_columns(rows: Dataset) -> Dataset:
    for form in FORMS:
        if set(form) <= set(rows.column_names):
            for column in form:
                _check_values(rows, column)
            return rows.select_columns(list(form))
    wanted = "; ".join(" and ".join(form) for form in FORMS)
    raise DataError(f"has columns {', '.join(rows.column_names)}; a trainer takes {wanted}")


def _check_values(rows: Dataset, column: str) -> None:
    """Refuse a column that holds something else than texts, or lists of messages."""
    for number, value in enumerate(rows[column]):
        whole = isinstance(value, str) and column != "messages"
        if isinstance(value, list) and value and column != "text":
            whole = all(
                isinstance(turn, dict)
                and isinstance(turn.get("role"), str)
                and isinstance(turn.get("content"), str)
                for turn in value
            )
        if not whole or (column in ("text", "completion") and not value):
            kind = "a text" if column == "text" else "a text or a list of messages"
            kind = "a list of messages" if column == "messages" else kind
            raise DataError(f"row {number + 1}: {column} is not {kind}, or is empty")
