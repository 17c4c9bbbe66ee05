"""Functions that run the steps of a study, by the work of the other rooms."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import open_checkpoint
from layerswap.checkpoint.commit import write_json
from layerswap.checkpoint.remote import TRAINING
from layerswap.compose.recipe import check_recipe
from layerswap.errors import EvaluationError, StudyError
from layerswap.evaluation.harness import PromptOptions
from layerswap.evaluation.languages import same_language
from layerswap.evaluation.results import read_scores, write_results
from layerswap.evaluation.suites.suites import WrittenTask
from layerswap.merge import Plan, make_plan
from layerswap.report.tables import write_tables
from layerswap.search.conditions import Condition
from layerswap.study.conditions import LanguageModels, RecipeData, recipes
from layerswap.study.results import (
    OTHER_LANGUAGES,
    RESULTS,
    benchmark_result,
    read_condition_scores,
    study_results,
)
from layerswap.study.runner import Context, StepFunction
from layerswap.study.spec import TASK
from layerswap.training.expert.distributed import launch_training
from layerswap.versions import versions

if TYPE_CHECKING:
    from layerswap.evaluation.response_cache import AnswerStore

MIX, EXPERT, SELECTION, MAP_FOLDER = "mix", "expert", "selection.json", "map"
ANSWERS, ANSWERED_BY = "answers.sqlite", "answered_by.json"
TABLES, NUMBERS = "tables", "tables.json"
DELETED = "deleted.json"
"""In the folder of a training: which of its checkpoints are left, where others were deleted."""


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
    built = build_mix(mix, folder=Path(context.step.settings["folder"]))
    save_mix(built, context.folder / MIX, recipe=text, overwrite=True)


def train(context: Context) -> None:
    """Train an expert; a training that was cut short resumes."""
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
    checked = check_expert(spec, where=context.step.name)
    resume = (out / TRAINING).is_file()
    if launch is not None:
        launch_training(spec, out, launch, resume=resume)
    else:
        trainer.train(checked, out, resume=resume, log=context.log)
    if context.step.delete_checkpoints:
        shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)


def expert_of(settings: Mapping[str, Any], sets: Sequence[Any]) -> dict[str, Any]:
    """The expert that a step trains, as in its YAML.

    Args:
        settings: of the step.
        sets: the data that it trains on.
    """
    own = ("data", "turns", "launch")
    spec = {key: one for key, one in settings.items() if one is not None and key not in own}
    turns = dict(settings.get("turns", {}))
    if turns:
        both = {"task": sets[0], "language": sets[1], "every": turns.pop("every")}
        return {**spec, "simultaneous": both, "train": turns}
    return {**spec, **({"data": sets[0]} if len(sets) == 1 else {"mix": list(sets)})}


def select_experts(context: Context) -> None:
    """Rank the checkpoints of several trainings, and write which are kept.

    Experts that exist are kept as they are.
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
            limit=settings["limit"],
            num_fewshot=settings["num_fewshot"],
            prompts=prompt_options(settings),
            device=settings["device"],
            dtype=settings["dtype"],
        )
    runs = [folder / EXPERT for folder in context.inputs.values()]
    keep = settings["keep"]
    _refuse_deleted(context.inputs)
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
    # Paths are relative to the folder of all steps, so that a study can be moved.
    root = context.folder.parent
    write_json(context.folder / SELECTION, [str(one.relative_to(root)) for one in folders])
    if context.step.delete_checkpoints:
        _delete_others(runs, folders)


def _refuse_deleted(trainings: Mapping[str, Path]) -> None:
    """Refuse to select anew where the losers of an earlier selection were deleted."""
    for name, folder in trainings.items():
        if (folder / DELETED).is_file():
            raise StudyError(
                f"{name}: checkpoints that an earlier selection left were deleted "
                f"(keep_checkpoints: selected); delete {folder} to train again"
            )


