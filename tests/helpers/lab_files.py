"""Files of the lab as a stranger has them: text, parallel text, and tables of a task."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from research.lab.datasets import language_stream, take, task_stream
from research.lab.tasks import LabExample, examples
from research.lab.world import make_world

LANGUAGE = "furo"


def write_lab_files(
    folder: Path, *, code: str = "qaa", task: str = "problems", rows: int = 200, tests: int = 20
) -> None:
    """Write CODE.txt, news.CODE, news.en, TASK-en.tsv, TASK-CODE.tsv and TASK-CODE-dev.tsv."""
    world = make_world()
    lines = [one.prompt + one.completion for one in take(language_stream(world, LANGUAGE, seed=5),
                                                         rows)]  # fmt: skip
    (folder / f"{code}.txt").write_text("\n".join(lines) + "\n")
    pairs = examples(world, LANGUAGE, "translation", "train", rows)
    sides = {code: [one.prompt.rpartition(" ")[0] for one in pairs],
             "en": [one.completion.strip() for one in pairs]}  # fmt: skip
    for side, texts in sides.items():
        (folder / f"news.{side}").write_text("\n".join(texts) + "\n")
    write_problems(folder / f"{task}-en.tsv", take(task_stream(world, seed=3), rows))
    for name, split in ((f"{task}-{code}", "test"), (f"{task}-{code}-dev", "development")):
        write_problems(folder / f"{name}.tsv", examples(world, LANGUAGE, "problem", split, tests))


def write_problems(path: Path, problems: Iterable[LabExample]) -> None:
    write_tsv(path, ("prompt", "answer"), [(p.prompt, p.completion.strip()) for p in problems])


def write_tsv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerows([header, *rows])
