"""Functions that run the steps of a study with the other rooms."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import open_checkpoint
from layerswap.checkpoint.remote import TRAINING
from layerswap.compose.recipe import check_recipe
from layerswap.evaluation.languages import same_language
from layerswap.evaluation.settings import EvaluationSettings
from layerswap.evaluation.suites.suites import WrittenTask
from layerswap.experiment.answers import lost_paths, write_results
from layerswap.experiment.benchmarks import (
    OTHER_LANGUAGES,
    RESULTS,
    benchmark_result,
    read_condition_scores,
    study_results,
)
from layerswap.experiment.conditions import Condition
from layerswap.ground.commit import write_json
from layerswap.ground.errors import EvaluationError, StudyError
from layerswap.ground.types import duration
from layerswap.merge import Plan, make_plan
from layerswap.merge.trained import base_notes
from layerswap.report.tables import write_tables
from layerswap.study.conditions import RecipeData, recipes
from layerswap.study.runner import Context, StepFunction
from layerswap.study.spec import TASK
from layerswap.training.expert.hyperparameters import launch_training
from layerswap.versions import versions

if TYPE_CHECKING:
    from layerswap.evaluation.response_cache import AnswerStore

MIX, EXPERT, SELECTION, MAP_FOLDER = "mix", "expert", "selection.json", "map"
ANSWERS, ANSWERED_BY = "answers.sqlite", "answered_by.json"
TABLES, NUMBERS = "tables", "tables.json"
EVERY = 15.0
"""Seconds between two lines of progress."""
DELETED = "deleted.json"
"""File in the folder of a training that lists the checkpoints left after others were deleted."""


def step_functions() -> Mapping[str, StepFunction]:
    """The function of each kind of step."""
    return {
        "data": build_data,
        "train": train,
        "select": select_experts,
        "change": measure_change,
        "evaluate": evaluate_language,
        "tables": write_study_tables,
    }


def build_data(context: Context) -> None:
    """Build a mix."""
    from layerswap.training.mix.build import build_mix
    from layerswap.training.mix.card import save_mix
    from layerswap.training.mix.schema import parse_mix

    text = context.step.settings["mix"]
    mix = parse_mix(text, where=context.step.name)
    shown = time.monotonic()

    def count(source: str, done: int, total: int) -> None:
        nonlocal shown
        if done == total or time.monotonic() - shown >= EVERY:
            shown = time.monotonic()
            context.log(f"{source}: {done:,} of {total:,} rows read")

    built = build_mix(mix, folder=Path(context.step.settings["folder"]), progress=count)
    save_mix(built, context.folder / MIX, recipe=text, overwrite=True)


def train(context: Context) -> None:
    """Train an expert, or resume an interrupted training."""
    from layerswap.training.expert import trainer
    from layerswap.training.expert.save import CHECKPOINTS
    from layerswap.training.expert.spec import check_expert

    settings = context.step.settings
    launch = settings.get("launch")
    sets = [
        str(context.inputs[one["step"]] / MIX) if "step" in one else one["given"]
        for one in settings["data"]
    ]
    spec = expert_of(settings, sets)
    out = context.folder / EXPERT
    context.log("reading the base and the rows")
    checked = check_expert(spec, where=context.step.name)
    resume = (out / TRAINING).is_file()
    if launch is not None:
        launch_training(spec, out, launch, resume=resume)
    else:
        trainer.train(checked, out, resume=resume, log=context.log)
    if context.step.delete_checkpoints:
        shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)


def expert_of(settings: Mapping[str, Any], sets: Sequence[Any]) -> dict[str, Any]:
    """The expert that a step trains on data sets, in the form of `EXPERT.yaml`."""
    own = ("data", "turns", "launch")
    spec = {key: one for key, one in settings.items() if one is not None and key not in own}
    turns = dict(settings.get("turns", {}))
    if turns:
        both = {"task": sets[0], "language": sets[1], "every": turns.pop("every")}
        return {**spec, "simultaneous": both, "train": turns}
    return {**spec, **({"data": sets[0]} if len(sets) == 1 else {"mix": list(sets)})}


def select_experts(context: Context) -> None:
    """Rank the checkpoints of several trainings, and write the names of the best.

    Experts that exist are written without a ranking.
    """
    settings = context.step.settings
    if "experts" in settings:
        write_json(context.folder / SELECTION, [{"model": one} for one in settings["experts"]])
        return
    from layerswap.training.expert.select import candidates, scorer, select

    score = None
    if settings["tasks"]:
        score = scorer(
            settings["tasks"],
            include=[Path(one) for one in settings["include"]],
            settings=EvaluationSettings.taken_from(settings),
        )
    runs = [folder / EXPERT for folder in context.inputs.values()]
    keep = settings["keep"]
    _refuse_deleted(context.inputs)
    measured = score is not None or any(one.loss is not None for one in candidates(runs[0]))
    if len(runs) == 1 and keep == 1 and not measured:
        folders = [runs[0]]  # no score to choose by, so the output of the training
    else:
        folders = [Path(one.folder) for one in select(runs, keep=keep, score=score).chosen]
    if len(folders) < keep:
        raise StudyError(
            f"`keep` is {keep}, but training saved only {len(folders)} checkpoints; keep fewer, or "
            "save more often (save_every)"
        )
    # Relative to the folder of all steps, so that a study can be moved.
    root = context.folder.parent
    write_json(context.folder / SELECTION, [one.relative_to(root).as_posix() for one in folders])
    if context.step.delete_checkpoints:
        _delete_others(runs, folders)


def _refuse_deleted(trainings: Mapping[str, Path]) -> None:
    """Refuse to select again if an earlier selection deleted checkpoints."""
    for name, folder in trainings.items():
        if (folder / DELETED).is_file():
            raise StudyError(
                f"{name}: an earlier selection deleted the other checkpoints "
                f"(keep_checkpoints: selected); delete {folder} to train again"
            )


def _delete_others(runs: Sequence[Path], selected: Sequence[Path]) -> None:
    """Delete optimiser states, and the weights of all checkpoints but the selected ones."""
    from layerswap.training.expert.save import CHECKPOINTS, checkpoints

    for run in runs:
        write_json(run.parent / DELETED, [one.relative_to(run).as_posix() for one in selected
                                          if one == run or run in one.parents])  # fmt: skip
        for folder in checkpoints(run / CHECKPOINTS).values():
            if folder not in selected:
                shutil.rmtree(folder)
        for folder in (run, *checkpoints(run / CHECKPOINTS).values()):
            unused = [*folder.glob("*.pt"), *folder.glob("optimizer*")]
            if folder not in selected:
                unused += folder.glob("*.safetensors*")
            for path in dict.fromkeys(unused):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def measure_change(context: Context) -> None:
    """Map the weights that the kept experts changed (paper 1, figures 2 and 4 to 9)."""
    from layerswap.deltas.atlas import measure_delta
    from layerswap.report.delta_map import write_atlas

    settings = context.step.settings
    named = {
        f"{kind}-{i}": path
        for kind in (TASK, settings["language"])
        for i, path in enumerate(selected(context.inputs, kind), 1)
    }
    atlas = measure_delta(settings["base"], named)
    write_atlas(atlas, context.folder / MAP_FOLDER, overwrite=True)


def evaluate_language(context: Context) -> None:
    """Evaluate the compositions and the baselines of every pair of experts of one language.

    In other languages, evaluate the baselines and the chosen compositions.
    """
    settings = context.step.settings
    plans = {
        one: make_plan(check_recipe({**recipe, "bake": True}, where=f"study, {one}"))
        for one, recipe in recipes_of(settings, context.inputs)
    }
    experts = {one.source: one for plan in plans.values() for one in plan.experts.values()}
    for note in base_notes(experts, open_checkpoint(settings["base"])):
        context.log(f"note: {note}")
    own, *others = asked_suites(settings)
    folder, asked = _tasks(context, *own)
    _evaluate(context, plans, asked, folder, RESULTS)
    for suites, languages in others:
        folder, asked = _tasks(context, suites, languages)
        _evaluate(context, _without_losers(context, plans), asked, folder, OTHER_LANGUAGES)


def asked_suites(settings: Mapping[str, Any]) -> Iterator[tuple[list[str], list[str]]]:
    """The suites and languages of an evaluation: its own language's, then the others'.

    Without a suite the study's own tasks are asked.
    """
    spec, language = settings["evaluate"], settings["language"]
    own = [spec["suite"]] if spec["suite"] else []
    yield own, [language]
    there = spec["other_languages"] or {}
    others = [one for one in there.get("languages", ()) if not same_language(one, language)]
    if others:
        yield there["suites"] or own, others


def asked_tasks(settings: Mapping[str, Any], languages: Iterable[str]) -> dict[str, WrittenTask]:
    """The study's own tasks in some languages, by name."""
    spec = settings["evaluate"]
    metric = (spec["metric"][0], spec["metric"][1])
    return {
        # The name in all languages: `mgsm_{language}` is `mgsm`.
        name: WrittenTask(
            name, task.replace("{language}", "").strip("_-") or task, language, metric
        )
        for task in spec["tasks"]
        for language in languages
        for name in [task.format(language=language)]
    }


