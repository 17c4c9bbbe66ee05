"""The lab's questions, drawn once from its world and shipped: as they are, and as lm-eval tasks.

*Problems* of three steps are the task, *comprehension* is reading in the language. The test split
has 1,000 questions of each skill in each language, the development split 500 problems in each
scarce language.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Literal, NamedTuple

ASSETS = Path(str(files("layerswap.lab") / "assets"))
QUESTIONS = ASSETS / "questions.jsonl.gz"
TASK = ASSETS / "task.yaml"

Skill = Literal["problem", "comprehension"]
NEW_TOKENS = 8
"""More tokens than any answer has."""


class Question(NamedTuple):
    """A prompt and its right answer."""

    prompt: str
    answer: str


def questions(skill: Skill, language: str, split: str) -> Sequence[Question]:
    """Return the questions of one skill, language and split; the first ones are a random sample."""
    return _questions()[skill, language, split]


@cache
def _questions() -> dict[tuple[str, str, str], list[Question]]:
    found: dict[tuple[str, str, str], list[Question]] = {}
    with gzip.open(QUESTIONS, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            key = row["skill"], row["language"], row["split"]
            found.setdefault(key, []).append(Question(row["prompt"], row["answer"]))
    return found


def write_tasks(folder: Path, n: int | None = None, *, at: Path | None = None) -> list[str]:
    """Write the first `n` test questions of each skill and language, all when None.

    An lm-eval task is a YAML file beside the JSON Lines of its documents, to which it has the
    absolute path. `at` is the final place of a folder that will be renamed. Returns the names of
    the tasks: `lab_problem_furo`, `lab_comprehension_furo`, and so on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    template, names = Template(TASK.read_text("utf-8")), []
    for (skill, language, split), every in _questions().items():
        if split == "test":
            name = f"lab_{skill}_{language}"
            rows = (json.dumps(question._asdict()) for question in every[:n])
            (folder / f"{name}.jsonl").write_bytes("".join(f"{row}\n" for row in rows).encode())
            file = json.dumps(str((at or folder).absolute() / f"{name}.jsonl"))
            filled = template.substitute(name=name, file=file, tokens=NEW_TOKENS)
            (folder / f"{name}.yaml").write_bytes(filled.encode())
            names.append(name)
    return names
