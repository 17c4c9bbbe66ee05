"""What each kind of step does; all of it is done by the other rooms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from layerswap.errors import StudyError
from layerswap.evaluation.languages import same_language
from layerswap.evaluation.results import read_scores
from layerswap.evaluation.suites.suites import WrittenTask
from layerswap.merge.planner import Plan
from layerswap.study.conditions import (
    ELSEWHERE,
    EXPERT,
    RESULTS,
    SELECTION,
    grid_name,
    models,
    pair_of,
    selected,
    treatment_of,
    zones_of,
)
from layerswap.study.launch import launch_training
from layerswap.study.results import condition, read_judged
from layerswap.study.runner import Context, Work

MAP_FOLDER = "map"


def step_functions() -> Mapping[str, Work]:
    """What does each kind of step."""
    from layerswap.study.results import write_study_tables

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
    from layerswap.training.mix.build import build_mix
    from layerswap.training.mix.card import save_mix
    from layerswap.training.mix.schema import parse_mix

    text = context.step.settings["mix"]
    mix = parse_mix(text, where=context.step.name)
    built = build_mix(mix, folder=Path(context.step.settings["folder"]))
    save_mix(built, context.folder / "mix", recipe=text, overwrite=True)


def train(context: Context) -> None:
    """Train an expert; a training that was cut short goes on."""
    from layerswap.training.expert import trainer
    from layerswap.training.expert.save import TRAINING
    from layerswap.training.expert.spec import check_expert

    settings = context.step.settings
    launch = settings.get("launch")
    sets = [
        str(context.inputs[one["step"]] / "mix") if "step" in one else one["given"]
        for one in settings["data"]
    ]
    spec = expert_of(settings, sets)
    out = context.folder / EXPERT
    checked = check_expert(spec, where=context.step.name)
    resume = (out / TRAINING).is_file()
    if launch is not None:
        launch_training(spec, out, launch, resume=resume)
    else:
        trainer.train(checked, out, resume=resume, log=context.log)


def expert_of(settings: Mapping[str, Any], sets: Sequence[Any]) -> dict[str, Any]:
    """The expert that a step trains, as in its YAML.

    Args:
        settings: of the step.
        sets: the data that it trains on.
    """
    ours = ("data", "turns", "launch")
    spec = {key: one for key, one in settings.items() if one is not None and key not in ours}
    turns = dict(settings.get("turns", {}))
    if turns:
        both = {"task": sets[0], "language": sets[1], "every": turns.pop("every")}
        return {**spec, "simultaneous": both, "train": turns}
    return {**spec, **({"data": sets[0]} if len(sets) == 1 else {"mix": list(sets)})}


def select_experts(context: Context) -> None:
    """Rank the checkpoints of several trainings."""
    from layerswap.training.expert.select import candidates, scorer, select

    settings = context.step.settings
    tasks = settings["tasks"]
    score = None
    if tasks:
        score = scorer(
            tasks,
            include=[Path(one) for one in settings["include"]],
            limit=settings["limit"],
            device=settings["device"],
            dtype=settings["dtype"],
        )
    runs = [folder / EXPERT for folder in context.inputs.values()]
    keep = settings["keep"]
    measured = score is not None or any(one.loss is not None for one in candidates(runs[0]))
    if len(runs) == 1 and keep == 1 and not measured:
        folders = [runs[0]]  # nothing to choose by: its output
    else:
        folders = [Path(one.folder) for one in select(runs, keep=keep, score=score).chosen]
    if len(folders) < keep:
        raise StudyError(
            f"{keep} are to be kept, but there are {len(folders)}; keep fewer, or save more often "
            "(save_every)"
        )
    # Folders are told from the study's own, so that a study can be moved.
    root = context.folder.parent
    told = [str(one.relative_to(root)) for one in folders]
    (context.folder / SELECTION).write_text(json.dumps(told, indent=2) + "\n", "utf-8")


def measure_change(context: Context) -> None:
    """Measure what the kept experts changed, and write the maps (paper 1, figures 2 and 4 to 9)."""
    from layerswap.deltas.atlas import measure_delta
    from layerswap.report.atlas_files import write_atlas

    settings = context.step.settings
    named = {
        f"{kind}-{i}": str(path)
        for kind in ("task", settings["language"])
        for i, path in enumerate(selected(context, f"select/{kind}"), 1)
    }
    atlas = measure_delta(settings["base"], named)
    write_atlas(atlas, context.folder / MAP_FOLDER, overwrite=True)


def judge(context: Context) -> None:
    """Judge every pair of experts of one language: the compositions and the baselines.

    In other languages, the baselines and what was chosen of the compositions.
    """
    from layerswap.evaluation.results import write_results

    settings = context.step.settings
    language, elsewhere = settings["language"], settings["judge"]["elsewhere"]
    named = dict(models(context))
    own = [one for one in [settings["judge"]["suite"]] if one]
    folder, asked = _tasks(context, own, [language])
    write_results(context.folder / RESULTS, _judged(context, named, asked, folder), asked)
    refuse_unscored(context.folder / RESULTS, asked)
    others = [
        one for one in (elsewhere or {}).get("languages", ()) if not same_language(one, language)
    ]
    if not others:
        return
    folder, asked = _tasks(context, elsewhere["suites"] or own, others)
    kept = _chosen(context, named)
    write_results(context.folder / ELSEWHERE, _judged(context, kept, asked, folder), asked)


def refuse_unscored(folder: Path, asked: Sequence[WrittenTask]) -> None:
    """Refuse results without the metric that counts, telling those that there are.

    Raises:
        StudyError: no document has it.
    """
    scores = read_scores(folder)
    if scores and not any(score.main for score in scores):
        known = sorted({f"{score.metric}, {score.filter}" for score in scores})
        metric = ", ".join(asked[0].metric)
        raise StudyError(f"judge: metric: no document has [{metric}]; there are {'; '.join(known)}")


def _judged(
    context: Context, named: Mapping[str, Plan], asked: Sequence[WrittenTask], folder: Path
) -> dict[str, Any]:
    from layerswap.evaluation.response_cache import AnswerStore
    from layerswap.evaluation.suite_run import EvaluationSettings, evaluate_models

    settings = context.step.settings
    how = EvaluationSettings(
        limit=settings["judge"]["limit"],
        device=settings["device"],
        dtype=settings["dtype"],
        allow_code=settings["judge"]["allow_code"],
    )
    store = AnswerStore(context.folder / "answers.sqlite")
    results: dict[str, Any] = {}
    # Pairs share no layers, so each is swept by itself: fewer compositions, larger batches.
    for _, group in groupby(named.items(), key=lambda one: pair_of(one[0])):
        results |= evaluate_models(
            dict(group), [one.name for one in asked], [folder], settings=how, store=store,
            log=context.log,
        )  # fmt: skip
    return results


def _chosen(context: Context, named: Mapping[str, Plan]) -> dict[str, Plan]:
    """All but the compositions of the grid that no benchmark of the language's own chose."""
    settings = context.step.settings
    kept: set[str] = set()
    for (benchmark, language), pairs in read_judged(context.folder / RESULTS).items():
        one = condition(language, benchmark, pairs, settings["judge"]["development"])
        for picked in (one.chosen, one.best):
            kept |= {f"{pair}: {grid_name(zones)}" for pair, zones in picked.items()}
    return {
        name: plan
        for name, plan in named.items()
        if name in kept or zones_of(treatment_of(name)) is None
    }


def _tasks(
    context: Context, suites: Sequence[str], languages: Sequence[str]
) -> tuple[Path, list[WrittenTask]]:
    """The tasks to ask in some languages, and the folder that holds them.

    Without suites they are tasks of one's own.
    """
    from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
    from layerswap.evaluation.suites.suites import write_suite

    settings = context.step.settings["judge"]
    if suites:
        tasks = TaskFolder(context.folder / "tasks")
        data = DataFolder.given(None)
        written = (
            write_suite(
                suite, languages, tasks, data=data, shots=settings["shots"],
                allow_code=settings["allow_code"], skip=context.log, needed=True,
            )
            for suite in suites
        )  # fmt: skip
        return tasks.root, [one for of_suite in written for one in of_suite]
    metric = (settings["metric"][0], settings["metric"][1])
    asked = [
        WrittenTask(name.format(language=language), benchmark_of(name), language, metric)
        for name in settings["tasks"]
        for language in languages
    ]
    return Path(settings["include"][0]), asked


def benchmark_of(task: str) -> str:
    """What a task is called in all languages: `mgsm_{language}` is `mgsm`."""
    return task.replace("{language}", "").strip("_-") or task
