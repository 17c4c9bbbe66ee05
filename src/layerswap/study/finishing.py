"""The steps that finish models on labelled rows of a language, and evaluate them.

Every start (the base, an expert or a merge) is trained on the same rows with the same settings.
Cross-validation over the rows chooses the start: each part of them is held out once, and the start
with the lowest loss on the held-out answers is chosen. No test document takes part in the choice.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from layerswap.compose.recipe import check_recipe
from layerswap.experiment.answers import read_answers
from layerswap.experiment.benchmarks import RESULTS, condition_scores
from layerswap.experiment.conditions import Condition, finished, methods
from layerswap.ground.commit import write_json
from layerswap.ground.errors import StudyError
from layerswap.ground.types import counted
from layerswap.merge.api import make_plan
from layerswap.reading.letters import bare
from layerswap.study.conditions import RecipeData, alone
from layerswap.study.evaluating import EvaluateStep
from layerswap.study.runner import Context
from layerswap.study.spec import TASK, Start
from layerswap.study.trainings import EXPERT, TrainStep, selected
from layerswap.training.expert.save import read_training

if TYPE_CHECKING:
    from datasets import Dataset

FINISH, MODEL, START = "finish.json", "model", "start"


class FinishStep(TrainStep):
    """Trains one start on the labelled rows of a language, and cross-validates it on them."""

    kind: ClassVar[str] = "finish"
    language: str
    start: Start
    folds: int
    development: float | None = None  # share of the documents that are not tested

    def run(self, context: Context) -> None:
        """Train, or resume; the output is a whole model."""
        (data,) = self.data
        rows = data.rows(context.inputs).train
        self._refuse_tested(rows, context.inputs[f"evaluate/{self.language}"] / RESULTS)
        if len(rows) < self.folds:
            raise StudyError(
                f"{counted(len(rows), 'labelled row')} cannot be cut into {self.folds} parts"
            )
        start, parts = context.folder / START, context.folder / "parts"
        if not start.is_dir():
            recipe = self._recipe(context.inputs)
            make_plan(check_recipe(recipe, where=f"study, {self.start}")).save(start)
        parts.mkdir(exist_ok=True)
        part_of = np.random.default_rng(0).permutation(len(rows)) % self.folds
        losses = [
            self._held_out(context, parts / str(part), rows, part_of == part)
            for part in range(self.folds)
        ]
        self._fit(context, {"train": _saved(rows, parts / "rows")}, context.folder / EXPERT)
        if self.lora:
            recipe = alone(str(context.folder / EXPERT), str(start)) | {"bake": True}
            plan = make_plan(check_recipe(recipe, where=f"study, {self.start}"))
            plan.save(context.folder / MODEL, overwrite=True)
        facts = {"start": self.start, "rows": len(rows), "losses": losses,
                 "loss": float(np.mean(losses))}  # fmt: skip
        write_json(context.folder / FINISH, facts)
        shutil.rmtree(parts)
        shutil.rmtree(start)

    def _recipe(self, inputs: Mapping[str, Path]) -> RecipeData:
        """Return the recipe of the start, over the best experts."""
        if self.start == "base":
            return alone(self.base, self.base)
        parts = {condition.method: part for condition, part in methods()}
        experts = {
            "task": selected(inputs, TASK)[0],
            "language": selected(inputs, self.language)[0],
        }
        return {"base": self.base, "experts": experts, **parts[self.start], "bake": True}

    def _refuse_tested(self, rows: Dataset, results: Path) -> None:
        """Refuse test documents among the rows, by their prompts."""
        prompts = {bare(row["prompt"]): i for i, row in enumerate(rows, 1)
                   if isinstance(row.get("prompt"), str)}  # fmt: skip
        for scores in condition_scores(read_answers(results)).values():
            for document in scores.split(self.development).test if scores.texts else ():
                if row := prompts.get(bare(scores.texts[document])):
                    raise StudyError(f"labels of {self.language}: row {row} is a test document")

    def _held_out(self, context: Context, folder: Path, rows: Dataset, held: Any) -> float:
        """Train on the other rows; returns the loss on the held-out answers, nats per token."""
        known = folder.with_suffix(".json")
        if not known.is_file():
            files = {
                name: _saved(rows.select(np.flatnonzero(chosen)), folder.with_suffix(f".{name}"))
                for name, chosen in (("train", ~held), ("validation", held))
            }
            self._fit(context, files, folder)
            write_json(known, read_training(folder)["losses"]["validation"])
            shutil.rmtree(folder)
        return float(json.loads(known.read_text("utf-8")))

    def _fit(self, context: Context, data: dict[str, str], out: Path) -> None:
        self.fit({**self.expert([data]), "base": str(context.folder / START)}, out, context)


class FinishedStep(EvaluateStep):
    """Evaluates the finished models of a language."""

    kind: ClassVar[str] = "finished"
    version: ClassVar[int] = 1

    @property
    def development(self) -> None:
        """None: the start is chosen by cross-validation."""
        return None

    def recipes(self, inputs: Mapping[str, Path]) -> Iterator[tuple[Condition, RecipeData]]:
        """The finished model of every start; the one with the lowest loss is chosen."""
        folders = {name.rpartition("/")[2]: folder for name, folder in inputs.items()}
        losses = {start: json.loads((folder / FINISH).read_text("utf-8"))["loss"]
                  for start, folder in folders.items()}  # fmt: skip
        best = min(losses, key=lambda start: losses[start])
        for start, folder in folders.items():
            model = folder / (MODEL if (folder / MODEL).is_dir() else EXPERT)
            yield finished(start, chosen=start == best), alone(str(model), self.base)


def _saved(rows: Dataset, path: Path) -> str:
    """Write rows as JSON Lines; returns the file."""
    file = f"{path}.jsonl"
    rows.to_json(file)
    return file
