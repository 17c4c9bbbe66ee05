"""What steps are thought to cost on a usual device, for a plan that is not run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from layerswap.compose.recipe import check_recipe
from layerswap.evaluate.suites import suites
from layerswap.evaluate.trie import build_trie, count_layers, paths_of
from layerswap.study.spec import Judging, Run, StudySpec
from layerswap.study.treatments import Trained, pair_of, recipes

READ = 1.2e14
"""Floating-point operations a second in training and in reading: about 40% of an A100's peak in
bfloat16."""
LOADED = 1e12
"""Bytes of weights a second that writing a token has to load: about half an A100's peak."""
BATCH = 32
"""Texts that are written at a time."""
LAYERS = 32
"""Of a base that is not at hand."""
ADAPTER = 0.02
"""Of the parameters, what an adapter of a usual rank trains."""
CHOSEN_OF_GRID = 2
"""Of a pair's grid, what is judged in other languages: the chosen composition and the best."""
ROWS, TOKENS = 80_000, 512
"""Rows of a data set and tokens of a row, where nothing better is known (paper 2, section 3.4)."""


@dataclass(frozen=True)
class Documents:
    """What a benchmark makes a model read and write.

    Attributes:
        number: of documents.
        read: tokens of one document, and of one exemplar.
        written: tokens that are written for it; none where answers are only scored.
    """

    number: int
    read: int
    written: int = 0


BENCHMARKS: Mapping[str, Documents] = {
    "mgsm": Documents(250, 200, 256),
    "belebele": Documents(900, 400),
    "flores": Documents(2 * 1012, 100, 100),
    "mbpp": Documents(500, 250, 256),
    "mmlu": Documents(14_042, 150),
}
"""The sizes are those of the published files; the tokens are for a language whose words fall into
more of them than English ones do."""
OWN = Documents(1000, 300, 128)
"""A task that is not one of those."""


def training_hours(run: Run, billions: float, sets: int) -> float:
    """Device hours of a training: 6 operations a parameter and token.

    Args:
        run: the training.
        billions: parameters.
        sets: data sets that it trains on, one after the other or mixed.
    """
    rows = _rows(run)
    return 6 * billions * 1e9 * rows * TOKENS * sets / READ / 3600


def checkpoints(run: Run) -> int:
    """How many checkpoints a training leaves to choose from."""
    return max(1, _rows(run) // run.save_every)


def training_disk_gb(run: Run, billions: float) -> float:
    """Disk of a training: its output and checkpoints in float32, and one optimiser's moments."""
    trained = ADAPTER if run.lora else 1.0
    return billions * trained * (4 * (1 + checkpoints(run)) + 8)


def _rows(run: Run) -> int:
    steps = run.hyperparameters.get("max_steps")
    batch = run.effective_batch or run.hyperparameters.get("per_device_train_batch_size", 8)
    # What is no number is refused where hyperparameters are checked.
    if isinstance(steps, int) and isinstance(batch, int) and steps > 0:
        return steps * batch
    return run.limit or ROWS


def language_hours(
    spec: StudySpec, settings: Mapping[str, Any], kept: Mapping[str, int], others: Sequence[str]
) -> float:
    """Device hours of judging a language: its models in it, and those that count elsewhere.

    Args:
        spec: the study.
        settings: of the step that judges.
        kept: how many experts of each kind are kept.
        others: the steps that train something beside them.
    """
    models = judged_models(settings, kept, others)
    hours = judging_hours(spec.judge, spec.billions, models)
    there = spec.judge.elsewhere
    if there is not None:
        models = judged_models({**settings, "grid": None}, kept, others, more=CHOSEN_OF_GRID)
        suites_there: list[str | None] = [*there.suites] or [spec.judge.suite]
        for suite in suites_there:
            judge = spec.judge.model_copy(update={"suite": suite})
            others_there = [one for one in there.languages if one != settings["language"]]
            hours += len(others_there) * judging_hours(judge, spec.billions, models)
    return hours


def judging_hours(judge: Judging, billions: float, models: float) -> float:
    """Device hours of judging models in one language.

    2 operations a parameter and token that is read; the weights loaded once for each token that a
    batch writes.

    Args:
        judge: what they are judged on.
        billions: parameters.
        models: how many; less than there are, where they share layers.
    """
    seconds = 0.0
    for documents, shots in _asked(judge):
        number = min(documents.number, judge.limit or documents.number)
        read = number * documents.read * (1 + shots) * 2 * billions * 1e9 / READ
        written = number * documents.written * 2 * billions * 1e9 / LOADED / BATCH
        seconds += read + written
    return models * seconds / 3600


def judged_models(
    settings: Mapping[str, Any], kept: Mapping[str, int], others: Sequence[str], more: int = 0
) -> float:
    """How many models judging a language costs as much as.

    Compositions of one pair run the layers that they share once, and an expert that is in several
    pairs is judged once.

    Args:
        settings: of the step that judges.
        kept: how many experts of each kind are kept.
        others: the steps that train something beside them.
        more: further models of each pair.
    """
    trained = Trained(
        {name: [f"{name}-{i}" for i in range(count)] for name, count in kept.items()},
        {name: name for name in others},
        LAYERS,
    )
    total = 0.0
    alone: set[str] = set()
    planned = list(recipes(settings, trained))
    for pair, group in groupby(planned, key=lambda named: pair_of(named[0])):
        made = [recipe for _, recipe in group]
        swapped = [recipe for recipe in made if {"swap", "partition"} & set(recipe)]
        paths = paths_of(check_recipe(one, where="plan").resolve(LAYERS) for one in swapped)
        total += count_layers(build_trie(paths)).distinct / LAYERS + (more if pair else 0)
        alone |= {_model(recipe) for recipe in made if recipe not in swapped}
    return total + len(alone)


def _model(recipe: Mapping[str, Any]) -> str:
    """A recipe without the experts that it does not use."""
    used = recipe["soup"]["experts"] if "soup" in recipe else list(recipe["experts"])
    experts = {name: recipe["experts"][name] for name in used}
    return json.dumps({**recipe, "experts": experts}, sort_keys=True)


def _asked(judge: Judging) -> Iterator[tuple[Documents, int]]:
    """What is asked, and how many exemplars come with it."""
    if judge.suite is None:
        yield from ((OWN, judge.shots or 0) for _ in judge.tasks)
    for part in suites.SUITES.get(judge.suite or "", ()):
        if suites.BENCHMARKS[part.benchmark].runs_code and not judge.allow_code:
            continue
        yield BENCHMARKS[part.benchmark], part.shots if judge.shots is None else judge.shots