def write_study_tables(context: Context) -> None:
    """Write `tables.json`, `tables.md` and `tables.tex` from the results of all languages."""
    settings = context.step.settings
    folders = {one: context.inputs[f"evaluate/{one}"] for one in settings["languages"]}
    results = study_results(folders, settings["development"])
    if not results.benchmarks:
        raise StudyError("nothing was evaluated")
    write_json(context.folder / NUMBERS, {"name": settings["name"], **results.to_dict()})
    write_tables(context.folder / TABLES, results.tables)


def selected(inputs: Mapping[str, Path], kind: str) -> list[str]:
    """The folders or Hub ids of the selected experts of a kind, the best first.

    `inputs` has the folders of steps by name.
    """
    folder = inputs[f"select/{kind}"]
    return selection(folder, folder.parent)


def selection(folder: Path, root: Path) -> list[str]:
    """The models that the step in a folder selected: paths from `root`, or models as given."""
    names = json.loads((folder / SELECTION).read_text("utf-8"))
    return [one["model"] if isinstance(one, dict) else str(root / one) for one in names]


def recipes_of(
    settings: Mapping[str, Any], inputs: Mapping[str, Path]
) -> Iterator[tuple[Condition, RecipeData]]:
    """The recipe of every condition of a language.

    `settings` are the evaluating step's; `inputs` has the folders of the steps that
    it needs, by name.
    """
    kept = {kind: selected(inputs, kind) for kind in settings["kinds"]}
    trained = {step: str(folder / EXPERT) for step, folder in inputs.items()}
    return recipes(settings, kept, trained, open_checkpoint(settings["base"]).layers)


