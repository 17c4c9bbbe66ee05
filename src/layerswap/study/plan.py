"""What steps are thought to cost on a usual device, for a plan that is not run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from layerswap.compose.recipe import check_recipe
from layerswap.engine.trie import build_trie, count_layers, paths_of
from layerswap.errors import RecipeError, StudyError
from layerswap.evaluation.suites import suites
from layerswap.evaluation.suites.folders import VARIABLE
from layerswap.study.conditions import TrainedExpert, pair_of, recipes
from layerswap.study.inputs import (
    base_of,
    existing_path,
    fingerprints,
    folder_fingerprint,
    mix_fingerprints,
    resolve_data,
    task_fingerprints,
    with_recipe,
)
from layerswap.study.launch import launch_configuration
from layerswap.study.spec import Experts, Judging, StudySpec, TrainingRun
from layerswap.study.steps import Estimate, Graph, Kind, Resources, Step
from layerswap.training.expert.spec import Data, Files, Trained
from layerswap.training.mix.schema import mix_text, ready_recipes

READ = 1.2e14
"""Floating-point operations a second in training and in reading: about 40% of an A100's peak in
bfloat16."""
LOADED = 1e12
"""Bytes of weights a second that writing a token has to load: about half an A100's peak."""
BATCH = 32
"""Texts that are written at a time."""
LAYERS = 32
"""Of a base that is not at hand."""
ADAPTER = 0.02
"""Of the parameters, what an adapter of a usual rank trains."""
CHOSEN_OF_GRID = 2
"""Of a pair's grid, what is judged in other languages: the chosen composition and the best."""
ROWS, TOKENS = 80_000, 512
"""Rows of a data set and tokens of a row, where nothing better is known (paper 2, section 3.4)."""


@dataclass(frozen=True)
class Documents:
    """What a benchmark makes a model read and write.

    Attributes:
        number: of documents.
        read: tokens of one document, and of one exemplar.
        written: tokens that are written for it; none where answers are only scored.
    """

    number: int
    read: int
    written: int = 0


BENCHMARKS: Mapping[str, Documents] = {
    "mgsm": Documents(250, 200, 256),
    "belebele": Documents(900, 400),
    "flores": Documents(2 * 1012, 100, 100),
    "mbpp": Documents(500, 250, 256),
    "mmlu": Documents(14_042, 150),
}
"""The sizes are those of the published files; the tokens are for a language whose words fall into
more of them than English ones do."""
OWN = Documents(1000, 300, 128)
"""A task that is not one of those."""


def training_hours(run: TrainingRun, billions: float, sets: int) -> float:
    """Device hours of a training: 6 operations a parameter and token.

    Args:
        run: the training.
        billions: parameters.
        sets: data sets that it trains on, one after the other or mixed.
    """
    rows = _rows(run)
    return 6 * billions * 1e9 * rows * TOKENS * sets / READ / 3600


