"""The estimate of a study: its tokens at one speed of the base, its disk and its memory.

`layerswap new` measures the speed on the real base. Without a measurement it is the usual speed of
a base of that size. Nothing is fetched.
"""

from __future__ import annotations

import json
import re
import socket
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import yaml

from layerswap.checkpoint import open_checkpoint
from layerswap.compose.recipe import check_recipe
from layerswap.engine.trie import build_trie, count_layers, paths_of
from layerswap.evaluation.suites.suites import Size as BenchmarkSize
from layerswap.evaluation.suites.suites import parts_of
from layerswap.ground import system
from layerswap.ground.types import duration
from layerswap.study.conditions import recipes
from layerswap.study.english import EnglishStep, TranslatedStep
from layerswap.study.evaluating import EvaluateStep
from layerswap.study.finishing import FinishedStep, FinishStep
from layerswap.study.inputs import files_of, layers_of
from layerswap.study.mixes import DataStep
from layerswap.study.spec import TASK, Benchmarks, StudySpec, TrainingRun
from layerswap.study.steps import Graph
from layerswap.study.trainings import SelectStep, TrainedOn, TrainStep
from layerswap.training.expert.spec import PRESETS
from layerswap.training.mix.card import CARD

SPEED = "speed.json"
"""The measured speed, beside the `study.yaml` that `layerswap new` wrote."""
GPU, CORE = 1.2e14, 1.2e11
"""Usual floating-point operations a second: of an A100 in bfloat16, and of one processor."""
WRITTEN = 4
"""A token that is written takes as long as so many that are read."""
STARTING = 15.0
"""Seconds until a training or an evaluation has imported its libraries and loaded its models."""
ROWS, TOKENS, LONGEST = 80_000, 512, 1024
"""Assumed rows of a data set and tokens of a row (paper 2, section 3.4), and TRL's `max_length`."""
IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z])", re.IGNORECASE)
"""A number of parameters in a model's name, such as `8B` or `135M`."""
UNKNOWN, INSIDE = 8.0, 0.9
"""Assumed billions of parameters of a base, and their share in its layers."""
ADAPTER = 0.02
"""Share of the parameters that an adapter of a usual rank trains."""
OTHER = BenchmarkSize(documents=1000, read=300, written=128)
"""Assumed size of a task that is no benchmark of ours."""


BATCH = 16
"""Rows of a step of the task in a study that `layerswap new` writes."""


@dataclass(frozen=True)
class Measured:
    """Speed of a base in training and in reading, tokens/s, and where it was measured.

    `memory_gb` is the peak of a training, which computes `rows` rows of the task at a time.
    """

    train: float
    read: float
    device: str = ""
    machine: str = field(default_factory=socket.gethostname)
    memory_gb: float = 0.0
    rows: int = BATCH


@dataclass(frozen=True)
class StudyCosts:
    """The estimated costs of the steps of a study that are not done."""

    hours: Mapping[str, float]  # by step that trains or evaluates
    disk_gb: float  # of all trainings, with the checkpoints of those that run
    memory_gb: float  # of the largest step
    speed: str  # in words
    measured: bool = True  # the memory; otherwise it is that of the weights and their moments

    def __str__(self) -> str:
        least = "" if self.measured else "at least "
        return (
            f"about {duration(3600 * sum(self.hours.values()))} {self.speed}, "
            f"{self.disk_gb:,.1f} GB of disk and {least}{self.memory_gb:,.1f} GB of memory"
        )


