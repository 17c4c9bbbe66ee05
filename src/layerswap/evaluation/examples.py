"""Reads example texts for measuring a model, and turns them into tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerswap.errors import EvaluationError, RecipeError


@dataclass(frozen=True)
class Example:
    """A text of which only what follows the prompt counts; without a prompt, all of it."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Tokens:
    """An example as token ids, and the positions of the tokens that are to be predicted."""

    ids: tuple[int, ...]
    predicted: range


Tokenized = Tokens | Sequence[int]
"""Token ids; all but the first are predicted where it is not said which."""


def as_tokens(texts: Sequence[Tokenized]) -> list[Tokens]:
    """Texts with the positions of the tokens that are to be predicted.

    Raises:
        EvaluationError: there is no text, or one without a token to predict.
    """
    found = [
        text if isinstance(text, Tokens) else Tokens(tuple(text), range(1, len(text)))
        for text in texts
    ]
    if not found:
        raise EvaluationError("there is no text to measure on")
    for index, text in enumerate(found):
        if not text.predicted:
            raise EvaluationError(
                f"text {index} has {len(text.ids)} tokens and none to predict; leave it out"
            )
    return found


def read_examples(path: Path) -> list[Example]:
    """The examples in a file.

    `.jsonl` holds an object on each line, with `text`, or with `prompt` and `completion`; any
    other file holds an example on each line. Empty lines are skipped.

    Raises:
        RecipeError: the file cannot be read or holds no example, or naming the line that is
            wrong.
    """
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RecipeError(f"{path}: cannot be read ({reason})") from None
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not filled:
        raise RecipeError(f"{path}: holds no example")
    if path.suffix != ".jsonl":
        return [Example("", line.strip()) for _, line in filled]
    return [_example(line, f"{path}, line {number}") for number, line in filled]


def tokenize(example: Example, tokenizer: Any, max_length: int) -> Tokens:
    """The tokens of an example, as supervised fine-tuning sees them.

    Special tokens are those that the tokenizer adds, and its end of text at the end.
    """
    prompt = tokenizer(example.prompt).input_ids if example.prompt else []
    text = tokenizer(example.text, add_special_tokens=not prompt).input_ids
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = (*prompt, *text, *(end if [*prompt, *text][-1:] != end else []))[:max_length]
    # Nothing comes before the first token to predict it from.
    return Tokens(ids, range(max(1, len(prompt)), len(ids)))


def _example(line: str, where: str) -> Example:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{where}: not valid JSON ({error})") from None
    keys = ("text",) if isinstance(row, dict) and "text" in row else ("prompt", "completion")
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in keys):
        raise RecipeError(f"{where}: needs a `text`, or a `prompt` and a `completion`")
    try:
        "".join(row[key] for key in keys).encode()
    except UnicodeEncodeError:
        raise RecipeError(f"{where}: holds half of a surrogate pair") from None
    return Example("" if keys == ("text",) else row["prompt"], row[keys[-1]])
