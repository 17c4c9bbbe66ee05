"""Files of the lab as a stranger has them: text, parallel text, and tables of a task."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from layerswap.lab.questions import questions

SOURCE, LANGUAGE = "basu", "furo"


def write_lab_files(
    folder: Path, *, code: str = "qaa", task: str = "problems", rows: int = 200, tests: int = 20
) -> None:
    """Write CODE.txt, news.CODE, news.en, TASK-en.tsv, TASK-CODE.tsv and TASK-CODE-dev.tsv."""
    for name, language, first in ((f"{code}.txt", LANGUAGE, 0), (f"news.{code}", LANGUAGE, rows),
                                  ("news.en", SOURCE, rows)):  # fmt: skip
        stories = questions("comprehension", language, "test")[first : first + rows]
        (folder / name).write_text("".join(f"{one.prompt} {one.answer}\n" for one in stories))
    for name, language, split, count in (
        ("en", SOURCE, "test", rows), (code, LANGUAGE, "test", tests),
        (f"{code}-dev", LANGUAGE, "development", tests),
    ):  # fmt: skip
        problems = questions("problem", language, split)[:count]
        write_tsv(folder / f"{task}-{name}.tsv", ("prompt", "answer"), problems)


def write_rows(folder: Path, train: int, validation: int) -> None:
    """Write NAME-train.jsonl and NAME-validation.jsonl of `task`, and of languages by their name.

    `language` is the far one, furo.
    """
    for name, skill, language in (("task", "problem", SOURCE), ("nela", "comprehension", "nela"),
                                  ("furo", "comprehension", "furo"),
                                  ("language", "comprehension", "furo")):  # fmt: skip
        rows = [
            json.dumps({"prompt": one.prompt, "completion": f" {one.answer}"}) + "\n"
            for one in questions(skill, language, "test")[: train + validation]
        ]
        (folder / f"{name}-train.jsonl").write_text("".join(rows[:train]))
        (folder / f"{name}-validation.jsonl").write_text("".join(rows[train:]))


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def write_tsv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerows([header, *rows])
