"""Schema of `STUDY.yaml`, a whole experiment from data to tables."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveInt,
    field_validator,
    model_validator,
)

from layerswap.compose.schema import DTYPES
from layerswap.evaluation.settings import Asked
from layerswap.evaluation.suites.suites import parts_of
from layerswap.experiment.spec import Grid
from layerswap.ground.errors import EvaluationError, RecipeError
from layerswap.ground.strict import Strict, once
from layerswap.ground.yaml_file import nearest, parse_yaml, read_text, validate
from layerswap.reading.origins import NonEmpty
from layerswap.study.steps import Resources
from layerswap.training.expert.spec import Data, Lora, Seed, Side, Trained

TASK = "task"
"""The kind of the task experts. The language experts have their language as kind."""
StepKind = Literal["data", "train", "select", "change", "evaluate"]
USUAL: dict[StepKind, Resources] = {
    "train": Resources(cpus=4, gpus=1, memory_gb=64),
    "select": Resources(cpus=4, gpus=1, memory_gb=64),
    "evaluate": Resources(cpus=4, gpus=1, memory_gb=96),
}
"""Usual resources of the steps that run models on a device other than the processor."""
Baseline = Literal[
    "base", "experts", "soup", "weighted soup", "magnitude soup", "task arithmetic", "ties",
    "joint", "simultaneous", "partial", "partial task", "reverted", "soups", "multilingual soup",
]  # fmt: skip

TRAINED_BASELINES = ("joint", "simultaneous", "partial", "partial task")
"""The baselines that are trained on the data of the experts."""


class TrainingRun(Strict):
    """One training of an expert, with keys as in `EXPERT.yaml` (docs/training.md).

    `train` names the places that train. With a partition, the expert's kind decides its part.
    """

    preset: str | None = None
    hyperparameters: dict[str, Any] = {}
    effective_batch: PositiveInt | None = None
    save_every: PositiveInt = 5000
    limit: PositiveInt | None = None
    lora: Lora | None = None
    train: Trained | None = None
    seed: Seed = 0


class Turns(Strict):
    """Settings of simultaneous partition SFT, for the baseline of that name.

    `every` counts the optimiser steps of a turn. Each of several lengths is a baseline (paper 2,
    table A.3).
    """

    partition: Literal["A", "B", "C", "Z"] = "C"
    outside: Side | None = None  # trains the places outside the layers; None: the default side
    every: Annotated[
        list[PositiveInt],
        BeforeValidator(lambda value: [value] if isinstance(value, int) else value),
        Field(min_length=1),
        AfterValidator(once),
    ] = [1]


class Experts(Strict):
    """Experts of one kind, which exist or which the study trains."""

    data: Data | None = None  # a mix too: a ready recipe or a file
    runs: Annotated[list[TrainingRun], Field(min_length=1)] = [TrainingRun()]
    keep: PositiveInt = 1  # checkpoints; no run gives more than its share
    by: Asked = Asked()  # without tasks, the validation loss ranks
    # In place of the other keys: folders, adapters or Hub ids.
    experts: Annotated[list[NonEmpty], Field(min_length=1), AfterValidator(once)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _all_are_kept(cls, data: object) -> object:
        if not (isinstance(data, dict) and isinstance(data.get("experts"), list)):
            return data
        if more := ", ".join(f"`{key}`" for key in data if key != "experts"):
            raise ValueError(f"`experts` that exist are not trained; remove {more}")
        return {**data, "keep": max(1, len(data["experts"]))}

    @model_validator(mode="after")
    def _something_given(self) -> Experts:
        if self.data is None and self.experts is None:
            raise ValueError("give `data` to train on, or `experts` that exist")
        return self

    @property
    def trainings(self) -> list[TrainingRun]:
        """The runs; empty for experts that exist."""
        return self.runs if self.experts is None else []


class Translated(Strict):
    """A translator's files for one language."""

    test: NonEmpty | None = None  # a table: the test documents in English, in their order
    task: Data | None = None  # the data of the task in the language, or a mix of them


Start = Literal["base", "task expert", "language expert", "swap", "soup"]
"""Start of a training on labels: the base, an expert, the default swap, or the soup."""


FOLDS = 4
"""Parts of the cross-validation over the labelled rows."""


