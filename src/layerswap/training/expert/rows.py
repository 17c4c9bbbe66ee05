"""The final form of examples: the rows that a trainer reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.errors import DataError, LayerswapError
from layerswap.merge.metadata import fingerprint
from layerswap.training.expert.spec import Data, Files
from layerswap.training.mix.card import load_saved
from layerswap.training.mix.schema import Origin, ready_recipes
from layerswap.training.mix.sources import matching_files, open_rows

if TYPE_CHECKING:
    from datasets import Dataset

    from layerswap.training.mix.mapping import MixExample, Turn
    from layerswap.training.mix.schema import Mix


Form = Callable[["MixExample"], dict[str, Any]]


def former(mix: Mix, folder: Path) -> Callable[[list[MixExample]], Dataset]:
    """A function from examples to the rows of the mix's kind.

    - `chat`: prompt and completion as lists of messages; a trainer applies the model's chat
      template and learns the completion alone.
    - `prompt-completion`: both as text, joined by the separator or made by the chat template.
    - `messages`: one list of messages.
    - `text`: one text.

    Args:
        mix: with its kind, separator and chat template.
        folder: what the path of the chat template is relative to.

    Raises:
        DataError: the chat template cannot be read or is wrong.
    """
    form = _form(mix, folder)
    columns = ("prompt", "completion") if mix.kind in ("chat", "prompt-completion") else (mix.kind,)

    def rows(examples: list[MixExample]) -> Dataset:
        from datasets import Dataset, Features, Value

        message = {"role": Value("string"), "content": Value("string")}
        value = [message] if mix.kind in ("chat", "messages") else Value("string")
        formed = [form(example) for example in examples]
        data = {column: [row[column] for row in formed] for column in columns}
        return Dataset.from_dict(data, features=Features(dict.fromkeys(columns, value)))

    return rows


def _form(mix: Mix, folder: Path) -> Form:
    if mix.kind == "chat":
        return lambda example: {
            "prompt": _messages(example.turns[:-1]), "completion": _messages(example.turns[-1:])
        }  # fmt: skip
    if mix.kind == "messages":
        return lambda example: {"messages": _messages(example.turns)}
    if mix.chat_template is None:
        pair = _joined(mix.separator)
    else:
        pair = _templated(folder / Path(mix.chat_template).expanduser())
    if mix.kind == "prompt-completion":
        return lambda example: dict(zip(("prompt", "completion"), pair(example), strict=True))
    return lambda example: {"text": "".join(pair(example)) if example.turns else example.text}


def _messages(turns: tuple[Turn, ...]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def _joined(separator: str) -> Callable[[MixExample], tuple[str, str]]:
    def pair(example: MixExample) -> tuple[str, str]:
        prompt = separator.join(content for _, content in example.turns[:-1])
        # A prompt that ends in white space says itself how the completion follows.
        apart = "" if prompt != prompt.rstrip() else separator
        return prompt + apart, example.completion

    return pair


def _templated(path: Path) -> Callable[[MixExample], tuple[str, str]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        template = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(f"chat_template: {path}: cannot be read ({reason})") from None

    def render(turns: tuple[Turn, ...], prompt: bool) -> str:
        try:
            rendered: Any = render_jinja_template(
                conversations=[_messages(turns)],
                chat_template=template,
                add_generation_prompt=prompt,
            )
        except Exception as error:  # jinja2 lets every error of the template through
            raise DataError(f"chat_template: {path}: fails on a row ({error})") from None
        return str(rendered[0][0])

    def pair(example: MixExample) -> tuple[str, str]:
        prompt, whole = render(example.turns[:-1], True), render(example.turns, False)
        if not whole.startswith(prompt):
            raise DataError(
                f"chat_template: {path}: the prompt is not the beginning of the whole; "
                "the template must write the same prompt with and without the answer"
            )
        return prompt, whole[len(prompt) :]

    return pair


FORMS = (("prompt", "completion"), ("messages",), ("text",))
"""Columns of the rows that TRL's SFTTrainer takes."""


@dataclass(frozen=True)
class TrainingRows:
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


def load_rows(data: Data, *, folder: Path, limit: int | None = None) -> TrainingRows:
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
        rows = TrainingRows(
            rows.name, rows.train.select(range(limit)), rows.validation, rows.fingerprints
        )
    return rows


def equal_parts(sets: list[Dataset]) -> list[Dataset]:
    """As many rows of each as the smallest has: a fair validation set (paper 2, section 4.5)."""
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
    files = [file for file in ("train.parquet", "validation.parquet") if (path / file).is_file()]
    prints = {file: fingerprint(path / file) for file in files}
    return TrainingRows(mix.name, train, validation, prints)


def _from_files(data: Files, folder: Path) -> TrainingRows:
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
    rows = TrainingRows(name, sets["train"], sets["validation"], prints)
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
