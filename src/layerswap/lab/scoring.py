"""Scores of models on the lab: the share of greedy answers that are exactly right.

Nothing is generated. Greedy decoding writes the right answer if and only if, at every position of
the answer, the most likely next token after the right tokens so far is the right token. One
teacher-forced forward pass therefore scores a whole batch of all compositions with the result of
`model.generate`. The answer includes its `</s>`, so an answer that runs on is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from layerswap.checkpoint.loading import load_causal_lm, load_tokenizer
from layerswap.engine.sweep import Sweep
from layerswap.evaluation.statistics import Interval, mean_interval
from layerswap.ground.errors import RecipeError
from layerswap.ground.types import Advance, Bars
from layerswap.lab.assets import LAB_RECORD, models_of, shipped
from layerswap.lab.tasks import LabExample, LabSplit, Skill, examples
from layerswap.lab.train import IGNORED, encode
from layerswap.lab.world import World, make_world
from layerswap.merge import soup

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    Right = npt.NDArray[np.bool_]

LabMeasure = Literal["task_target", "task_source", "comprehension_target", "comprehension_source"]
MEASURES: tuple[LabMeasure, ...] = get_args(LabMeasure)
"""The task and comprehension, each in the scarce (target) and in the source language."""
NAMES: dict[Skill, str] = {"problem": "problems", "comprehension": "comprehension"}
"""Names of the skills in tables."""
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")
"""Libraries on which the scores depend."""
NEW_TOKENS = 8
"""More tokens than any answer has."""
TEST_QUESTIONS = 1000
"""Test questions per measure of the quickstart."""
SHOWN = 100
"""Test problems of the quickstart whose answers are in its report."""


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

    Equal arguments give equal examples, so the answers of two models are paired.
    """
    if measure not in MEASURES:
        raise RecipeError(f"no measure {measure!r} in the lab; it has {', '.join(MEASURES)}")
    world = world or make_world()
    skill, spoken = _skill_and_language(measure, language, world)
    return examples(world, spoken, skill, split, n, seed=seed)


def measure_names(language: str) -> dict[LabMeasure, str]:
    """Return the name of every measure in tables, such as `problems, furo`."""
    world = shipped().world
    skills = {measure: _skill_and_language(measure, language, world) for measure in MEASURES}
    return {measure: f"{NAMES[skill]}, {spoken}" for measure, (skill, spoken) in skills.items()}


def _skill_and_language(measure: LabMeasure, language: str, world: World) -> tuple[Skill, str]:
    spoken = world.language(language) if measure.endswith("target") else world.source
    return "problem" if measure.startswith("task") else "comprehension", spoken.name


def score_folder(
    folder: Path, language: str, split: LabSplit, n: int, *, world: World
) -> dict[LabMeasure, Right]:
    """Score a checkpoint's answers to `n` examples of every measure: bool `(n,)` each."""
    sweep, tokenizer = Sweep([soup({"model": folder})], dtype="float32"), load_tokenizer(folder)
    return {
        measure: sweep_correct(
            sweep, tokenizer, questions(measure, language, split, n, world=world)
        )[0]
        for measure in MEASURES
    }


def score_folders(
    models: Sequence[Path], *, language: str | None, split: LabSplit, n: int, progress: Bars
) -> dict[str, dict[LabMeasure, Interval]]:
    """Score checkpoint folders, or whole labs, by folder name."""
    lab = shipped()
    target = lab.scarce(language)
    folders = [folder for model in models for folder in _checkpoints(model)]
    names = {folder.name for folder in folders}
    scores: dict[str, dict[LabMeasure, Interval]] = {}
    with progress("scoring", len(folders), "models") as advance:
        for folder in folders:
            answers = score_folder(folder, target, split, n, world=lab.world)
            name = folder.name if len(names) == len(folders) else str(folder)
            scores[name] = {measure: mean_interval(right) for measure, right in answers.items()}
            advance(1)
    return scores


def _checkpoints(folder: Path) -> list[Path]:
    """Return the folder itself, or the models of the lab that it holds."""
    if not (folder / LAB_RECORD).is_file():
        return [folder]
    return [folder / name for name in models_of(folder)]


def sweep_correct(
    sweep: Sweep,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[LabExample],
    *,
    members: Sequence[int] | None = None,
    batch_size: int = 256,
    progress: Advance | None = None,
) -> Right:
    """Return true for every example that a composition answers exactly: `(compositions, n)`.

    `members` are the numbers of the compositions; all when None.
    `progress` is called after each batch with the number of examples in it.
    """
    import numpy as np

    if not examples:
        raise RecipeError("there is nothing to score: no examples")
    rows = encode(tokenizer, examples)
    starts = [row["labels"].count(IGNORED) for row in rows]
    requests = [
        (row["input_ids"][:start], row["input_ids"][start:])
        for row, start in zip(rows, starts, strict=True)
    ]
    chosen = sweep.choose(members)
    right = np.zeros((len(chosen), len(requests)), dtype=bool)
    for scores in sweep.iter_loglikelihood(requests, members=chosen, batch_size=batch_size):
        right[:, scores.requests] = scores.greedy
        if progress is not None:
            progress(len(scores.requests))
    return right


def sweep_written(
    sweep: Sweep,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[LabExample],
    *,
    members: Sequence[int] | None = None,
) -> list[list[str]]:
    """Write the greedy text of every composition after each prompt: `[composition][prompt]`."""
    if not examples:
        return [[] for _ in sweep.choose(members)]
    prompts = tokenizer([e.prompt for e in examples])["input_ids"]
    rows = sweep.generate(prompts, members=members, max_new_tokens=NEW_TOKENS)
    return [
        [text.strip() for text in tokenizer.batch_decode(
            [list(generation.tokens) for generation in row], skip_special_tokens=True)]
        for row in rows
    ]  # fmt: skip
