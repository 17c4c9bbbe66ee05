"""From a study to its graph of steps: nothing is read but small files, nothing is fetched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from layerswap.errors import RecipeError, StudyError
from layerswap.evaluate.suites.local import VARIABLE
from layerswap.study.costs import (
    checkpoints,
    judging_hours,
    language_hours,
    training_disk_gb,
    training_hours,
)
from layerswap.study.inputs import (
    base_of,
    fingerprints,
    folder_fingerprint,
    given,
    mix_fingerprints,
    task_fingerprints,
    there,
    with_recipe,
)
from layerswap.study.launching import launch_configuration
from layerswap.study.resources import Kind
from layerswap.study.spec import Experts, Judging, Run, StudySpec
from layerswap.study.steps import Estimate, Graph, Resources, Step
from layerswap.train.expert_schema import Data, Files, Trained
from layerswap.train.mix_file import mix_text, ready_recipes

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
    run: Run,
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
            told = given(one, folder)
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
        settings["include"] = [there(folder / one) for one in experts.by.include]
        for one in settings["include"]:
            inputs |= task_fingerprints(one)
        settings |= {"device": spec.device, "dtype": spec.dtype}
    return Step(
        f"select/{name}", "select", settings, needs, inputs, estimate=Estimate(gpu_hours=hours),
        resources=_takes("select", spec) if experts.by.tasks else Resources(),
    )  # fmt: skip


def _judge(language: str, spec: StudySpec, trained: tuple[str, ...], folder: Path) -> Step:
    judge = spec.judge.model_dump(mode="json")
    judge["include"] = [there(folder / one) for one in spec.judge.include]
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
