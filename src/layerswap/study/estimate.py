"""Estimated costs of the steps of a study: hours, memory and disk.

They follow from the parameters of the base, the device, the rows of the data and the documents of
the benchmarks.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from layerswap.errors import StudyError
from layerswap.evaluation.suites.suites import parts_of
from layerswap.study.conditions import models_to_run
from layerswap.study.inputs import files_of
from layerswap.study.plan import plan_study
from layerswap.study.sizes import ADAPTER, DataSize, Size, data_size, lines_of, mix_size, size_of
from layerswap.study.spec import EvaluationSpec, Experts, StudySpec, TrainingRun
from layerswap.study.steps import Graph, Step
from layerswap.training.expert.hyperparameters import autocast_pays
from layerswap.training.expert.spec import PRESETS, Lora

BATCH = 32
"""Texts that are generated at a time."""
USUAL = DataSize(80_000, 512)
"""Assumed rows of a data set and tokens of a row (paper 2, section 3.4)."""
STARTING = 15.0
"""Seconds until a training or an evaluation has imported its libraries and loaded its models."""
CHOSEN_OF_GRID = 2
"""Compositions of a pair's grid evaluated in other languages: the chosen one and the best."""


class Speed(NamedTuple):
    """The usual speed of a device.

    Attributes:
        read: floating-point operations a second in training and in reading.
        loaded: bytes of weights that it loads a second when it generates.
        name: words for the caption of a plan.
    """

    read: float
    loaded: float
    name: str


AUTOCAST = 3
"""Speed-up of training on a processor that multiplies in bfloat16."""
GPU = Speed(1.2e14, 1e12, "on an A100")
"""About 40% of its peak in bfloat16, and half of its memory bandwidth."""


def speed_of(device: str) -> Speed:
    """The speed of a device: of this machine's processors in float32, or of a GPU."""
    if device != "cpu":
        return GPU
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Speed(4e10 * (cores or 1), 5e9, f"on {cores or 1} processors")


@dataclass(frozen=True)
class Documents:
    """The size of a benchmark.

    Attributes:
        number: of documents.
        read: tokens of one document, and of one exemplar.
        written: tokens generated for it; 0 if answers are only scored.
    """

    number: int
    read: int
    written: int = 0


OTHER = Documents(1000, 300, 128)
"""Usual size of a task whose benchmark states none."""


