"""MBPP (Austin et al., 2021): short programs from a sentence, run in the sandbox."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from layerswap.errors import EvaluationError
from layerswap.evaluation.suites.folders import DataFolder, Function, TaskFolder, hub_rows

HUB = "google-research-datasets/mbpp"
FIRST, LAST = 11, 510
"""The task ids of the test split."""
COLUMNS = ("task_id", "text", "code", "test_list", "test_setup_code")
PROMPT = (
    "You are an expert Python programmer, and here is your task: {{text}} Your code should pass "
    "these tests:\n\n{{test_list[0]}}\n{{test_list[1]}}\n{{test_list[2]}}\n[BEGIN]\n"
)
FENCE = re.compile(r"```(?:\w+)?\n(.*?)(?:```|\Z)", re.DOTALL)


def write_mbpp(code: str, shots: int, data: DataFolder, tasks: TaskFolder) -> str:
    """Write MBPP with its sentences in one language, 0-shot as in the first paper; pass@1.

    The prompt is lm-eval's; only the sentence is translated. The first paper's translations were
    not published, so a language other than English needs a file of one's own.

    Args:
        code: ISO 639 code; `en` for the original.
        shots: exemplars, from the three that Austin et al. prompt with (tasks 2 to 4).
        data: where `mbpp.jsonl` may be, and `mbpp_{code}.jsonl` with `task_id` and `text`.
        tasks: where the task goes.

    Raises:
        EvaluationError: the data or the translation cannot be had.
    """
    name = f"mbpp_{code}_{shots}shot"
    rows = _rows(data)
    if code != "en":
        rows = _translated(rows, code, data)
    splits = {"test": [row for row in rows if FIRST <= int(row["task_id"]) <= LAST]}
    splits["prompt"] = [row for row in rows if 2 <= int(row["task_id"]) <= 4]
    tasks.module(
        "mbpp_program",
        "from layerswap.evaluation.suites.mbpp import results\n\nresults = results\n",
    )
    return tasks.task(
        name,
        {
            **tasks.rows(name, splits),
            "output_type": "generate_until",
            "unsafe_code": True,
            "test_split": "test",
            "fewshot_split": "prompt",
            "fewshot_config": {"sampler": "first_n"},
            "num_fewshot": shots,
            "doc_to_text": PROMPT,
            "doc_to_target": "{{code}}\n[DONE]",
            "target_delimiter": "",
            "process_results": Function("mbpp_program.results"),
            "generation_kwargs": {"until": ["[DONE]"], "do_sample": False, "max_gen_toks": 512},
            "metric_list": [
                {"metric": "pass_at_1", "aggregation": "mean", "higher_is_better": True}
            ],
            "metadata": {"version": 1},
        },
    )


def results(doc: dict[str, Any], written: list[str]) -> dict[str, float]:
    """Run what was written against the three tests; 1 if all pass.

    Raises:
        EvaluationError: this system cannot wall a program off.
    """
    from layerswap.evaluation.sandbox import run_program

    source = "\n".join([program_of(written[0]), doc.get("test_setup_code") or ""])
    ran = run_program(source, tests=doc["test_list"])
    return {"pass_at_1": float(ran.outcome == "passed")}


def program_of(written: str) -> str:
    """The program in an answer: up to [DONE], and the first fenced block if there is one."""
    text = written.split("[DONE]", maxsplit=1)[0]
    fenced = FENCE.search(text)
    return fenced[1] if fenced else text


def _rows(data: DataFolder) -> list[dict[str, Any]]:
    path = data.find("mbpp.jsonl")
    if path is not None:
        rows = _read(path)
    else:
        wanted = "mbpp.jsonl of https://github.com/google-research/google-research/tree/master/mbpp"
        rows = [
            row
            for split in ("test", "prompt")
            for row in hub_rows(HUB, "full", split, data, wanted=wanted)
        ]
    return [{column: row.get(column) for column in COLUMNS} for row in rows]


def _translated(rows: list[dict[str, Any]], code: str, data: DataFolder) -> list[dict[str, Any]]:
    path = data.find(f"mbpp_{code}.jsonl")
    if path is None:
        raise EvaluationError(
            f"MBPP in {code}: its translations were not published; give mbpp_{code}.jsonl with "
            "`task_id` and the translated `text` of each task in --data DIR"
        )
    texts = {int(row["task_id"]): str(row["text"]) for row in _read(path)}
    wanted = {int(row["task_id"]) for row in rows if FIRST <= int(row["task_id"]) <= LAST}
    missing = sorted(wanted - set(texts))
    if missing:
        raise EvaluationError(f"{path}: lacks {len(missing)} tasks, the first is {missing[0]}")
    return [{**row, "text": texts.get(int(row["task_id"]), row["text"])} for row in rows]


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise EvaluationError(f"{path}: not JSON Lines ({error})") from None
