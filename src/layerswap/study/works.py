"""What each kind of step does; all of it is done by the other rooms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from layerswap.study.running import Context, Work
from layerswap.study.treatments import EXPERT, SELECTION, models, selected

RESULTS, ATLAS = "results", "map"


def works() -> Mapping[str, Work]:
    """What does each kind of step."""
    from layerswap.study.tables import write_study_tables

    return {
        "data": build_data,
        "train": train,
        "select": select_experts,
        "change": measure_change,
        "judge": judge,
        "tables": write_study_tables,
    }


def build_data(context: Context) -> None:
    """Build a mix."""
    from layerswap.train.data_card import save_mix
    from layerswap.train.mix_file import parse_mix
    from layerswap.train.mixes import build_mix

    text = context.step.settings["mix"]
    mix = parse_mix(text, where=context.step.name)
    built = build_mix(mix, folder=Path(context.step.settings["folder"]))
    save_mix(built, context.folder / "mix", recipe=text, overwrite=True)


def train(context: Context) -> None:
    """Train an expert; a training that was cut short goes on."""
    from layerswap.train.expert import train_expert
    from layerswap.train.expert_file import check_expert
    from layerswap.train.finish import TRAINING

    settings = dict(context.step.settings)
    sets = [
        str(context.inputs[one["step"]] / "mix") if "step" in one else one["given"]
        for one in settings.pop("data")
    ]
    turns = dict(settings.pop("turns", {}))
    spec = {key: value for key, value in settings.items() if value is not None}
    data: dict[str, Any] = {"data": sets[0]} if len(sets) == 1 else {"mix": sets}
    if turns:
        both = {"task": sets[0], "language": sets[1], "every": turns.pop("every")}
        data = {"simultaneous": both, "train": turns}
    out = context.folder / EXPERT
    checked = check_expert({**spec, **data}, where=context.step.name)
    train_expert(checked, out, resume=(out / TRAINING).is_file(), say=context.say)


def select_experts(context: Context) -> None:
    """Rank the checkpoints of several trainings."""
    from layerswap.train.selection import scorer, select

    settings = context.step.settings
    tasks = settings["tasks"]
    score = scorer(tasks, limit=settings["limit"]) if tasks else None
    runs = [folder / EXPERT for folder in context.inputs.values()]
    if len(runs) == 1 and settings["keep"] == 1 and score is None:
        chosen = [{"folder": str(runs[0])}]  # nothing to choose by, and nothing to choose
    else:
        found = json.loads(select(runs, keep=settings["keep"], score=score).to_json())
        chosen = found["chosen"]
    # Folders are told from the study's own, so that a study can be moved.
    root = context.folder.parent
    told = [str(Path(one["folder"]).relative_to(root)) for one in chosen]
    (context.folder / SELECTION).write_text(json.dumps(told, indent=2) + "\n", "utf-8")


def measure_change(context: Context) -> None:
    """Measure what the kept experts changed, and write the maps (paper 1, figures 2 and 4 to 9)."""
    from layerswap.delta.atlas import measure_delta
    from layerswap.report.atlas_files import write_atlas

    settings = context.step.settings
    named = {
        f"{kind}-{i}": str(path)
        for kind in ("task", settings["language"])
        for i, path in enumerate(selected(context, f"select/{kind}"), 1)
    }
    atlas = measure_delta(settings["base"], named)
    write_atlas(atlas, context.folder / ATLAS, overwrite=True)


def judge(context: Context) -> None:
    """Judge every pair of experts of one language: the compositions and the baselines."""
    from layerswap.evaluate.answers import AnswerStore
    from layerswap.evaluate.result_files import write_results
    from layerswap.evaluate.suite_run import Settings, run_suite

    settings = context.step.settings
    folder, asked = _tasks(context)
    how = Settings(
        limit=settings["judge"]["limit"],
        device=settings["device"],
        dtype=settings["dtype"],
        allow_code=settings["judge"]["allow_code"],
    )
    store = AnswerStore(context.folder / "answers.sqlite")
    results: dict[str, Any] = {}
    # Pairs share no layers, so each is swept by itself: fewer compositions, larger batches.
    for _, group in groupby(models(context), key=lambda named: named[0].rpartition(": ")[0]):
        results |= run_suite(dict(group), asked, folder, settings=how, store=store, say=context.say)
    write_results(context.folder / RESULTS, results, asked)


def _tasks(context: Context) -> tuple[Path, list[Any]]:
    """The tasks to ask, and the folder that holds them."""
    from layerswap.evaluate.suites.local import DataFolder
    from layerswap.evaluate.suites.suites import Asked, write_suite
    from layerswap.evaluate.suites.task_folder import TaskFolder

    settings = context.step.settings["judge"]
    language = context.step.settings["language"]
    if settings["suite"]:
        tasks = TaskFolder(context.folder / "tasks")
        data = DataFolder.given(None)
        asked = write_suite(
            settings["suite"], [language], tasks, data=data, shots=settings["shots"],
            allow_code=settings["allow_code"], skip=context.say,
        )  # fmt: skip
        return tasks.root, asked
    metric = (settings["metric"][0], settings["metric"][1])
    asked = [
        Asked(name.format(language=language), benchmark_of(name), language, metric)
        for name in settings["tasks"]
    ]
    return Path(settings["include"][0]), asked


def benchmark_of(task: str) -> str:
    """What a task is called in all languages: `mgsm_{language}` is `mgsm`."""
    return task.replace("{language}", "").strip("_-") or task
