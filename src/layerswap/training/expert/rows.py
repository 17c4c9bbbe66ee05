"""Loads the rows that a trainer reads, from a built mix or from files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import fingerprint
from layerswap.errors import DataError, LayerswapError
from layerswap.training.expert.spec import Data, Files
from layerswap.training.mix.card import CARD, SPLITS, load_saved
from layerswap.training.mix.schema import Origin, ready_recipes
from layerswap.training.mix.sources import matching_files, open_rows

if TYPE_CHECKING:
    from datasets import Dataset

FORMS = (("prompt", "completion"), ("messages",), ("text",))
"""Columns of the rows that TRL's SFTTrainer takes."""


@dataclass(frozen=True)
class TrainingRows:
    """One data set, ready for the trainer."""

    name: str  # in messages and on the card
    train: Dataset  # with the columns of one of `FORMS`
    validation: Dataset | None  # with the same columns
    fingerprints: dict[str, str]  # by file name
    contaminated: dict[str, int] = field(default_factory=dict)  # rows by evaluation set

    @property
    def form(self) -> str:
        """The first of the columns: `prompt`, `messages` or `text`."""
        return str(next(form[0] for form in FORMS if form[0] in self.train.column_names))

    @property
    def conversational(self) -> bool:
        """True if rows are lists of messages, which need a chat template."""
        return isinstance(self.train[0][self.form], list)


def load_rows(data: Data, *, folder: Path, limit: int | None = None) -> TrainingRows:
    """Load validation rows and at most `limit` training rows; `folder` is the base of paths."""
    rows = _from_files(data, folder) if isinstance(data, Files) else _from_folder(data, folder)
    if limit is not None and limit < len(rows.train):
        rows = replace(rows, train=rows.train.select(range(limit)))
    return rows


def equal_parts(sets: list[Dataset]) -> list[Dataset]:
    """Cut every set to the size of the smallest: a fair validation set (paper 2, section 4.5)."""
    smallest = min(len(rows) for rows in sets)
    return [rows.select(range(smallest)) for rows in sets]


def _from_folder(data: str, folder: Path) -> TrainingRows:
    path = folder / Path(data).expanduser()
    if not path.is_dir():
        if data in ready_recipes():
            raise DataError(
                f"data: {data} is a ready recipe; build it first: "
                f"layerswap data {data} --out data/{data}"
            )
        raise DataError(f"data: {path}: no such folder; for files write `train: FILE` under data")
    mix, train, validation = load_saved(path)
    files = [path / f"{split}.parquet" for split in SPLITS]
    fingerprints = {file.name: fingerprint(file) for file in files if file.is_file()}
    contaminated: Counter[str] = Counter()
    for facts in json.loads((path / CARD).read_text("utf-8")).get("sources", {}).values():
        contaminated.update(facts.get("contaminated", {}))
    return TrainingRows(mix.name, train, validation, fingerprints, dict(contaminated))


def _from_files(data: Files, folder: Path) -> TrainingRows:
    sets: dict[str, Any] = dict.fromkeys(SPLITS)
    fingerprints: dict[str, str] = {}
    for split, pattern in data.model_dump(exclude_none=True).items():
        try:
            sets[split] = _trainer_columns(open_rows(Origin(path=pattern), folder=folder).rows)
            for file in map(Path, matching_files(folder, pattern)):
                fingerprints[file.name] = fingerprint(file)
        except LayerswapError as error:
            raise error.within(f"data.{split}: {pattern}") from None
    rows = TrainingRows(Path(data.train).stem, sets["train"], sets["validation"], fingerprints)
    if rows.validation is not None and rows.validation.column_names != rows.train.column_names:
        raise DataError("data.validation: its columns differ from those of the training rows")
    return rows


def _trainer_columns(rows: Dataset) -> Dataset:
    form = next((form for form in FORMS if set(form) <= set(rows.column_names)), None)
    if form is None:
        forms = "; ".join(" and ".join(form) for form in FORMS)
        raise DataError(f"has columns {', '.join(rows.column_names)}; a trainer takes {forms}")
    for column in form:
        _check_values(rows, column)
    if len(rows) and len({isinstance(rows[0][column], str) for column in form}) > 1:
        raise DataError(f"{' and '.join(form)} must both be texts or both lists of messages")
    return rows.select_columns(list(form))


def _check_values(rows: Dataset, column: str) -> None:
    """Refuse a column with values other than texts or lists of messages."""
    for number, value in enumerate(rows[column], start=1):
        if isinstance(value, str):
            valid = column != "messages" and (bool(value) or column == "prompt")
        else:
            valid = column != "text" and isinstance(value, list) and _are_messages(value)
        if not valid:
            kinds = {"text": "a text", "messages": "a list of messages"}
            kind = kinds.get(column, "a text or a list of messages")
            raise DataError(f"row {number}: {column} is not {kind}, or is empty")


def _are_messages(turns: list[Any]) -> bool:
    return bool(turns) and all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in turns
    )
