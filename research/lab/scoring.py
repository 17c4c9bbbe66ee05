"""Scores of checkpoints on the lab: the share of greedy answers that are exactly right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from layerswap.checkpoint.loading import load_causal_lm, load_tokenizer
from layerswap.engine.sweep import Sweep
from layerswap.evaluation.statistics import Interval, mean_interval
from layerswap.lab.assets import LAB_RECORD, models_of, shipped
from layerswap.lab.quickstart import MEASURES, LabMeasure
from layerswap.lab.scoring import sweep_correct
from layerswap.merge.api import soup
from research.lab.tasks import LabExample, LabSplit, Skill, examples
from research.lab.world import World, make_world

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def load(folder: Path | str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load a checkpoint folder as a float32 model on the CPU, and its tokenizer."""
    return load_causal_lm(folder, dtype="float32"), load_tokenizer(folder)


def questions(
    measure: LabMeasure,
    language: str,
    split: LabSplit,
    n: int,
    *,
    seed: int = 0,
    world: World | None = None,
) -> list[LabExample]:
    """Draw the `n` examples of a measure; `language` is the scarce one.

    Equal arguments give equal examples, so the answers of two models are paired. Those of seed 0 in
    the shipped world are the questions in the package, and the first ones of more.
    """
    world = world or make_world()
    spoken = world.language(language) if measure.endswith("target") else world.source
    skill: Skill = "problem" if measure.startswith("task") else "comprehension"
    return examples(world, spoken.name, skill, split, n, seed=seed)


def score_folder(
    folder: Path, language: str, split: LabSplit, n: int, *, world: World | None = None
) -> dict[LabMeasure, npt.NDArray[np.bool_]]:
    """Score a checkpoint's answers to `n` examples of every measure: bool `(n,)` each."""
    sweep, tokenizer = Sweep([soup({"model": folder})], dtype="float32"), load_tokenizer(folder)
    return {
        measure: sweep_correct(
            sweep, tokenizer, questions(measure, language, split, n, world=world)
        )[0]
        for measure in MEASURES
    }


def score_folders(
    models: Sequence[Path], *, language: str | None, split: LabSplit, n: int
) -> dict[LabMeasure, dict[str, Interval]]:
    """Score checkpoint folders, or whole labs, by measure and folder name."""
    target = shipped().scarce(language)
    folders = [folder for model in models for folder in _checkpoints(model)]
    names = {folder.name for folder in folders}
    scores: dict[LabMeasure, dict[str, Interval]] = {measure: {} for measure in MEASURES}
    for folder in folders:
        name = folder.name if len(names) == len(folders) else str(folder)
        for measure, right in score_folder(folder, target, split, n).items():
            scores[measure][name] = mean_interval(right)
    return scores


def _checkpoints(folder: Path) -> list[Path]:
    """Return the folder itself, or the models of the lab that it holds."""
    if not (folder / LAB_RECORD).is_file():
        return [folder]
    return [folder / name for name in models_of(folder)]
