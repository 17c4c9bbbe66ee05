"""Belebele (Bandarkar et al., 2024) and Global-MMLU (Singh et al., 2024): multiple choice."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from layerswap.errors import EvaluationError
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder, builtin, hub_rows

BELEBELE = "facebook/belebele"
MMLU = ("CohereLabs/Global-MMLU", "CohereForAI/Global-MMLU")
"""Its name on the Hub, and the one that it had before."""
BELEBELE_COLUMNS = (
    "flores_passage", "question", "mc_answer1", "mc_answer2", "mc_answer3", "mc_answer4",
    "correct_answer_num",
)  # fmt: skip
MMLU_COLUMNS = ("subject", "question", "option_a", "option_b", "option_c", "option_d", "answer")


def write_belebele(code: str, shots: int, data: DataFolder, tasks: TaskFolder) -> str:
    """Write Belebele in one language, with lm-eval's prompt; 900 questions on 488 passages.

    Belebele has no training split; as in lm-eval, its first questions are the exemplars, and a
    question is never its own.

    Args:
        code: of FLORES-200, such as `swh_Latn`.
        shots: exemplars in the prompt.
        data: where published files may be: `{code}.jsonl`, or a copy of the Hub's data set.
        tasks: where the task goes.

    Raises:
        EvaluationError: the data cannot be had, or lacks a column.
    """
    name = f"belebele_{code}_{shots}shot"
    wanted = f"{code}.jsonl of https://github.com/facebookresearch/belebele"
    path = data.find(f"belebele/{code}.jsonl", f"Belebele/{code}.jsonl", f"{code}.jsonl")
    if path is not None:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    else:
        rows = hub_rows(BELEBELE, code, "test", data, wanted=wanted)
    _check(rows, BELEBELE_COLUMNS, str(path or BELEBELE))
    kept = [{column: str(row[column]) for column in BELEBELE_COLUMNS} for row in rows]
    return tasks.task(
        name,
        {
            "include": builtin(f"belebele/belebele_{code}.yaml"),
            "tag": None,
            **tasks.rows(name, {"test": kept}),
            "num_fewshot": shots,
        },
    )


def write_mmlu(code: str, shots: int, data: DataFolder, tasks: TaskFolder) -> str:
    """Write Global-MMLU in one language: a group of its subjects, with lm-eval's prompt.

    Args:
        code: of Global-MMLU, such as `sw`.
        shots: exemplars in the prompt, from the subject's own development questions.
        data: where a copy of the data set may be (parquet files, as on the Hub).
        tasks: where the tasks go.

    Raises:
        EvaluationError: the data cannot be had, or lacks a column.
    """
    name = f"mmlu_{code}_{shots}shot"
    by_subject: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(dict)
    for split in ("dev", "test"):
        for subject, rows in _subjects(code, split, data).items():
            by_subject[subject][split] = rows
    template = builtin(f"global_mmlu/full/{code}/_{code}_template_yaml")
    members = []
    for subject, splits in sorted(by_subject.items()):
        if "test" not in splits:
            continue
        member = f"{name}_{subject}"
        config = {"include": template, "num_fewshot": shots, "metadata": {"version": 1}}
        members.append(tasks.task(member, {**config, **tasks.rows(member, {"dev": [], **splits})}))
    aggregate = [{"metric": "acc", "weight_by_size": True}]
    return tasks.task(name, {"group": name, "task": members, "aggregate_metric_list": aggregate})


def _subjects(code: str, split: str, data: DataFolder) -> dict[str, list[dict[str, Any]]]:
    copy = next((one for one in MMLU if data.snapshot(one) is not None), MMLU[0])
    wanted = f"a copy of {MMLU[0]} (hf download --repo-type dataset {MMLU[0]})"
    rows = hub_rows(copy, code, split, data, wanted=wanted)
    _check(rows, MMLU_COLUMNS, copy)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[str(row["subject"])].append({column: row[column] for column in MMLU_COLUMNS})
    return found


def _check(rows: list[dict[str, Any]], columns: tuple[str, ...], where: str) -> None:
    missing = [column for column in columns if not rows or column not in rows[0]]
    if missing:
        raise EvaluationError(f"{where}: has no {', '.join(missing)}")