class Finish(Strict):
    """Trainings on labelled rows of a language, after the merges.

    `labels` has the data of each language, as the task's. Every start is trained by `run`. The
    start is chosen by cross-validation over the rows, in `folds` parts.
    """

    labels: Annotated[dict[NonEmpty, Data], Field(min_length=1)]
    starts: Annotated[list[Start], Field(min_length=1), AfterValidator(once)] = [
        "base", "task expert", "swap", "soup",
    ]  # fmt: skip
    run: TrainingRun = TrainingRun(hyperparameters={
        "learning_rate": 2e-5, "num_train_epochs": 3, "per_device_train_batch_size": 16,
        "lr_scheduler_type": "linear",
    })  # fmt: skip
    folds: Annotated[int, Field(ge=2)] = FOLDS


class OtherLanguages(Strict):
    """Other languages to evaluate the models of every language in (paper 1, tables 2 and 5).

    The models' own language is skipped. The suite of `evaluate` is the default.
    """

    languages: Annotated[list[NonEmpty], Field(min_length=1)]
    suites: list[NonEmpty] = []


def _read_metric(value: object) -> object:
    texts = [text for text in value if isinstance(text, str)] if isinstance(value, list) else []
    if len(texts) != 2 or texts != value:
        raise ValueError(
            "write a metric of lm-eval and its filter, such as [exact_match, none]; found "
            f"{value!r:.60}"
        )
    return value


class Benchmarks(Asked):
    """Benchmarks of a study: a suite, or lm-eval tasks in one folder.

    In names of tasks, `{language}` is replaced by the study's name of the language.
    """

    fewest = 2  # one to choose on, and one to report
    suite: str | None = None
    # The metric of `tasks` that is reported, and its filter.
    metric: Annotated[list[str], BeforeValidator(_read_metric)] = ["exact_match", "none"]
    # Share of the documents that compositions are chosen on, where no development split is
    # published; with `none` nothing is chosen.
    development: Annotated[float, Field(gt=0, lt=1)] | Literal["none"] = 0.5
    # Run programs that a model writes, in the sandbox; a command alone may set it, no file.
    allow_code: bool = False
    other_languages: OtherLanguages | None = None  # of the grid, the chosen compositions alone


class EvaluationSpec(Benchmarks):
    """Benchmarks as a study file names them: what cannot be asked is refused."""

    @field_validator("allow_code")
    @classmethod
    def _no_file_consents(cls, given: bool) -> bool:
        if given:
            raise ValueError("remove it; a file cannot allow programs, only --allow-code can")
        return given

    @model_validator(mode="after")
    def _tasks_or_suite(self) -> EvaluationSpec:
        there = self.other_languages.suites if self.other_languages else []
        for suite in filter(None, [self.suite, *there]):
            try:
                parts_of(suite)
            except EvaluationError as error:
                raise ValueError(str(error)) from None
        if bool(self.suite) == bool(self.tasks):
            raise ValueError("give either a suite or tasks")
        for task in self.tasks:
            try:
                task.format(language="x")
            except (KeyError, IndexError, ValueError):
                why = f"tasks: {task}: only {{language}} can be filled in"
                raise ValueError(why) from None
        same = next((task for task in self.tasks if "{language}" not in task), None)
        if self.other_languages and not there and same:
            raise ValueError(
                f"other_languages: {same} has no {{language}}, so it is the same in all"
            )
        if self.tasks and len(self.include) != 1:
            raise ValueError("tasks: give their one folder in `include`")
        return self


class TrainingResources(Resources):
    """Resources of a training, which accelerate may launch in several processes."""

    processes: PositiveInt = 1  # without `effective_batch`, the batch grows with them
    launch: NonEmpty = "ddp"  # configuration of accelerate: `ddp`, `fsdp2` or a file


class StudyResources(Strict):
    """Resources of the steps of each kind; keys that are not given have their usual values."""

    data: Resources = Resources()
    train: TrainingResources = TrainingResources()
    select: Resources = Resources()
    change: Resources = Resources()
    evaluate: Resources = Resources()

    def of(self, kind: StepKind, *, device: str) -> Resources:
        """Return the resources of a kind of step when models run on `device`."""
        usual = Resources() if device == "cpu" else USUAL.get(kind, Resources())
        if kind == "train" and device != "cpu" and self.train.processes > 1:
            usual = usual.model_copy(update={"gpus": self.train.processes})
        given = getattr(self, kind).model_dump(
            include=set(Resources.model_fields), exclude_unset=True
        )
        return usual.model_copy(update=given)


