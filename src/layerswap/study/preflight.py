"""What can be known of a study before its first step, so that nothing is trained in vain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from layerswap.checkpoint import open_checkpoint
from layerswap.compose.presets import zone_grid
from layerswap.engine.devices import open_device
from layerswap.errors import EvaluationError, StudyError
from layerswap.evaluation.harness import check_task_names, load_tasks
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
from layerswap.evaluation.suites.suites import check_askable, write_suite
from layerswap.study.journal import INDEX, StudyJournal, read_journal
from layerswap.study.step_functions import expert_of
from layerswap.study.steps import Graph, Step
from layerswap.study.storage import Storage
from layerswap.training.expert.hyperparameters import check_hyperparameters
from layerswap.training.expert.spec import ExpertSpec, check_expert
from layerswap.training.expert.trainable import rates_by_place, trained_parts


def check_plan(graph: Graph) -> None:
    """Refuse what the plan itself shows to be impossible; nothing is fetched.

    Raises:
        LayerswapError: a suite that has not the language, a task that is not there,
            hyperparameters that do not exist, or a grid of which nothing fits.
    """
    for step in graph:
        if step.kind == "train":
            data = ["data" for _ in step.settings["data"]]
            _check_training(check_expert(expert_of(step.settings, data), where=step.name))
        elif step.kind == "select" and step.settings["tasks"]:
            check_task_names(step.settings["tasks"], _include(step.settings))
        elif step.kind == "judge":
            _check_grid(step)
            for suite, language in _suites(step):
                check_askable(suite, language, allow_code=step.settings["judge"]["allow_code"])
            _check_tasks(step)


def check_here(left: Sequence[Step], *, device: bool) -> None:
    """Refuse what this machine shows to be impossible: benchmark data and the device.

    Args:
        left: the steps of the study that are not done.
        device: whether steps run on this machine, and so on its device.

    Raises:
        EvaluationError: data of a benchmark that cannot be had, or no such device.
    """
    judged = [step for step in left if step.kind == "judge"]
    for where in {step.settings["device"] for step in judged} if device else ():
        open_device(where)
    for step in left:
        if step.kind == "select" and step.settings["tasks"]:
            load_tasks(step.settings["tasks"], include=_include(step.settings))
    for step in judged:
        _check_metric(step)
    asked: set[tuple[str, str]] = set()
    with TemporaryDirectory() as folder:
        for step in judged:
            judge = step.settings["judge"]
            for suite, language in sorted({*_suites(step)} - asked):
                write_suite(
                    suite, [language], TaskFolder(Path(folder)), data=DataFolder.given(None),
                    shots=judge["shots"], allow_code=judge["allow_code"],
                    skip=lambda line: None, needed=True,
                )  # fmt: skip
            asked.update(_suites(step))


def refuse_other_study(graph: Graph, root: Path, storage: Storage | None) -> None:
    """Refuse a folder that another study is in; the same one, changed, goes on.

    Raises:
        StudyError: it holds another study, or what another command wrote.
    """
    try:
        there: StudyJournal = read_journal(root, storage)
    except StudyError:
        held = (root / INDEX).is_file() if storage is None else storage.read(INDEX) is not None
        if held:
            raise  # damaged: a study may still be in it
        return  # nothing yet, or something that `Journal.open` refuses
    other = there.graph.by_name.get("tables")
    name = other.settings.get("name") if other else None
    if name != graph["tables"].settings["name"]:
        what = f"the study {name!r}" if name else "the steps of another command"
        raise StudyError(f"{root}: holds {what}; choose another output")


def _check_training(spec: ExpertSpec) -> None:
    check_hyperparameters(spec)
    if Path(spec.base).is_dir():
        layers = open_checkpoint(spec.base).layers
        trained_parts(spec, layers, Path())
        rates_by_place(spec.rates, layers)


def _check_metric(step: Step) -> None:
    """Load tasks of one's own: their data must be there, and the metric that counts."""
    judge = step.settings["judge"]
    names = _own_tasks(step)
    if not names:
        return
    loaded = load_tasks(names, include=_include(judge))
    for name, task in loaded["tasks"].items():
        metrics = list(task.aggregation())
        filters = [one.name for one in task._filters] or ["none"]
        metric, of = judge["metric"]
        if metric not in metrics or of not in filters:
            raise EvaluationError(
                f"judge.metric: {name} has no [{metric}, {of}]; its metrics are "
                f"{', '.join(metrics)}, its filters {', '.join(filters)}"
            )


def _include(settings: Mapping[str, Any]) -> list[Path]:
    return [Path(one) for one in settings.get("include", ())]


def _check_grid(step: Step) -> None:
    base, grid = step.settings["base"], step.settings["grid"]
    if grid and Path(base).is_dir():
        layers = open_checkpoint(base).layers
        if not any(zone_grid(layers, **grid)):
            raise StudyError(f"grid: nothing of it fits into the {layers} layers of the base")


def _check_tasks(step: Step) -> None:
    names = _own_tasks(step)
    if names:
        check_task_names(names, _include(step.settings["judge"]))


def _own_tasks(step: Step) -> list[str]:
    """The tasks that are no suite's, of the language and of the others that it is judged in."""
    judge = step.settings["judge"]
    there = judge["elsewhere"] or {"languages": [], "suites": []}
    languages = [step.settings["language"], *(() if there["suites"] else there["languages"])]
    names = [task.format(language=one) for task, one in product(judge["tasks"], languages)]
    return list(dict.fromkeys(names))


def _suites(step: Step) -> list[tuple[str, str]]:
    """What is asked of ready suites, in which languages."""
    judge = step.settings["judge"]
    there = judge["elsewhere"] or {"languages": [], "suites": []}
    own = [judge["suite"]] if judge["suite"] else []
    return [
        *product(own, [step.settings["language"]]),
        *product(there["suites"] or own, there["languages"]),
    ]
