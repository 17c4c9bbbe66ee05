"""Checks of a study before its first step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from layerswap.checkpoint import open_checkpoint
from layerswap.checkpoint.loading import load_tokenizer, open_device
from layerswap.compose.presets import zone_grid
from layerswap.compose.recipe import check_recipe
from layerswap.evaluation.harness import check_task_names, load_tasks
from layerswap.evaluation.metrics import ADDED
from layerswap.evaluation.settings import PromptOptions
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
from layerswap.evaluation.suites.suites import check_askable, write_suite
from layerswap.experiment.spec import Grid
from layerswap.ground.errors import EvaluationError, LayerswapError, StudyError
from layerswap.ground.types import Log
from layerswap.merge import make_plan
from layerswap.reading.origins import open_rows, where_filter
from layerswap.study.journal import INDEX, Storage, read_journal
from layerswap.study.plan import existing_path, files_of
from layerswap.study.step_functions import asked_suites, asked_tasks, expert_of
from layerswap.study.steps import Graph, Step
from layerswap.training.expert.hyperparameters import check_hyperparameters
from layerswap.training.expert.job import load_rows
from layerswap.training.expert.spec import Files, check_expert
from layerswap.training.expert.trainable import trained_parts
from layerswap.training.mix.examples import ExampleMaker
from layerswap.training.mix.schema import parse_mix

READER = re.compile(r"^dataset_path: *(\S+)", re.MULTILINE)
"""The reader of a task's data: a format of files, or a data set of the Hub."""
FIRST = 100
"""Rows of a source that are read before the first step."""


def check_plan(graph: Graph) -> None:
    """Check mixes, trainings, experts, tasks, suites and the grid, without fetching anything."""
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


def check_here(left: Iterable[Step], *, device: bool, log: Log = lambda line: None) -> None:
    """Check that this machine has the data, the device, and the experts of the Hub.

    `left` are the steps that are not done. The device is checked only if they run here.
    """
    steps = list(left)
    evaluations = [step.settings for step in steps if step.kind == "evaluate"]
    if device and evaluations:
        _check_device(evaluations[0]["device"])
    check_data(steps, fetch=True, log=log)
    for step in steps:
        if step.kind == "select" and step.settings.get("tasks"):
            load_tasks(step.settings["tasks"], include=_include(step.settings))
        if step.kind == "select" and "experts" in step.settings:
            _check_experts(step, local=False)


def check_data(left: Iterable[Step], *, fetch: bool, log: Log = lambda line: None) -> None:
    """Check the files, columns, splits and labels that the steps will read.

    Without `fetch`, only those on this machine. `log` receives a line for each benchmark that is
    left out, has no development split, or is elsewhere.
    """
    written: set[tuple[str, str]] = set()
    for step in left:
        settings = step.settings
        if step.kind == "data":
            _check_sources(step)
        elif step.kind == "train":
            for given in (one["given"] for one in settings["data"] if "given" in one):
                load_rows(Files(**given) if isinstance(given, dict) else given, folder=Path())
        elif step.kind == "evaluate":
            if fetch or _reads_files(_include(settings["evaluate"])):
                _check_metric(settings)
            for suite, language in sorted({*_suites(settings)} - written):
                _check_suite(suite, language, settings["evaluate"], fetch=fetch, log=log)
                written.add((suite, language))


def _reads_files(include: Iterable[Path]) -> bool:
    """True if all tasks of some folders read local files, and no data set of the Hub."""
    texts = [
        path.read_text("utf-8", errors="replace")
        for folder in include
        for path in files_of(folder)
        if path.suffix in (".yaml", ".yml")
    ]
    readers = [one for text in texts for one in READER.findall(text)]
    return bool(readers) and {*readers} <= {"json", "csv", "parquet", "text"}


def _check_device(device: str) -> None:
    try:
        open_device(device)
    except EvaluationError as error:
        why = str(error).removesuffix("; 'cpu' always works")
        raise EvaluationError(f"{why}; run with --device cpu, or where the device is") from None