class Contenders(Strict):
    """Settings of the models that a study compares; `StudySpec` describes them."""

    pairs: Literal["all", "same"] = "all"
    partitions: Annotated[list[Literal["A", "B", "C", "Z"]], AfterValidator(once)] = []
    outside: Side | None = None
    baselines: Annotated[list[Baseline], AfterValidator(once)] = ["base", "experts", "soup"]
    ties: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=1)] = [0.2]
    soup_shares: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)] = [
        0.3, 0.5, 0.7, 0.9,
    ]  # fmt: skip
    scales: Annotated[list[Annotated[float, Field(gt=0, le=2)]], Field(min_length=1)] = [
        0.3, 0.5, 0.7, 1.0,
    ]  # fmt: skip
    device: str = "cpu"
    dtype: Literal[DTYPES] | None = None  # type: ignore[valid-type]


class StudySpec(Contenders):
    """A whole study.

    Attributes:
        base: folder or Hub id that all experts start from.
        languages: the language experts, by any code of their language.
        pairs: `all` pairs every kept task expert with every kept language expert (paper 1);
            `same` pairs the first with the first, the second with the second, and so on.
        grid: compositions to try beside the default; the best is chosen on development documents.
        partitions: partitions of the second paper, as compositions of the two experts.
        outside: the side that trains the places outside the layers in those partitions; the
            published choice by default.
        simultaneous: settings of that baseline.
        both: the training on both data sets; the first run of the language by default. Only
            `train.places` is used; it defaults to the language run's.
        lora: train the experts and the trained baselines with LoRA as well, from the first run
            of each (paper 2, table 3).
        baselines: models to compare with the swap. `partial`: experts that train their own part
            of a partition alone, each by itself and swapped (paper 2, tables 1 and 2).
            `partial task`: the task expert that trains its own part alone, by itself and swapped
            with the language expert.
            `reverted`: experts whose weights outside their own part are reset to the base
            (paper 2, section 6). `soups`: the soup of the kept language experts swapped with the
            soup of the kept task experts. `multilingual soup`: the same with the soup of the
            experts of all languages (paper 1, table 6).
        ties: densities of that baseline, each evaluated (Yadav et al., 2023, keep a fifth).
        soup_shares: shares of the task expert in the `weighted soup`; the best on development
            documents is reported.
        scales: factors of both deltas in `task arithmetic` (Ilharco et al., 2023); the best on
            development documents is reported.
        change: map the weights that fine-tuning changed (paper 1, figures 2 and 4 to 9).
        encoder: folder or Hub id of an encoder that sentence-transformers loads. Classifiers on its
            vectors are compared with the models of tasks with labels.
        translated: files that a translator made, by language. `test` adds the task experts on the
            translated test; `task` adds a task expert trained on the translated task.
        finish: trainings on labelled rows of a language, after the merges.
        cautions: sentences that the report shows below its verdict.
        merge: write the selected model of each language at the end.
        keep_checkpoints: `selected` deletes the checkpoints that no later step reads.
        device: device of the evaluation.
        slurm: parameters of jobs as submitit names them, such as `partition` and `account`; a
            key of `resources`, or `tables`, holds those of its steps alone.
    """

    name: NonEmpty
    description: str = ""
    base: NonEmpty
    task: Experts
    languages: Annotated[dict[NonEmpty, Experts], Field(min_length=1)]
    grid: Grid | None = None
    simultaneous: Turns = Turns()
    both: TrainingRun | None = None
    lora: Lora | None = None
    change: bool = True
    encoder: NonEmpty | None = None
    translated: dict[NonEmpty, Translated] = {}
    finish: Finish | None = None
    cautions: list[NonEmpty] = []
    evaluate: EvaluationSpec
    merge: bool = False
    keep_checkpoints: Literal["all", "selected"] = "all"
    resources: StudyResources = StudyResources()
    slurm: dict[str, Any] = {}

    @property
    def notes(self) -> list[str]:
        """Notes for the plan: choices without data, and commands in the file."""
        grid = self.grid and self.evaluate.development == "none"
        notes = ["development: none: the grid is not tried"] if grid else []
        parts = [part for part in (self.slurm, *self.slurm.values()) if isinstance(part, dict)]
        lines = [line for part in parts for line in part.get("setup") or ()]
        return notes + [f"slurm: setup: jobs on Slurm run {line!r}" for line in lines]

    @property
    def development(self) -> float | None:
        """The share of drawn development documents; None if nothing is chosen on any."""
        share = self.evaluate.development
        settings = {
            "weighted soup": self.soup_shares, "task arithmetic": self.scales, "ties": self.ties,
        }  # fmt: skip
        several = any(len(settings.get(baseline, ())) > 1 for baseline in self.baselines)
        return share if share != "none" and (self.grid or several) else None

    @property
    def kinds(self) -> dict[str, Experts]:
        """The experts of every kind: those of `task`, then those of each language."""
        return {TASK: self.task, **self.languages}

    @field_validator("languages")
    @classmethod
    def _names(cls, languages: dict[str, Experts]) -> dict[str, Experts]:
        for name in languages:
            if name == TASK or "/" in name:
                raise ValueError(f"{name!r} cannot be the name of a language")
        return languages

    @model_validator(mode="after")
    def _fits_together(self) -> StudySpec:
        for name, experts in self.languages.items():
            if self.pairs == "same" and experts.keep != self.task.keep:
                raise ValueError(
                    f"`pairs: same` needs as many experts of each kind, but the task keeps "
                    f"{self.task.keep} and {name} {experts.keep}"
                )
        finished = next((kind for kind, given in self.kinds.items() if given.experts), None)
        training = [
            f"baseline `{baseline}`" for baseline in self.baselines if baseline in TRAINED_BASELINES
        ]
        training += ["`lora`"] if self.lora else []
        training += ["`translated.task`"] if any(t.task for t in self.translated.values()) else []
        if finished and training:
            raise ValueError(f"{training[0]} needs training, but {finished} has no data; remove it")
        for name in ("partial", "partial task", "reverted"):
            if name in self.baselines and not self.partitions:
                raise ValueError(f"baseline `{name}` needs `partitions`")
        labelled = self.finish.labels if self.finish else ()
        for key, named in (("translated", self.translated), ("finish", labelled)):
            if strange := [name for name in named if name not in self.languages]:
                raise ValueError(f"{key}: {strange[0]} is none of the languages")
        tests = any(translated.test for translated in self.translated.values())
        if tests and not (self.evaluate.suite and "experts" in self.baselines):
            raise ValueError("translated: a test needs a suite, and the baseline `experts`")
        return self


