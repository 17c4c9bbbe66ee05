"""Checks of a study before its first step, so that nothing is trained in vain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from layerswap.checkpoint import open_checkpoint
from layerswap.checkpoint.loading import load_tokenizer, open_device
from layerswap.compose.presets import zone_grid
from layerswap.compose.recipe import check_recipe
from layerswap.errors import EvaluationError, StudyError
from layerswap.evaluation.calibration import CALIBRATED
from layerswap.evaluation.harness import check_task_names, load_tasks
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
from layerswap.evaluation.suites.suites import check_askable, write_suite
from layerswap.merge import make_plan
from layerswap.search.spec import Grid
from layerswap.study.inputs import existing_path
from layerswap.study.journal import INDEX, read_journal
from layerswap.study.step_functions import expert_of, prompt_options
from layerswap.study.steps import Graph, Step
from layerswap.study.storage import Storage
from layerswap.training.expert.hyperparameters import check_hyperparameters
from layerswap.training.expert.spec import check_expert
from layerswap.training.expert.trainable import rates_by_place, trained_parts
from layerswap.training.mix.schema import parse_mix


def check_plan(graph: Graph) -> None:
    """Refuse what the plan itself shows to be impossible; nothing is fetched.

    Raises:
        LayerswapError: a mix that is wrong or lacks a file, a suite without the language, a task
            or hyperparameters that do not exist, or a grid of which nothing fits.
    """
    for step in graph:
        settings = step.settings
        if step.kind == "data":
            _check_mix(step)
        elif step.kind == "train":
            _check_training(step)
        elif step.kind == "select" and "experts" in settings:
            if Path(settings["base"]).is_dir():
                _check_experts(step, local=True)
        elif step.kind == "select" and settings["tasks"]:
            check_task_names(settings["tasks"], _include(settings))
            _check_prompts(settings, settings["base"])
        elif step.kind == "evaluate":
            _check_grid(settings["base"], settings["grid"])
            _check_prompts(settings["evaluate"], settings["base"])
            for suite, language in _suites(settings):
                allow_code = settings["evaluate"]["allow_code"]
                check_askable(suite, language, allow_code=allow_code)
            if names := _tasks(settings):
                check_task_names(names, _include(settings["evaluate"]))


def check_here(left: Iterable[Step], *, device: bool) -> None:
    """Refuse what this machine shows to be impossible: data, the device, experts on the Hub.

    Args:
        left: the steps of the study that are not done.
        device: check the device too: steps run on this machine.

    Raises:
        EvaluationError: data of a benchmark that cannot be had, or no such device.
        LayerswapError: an expert that cannot be had or does not fit the base.
    """
    steps = list(left)
    evaluations = [step.settings for step in steps if step.kind == "evaluate"]
    for name in {settings["device"] for settings in evaluations} if device else ():
        open_device(name)
    for step in steps:
        if step.kind == "select" and step.settings.get("tasks"):
            load_tasks(step.settings["tasks"], include=_include(step.settings))
        if step.kind == "select" and "experts" in step.settings:
            _check_experts(step, local=False)
    written: set[tuple[str, str]] = set()
    for settings in evaluations:
        _check_metric(settings)
        spec = settings["evaluate"]
        for suite, language in sorted({*_suites(settings)} - written):
            with TemporaryDirectory() as folder:
                write_suite(
                    suite, [language], TaskFolder(Path(folder)), data=DataFolder.given(None),
                    shots=spec["num_fewshot"], allow_code=spec["allow_code"],
                    skip=lambda line: None, needed=True,
                )  # fmt: skip
            written.add((suite, language))


def refuse_other_study(graph: Graph, root: Path, storage: Storage | None) -> None:
    """Refuse a folder that another study is in; the same one, changed, resumes.

    Raises:
        StudyError: it holds another study, or the output of another command.
    """
    try:
        there = read_journal(root, storage).graph
    except StudyError:
        held = (root / INDEX).is_file() if storage is None else storage.read(INDEX) is not None
        if held:
            raise  # damaged: a study may still be in it
        return  # empty, or something that `StudyJournal.open` refuses
    name = there["tables"].settings.get("name") if "tables" in there else None
    if name != graph["tables"].settings["name"]:
        what = f"the study {name!r}" if name else "the steps of another command"
        raise StudyError(f"{root}: holds {what}; choose another output")


def _check_mix(step: Step) -> None:
    mix = parse_mix(step.settings["mix"], where=step.name)
    for source in mix.sources.values():
        if source.path is not None:
            existing_path(Path(step.settings["folder"]) / source.path)


def _check_experts(step: Step, *, local: bool) -> None:
    """Refuse experts, local ones or those on the Hub, that are not there or do not fit the base."""
    sources = [one for one in step.settings["experts"] if Path(one).is_dir() == local]
    if sources:
        named = {f"expert-{i}": source for i, source in enumerate(sources, 1)}
        recipe = {"base": step.settings["base"], "experts": named,
                  "soup": {"experts": [*named]}, "bake": True}  # fmt: skip
        make_plan(check_recipe(recipe, where=f"study, {step.name}"))


def _check_training(step: Step) -> None:
    spec = check_expert(expert_of(step.settings, ["data"] * len(step.settings["data"])),
                        where=step.name)  # fmt: skip
    check_hyperparameters(spec)
    if Path(spec.base).is_dir():
        layers = open_checkpoint(spec.base).layers
        trained_parts(spec, layers, Path())
        rates_by_place(spec.rates, layers)


def _check_grid(base: str, grid: Mapping[str, Any] | None) -> None:
    if grid and Path(base).is_dir():
        layers = open_checkpoint(base).layers
        if not any(zone_grid(layers, **Grid(**grid).sizes)):
            raise StudyError(f"grid: nothing of it fits into the {layers} layers of the base")


def _check_prompts(settings: Mapping[str, Any], base: str) -> None:
    """Refuse generation settings that are none, and a chat template that a local base lacks."""
    options = prompt_options(settings)
    _ = options.generation
    if options.apply_chat_template and Path(base).is_dir():
        options.tokenizer(load_tokenizer(Path(base), named="the base"))


def _check_metric(settings: Mapping[str, Any]) -> None:
    """Load the tasks that the study names: their data must be there, and the metric."""
    names, spec = _tasks(settings), settings["evaluate"]
    if not names:
        return
    metric, of = spec["metric"]
    for name, task in load_tasks(names, include=_include(spec))["tasks"].items():
        metrics = list(task.aggregation())
        if "acc" in metrics:
            metrics.append(CALIBRATED)
        filters = [one.name for one in task._filters] or ["none"]
        if metric not in metrics or of not in filters:
            raise EvaluationError(
                f"evaluate.metric: {name} has no [{metric}, {of}]; its metrics are "
                f"{', '.join(metrics)}, its filters {', '.join(filters)}"
            )


def _include(settings: Mapping[str, Any]) -> list[Path]:
    return [Path(one) for one in settings["include"]]


def _other_languages(settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The other languages that a step evaluates in, and their suites."""
    there = settings["evaluate"]["other_languages"]
    return (there["languages"], there["suites"]) if there else ([], [])


def _tasks(settings: Mapping[str, Any]) -> list[str]:
    """The tasks that are no suite's, in the language and in the others that have no suite."""
    languages, suites = _other_languages(settings)
    every = [settings["language"], *(() if suites else languages)]
    pairs = product(settings["evaluate"]["tasks"], every)
    return list(dict.fromkeys(task.format(language=one) for task, one in pairs))


def _suites(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The suites to run, each with a language."""
    languages, suites = _other_languages(settings)
    own = [settings["evaluate"]["suite"]] if settings["evaluate"]["suite"] else []
    return [*product(own, [settings["language"]]), *product(suites or own, languages)]
