"""Estimated costs of steps, for a plan that is not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from layerswap.evaluation.suites import suites
from layerswap.study.spec import EvaluationSpec, TrainingRun

READ = 1.2e14
"""Floating-point operations a second in training and in reading: about 40% of an A100's peak in
bfloat16."""
LOADED = 1e12
"""Bytes of weights a second that writing a token has to load: about half an A100's peak."""
BATCH = 32
"""Texts that are written at a time."""
ADAPTER = 0.02
"""Share of the parameters that an adapter of a usual rank trains."""
ROWS, TOKENS = 80_000, 512
"""Rows of a data set and tokens of a row, where nothing better is known (paper 2, section 3.4)."""


@dataclass(frozen=True)
class Documents:
    """The size of a benchmark.

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
    "sib200": Documents(303, 60),
    "masakhanews": Documents(700, 180),
}
"""The sizes are those of the published files; the tokens are for a language whose words fall into
more of them than English ones do."""
OTHER = Documents(1000, 300, 128)
"""A task that is not one of those."""


def training_hours(run: TrainingRun, billions: float, sets: int) -> float:
    """Device hours of a training: 6 operations a parameter and token.

    Args:
        run: the training.
        billions: parameters.
        sets: data sets that it trains on, one after the other or mixed.
    """
    return 6 * billions * 1e9 * _rows(run) * TOKENS * sets / READ / 3600


def checkpoints(run: TrainingRun) -> int:
    """The number of checkpoints that a training leaves to choose from."""
    return max(1, _rows(run) // run.save_every)


def training_disk_gb(run: TrainingRun, billions: float) -> float:
    """Disk of a training: its output and checkpoints in float32, and one optimiser's moments."""
    trained = ADAPTER if run.lora else 1.0
    return billions * trained * (4 * (1 + checkpoints(run)) + 8)


def evaluation_hours(spec: EvaluationSpec, billions: float, models: float) -> float:
    """Device hours of evaluating models in one language.

    2 operations a parameter and token that is read; the weights loaded once for each token that a
    batch writes.

    Args:
        spec: the benchmarks.
        billions: parameters.
        models: how many; compositions that share layers count as less.
    """
    seconds = 0.0
    for documents, shots in _benchmarks(spec):
        number = min(documents.number, spec.limit or documents.number)
        read = number * documents.read * (1 + shots) * 2 * billions * 1e9 / READ
        written = number * documents.written * 2 * billions * 1e9 / LOADED / BATCH
        seconds += read + written
    return models * seconds / 3600


def _rows(run: TrainingRun) -> int:
    steps = run.hyperparameters.get("max_steps")
    batch = run.effective_batch or run.hyperparameters.get("per_device_train_batch_size", 8)
    # Other values are refused where hyperparameters are checked.
    if isinstance(steps, int) and isinstance(batch, int) and steps > 0:
        return steps * batch
    return run.limit or ROWS


def _benchmarks(spec: EvaluationSpec) -> Iterator[tuple[Documents, int]]:
    """The documents of each benchmark, and the exemplars that come with one."""
    if spec.suite is None:
        yield from ((OTHER, spec.shots or 0) for _ in spec.tasks)
    for part in suites.SUITES.get(spec.suite or "", ()):
        if not suites.BENCHMARKS[part.benchmark].runs_code or spec.allow_code:
            yield BENCHMARKS[part.benchmark], part.shots if spec.shots is None else spec.shots