def _check_suite(
    suite: str, language: str, spec: Mapping[str, Any], *, fetch: bool, log: Log
) -> None:
    """Write the tasks of a suite into a folder that is thrown away."""
    with TemporaryDirectory() as folder:
        write_suite(
            suite, [language], TaskFolder(Path(folder)),
            data=DataFolder.given(None, fetch=fetch), shots=spec["num_fewshot"],
            allow_code=spec["allow_code"], skip=log, needed=True,
            development=spec["development"] is not None,
        )  # fmt: skip


def _check_sources(step: Step) -> None:
    """Read the first rows of a mix's local sources, and check their columns."""
    mix = parse_mix(step.settings["mix"], where=step.name)
    for name, source in mix.sources.items():
        if source.id is not None:
            continue
        try:
            rows = open_rows(source, folder=Path(step.settings["folder"]), limit=FIRST).rows
            where_filter(source, rows)
            ExampleMaker(source, name).check(rows)
        except LayerswapError as error:
            raise error.within(f"{step.name}, source {name!r}") from None


def refuse_other_study(graph: Graph, root: Path, storage: Storage | None) -> None:
    """Refuse the folder of another study; a changed version of the same study resumes."""
    try:
        there = read_journal(root, storage).graph
    except StudyError:
        held = (root / INDEX).is_file() if storage is None else storage.read(INDEX) is not None
        if held:
            raise  # it is damaged, and may still hold a study
        return  # it is empty, or `StudyJournal.open` refuses it
    name = there["tables"].settings.get("name") if "tables" in there else None
    if name != graph["tables"].settings["name"]:
        what = f"the study {name!r}" if name else "the steps of another command"
        raise StudyError(f"{root}: holds {what}; choose another output")


def _check_mix(step: Step) -> None:
    mix = parse_mix(step.settings["mix"], where=step.name)
    for source in mix.sources.values():
        for path in source.paths:
            existing_path(Path(step.settings["folder"]) / path)


def _check_experts(step: Step, *, local: bool) -> None:
    """Refuse experts, local or on the Hub, that are missing or do not fit the base."""
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
        trained_parts(spec, open_checkpoint(spec.base).layers, Path())


def _check_grid(base: str, grid: Mapping[str, Any] | None) -> None:
    if grid and Path(base).is_dir():
        layers = open_checkpoint(base).layers
        if not any(zone_grid(layers, **Grid(**grid).sizes)):
            raise StudyError(f"grid: no composition fits into the {layers} layers of the base")


def _check_prompts(settings: Mapping[str, Any], base: str) -> None:
    """Refuse a chat template that a local base does not have."""
    prompts = PromptOptions.taken_from(settings)
    if prompts.apply_chat_template and Path(base).is_dir():
        prompts.with_chat_template(load_tokenizer(Path(base), named="the base"))


def _check_metric(settings: Mapping[str, Any]) -> None:
    """Load the tasks that the study names, and check that they have the metric."""
    names, spec = _tasks(settings), settings["evaluate"]
    if not names:
        return
    metric, of = spec["metric"]
    for name, task in load_tasks(names, include=_include(spec))["tasks"].items():
        metrics = list(task.aggregation())
        metrics += [name for name, added in ADDED.items() if added.needs in metrics]
        filters = [one["name"] for one in task.get_config("filter_list") or [{"name": "none"}]]
        if metric not in metrics or of not in filters:
            raise EvaluationError(
                f"evaluate.metric: {name} has no [{metric}, {of}]; its metrics are "
                f"{', '.join(metrics)}, its filters {', '.join(filters)}"
            )


def _include(settings: Mapping[str, Any]) -> list[Path]:
    return [Path(one) for one in settings["include"]]


def _tasks(settings: Mapping[str, Any]) -> list[str]:
    """The study's own tasks, in all languages that they are asked in."""
    languages = [one for suites, of in asked_suites(settings) if not suites for one in of]
    return list(asked_tasks(settings, languages))


def _suites(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The suites to run, each with a language."""
    return [pair for asked in asked_suites(settings) for pair in product(*asked)]