def _delete_others(runs: Sequence[Path], selected: Sequence[Path]) -> None:
    """Delete the weights of all checkpoints but the selected ones, and optimiser states."""
    from layerswap.training.expert.save import CHECKPOINTS, checkpoints

    for run in runs:
        write_json(run.parent / DELETED, [str(one.relative_to(run)) for one in selected
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
    """Measure what the kept experts changed, and write the maps (paper 1, figures 2 and 4 to 9)."""
    from layerswap.deltas.atlas import measure_delta
    from layerswap.report.measurements import write_atlas

    settings = context.step.settings
    named = {
        f"{kind}-{i}": path
        for kind in (TASK, settings["language"])
        for i, path in enumerate(selected(context.inputs, kind), 1)
    }
    atlas = measure_delta(settings["base"], named)
    write_atlas(atlas, context.folder / MAP_FOLDER, overwrite=True)


def evaluate_language(context: Context) -> None:
    """Evaluate every pair of experts of one language: the compositions and the baselines.

    In other languages, the baselines and the chosen compositions.
    """
    settings, spec = context.step.settings, context.step.settings["evaluate"]
    language, there = settings["language"], spec["other_languages"] or {}
    plans = {
        one: make_plan(check_recipe({**recipe, "bake": True}, where=f"study, {one}"))
        for one, recipe in recipes_of(settings, context.inputs)
    }
    own = [spec["suite"]] if spec["suite"] else []
    folder, asked = _tasks(context, own, [language])
    _evaluate(context, plans, asked, folder, RESULTS)
    refuse_unscored(context.folder / RESULTS, asked)
    others = [one for one in there.get("languages", ()) if not same_language(one, language)]
    if others:
        folder, asked = _tasks(context, there["suites"] or own, others)
        _evaluate(context, _without_losers(context, plans), asked, folder, OTHER_LANGUAGES)


def write_study_tables(context: Context) -> None:
    """Write `tables.json`, `tables.md` and `tables.tex` from the results of all languages.

    Raises:
        StudyError: nothing was evaluated.
    """
    settings = context.step.settings
    folders = {one: context.inputs[f"evaluate/{one}"] for one in settings["languages"]}
    results = study_results(folders, settings["development"])
    if not results.benchmarks:
        raise StudyError("nothing was evaluated")
    write_json(context.folder / NUMBERS, {"name": settings["name"], **results.to_dict()})
    write_tables(context.folder / TABLES, results.tables)


def selected(inputs: Mapping[str, Path], kind: str) -> list[str]:
    """The folders or Hub ids of the experts of a kind that were selected, the best first.

    Args:
        inputs: the folders of steps, by name.
        kind: `task`, or a language.
    """
    folder = inputs[f"select/{kind}"]
    return selection(folder, folder.parent)


def selection(folder: Path, root: Path) -> list[str]:
    """What the step in a folder selected: checkpoints, as paths from `root`, or models as given."""
    names = json.loads((folder / SELECTION).read_text("utf-8"))
    return [one["model"] if isinstance(one, dict) else str(root / one) for one in names]


def recipes_of(
    settings: Mapping[str, Any], inputs: Mapping[str, Path]
) -> Iterator[tuple[Condition, RecipeData]]:
    """The recipe of every condition of a language.

    Args:
        settings: of the step that evaluates it.
        inputs: the folders of the steps that it needs, by name.
    """
    models = LanguageModels(
        {kind: selected(inputs, kind) for kind in settings["kinds"]},
        {step: str(folder / EXPERT) for step, folder in inputs.items()},
        open_checkpoint(settings["base"]).layers,
    )
    return recipes(settings, models)


def prompt_options(settings: Mapping[str, Any]) -> PromptOptions:
    """How prompts are written, of the settings of a selection or of an evaluation."""
    return PromptOptions(**{name: settings[name] for name in PromptOptions.model_fields})


def refuse_unscored(folder: Path, asked: Sequence[WrittenTask]) -> None:
    """Refuse results without the metric that is reported.

    Raises:
        StudyError: no document has it; the message names those that there are.
    """
    scores = read_scores(folder)
    if scores and not any(score.main for score in scores):
        known = sorted({f"{score.metric}, {score.filter}" for score in scores})
        metric = ", ".join(asked[0].metric)
        raise StudyError(
            f"evaluate.metric: no document has [{metric}]; there are {'; '.join(known)}"
        )


def _evaluate(
    context: Context,
    plans: Mapping[Condition, Plan],
    asked: Sequence[WrittenTask],
    tasks: Path,
    name: str,
) -> None:
    """Evaluate conditions on tasks, and write their results into a folder of the step."""
    from layerswap.evaluation.response_cache import AnswerStore
    from layerswap.evaluation.suite_run import EvaluationSettings, common_dtype, evaluate_models

    settings = context.step.settings
    named = {str(condition): plan for condition, plan in plans.items()}
    how = EvaluationSettings(
        limit=settings["evaluate"]["limit"],
        device=settings["device"],
        dtype=settings["dtype"] or common_dtype(named, context.log),
        allow_code=settings["evaluate"]["allow_code"],
        num_fewshot=settings["evaluate"]["num_fewshot"] if settings["evaluate"]["tasks"] else None,
        prompts=prompt_options(settings["evaluate"]),
        engine=settings["evaluate"]["engine"],
        engine_args=settings["evaluate"]["engine_args"],
    )
    results: dict[str, Any] = {}
    done = 0

    def count(models: int) -> None:
        nonlocal done
        done += models
        context.log(f"{context.step.name}: {done:,} of {len(plans):,} models")

    with closing(AnswerStore(context.folder / ANSWERS)) as store:
        _adopt_answers(context, store, plans.values())
        # Pairs share no layers, so each is swept by itself: fewer compositions, larger batches.
        for _, group in groupby(plans.items(), key=lambda item: item[0].pair):
            models = {str(condition): plan for condition, plan in group}
            results |= evaluate_models(
                models, [one.name for one in asked], [tasks], settings=how, store=store,
                log=context.log, progress=count,
            )  # fmt: skip
    columns = {str(condition): condition.to_dict() for condition in plans}
    write_results(context.folder / name, results, asked, columns=columns)


def _adopt_answers(context: Context, store: AnswerStore, plans: Iterable[Plan]) -> None:
    """Take over the answers of these models that an earlier form of this step has.

    So a study to which a baseline or a seed was added evaluates what is new alone. Answers are
    kept by what decides a model's weights and by the tokens that it is asked; what else decides
    them, the engine and its versions, has to be the same.
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
            # Keys read parts of every expert, and most evaluations have no earlier form.
            keys = keys or [composition_key(plan) for plan in plans]
            known = store.adopt(folder / ANSWERS, keys)
        except (OSError, ValueError, EvaluationError):
            continue  # the answers are computed again
        if known:
            context.log(f"{context.step.name}: {known:,} answers are known of an earlier run")


def _without_losers(context: Context, plans: Mapping[Condition, Plan]) -> dict[Condition, Plan]:
    """All but the compositions of the grid that no benchmark of the language's own chose."""
    development = context.step.settings["evaluate"]["development"]
    picked: set[tuple[str, Condition]] = set()
    for (benchmark, language), scores in read_condition_scores(context.folder / RESULTS).items():
        found = benchmark_result(language, benchmark, scores, development)
        picked |= {*found.chosen.items(), *found.best.items()}
    return {
        one: plan
        for one, plan in plans.items()
        if one.zones is None or (one.pair, one.treatment) in picked
    }


def _tasks(
    context: Context, suites: Sequence[str], languages: Sequence[str]
) -> tuple[Path, list[WrittenTask]]:
    """The tasks to evaluate on in some languages, and the folder that holds them.

    Without suites they are the tasks that the study names.
    """
    from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
    from layerswap.evaluation.suites.suites import write_suite

    settings = context.step.settings["evaluate"]
    if suites:
        tasks = TaskFolder(context.folder / "tasks")
        data = DataFolder.given(None)
        written = (
            write_suite(
                suite, languages, tasks, data=data, shots=settings["num_fewshot"],
                allow_code=settings["allow_code"], skip=context.log, needed=True, development=True,
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
    """The name of a task in all languages: `mgsm_{language}` is `mgsm`."""
    return task.replace("{language}", "").strip("_-") or task