def _evaluate(
    context: Context,
    plans: Mapping[Condition, Plan],
    asked: Sequence[WrittenTask],
    tasks: Path,
    name: str,
) -> None:
    """Evaluate conditions on tasks, and write the results into a folder of the step."""
    from layerswap.evaluation.harness import common_dtype, evaluate_models
    from layerswap.evaluation.response_cache import AnswerStore

    settings = context.step.settings
    named = {str(condition): plan for condition, plan in plans.items()}
    dtype = settings["dtype"] or common_dtype(named, context.log)
    how = EvaluationSettings.taken_from(
        settings["evaluate"], device=settings["device"], dtype=dtype
    )
    results: dict[str, Any] = {}
    done = 0

    def count(models: int) -> None:
        nonlocal done
        done += models
        context.log(f"{context.step.name}: {done:,} of {len(plans):,} models")

    started = shown = time.monotonic()

    def answered(total: int, count: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if count and now - shown >= EVERY:
            shown, rate = now, count / (now - started)
            context.log(
                f"{count:,} of {total:,} answers of these models, {rate:,.0f}/s, "
                f"{duration((total - count) / rate)} left for them"
            )

    context.log(f"loading {len(plans):,} models and the tasks")
    with closing(AnswerStore(context.folder / ANSWERS, answered)) as store:
        _adopt_answers(context, store, plans.values())
        # Pairs share no layers. Swept one by one, they allow larger batches.
        for _, group in groupby(plans.items(), key=lambda item: item[0].pair):
            models = {str(condition): plan for condition, plan in group}
            results |= evaluate_models(
                models, [one.name for one in asked], [tasks], settings=how, store=store,
                log=context.log, progress=count,
            )  # fmt: skip
    for lost in lost_paths(results.values()):
        context.log(lost)
    of_model = {str(condition): {"condition": condition} for condition in plans}
    write_results(context.folder / name, results, asked, of_model=of_model)


def _adopt_answers(context: Context, store: AnswerStore, plans: Iterable[Plan]) -> None:
    """Copy the answers of these models from earlier versions of this step.

    So a study with a new baseline or seed evaluates the new models alone. The keys of answers
    cover a model's weights and the tokens of a request. The engine and the versions of its
    packages must be the same.
    """
    from layerswap.evaluation.response_cache import composition_key

    settings, keys = context.step.settings, None
    how = {
        "step": context.step.name,
        "device": settings["device"],
        "dtype": settings["dtype"],
        "engine": settings["evaluate"]["engine"],
        "engine_args": settings["evaluate"]["engine_args"],
        "versions": versions("torch", "transformers", "vllm"),
    }
    write_json(context.folder / ANSWERED_BY, how)
    for folder in sorted(context.folder.parent.glob(f"{context.step.kind}-*")):
        if folder == context.folder or not (folder / ANSWERS).is_file():
            continue
        try:
            if json.loads((folder / ANSWERED_BY).read_text("utf-8")) != how:
                continue
            # Keys read parts of every expert, and most evaluations have no earlier version.
            keys = keys or [composition_key(plan) for plan in plans]
            known = store.adopt(folder / ANSWERS, keys)
        except (OSError, ValueError, EvaluationError):
            continue  # the answers are computed again
        if known:
            context.log(f"{context.step.name}: {known:,} answers are known from an earlier run")


def _without_losers(context: Context, plans: Mapping[Condition, Plan]) -> dict[Condition, Plan]:
    """Drop the compositions of the grid that no benchmark of the language chose."""
    development = context.step.settings["evaluate"]["development"]
    scores = read_condition_scores(context.folder / RESULTS)
    own = [benchmark_result(one, name, of, development) for (name, one), of in scores.items()]
    return {one: plan for one, plan in plans.items() if any(by.names_of(one) for by in own)}


def _tasks(
    context: Context, suites: Sequence[str], languages: Sequence[str]
) -> tuple[Path, list[WrittenTask]]:
    """The tasks in some languages, and their folder; without suites, the study's own tasks."""
    from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
    from layerswap.evaluation.suites.suites import write_suite

    settings = context.step.settings["evaluate"]
    if suites:
        tasks = TaskFolder(context.folder / "tasks")
        data = DataFolder.given(None)
        written = (
            write_suite(
                suite, languages, tasks, data=data, shots=settings["num_fewshot"],
                allow_code=settings["allow_code"], skip=context.log, needed=True,
                development=settings["development"] is not None,
            )
            for suite in suites
        )  # fmt: skip
        return tasks.root, [one for of_suite in written for one in of_suite]
    asked = asked_tasks(context.step.settings, languages)
    return Path(settings["include"][0]), list(asked.values())