def read_speed(folder: Path, device: str) -> Measured | None:
    """Read the speed of this machine on a device; None if it was measured elsewhere or never."""
    try:
        speed = Measured(**json.loads((folder / SPEED).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return speed if (speed.device, speed.machine) == (device, socket.gethostname()) else None


def cost_study(
    spec: StudySpec, graph: Graph, measured: Measured | None = None, done: Collection[str] = ()
) -> StudyCosts:
    """Estimate the costs of a study from its plan; `done` names finished steps."""
    evaluations, finishes = EvaluateStep.all_of(graph), FinishStep.all_of(graph)
    trainings = {**TrainStep.all_of(graph), **finishes}
    billions, inside = size_of(next(iter(evaluations.values())).base)
    speed, words = measured, "at this machine's measured speed"
    if speed is None:
        many = GPU if spec.device != "cpu" else CORE * (system.processors() or 1)
        # 2 operations a parameter and token forward, and 4 backward.
        speed = Measured(many / (6e9 * billions), many / (2e9 * billions))
        where = "an A100" if spec.device != "cpu" else "this machine's processors"
        words = f"at the usual speed of {where} for {billions:.2g} billion parameters"
    examples = {name: examples_seen(step, graph) for name, step in trainings.items()}
    seconds = {name: seen * tokens / speed.train for name, (seen, tokens) in examples.items()}
    for name, finish in finishes.items():
        seconds[name] *= finish.folds  # each part of the rows is left out once, then none
    for name, select in SelectStep.all_of(graph).items():
        if select.tasks:
            models = sum(examples[need][0] // trainings[need].save_every or 1
                         for need in graph[name].needs)  # fmt: skip
            asked = Benchmarks.model_validate({"tasks": select.tasks, "limit": select.limit})
            seconds[name] = models * tokens_read(asked) / speed.read
    for name, step in evaluations.items():
        seconds[name] = _tokens_of(step, graph) / speed.read
    for name, alone in {**EnglishStep.all_of(graph), **TranslatedStep.all_of(graph)}.items():
        experts = SelectStep.of(graph[f"select/{TASK}"]).kept
        seconds[name] = experts * tokens_read(alone.evaluate) / speed.read
    for name, finished in FinishedStep.all_of(graph).items():
        seconds[name] = len(graph[name].needs) * tokens_read(finished.evaluate) / speed.read
    gpu, whole = spec.device != "cpu", spec.dtype == "float32"
    memory = [2.5 * (4 if whole or (spec.dtype is None and not gpu) else 2)]  # two experts, a blend
    for run in trainings.values():
        # Weights, gradients and two moments. With LoRA on a GPU, frozen weights take two bytes.
        trained = ADAPTER if run.lora else inside if run.train else 1
        memory.append((2 if run.lora and gpu else 4) + 12 * trained)
    return StudyCosts(
        {name: (STARTING + s) / 3600 for name, s in seconds.items() if name not in done},
        _disk(spec, trainings, {name: seen for name, (seen, _) in examples.items()}, billions),
        max(billions * max(memory), speed.memory_gb), words, measured is not None,
    )  # fmt: skip


def _disk(
    spec: StudySpec, trainings: Mapping[str, TrainStep], seen: Mapping[str, int], billions: float
) -> float:
    """Disk of all trainings, GB: what they keep, and what one kind of them needs until then."""
    kept, passing = 0.0, defaultdict[str, float](float)
    for name, run in trainings.items():
        adapter = run.lora and not isinstance(run, FinishStep)  # which saves a whole model
        weights = 4 * billions * (ADAPTER if adapter else 1)  # in float32
        saved = weights * (seen[name] // run.save_every) + 2 * weights  # and two moments
        kept += weights + (saved if spec.keep_checkpoints == "all" else 0)
        passing[name.rpartition("/")[0]] += saved if spec.keep_checkpoints == "selected" else 0
    return kept + max(passing.values(), default=0)


def size_of(base: str) -> tuple[float, float]:
    """Billions of parameters of a base, and their share in its layers.

    By its header, by its name, or a guess.
    """
    if not Path(base).is_dir():
        named = IN_NAME.search(base.rpartition("/")[2])
        if named is None:
            return UNKNOWN, INSIDE
        return float(named[1]) / (1000 if named[2] in "mM" else 1), INSIDE
    opened = open_checkpoint(base)
    sizes = {name: tensor.elements for name, tensor in opened.tensors.items()}
    inside = sum(size for name, size in sizes.items() if opened.places[name].layer is not None)
    total = sum(sizes.values()) or 1
    return total / 1e9, inside / total


def examples_seen(step: TrainStep, graph: Graph) -> tuple[int, float]:
    """The examples that a training sees, and their mean tokens."""
    longest = _setting(step, "max_length") or LONGEST
    sets = [(min(rows, step.limit or rows), min(tokens, longest))
            for rows, tokens in (_rows(data, graph) for data in step.data)]  # fmt: skip
    total = sum(rows for rows, _ in sets)
    mean = sum(rows * tokens for rows, tokens in sets) / (total or 1)
    if (steps := _setting(step, "max_steps")) is not None:
        batch = step.effective_batch or _setting(step, "per_device_train_batch_size") or 8
        return steps * batch, mean
    epochs = step.hyperparameters.get("num_train_epochs", 1)
    return int(total * (epochs if isinstance(epochs, int | float) else 1)), mean


def _rows(data: TrainedOn, graph: Graph) -> tuple[int, float]:
    """The rows of a data set and the mean tokens of a row, assumed where nothing says so."""
    if data.step is not None:
        # Not checked here: templates need jinja2, which `study list` works without.
        mix = yaml.safe_load(DataStep.of(graph[data.step]).mix)
        total, tokens = mix.get("total"), mix.get("row_tokens")
        return (total if isinstance(total, int) else ROWS,
                tokens if isinstance(tokens, int) else TOKENS)  # fmt: skip
    if isinstance(data.given, dict):
        lines = [len(line) for file in files_of(Path(data.given["train"]))
                 if file.suffix == ".jsonl" for line in file.read_bytes().splitlines()]  # fmt: skip
        return (len(lines), sum(lines) / len(lines) / 3) if lines else (ROWS, TOKENS)
    try:
        card = json.loads((Path(str(data.given)) / CARD).read_text("utf-8"))
        return card["rows"]["train"], card["mean_characters"] / 3
    except (OSError, ValueError, KeyError):  # refused elsewhere
        return ROWS, TOKENS


def _tokens_of(step: EvaluateStep, graph: Graph) -> float:
    """Tokens that the models of a language read, in their language and in the others."""
    kept = [SelectStep.of(graph[f"select/{kind}"]).kept for kind in (TASK, step.language)]
    pairs = max(kept) if step.pairs == "same" else prod(kept)
    layers = layers_of(step.base) if Path(step.base).is_dir() else 32
    tokens = models_to_run(step, layers) * tokens_read(step.evaluate)
    if (there := step.evaluate.other_languages) is not None:
        models = models_to_run(step.model_copy(update={"grid": None}), layers)
        asked = [step.evaluate.model_copy(update={"suite": suite}) for suite in there.suites]
        each = sum(map(tokens_read, asked or [step.evaluate]))
        tokens += len(there.languages) * models * each
    return pairs * tokens


def models_to_run(step: EvaluateStep, layers: int) -> float:
    """Whole models that the evaluation of one pair runs; its compositions share layers."""
    names = [joint["step"] for joint in step.both]
    names += [name for variant in step.variants for name in (variant.task, variant.language or "")]
    kept = {kind: [kind] for kind in step.kinds}
    first = [recipe for _, recipe in recipes(step, kept, {name: name for name in names}, layers)]
    composed = [check_recipe(recipe, where="plan").resolve(layers)
                for recipe in first if "swap" in recipe or "partition" in recipe]  # fmt: skip
    distinct = count_layers(build_trie(paths_of(composed))).distinct
    return len(first) - len(composed) + distinct / layers


def tokens_read(asked: Benchmarks) -> float:
    """Tokens that one model reads for all documents of one language."""
    sizes = [(OTHER, asked.num_fewshot or 0) for _ in asked.tasks]
    for part in parts_of(asked.suite) if asked.suite else ():
        if not part.benchmark.runs_code or asked.allow_code:
            shots = part.shots if asked.num_fewshot is None else asked.num_fewshot
            sizes.append((part.benchmark.size, shots))
    return sum(
        min(size.documents, asked.limit or size.documents)
        * (size.read * (1 + shots) + WRITTEN * size.written)
        for size, shots in sizes
    )


def _setting(run: TrainingRun, name: str) -> int | None:
    """A positive hyperparameter, or None; other values are refused elsewhere."""
    value = {**PRESETS.get(run.preset or "", {}), **run.hyperparameters}.get(name)
    return value if isinstance(value, int) and value > 0 else None
