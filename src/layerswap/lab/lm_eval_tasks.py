"""Exports the lab's questions as lm-eval tasks.

A task is a YAML file beside a JSON Lines file of its documents. `lab_problem_furo` has the problems
of the task in `furo`, `lab_comprehension_furo` the stories. Both compare the greedy answer with the
right one, as `layerswap lab score` does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from layerswap.checkpoint import atomic_folder
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.scoring import NEW_TOKENS
from layerswap.lab.tasks import LabSplit, Skill, examples

MARKER = "lab_tasks.json"
SKILLS: tuple[Skill, ...] = ("problem", "comprehension")


def export_tasks(
    out: Path,
    *,
    split: LabSplit = "test",
    n: int = 1000,
    seed: int = 0,
    lab: Lab | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Write the questions of the source language and of every scarce one as lm-eval tasks.

    Args:
        out: the folder to create.
        split: of the questions.
        n: questions per task.
        seed: of the questions; `layerswap lab score` has seed 0.
        lab: the lab; the shipped one when None.
        overwrite: replace a folder that this function wrote.

    Returns:
        The names of the tasks.

    Raises:
        LayerswapError: the folder exists, or a setting is wrong.
    """
    import yaml

    lab = lab or shipped()
    target = out.expanduser().absolute()
    names = []
    with atomic_folder(target, marker=MARKER, overwrite=overwrite) as folder:
        for language in (lab.world.source.name, *lab.languages):
            for skill in SKILLS:
                name = f"lab_{skill}_{language}"
                asked = examples(lab.world, language, skill, split, n, seed=seed)
                lines = [
                    json.dumps({"prompt": one.prompt, "answer": one.completion.strip()})
                    for one in asked
                ]
                (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
                data = str(target / f"{name}.jsonl")
                (folder / f"{name}.yaml").write_text(yaml.safe_dump(_task(name, data)), "utf-8")
                names.append(name)
        (folder / MARKER).write_text(json.dumps(names) + "\n", "utf-8")
    return names


def _task(name: str, data: str) -> dict[str, Any]:
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": data}},
        "test_split": "test",
        "output_type": "generate_until",
        "num_fewshot": 0,
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": NEW_TOKENS, "do_sample": False},
        "filter_list": [
            {
                "name": "whole",
                "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
