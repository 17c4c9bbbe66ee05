"""A sweep against the loop that users write: merge with mergekit, load, judge with lm-eval.

    python bench/peers.py --mergekit mergekit-env/bin/mergekit-yaml

The lab's experts, the lab's task in the target language through lm-eval, swaps of the quickstart's
grid. The loop runs every composition as its users do: a configuration for mergekit, a process that
merges, transformers that loads, lm-eval that judges, and the folder removed. It is run for a few
compositions, since each costs the same; the sweep is run for all. Both judge the same documents,
and the scores of the compositions that both ran are compared. mergekit cannot blend what lies
outside the layers while it swaps, so both take that from the language expert.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from layerswap.compose.recipe import check_recipe
from layerswap.lab.assets import shipped
from layerswap.lab.questions import write_tasks
from layerswap.merge.api import make_plan

TASK = "lab_problem_furo"
JUDGE = """
import json, sys
import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
model, tasks, out = sys.argv[1:]
found = lm_eval.simple_evaluate(
    model=HFLM(pretrained=model, batch_size=16, device="cpu", dtype="float32"),
    tasks=["TASK"], bootstrap_iters=0,
    task_manager=TaskManager(include_path=tasks, include_defaults=False))
json.dump(found["results"]["TASK"]["exact_match,whole"], open(out, "w"))
""".replace("TASK", TASK)


def recipe_of(bottom: int, top: int) -> dict[str, Any]:
    lab = shipped()
    return {
        "experts": {
            "task": str(lab.task_experts[0]),
            "language": str(lab.language_experts["furo"][0]),
        },
        "swap": {"bottom": bottom, "top": top, "outside": "language"},
        "dtype": "float32",
    }


def mergekit_of(bottom: int, top: int, layers: int) -> dict[str, Any]:
    """The same swap as a mergekit configuration."""
    lab = shipped()
    task, language = str(lab.task_experts[0]), str(lab.language_experts["furo"][0])
    parts = [(language, 0, bottom), (task, bottom, layers - top), (language, layers - top, layers)]
    slices = [
        {"sources": [{"model": model, "layer_range": [first, stop]}]}
        for model, first, stop in parts
        if first < stop
    ]
    return {"merge_method": "passthrough", "slices": slices, "dtype": "float32"}


def timed(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def by_hand(mergekit: str, swap: dict[str, Any], tasks: Path, root: Path) -> dict[str, float]:
    """One composition the way its users do it: seconds by step, megabytes written, its score."""
    config, folder, score = root / "config.yml", root / "merged", root / "score.json"
    config.write_text(yaml.safe_dump(swap))
    merging = timed([mergekit, str(config), str(folder), "--quiet"])
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    judging = timed([sys.executable, "-c", JUDGE, str(folder), str(tasks), str(score)])
    shutil.rmtree(folder)
    return {
        "merging": merging,
        "judging": judging,
        "megabytes": written / 1e6,
        "score": float(score.read_text()),
    }


def sweep(bottoms: list[int], tops: list[int], tasks: Path, root: Path) -> tuple[float, int]:
    spec = {
        "recipe": recipe_of(1, 1),
        "grid": {"bottom": bottoms, "top": tops},
        "tasks": [TASK],
        "include": [str(tasks)],
        "development": 0.99,
        "dtype": "float32",
    }
    (root / "sweep.yaml").write_text(yaml.safe_dump(spec))
    out = root / "results"
    shutil.rmtree(out, ignore_errors=True)
    layerswap = str(Path(sys.executable).with_name("layerswap"))
    seconds = timed([layerswap, "sweep", str(root / "sweep.yaml"), "--out", str(out)])
    return seconds, sum(file.stat().st_size for file in out.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mergekit", required=True, help="its mergekit-yaml, in its environment")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--loops", type=int, default=3, help="compositions to run by hand")
    options = parser.parse_args()
    layers = make_plan(check_recipe(recipe_of(1, 1), where="peers")).composition.layers
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_tasks(root / "tasks", options.questions)
        runs = [
            by_hand(options.mergekit, mergekit_of(1 + i, 1, layers), root / "tasks", root)
            for i in range(options.loops)
        ]
        print("| | compositions | seconds each | MB written each |")
        print("|---|---:|---:|---:|")
        whole = [run["merging"] + run["judging"] for run in runs]
        print(
            f"| mergekit, transformers, lm-eval | {len(runs)} | {statistics.median(whole):.1f} "
            f"(merging {statistics.median([run['merging'] for run in runs]):.1f}) | "
            f"{runs[0]['megabytes']:.1f} |"
        )
        for bottoms, tops in (([0, 1, 2], [0, 1, 2]), (range(9), [0, 1, 2]), (range(9), range(9))):
            count = sum(b + u <= layers for b in bottoms for u in tops)
            seconds, written = sweep(list(bottoms), list(tops), root / "tasks", root)
            each = f"{seconds / count:.2f} | {written / count / 1e6:.2f}"
            print(f"| layerswap sweep | {count} | {each} |", flush=True)
        print(f"\nscores by hand: {[run['score'] for run in runs]}")


if __name__ == "__main__":
    main()
