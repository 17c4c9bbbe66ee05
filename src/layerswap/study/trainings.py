"""The steps that train experts, and those that select among their checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt, field_serializer

from layerswap.checkpoint.hub import TRAINING
from layerswap.checkpoint.loading import load_tokenizer, open_device
from layerswap.compose.recipe import check_recipe
from layerswap.compose.schema import Where
from layerswap.evaluation.settings import Asked, EvaluationSettings
from layerswap.ground.commit import write_json
from layerswap.ground.errors import EvaluationError, StudyError
from layerswap.ground.lease import Owner, taken
from layerswap.ground.strict import Strict
from layerswap.ground.types import Log
from layerswap.merge.api import make_plan
from layerswap.study.inputs import layers_of
from layerswap.study.kind import Kind, given
from layerswap.study.mixes import MIX
from layerswap.study.runner import Context
from layerswap.study.spec import StepKind, TrainingRun
from layerswap.training.expert.hyperparameters import check_hyperparameters, launch_training
from layerswap.training.expert.job import TrainingRows, load_rows
from layerswap.training.expert.spec import Files, Side, check_expert

EXPERT, SELECTION = "expert", "selection.json"
DELETED = "deleted.json"
"""File in the folder of a training that lists the checkpoints left after others were deleted."""


class TrainedOn(Strict):
    """A data set of a training: a mix that a step builds, or data that exist."""

    step: str | None = None
    given: str | dict[str, str] | None = None  # a folder, or files by their part

    def at(self, inputs: Mapping[str, Path]) -> Any:
        """The data in the form of `EXPERT.yaml`; `inputs` has the folders of steps by name."""
        return str(inputs[self.step] / MIX) if self.step else self.given

    def rows(self, inputs: Mapping[str, Path]) -> TrainingRows:
        """Load the rows."""
        data = self.at(inputs)
        return load_rows(Files(**data) if isinstance(data, dict) else data, folder=Path())


class InTurns(Strict):
    """Settings of a training by simultaneous partition SFT."""

    partition: Literal["A", "B", "C", "Z"]
    outside: Side | None = None
    every: PositiveInt
    places: list[Where] | None = None


class Launch(Strict):
    """Processes that accelerate launches, and its configuration; None is for the CPU."""

    processes: PositiveInt
    configuration: str | None = None


class TrainStep(Kind, TrainingRun):
    """Trains an expert, or resumes an interrupted training."""

    kind: ClassVar[str] = "train"
    resources: ClassVar[StepKind] = "train"
    base: str
    data: list[TrainedOn]
    turns: InTurns | None = None
    launch: Launch | None = None

    @field_serializer("data")
    def _data_as_given(self, data: list[TrainedOn]) -> list[dict[str, Any]]:
        return [given(data_set) for data_set in data]

    @field_serializer("turns")
    def _turns_as_given(self, turns: InTurns | None) -> dict[str, Any] | None:
        return None if turns is None else given(turns)

    def expert(self, sets: Sequence[Any]) -> dict[str, Any]:
        """The expert that the step trains on data sets, in the form of `EXPERT.yaml`."""
        own = self.model_dump(mode="json", include={"base", *TrainingRun.model_fields})
        spec = {key: value for key, value in own.items() if value is not None}
        if self.turns is not None:
            part = given(self.turns)
            turns = {"task": sets[0], "language": sets[1], "every": part.pop("every")}
            return {**spec, "simultaneous": turns, "train": part}
        return {**spec, **({"data": sets[0]} if len(sets) == 1 else {"mix": list(sets)})}

    def check(self, name: str) -> None:
        """Check the expert and its hyperparameters, and its places if the base is local."""
        from layerswap.training.expert.trainable import trained_parts

        spec = check_expert(self.expert(["data"] * len(self.data)), where=name)
        check_hyperparameters(spec)
        if Path(spec.base).is_dir():
            trained_parts(spec, layers_of(spec.base), Path())

    def check_data(self, name: str, *, fetch: bool, log: Log, seen: set[tuple[str, str]]) -> None:
        """Read the rows of data that exist."""
        for data in self.data:
            if data.given is not None:
                data.rows({})

    def run(self, context: Context) -> None:
        """Train, or resume."""
        sets = [data.at(context.inputs) for data in self.data]
        out = context.folder / EXPERT
        context.log("reading the base and the rows")
        self.fit(self.expert(sets), out, context)

    def fit(self, spec: dict[str, Any], out: Path, context: Context) -> None:
        """Train an expert, in the form of `EXPERT.yaml`, or resume its training."""
        from layerswap.training.expert import trainer
        from layerswap.training.expert.save import CHECKPOINTS

        checked = check_expert(spec, where=context.step.name)
        resume = (out / TRAINING).is_file()
        if self.launch is not None:
            launch_training(spec, out, self.launch.model_dump(), resume=resume)
        else:
            trainer.train(checked, out, resume=resume, log=context.log)
        if context.step.delete_checkpoints:
            shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)


class SelectStep(Kind, EvaluationSettings):
    """Ranks the checkpoints of several trainings, and writes the names of the best.

    Experts that exist are written without a ranking.
    """

    kind: ClassVar[str] = "select"
    resources: ClassVar[StepKind] = "select"
    new_fields = EvaluationSettings.new_fields | {"engine", "engine_args"}
    keep: PositiveInt = 1
    experts: list[str] | None = None
    base: str | None = None
    device: str = "cpu"

    @property
    def kept(self) -> int:
        """The number of experts that the step writes."""
        return self.keep if self.experts is None else len(self.experts)

    def check(self, name: str) -> None:
        """Check local experts, or the names of the tasks and the chat template."""
        from layerswap.evaluation.harness import check_task_names

        if self.experts is not None:
            self._check_experts(name, local=True)
        elif self.tasks:
            check_task_names(self.tasks, list(map(Path, self.include)))
            check_prompts(self, self.base)

    def check_here(self, name: str, *, device: bool) -> None:
        """Load the tasks, and look at the experts on the Hub."""
        from layerswap.evaluation.harness import load_tasks

        if self.tasks:
            load_tasks(self.tasks, include=list(map(Path, self.include)))
        self._check_experts(name, local=False)

    def _check_experts(self, name: str, *, local: bool) -> None:
        """Refuse experts, local or on the Hub, that are missing or do not fit the base."""
        sources = [source for source in self.experts or () if Path(source).is_dir() == local]
        if local and not Path(self.base or "").is_dir():
            return
        if sources:
            named = {f"expert-{i}": source for i, source in enumerate(sources, 1)}
            recipe = {"base": self.base, "experts": named,
                      "soup": {"experts": [*named]}, "bake": True}  # fmt: skip
            make_plan(check_recipe(recipe, where=f"study, {name}"))

    def run(self, context: Context) -> None:
        """Select, and write the selection."""
        if self.experts is not None:
            write_json(context.folder / SELECTION, [{"model": expert} for expert in self.experts])
            return
        from layerswap.training.expert.select import candidates, scorer, select

        score = None
        if self.tasks:
            check_device(self.device)
            score = scorer(self)
        for name, folder in context.inputs.items():
            if (folder / DELETED).is_file():
                raise StudyError(
                    f"{name}: an earlier selection deleted the other checkpoints "
                    f"(keep_checkpoints: selected); delete {folder} to train again"
                )
        runs = [folder / EXPERT for folder in context.inputs.values()]
        measured = score is not None or any(saved.loss is not None for saved in candidates(runs[0]))
        if len(runs) == 1 and self.keep == 1 and not measured:
            folders = [runs[0]]  # no score to choose by, so the output of the training
        else:
            chosen = select(runs, keep=self.keep, score=score).chosen
            folders = [Path(checkpoint.folder) for checkpoint in chosen]
        if len(folders) < self.keep:
            raise StudyError(
                f"`keep` is {self.keep}, but training saved only {len(folders)} checkpoints; keep "
                "fewer, or save more often (save_every)"
            )
        # Relative to the folder of all steps, so that a study can be moved.
        root = context.folder.parent
        names = [folder.relative_to(root).as_posix() for folder in folders]
        write_json(context.folder / SELECTION, names)
        if context.step.delete_checkpoints:
            _delete_others(runs, folders)


def selected(inputs: Mapping[str, Path], kind: str) -> list[str]:
    """Selected experts of one kind (folders or Hub ids), best first.

    `inputs` has the folders of steps by name.
    """
    folder = inputs[f"select/{kind}"]
    return selection(folder, folder.parent)


def selection(folder: Path, root: Path) -> list[str]:
    """The models that the step in a folder selected: paths from `root`, or models as given."""
    names = json.loads((folder / SELECTION).read_text("utf-8"))
    return [entry["model"] if isinstance(entry, dict) else str(root / entry) for entry in names]


def check_prompts(prompts: Asked, base: str | None) -> None:
    """Refuse a chat template that a local base does not have."""
    if prompts.apply_chat_template and base is not None and Path(base).is_dir():
        prompts.with_chat_template(load_tokenizer(Path(base), named="the base"))


def check_device(device: str) -> None:
    """Check that a device works on this machine, before models are read."""
    try:
        open_device(device)
    except EvaluationError as error:
        why = str(error).removesuffix("; 'cpu' always works")
        raise EvaluationError(f"{why}; run with --device cpu, or where the device is") from None


def _delete_others(runs: Sequence[Path], selected: Sequence[Path]) -> None:
    """Delete optimiser states, and the weights of all checkpoints but the selected ones.

    Raises:
        InUse: another process writes into the folder of a training.
    """
    from layerswap.training.expert.save import CHECKPOINTS, checkpoints

    with ExitStack() as leases:
        for run in runs:
            leases.enter_context(taken(run.parent, Owner(brief=True)))
        for run in runs:
            write_json(run.parent / DELETED, [kept.relative_to(run).as_posix() for kept in selected
                                              if kept == run or run in kept.parents])  # fmt: skip
            for folder in checkpoints(run / CHECKPOINTS).values():
                if folder not in selected:
                    shutil.rmtree(folder)
            for folder in (run, *checkpoints(run / CHECKPOINTS).values()):
                unused = [*folder.glob("*.pt"), *folder.glob("optimizer*")]
                if folder not in selected:
                    unused += folder.glob("*.safetensors*")
                for path in dict.fromkeys(unused):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