def read_study(path: Path) -> StudySpec:
    """The study in a YAML file, whose paths are relative to the file."""
    data, lines = parse_yaml(read_text(path), str(path))
    if isinstance(data, dict) and isinstance(evaluate := data.get("evaluate"), dict):
        _locate_suites(evaluate, path.parent)
    expected = "a study is a mapping with `base`, `task` and `languages`"
    return validate(StudySpec, data, where=str(path), expected=expected, lines=lines)


def find_study(study: str) -> tuple[StudySpec, Path]:
    """Find a study by file or ready name; return it with the folder of its relative paths."""
    path = Path(study)
    if path.suffix in (".yaml", ".yml") or path.exists():
        return read_study(path), path.parent
    return read_study(ready_study(study)), Path()


def _locate_suites(evaluate: dict[str, Any], folder: Path) -> None:
    """Make the files of suites absolute, in place; they are relative to the study's file."""

    def located(suite: Any) -> Any:
        return str((folder / suite).absolute()) if str(suite).endswith(".yaml") else suite

    if isinstance(evaluate.get("suite"), str):
        evaluate["suite"] = located(evaluate["suite"])
    there = evaluate.get("other_languages")
    if isinstance(there, dict) and isinstance(there.get("suites"), list):
        there["suites"] = [located(suite) for suite in there["suites"]]


def ready_study(name: str) -> Path:
    """The file of a ready study."""
    known = ready_studies()
    if name not in known:
        hint = nearest(name, list(known)) or f"; ready studies: {', '.join(known)}"
        raise RecipeError(f"{name}: no such file or ready study{hint}")
    return known[name]


def ready_studies() -> dict[str, Path]:
    """The files of the studies that ship with the package, by name."""
    folder = Path(str(resources.files("layerswap.study") / "ready"))
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}
