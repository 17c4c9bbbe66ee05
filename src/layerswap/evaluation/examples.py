"""Example texts for measuring a model, and their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerswap.ground.errors import RecipeError
from layerswap.reading.files import FORMATS, format_of, lines_of, rows_of, unpacked


@dataclass(frozen=True)
class Example:
    """A text after a prompt, which may be empty; only the text is predicted."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Tokens:
    """An example as token ids, with the positions of the tokens to predict."""

    ids: tuple[int, ...]
    predicted: range


def read_examples(path: Path) -> list[Example]:
    """Read the examples in a file, one per line; empty lines are skipped.

    JSON and tables have `text`, or `prompt` and `completion` (or `answer`). Any other file holds
    plain text.
    """
    if unpacked(path).suffix.lower() in FORMATS and format_of(str(path)) != "text":
        return [_example(row, f"{path}, row {n}") for n, row in enumerate(rows_of(path), start=1)]
    examples = [Example("", line.strip()) for line in lines_of(path) if line.strip()]
    if not examples:
        raise RecipeError(f"{path}: holds no example")
    return examples


def tokenize(example: Example, tokenizer: Any, max_length: int) -> Tokens:
    """Tokenize an example as supervised fine-tuning does.

    Adds the tokenizer's special tokens, and its end-of-text token at the end.
    """
    prompt = tokenizer(example.prompt).input_ids if example.prompt else []
    text = tokenizer(example.text, add_special_tokens=not prompt).input_ids
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = (*prompt, *text, *(end if [*prompt, *text][-1:] != end else []))[:max_length]
    # Nothing before the first token predicts it.
    return Tokens(ids, range(max(1, len(prompt)), len(ids)))


def _example(row: Mapping[str, Any], where: str) -> Example:
    after = "completion" if "completion" in row else "answer"
    keys = ("text",) if "text" in row else ("prompt", after)
    if not all(isinstance(row.get(key), str) for key in keys):
        raise RecipeError(f"{where}: needs a `text`, or a `prompt` and a `completion`")
    return Example("" if keys == ("text",) else row["prompt"], row[keys[-1]])
