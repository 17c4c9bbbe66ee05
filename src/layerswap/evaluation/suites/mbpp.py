"""MBPP's rules: tasks and their translations from files, and programs run in the sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from layerswap.evaluation.suites.folders import DataFolder, Rows, hub_rows
from layerswap.ground.errors import EvaluationError
from layerswap.reading.files import rows_of

HUB = "google-research-datasets/mbpp"
WANTED = "mbpp.jsonl of https://github.com/google-research/google-research/tree/master/mbpp"
TEST, EXEMPLARS = range(11, 511), range(2, 5)
"""Task ids of the test split, and of the three tasks that Austin et al. prompt with."""
COLUMNS = ("task_id", "text", "code", "test_list", "test_setup_code")
FENCE = re.compile(r"```(?:\w+)?\n(.*?)(?:```|\Z)", re.DOTALL)


def results(doc: dict[str, Any], written: list[str]) -> dict[str, float]:
    """Run a program against the three tests of its task; 1 if it passes all."""
    from layerswap.evaluation.sandbox import run_program

    source = "\n".join([_program(written[0]), doc.get("test_setup_code") or ""])
    return {"pass_at_1": float(run_program(source, tests=doc["test_list"]).outcome == "passed")}


def _program(written: str) -> str:
    """Cut the program from an answer: up to [DONE], and the first fenced block if there is one."""
    text = written.split("[DONE]", maxsplit=1)[0]
    fenced = FENCE.search(text)
    return fenced[1] if fenced else text


def rows(values: Mapping[str, Any], data: DataFolder) -> dict[str, Rows]:
    """Read the tasks (`test`) and the exemplars (`prompt`), their sentences in one language."""
    path = data.find("mbpp.jsonl")
    if path is not None:
        published = list(rows_of(path))
    else:
        published = [
            row
            for split in ("test", "prompt")
            for row in hub_rows(HUB, "full", split, data, wanted=WANTED)
        ]
    tasks: Rows = [{column: row.get(column) for column in COLUMNS} for row in published]
    if values["code"] != "en":
        tasks = _translated(tasks, values["code"], data)
    return {
        split: [row for row in tasks if int(row["task_id"]) in ids]
        for split, ids in (("test", TEST), ("prompt", EXEMPLARS))
    }


def _translated(tasks: Rows, code: str, data: DataFolder) -> Rows:
    path = data.find(f"mbpp_{code}.jsonl")
    if path is None:
        raise EvaluationError(
            f"MBPP in {code}: its translations were not published; put mbpp_{code}.jsonl with "
            "`task_id` and the translated `text` of each task into the folder of --data"
        )
    texts = {int(row["task_id"]): str(row["text"]) for row in rows_of(path)}
    missing = sorted({int(row["task_id"]) for row in tasks} & set(TEST) - set(texts))
    if missing:
        raise EvaluationError(f"{path}: lacks {len(missing)} tasks, the first is {missing[0]}")
    return [{**row, "text": texts.get(int(row["task_id"]), row["text"])} for row in tasks]