def checkpoints(run: TrainingRun) -> int:
    """How many checkpoints a training leaves to choose from."""
    return max(1, _rows(run) // run.save_every)


def training_disk_gb(run: TrainingRun, billions: float) -> float:
    """Disk of a training: its output and checkpoints in float32, and one optimiser's moments."""
    trained = ADAPTER if run.lora else 1.0
    return billions * trained * (4 * (1 + checkpoints(run)) + 8)


def _rows(run: TrainingRun) -> int:
    steps = run.hyperparameters.get("max_steps")
    batch = run.effective_batch or run.hyperparameters.get("per_device_train_batch_size", 8)
    # What is no number is refused where hyperparameters are checked.
    if isinstance(steps, int) and isinstance(batch, int) and steps > 0:
        return steps * batch
    return run.limit or ROWS


def language_hours(
    spec: StudySpec, settings: Mapping[str, Any], kept: Mapping[str, int], others: Sequence[str]
) -> float:
    """Device hours of judging a language: its models in it, and those that count elsewhere.

    Args:
        spec: the study.
        settings: of the step that judges.
        kept: how many experts of each kind are kept.
        others: the steps that train something beside them.
    """
    models = judged_models(settings, kept, others)
    hours = judging_hours(spec.judge, spec.billions, models)
    there = spec.judge.elsewhere
    if there is not None:
        models = judged_models({**settings, "grid": None}, kept, others, more=CHOSEN_OF_GRID)
        suites_there: list[str | None] = [*there.suites] or [spec.judge.suite]
        for suite in suites_there:
            judge = spec.judge.model_copy(update={"suite": suite})
            others_there = [one for one in there.languages if one != settings["language"]]
            hours += len(others_there) * judging_hours(judge, spec.billions, models)
    return hours


def judging_hours(judge: Judging, billions: float, models: float) -> float:
    """Device hours of judging models in one language.

    2 operations a parameter and token that is read; the weights loaded once for each token that a
    batch writes.

    Args:
        judge: what they are judged on.
        billions: parameters.
        models: how many; less than there are, where they share layers.
    """
    seconds = 0.0
    for documents, shots in _asked(judge):
        number = min(documents.number, judge.limit or documents.number)
        read = number * documents.read * (1 + shots) * 2 * billions * 1e9 / READ
        written = number * documents.written * 2 * billions * 1e9 / LOADED / BATCH
        seconds += read + written
    return models * seconds / 3600


def judged_models(
    settings: Mapping[str, Any], kept: Mapping[str, int], others: Sequence[str], more: int = 0
) -> float:
    """How many models judging a language costs as much as.

    Compositions of one pair run the layers that they share once, and an expert that is in several
    pairs is judged once.

    Args:
        settings: of the step that judges.
        kept: how many experts of each kind are kept.
        others: the steps that train something beside them.
        more: further models of each pair.
    """
    trained = TrainedExpert(
        {name: [f"{name}-{i}" for i in range(count)] for name, count in kept.items()},
        {name: name for name in others},
        LAYERS,
    )
    total = 0.0
    alone: set[str] = set()
    planned = list(recipes(settings, trained))
    for pair, group in groupby(planned, key=lambda named: pair_of(named[0])):
        made = [recipe for _, recipe in group]
        swapped = [recipe for recipe in made if {"swap", "partition"} & set(recipe)]
        paths = paths_of(check_recipe(one, where="plan").resolve(LAYERS) for one in swapped)
        total += count_layers(build_trie(paths)).distinct / LAYERS + (more if pair else 0)
        alone |= {_model(recipe) for recipe in made if recipe not in swapped}
    return total + len(alone)


def _model(recipe: Mapping[str, Any]) -> str:
    """A recipe without the experts that it does not use."""
    used = recipe["soup"]["experts"] if "soup" in recipe else list(recipe["experts"])
    experts = {name: recipe["experts"][name] for name in used}
    return json.dumps({**recipe, "experts": experts}, sort_keys=True)


def _asked(judge: Judging) -> Iterator[tuple[Documents, int]]:
    """What is asked, and how many exemplars come with it."""
    if judge.suite is None:
        yield from ((OWN, judge.shots or 0) for _ in judge.tasks)
    for part in suites.SUITES.get(judge.suite or "", ()):
        if suites.BENCHMARKS[part.benchmark].runs_code and not judge.allow_code:
            continue
        yield BENCHMARKS[part.benchmark], part.shots if judge.shots is None else judge.shots


TASK = "task"
VERSIONS = {"judge": 2, "tables": 2}
"""Of the kinds of step that have come to write something else for the same settings."""


def plan_study(spec: StudySpec, folder: Path) -> Graph:
    """The steps of a study.

    Args:
        spec: the study.
        folder: what its paths are relative to.

    Raises:
        StudyError: steps that do not fit together.
        RecipeError: a mix that cannot be read, or a base, data or tasks that are not there.
    """
    graph = Graph(list(_steps(spec, folder)))
    first: dict[str, str] = {}
    for name, key in graph.keys.items():
        if key in first:
            what = f"{name} and {first[key]} are the same"
            raise StudyError(f"{what}; change a seed, or leave one out")
        first[key] = name
    return graph


def _steps(spec: StudySpec, folder: Path) -> Iterator[Step]:
    kinds = {TASK: spec.task, **spec.languages}
    for name, experts in kinds.items():
        yield from _data(name, experts.data, spec, folder)
        for i, run in enumerate(experts.runs):
            yield _train(f"train/{name}/{i}", spec, [(name, experts.data)], run, folder)
        yield from _variants(name, experts, spec, folder)
        yield _select(name, experts, spec, folder)
    results = []
    for language in spec.languages:
        both = list(_both(language, spec, folder))
        yield from both
        judge = _judge(language, spec, tuple(step.name for step in both), folder)
        yield judge
        results.append(judge.name)
        if spec.change:
            yield _change(language, spec, folder)
            results.append(f"change/{language}")
    settings = {"name": spec.name, "description": spec.description,
                "development": spec.judge.development}  # fmt: skip
    yield Step("tables", "tables", settings, tuple(results), version=VERSIONS["tables"])


def _regimes(spec: StudySpec) -> dict[str, dict[str, Any]]:
    """How trainings differ, by what their steps' names begin with: as given, and with LoRA."""
    return {"": {}} | ({"lora-": {"lora": spec.lora}} if spec.lora else {})


def _variants(name: str, experts: Experts, spec: StudySpec, folder: Path) -> Iterator[Step]:
    """Experts of one kind beside the runs: with LoRA, and of one part of a partition alone."""
    sets = [(name, experts.data)]
    part: Literal["task", "language"] = "task" if name == TASK else "language"
    for regime, changes in _regimes(spec).items():
        run = experts.runs[0].model_copy(update=changes)
        if changes:
            yield _train(f"{regime}train/{name}", spec, sets, run, folder)
        for partition in spec.partitions if "partial" in spec.baselines else ():
            trained = Trained(partition=partition, part=part, outside=spec.outside)
            only = run.model_copy(update={"train": trained})
            yield _train(f"{regime}partial/{name}/{partition}", spec, sets, only, folder)


def _both(language: str, spec: StudySpec, folder: Path) -> Iterator[Step]:
    """Trainings on the data of the task and of a language."""
    experts = spec.languages[language]
    both = [(TASK, spec.task.data), (language, experts.data)]
    for regime, changes in _regimes(spec).items():
        run = (spec.both or experts.runs[0]).model_copy(update={"train": None, **changes})
        if "joint" in spec.baselines:
            yield _train(f"{regime}both/{language}/joint", spec, both, run, folder)
        for every in spec.simultaneous.every if "simultaneous" in spec.baselines else ():
            turns = {**spec.simultaneous.model_dump(exclude_none=True), "every": every}
            name = "simultaneous"
            if len(spec.simultaneous.every) > 1:
                name += f" ({every} steps)"
            where = f"{regime}both/{language}/{name}"
            yield _train(where, spec, both, run, folder, turns=turns)


def _change(language: str, spec: StudySpec, folder: Path) -> Step:
    base = base_of(spec, folder)
    settings = {"language": language, "base": base}
    needs = _kept(spec, TASK, language)
    return Step(
        f"change/{language}", "change", settings, needs, folder_fingerprint(base),
        estimate=Estimate(disk_gb=0.1), resources=_takes("change", spec),
    )  # fmt: skip


def _data(name: str, data: Data, spec: StudySpec, folder: Path) -> Iterator[Step]:
    if _is_mix(data, folder):
        assert isinstance(data, str)
        where = data if data in ready_recipes() else str(folder / data)
        settings = {"mix": mix_text(where), "folder": str(Path(where).parent)}
        inputs = mix_fingerprints(settings["mix"], Path(where).parent)
        yield Step(
            f"data/{name}", "data", settings, inputs=inputs, estimate=Estimate(disk_gb=0.2),
            resources=_takes("data", spec),
        )  # fmt: skip


def _is_mix(data: Data, folder: Path) -> bool:
    """Whether data is a recipe of a mix that a step has to build."""
    if isinstance(data, Files):
        return False
    return data in ready_recipes() or (folder / data).suffix in (".yaml", ".yml")


def _train(
    name: str,
    spec: StudySpec,
    sets: list[tuple[str, Data]],
    run: TrainingRun,
    folder: Path,
    *,
    turns: dict[str, Any] | None = None,
) -> Step:
    needs: list[str] = []
    data: list[dict[str, Any]] = []
    base, run = base_of(spec, folder), with_recipe(run, folder)
    inputs = folder_fingerprint(base) | fingerprints(run.train.recipe if run.train else None)
    for which, one in sets:
        if _is_mix(one, folder):
            needs.append(f"data/{which}")
            data.append({"step": f"data/{which}"})
        else:
            told = resolve_data(one, folder)
            data.append({"given": told})
            inputs |= fingerprints(*(told.values() if isinstance(told, dict) else [told]))
    settings = {"base": base, "data": data, **run.model_dump(mode="json")}
    if run.train and run.train.partition and run.train.part is None:
        settings["train"]["part"] = TASK if sets[0][0] == TASK else "language"
    if turns is not None:
        settings["turns"] = turns
    takes = spec.resources.train
    if takes.processes > 1:
        known = launch_configuration(takes.launch, folder)
        configuration = known if spec.device != "cpu" else None
        settings["launch"] = {"processes": takes.processes, "configuration": configuration}
    hours = training_hours(run, spec.billions, len(sets))
    return Step(
        name, "train", settings, tuple(needs), inputs, _takes("train", spec),
        Estimate(gpu_hours=hours, disk_gb=training_disk_gb(run, spec.billions)),
    )  # fmt: skip


def _select(name: str, experts: Experts, spec: StudySpec, folder: Path) -> Step:
    needs = tuple(f"train/{name}/{i}" for i in range(len(experts.runs)))
    settings = {"keep": experts.keep, **experts.by.model_dump(mode="json")}
    hours = 0.0
    inputs: dict[str, str] = {}
    blind = isinstance(experts.data, Files) and experts.data.validation is None
    if blind and not experts.by.tasks and (experts.keep > 1 or len(experts.runs) > 1):
        raise RecipeError(f"{name}: checkpoints are selected by validation loss or tasks; give one")
    if experts.by.tasks:
        judge = Judging(tasks=experts.by.tasks, include=["."], limit=experts.by.limit)
        hours = judging_hours(judge, spec.billions, sum(map(checkpoints, experts.runs)))
        settings["include"] = [existing_path(folder / one) for one in experts.by.include]
        for one in settings["include"]:
            inputs |= task_fingerprints(one)
        settings |= {"device": spec.device, "dtype": spec.dtype}
    return Step(
        f"select/{name}", "select", settings, needs, inputs, estimate=Estimate(gpu_hours=hours),
        resources=_takes("select", spec) if experts.by.tasks else Resources(),
    )  # fmt: skip


def _judge(language: str, spec: StudySpec, trained: tuple[str, ...], folder: Path) -> Step:
    judge = spec.judge.model_dump(mode="json")
    judge["include"] = [existing_path(folder / one) for one in spec.judge.include]
    base = base_of(spec, folder)
    inputs = folder_fingerprint(base)
    for one in judge["include"]:
        inputs |= task_fingerprints(one)
    if spec.judge.suite or spec.judge.elsewhere:
        inputs |= folder_fingerprint(os.environ.get(VARIABLE))
    settings = {
        "language": language,
        "base": base,
        "pairs": spec.pairs,
        "grid": spec.grid.model_dump(mode="json") if spec.grid else None,
        "partitions": list(spec.partitions),
        "outside": spec.outside,
        "baselines": list(spec.baselines),
        "ties": list(spec.ties),
        "judge": judge,
        "device": spec.device,
        "dtype": spec.dtype,
    }
    compared = _compared(language, spec, folder)
    kinds = {TASK: spec.task, **spec.languages}
    kept = {one: kinds[one].keep for one in kinds if f"select/{one}" in compared}
    hours = language_hours(spec, settings, kept, (*compared, *trained))
    return Step(
        f"judge/{language}", "judge", settings, (*compared, *trained), inputs,
        resources=_takes("judge", spec), estimate=Estimate(gpu_hours=hours, disk_gb=0.1),
        version=VERSIONS["judge"],
    )  # fmt: skip


def _takes(kind: Kind, spec: StudySpec) -> Resources:
    return spec.resources.of(kind, device=spec.device)


def _kept(spec: StudySpec, *names: str) -> tuple[str, ...]:
    """The selections of some experts, and the trainings whose folders they point to."""
    found: list[str] = []
    for name in names:
        runs = (spec.task if name == TASK else spec.languages[name]).runs
        found += [f"select/{name}", *(f"train/{name}/{i}" for i in range(len(runs)))]
    return tuple(found)


def _compared(language: str, spec: StudySpec, folder: Path) -> tuple[str, ...]:
    """The steps whose experts a language is judged with, beside those trained on both data."""
    others = [one for one in spec.languages if one != language]
    if "multilingual soup" not in spec.baselines:
        others = []
    kinds = {TASK: spec.task, language: spec.languages[language]}
    variants = [
        step.name
        for name, experts in kinds.items()
        for step in _variants(name, experts, spec, folder)
    ]
    return (*_kept(spec, TASK, language, *others), *variants)