@dataclass(frozen=True)
class Costs:
    """Costs of trainings and evaluations of one base on one device.

    Attributes:
        size: of the base.
        speed: of the device.
        bytes_each: bytes of a weight where models are evaluated.
        documents: of the study's own tasks, by their name in the study.
    """

    size: Size
    speed: Speed
    bytes_each: int
    documents: Mapping[str, Documents] = field(default_factory=dict)

    def training_hours(self, run: TrainingRun, sets: Sequence[DataSize]) -> float:
        """Hours of a training.

        2 operations a parameter and token forward, 2 backward, and 2 for each gradient of a
        weight that trains.

        Args:
            run: the training.
            sets: its data, one after the other or mixed.
        """
        longest = _setting(run, "max_length")
        rows = [min(one.rows, run.limit or one.rows) for one in sets]
        tokens = sum(
            count * min(one.tokens, longest or one.tokens)
            for count, one in zip(rows, sets, strict=True)
        )
        times = _examples(run, sets) / (sum(rows) or 1)
        each = 4 + 2 * self.size.trained(run)
        able = self.speed != GPU and autocast_pays(round(self.size.billions * 1e9))
        lower = able and run.hyperparameters.get("bf16", True) is not False
        speed = self.speed.read * (AUTOCAST if lower else 1)
        seconds = each * self.size.billions * 1e9 * tokens * times / speed
        return (STARTING + seconds) / 3600

    def checkpoints(self, run: TrainingRun, sets: Sequence[DataSize]) -> int:
        """The number of checkpoints that a training saves."""
        return max(1, _examples(run, sets) // run.save_every)

    def checkpoint_gb(self, run: TrainingRun) -> float:
        """Disk of one checkpoint: whole weights in float32, or an adapter."""
        return 4 * self.size.billions * (ADAPTER if run.lora else 1)

    def training_disk_gb(self, run: TrainingRun, sets: Sequence[DataSize]) -> float:
        """Disk of a training: its output, checkpoints, and the two moments of one optimiser."""
        many = 1 + self.checkpoints(run, sets)
        moments = 8 * self.size.billions * self.size.trained(run)
        return many * self.checkpoint_gb(run) + moments

    def training_memory_gb(self, run: TrainingRun) -> float:
        """Memory of a training without activations: weights, gradients and two moments.

        With LoRA on a GPU, the frozen weights take two bytes each.
        """
        held = 2 if run.lora and self.speed == GPU else 4
        return self.size.billions * (held + 12 * self.size.trained(run))

    def evaluation_hours(self, spec: EvaluationSpec, models: float) -> float:
        """Hours of evaluating models in one language.

        2 operations a parameter and token that is read; the weights are loaded once for each
        token that a batch generates.

        Args:
            spec: the benchmarks.
            models: their number; compositions that share layers count as less.
        """
        seconds = 0.0
        for documents, shots in self._benchmarks(spec):
            number = min(documents.number, spec.limit or documents.number)
            read = number * documents.read * (1 + shots) * 2 * self.size.billions * 1e9
            loaded = self.bytes_each * self.size.billions * 1e9
            seconds += read / self.speed.read
            seconds += number * documents.written * loaded / self.speed.loaded / BATCH
        return (STARTING + models * seconds) / 3600 if seconds else 0.0

    def evaluation_memory_gb(self) -> float:
        """Memory of two experts and their compositions, which share their layers."""
        return 2.5 * self.bytes_each * self.size.billions

    def _benchmarks(self, spec: EvaluationSpec) -> Iterator[tuple[Documents, int]]:
        """The documents of each benchmark, and its examples in a prompt."""
        if spec.suite is None:
            yield from (
                (self.documents.get(one, OTHER), spec.num_fewshot or 0) for one in spec.tasks
            )
            return
        for part in parts_of(spec.suite):
            if not part.benchmark.runs_code or spec.allow_code:
                shots = part.shots if spec.num_fewshot is None else spec.num_fewshot
                size = part.benchmark.size
                yield Documents(size.documents, size.read, size.written), shots


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a step.

    Attributes:
        hours: time on the device that it is planned for, h.
        disk_gb: size of its output when the study has ended, GB.
        memory_gb: memory of the device, GB, without activations.
        passing_gb: further disk that is free again when the study has ended, GB.
    """

    hours: float = 0
    disk_gb: float = 0
    memory_gb: float = 0
    passing_gb: float = 0


@dataclass(frozen=True)
class StudyCosts:
    """The estimated costs of a study.

    Attributes:
        costs: their arithmetic.
        steps: the cost of each step, by name.
        disk_gb: disk when the study has ended, GB.
        passing_gb: further disk while it runs, GB.
    """

    costs: Costs
    steps: Mapping[str, Estimate]
    disk_gb: float
    passing_gb: float


def cost_study(spec: StudySpec, graph: Graph) -> StudyCosts:
    """Estimate the costs of a study from its plan; nothing is fetched."""
    base = next(step.settings["base"] for step in graph if step.kind == "evaluate")
    whole = spec.dtype == "float32" or (spec.dtype is None and spec.device == "cpu")
    costs = Costs(
        size_of(spec, base), speed_of(spec.device), 4 if whole else 2, dict(_own_tasks(graph))
    )
    estimator = _Estimator(spec, graph, costs)
    steps = {step.name: estimator.estimate(step) for step in graph}
    # Checkpoints of the runs of one kind are on the disk together, until some are selected.
    passing: dict[str, float] = defaultdict(float)
    for step in graph:
        selection = estimator.selection_after(step)
        passing[(selection or step).name] += steps[step.name].passing_gb
    disk = sum(estimate.disk_gb for estimate in steps.values())
    return StudyCosts(costs, steps, disk, max(passing.values()))


def smaller_disks(spec: StudySpec, folder: Path) -> dict[str, float]:
    """Disk of the same study with other settings, GB, by the change that saves disk.

    Args:
        spec: the study.
        folder: its paths are relative to this folder.
    """
    selected = spec.model_copy(update={"keep_checkpoints": "selected"})
    changed = {} if spec == selected else {"keep_checkpoints: selected": selected}

    def adapted(experts: Experts) -> Experts:
        runs = [run.model_copy(update={"lora": run.lora or Lora()}) for run in experts.runs]
        return experts.model_copy(update={"runs": runs})

    languages = {name: adapted(experts) for name, experts in selected.languages.items()}
    both = selected.both and selected.both.model_copy(update={"lora": Lora()})
    kinds = {"task": adapted(selected.task), "languages": languages, "both": both, "lora": None}
    changed["keep_checkpoints: selected, and lora: {} in every run"] = selected.model_copy(
        update=kinds
    )
    disks = {}
    for change, study in changed.items():
        with suppress(StudyError):  # two runs that differ by their seed alone become one
            costs = cost_study(study, plan_study(study, folder))
            disks[change] = costs.disk_gb + costs.passing_gb
    return disks


class _Estimator:
    """Estimates the steps of one study."""

    def __init__(self, spec: StudySpec, graph: Graph, costs: Costs) -> None:
        self.spec, self.graph, self.costs = spec, graph, costs

    def estimate(self, step: Step) -> Estimate:
        """The cost of a step."""
        if step.kind == "train":
            return self._training(step)
        if step.kind == "select" and step.settings.get("tasks"):
            return self._selection(step)
        if step.kind == "evaluate":
            memory = self.costs.evaluation_memory_gb()
            return Estimate(self._language_hours(step.settings), 0.1, memory)
        return Estimate(disk_gb={"data": 0.2, "change": 0.1}.get(step.kind, 0))

    def selection_after(self, training: Step) -> Step | None:
        """The step that selects from the checkpoints of a training, if any."""
        steps = (step for step in self.graph if step.kind == "select")
        return next((step for step in steps if training.name in step.needs), None)

    def _training(self, step: Step) -> Estimate:
        costs, run, sets = self.costs, _run_of(step), self._data_of(step)
        disk = kept = costs.training_disk_gb(run, sets)
        selection = self.selection_after(step)
        if selection is None and step.delete_checkpoints:
            kept = costs.checkpoint_gb(run)
        elif selection is not None and selection.delete_checkpoints:
            share = selection.settings["keep"] / len(selection.needs)
            kept = costs.checkpoint_gb(run) * share
        hours, memory = costs.training_hours(run, sets), costs.training_memory_gb(run)
        return Estimate(hours, min(kept, disk), memory, max(0.0, disk - kept))

    def _selection(self, step: Step) -> Estimate:
        runs = [self.graph[name] for name in step.needs]
        checkpoints = sum(self.costs.checkpoints(_run_of(run), self._data_of(run)) for run in runs)
        tasks = EvaluationSpec(
            tasks=step.settings["tasks"], include=["."], limit=step.settings["limit"]
        )
        hours = self.costs.evaluation_hours(tasks, checkpoints)
        return Estimate(hours, memory_gb=self.costs.evaluation_memory_gb() / 2.5)

    def _language_hours(self, settings: Mapping[str, Any]) -> float:
        """Hours of evaluating a language's models, in it and in the other languages."""
        spec = self.spec.evaluate
        kept = {kind: self.spec.kinds[kind].keep for kind in settings["kinds"]}
        hours = self.costs.evaluation_hours(spec, models_to_run(settings, kept))
        if (there := spec.other_languages) is not None:
            models = models_to_run({**settings, "grid": None}, kept, more=CHOSEN_OF_GRID)
            suites: list[str | None] = [*there.suites]
            for suite in suites or [spec.suite]:
                same = spec.model_copy(update={"suite": suite})
                others = [one for one in there.languages if one != settings["language"]]
                hours += len(others) * self.costs.evaluation_hours(same, models)
        return hours

    def _data_of(self, step: Step) -> list[DataSize]:
        """The sizes of the data sets of a training."""
        sizes = []
        for data in step.settings["data"]:
            if "step" in data:
                settings = self.graph[data["step"]].settings
                sizes.append(mix_size(settings["mix"], Path(settings["folder"]), USUAL))
            else:
                sizes.append(data_size(data["given"], USUAL))
        return sizes


def _run_of(step: Step) -> TrainingRun:
    """The run of a training, whose settings have further keys."""
    keys = TrainingRun.model_fields
    return TrainingRun(**{key: value for key, value in step.settings.items() if key in keys})


def _own_tasks(graph: Graph) -> Iterator[tuple[str, Documents]]:
    """The documents of the study's own tasks whose YAML names a file of JSON Lines."""
    for step in graph:
        asked = step.settings["evaluate"] if step.kind == "evaluate" else step.settings
        for task in asked.get("tasks", ()):
            name = task.format(language=step.settings.get("language"))
            task_file = next(filter(None, (_task_file(one, name) for one in asked["include"])), {})
            files = (task_file.get("dataset_kwargs") or {}).get("data_files") or {}
            split = task_file.get("test_split") or task_file.get("validation_split")
            file = files.get(split) if isinstance(files, dict) else files
            if not (isinstance(file, str) and Path(file).is_file() and file.endswith("jsonl")):
                continue
            settings = task_file.get("generation_kwargs") or {}
            writes = task_file.get("output_type") == "generate_until"
            yield task, Documents(
                lines_of(Path(file)), OTHER.read,
                settings.get("max_gen_toks", OTHER.written) if writes else 0,
            )  # fmt: skip


def _task_file(folder: str, task: str) -> dict[str, Any] | None:
    """The configuration of a task in a folder of YAMLs that need no tags of lm-eval."""
    for path in files_of(Path(folder)):
        if path.suffix not in (".yaml", ".yml"):
            continue
        try:
            content = yaml.safe_load(path.read_text("utf-8"))
        except (yaml.YAMLError, ValueError):
            continue
        if isinstance(content, dict) and content.get("task") == task:
            return content
    return None


def _examples(run: TrainingRun, sets: Sequence[DataSize]) -> int:
    """The number of examples that a training sees."""
    steps, epochs = _setting(run, "max_steps"), run.hyperparameters.get("num_train_epochs", 1)
    if steps is not None:
        batch = run.effective_batch or _setting(run, "per_device_train_batch_size") or 8
        return steps * batch
    times = epochs if isinstance(epochs, int | float) and epochs > 0 else 1
    return int(times * sum(min(one.rows, run.limit or one.rows) for one in sets))


def _setting(run: TrainingRun, name: str) -> int | None:
    """A positive hyperparameter, or None; other values are refused elsewhere."""
    value = {**PRESETS.get(run.preset or "", {}), **run.hyperparameters}.get(name)
    return value if isinstance(value, int) and value > 0 else None
