"""Measures linearity: the loss between two experts, and the additivity of their effects."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from layerswap.checkpoint import open_checkpoint
from layerswap.checkpoint.loading import in_float64, load_tokenizer
from layerswap.compose.recipe import check_recipe
from layerswap.compose.schema import Override
from layerswap.engine.rows import batches
from layerswap.engine.sweep import Sweep
from layerswap.engine.virtual import VirtualModel
from layerswap.evaluation.examples import Tokens, read_examples, tokenize
from layerswap.ground.errors import EvaluationError
from layerswap.ground.types import PathLike
from layerswap.merge.api import make_plan
from layerswap.merge.plan import Plan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Additivity:
    """Distance between the effect of two deltas together and the sum of their effects.

    The departure is `|f(b + d1 + d2) - (f(b + d1) + f(b + d2) - f(b))| / |f(b + d1 + d2) - f(b)|`,
    with Euclidean norms over all tokens. 0 is linear; 1 is the error of predicting no change. The
    second paper (section 6) expects fine-tuning to be nearly linear.

    Attributes:
        layers: departure of the hidden state after each layer, counted from the input. All weights
            change, so departures of earlier layers add up.
        logits: departure of the logits.
    """

    layers: tuple[float, ...]
    logits: float


def additivity(
    base: PathLike,
    task: PathLike,
    language: PathLike,
    texts: Sequence[Tokens],
    *,
    batch_size: int = 8,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
) -> Additivity:
    """Measure the additivity of the effects of two experts' deltas.

    Memory holds the four models and the hidden states of one batch. Below float32, rounding of
    small deltas adds to the departure.
    """
    import torch

    plans = _four_plans(base, task, language, dtype)
    virtual = VirtualModel(plans, device=device)
    sums = np.zeros((len(virtual.layers) + 1, 2))
    with torch.inference_mode():
        for ids, mask in batches([text.ids for text in texts], batch_size):
            inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
            states = [_states(virtual, index, inputs) for index in range(len(plans))]
            real = inputs["attention_mask"].bool()
            for step, four in enumerate(zip(*states, strict=True)):
                sums[step] += _squares([state[real] for state in four])
    *layers, logits = (float((departure / change) ** 0.5) if change else 0.0
                       for departure, change in sums)  # fmt: skip
    return Additivity(tuple(layers), logits)


def _four_plans(base: PathLike, task: PathLike, language: PathLike, dtype: str) -> list[Plan]:
    """Plan the base, each expert, and the base plus both deltas."""
    data: dict[str, Any] = {
        "base": os.fspath(base),
        "experts": {"task": os.fspath(task), "language": os.fspath(language)},
        "bake": True,
        "dtype": dtype,
    }
    methods: list[dict[str, Any]] = [
        {"soup": {"experts": ["task"]}, "places": [{"layers": "all", "take": name}]}
        for name in ("base", "task", "language")
    ]
    arithmetic = {"method": "task_arithmetic", "experts": ["task", "language"]}
    methods.append({"merge": arithmetic})
    return [make_plan(check_recipe({**data, **m}, where="linearity")) for m in methods]


def _states(
    virtual: VirtualModel, index: int, inputs: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Return the hidden state after each layer, then the logits, `(rows, tokens, width)`.

    Hooks read the layers' outputs; transformers' last hidden state is after the final norm.
    """
    model = virtual.switch(index)
    states: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        del module, args
        states.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(keep) for layer in virtual.layers]
    try:
        logits = model(**inputs, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return [*states, logits]


def _squares(outputs: Sequence[torch.Tensor]) -> npt.NDArray[np.float64]:
    """Return the squared norms of the departure and of the change, in float64."""
    base, task, language, merged = map(in_float64, outputs)
    change = merged - base
    departure = change - (task - base) - (language - base)
    return np.array([float(departure.square().sum()), float(change.square().sum())])


@dataclass(frozen=True)
class Line:
    """Loss along the line from one model to another."""

    positions: tuple[float, ...]  # from 0, the first model, to 1, the second
    losses: tuple[float, ...]  # nats per predicted token at each position

    @property
    def barrier(self) -> float:
        """Largest rise of the loss above the straight line between its values at 0 and 1.

        In nats per token; 0 if the two are linearly connected (Frankle et al., 2020).
        """
        first, last = self.losses[0], self.losses[-1]
        points = zip(self.positions, self.losses, strict=True)
        return max(loss - ((1 - at) * first + at * last) for at, loss in points)


@dataclass(frozen=True)
class Connectivity:
    """Loss between two experts."""

    whole: Line  # all weights interpolated
    layers: tuple[Line, ...]  # for each layer, only its weights; the others are the task expert's


def connectivity(
    task: PathLike,
    language: PathLike,
    texts: Sequence[Tokens],
    *,
    steps: int = 4,
    batch_size: int = 16,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
) -> Connectivity:
    """Measure the loss along the line between two experts, for the whole model and each layer.

    At position a the weights are `(1 - a) task + a language`. One sweep holds all models, writes
    nothing, and shares the work of common layers. The other weights are the task expert's while one
    layer is interpolated (Adilova et al., 2024, interpolate one layer of a trained model).
    """
    experts = {"task": os.fspath(task), "language": os.fspath(language)}
    recipe = {"experts": experts, "soup": {"experts": ["task"]}, "bake": True, "dtype": dtype}
    opened = make_plan(check_recipe(recipe, where="linearity"))
    positions = tuple(step / steps for step in range(steps + 1))
    plans = [
        _between(opened, at, layer)
        for layer in (None, *range(opened.composition.layers))
        for at in positions
    ]
    requests = [(text.ids[: text.predicted.start], text.ids[text.predicted.start :])
                for text in texts]  # fmt: skip
    scores = Sweep(plans, device=device).loglikelihood(requests, batch_size=batch_size)
    predicted = sum(len(text.predicted) for text in texts)
    losses = (-scores.logprob.sum(-1) / predicted).reshape(-1, len(positions))
    whole, *layers = (Line(positions, tuple(map(float, row))) for row in losses)
    return Connectivity(whole, tuple(layers))


def _between(opened: Plan, at: float, layer: int | None) -> Plan:
    """Plan position `at` in one layer of the task expert, or everywhere when None."""
    take = {name: share for name, share in (("task", 1 - at), ("language", at)) if share}
    places = [Override(layers="all" if layer is None else str(layer), take=take)]
    return opened.with_recipe(opened.recipe.model_copy(update={"places": places}))


@dataclass(frozen=True)
class Linearity:
    """Both measurements of two experts on the same texts."""

    line: Connectivity
    sums: Additivity
    texts: int  # number of texts
    left_out: int  # number of texts that were too short
    predicted: int  # number of predicted tokens

    def lines(self) -> list[str]:
        """Describe the result in words."""
        whole, layers, sums = self.line.whole, self.line.layers, self.sums
        worst = max(range(len(layers)), key=lambda layer: layers[layer].barrier)
        left_out = f", {self.left_out} left out" if self.left_out else ""
        return [
            f"{self.texts} texts{left_out}, {self.predicted} tokens predicted",
            f"loss: task expert {whole.losses[0]:.4f}, language expert {whole.losses[-1]:.4f}; "
            f"barrier {whole.barrier:.4f} nats per token",
            f"largest barrier of one layer: {layers[worst].barrier:.4f} in layer {worst}",
            f"both deltas at once depart from the sum of their effects by {sums.layers[-1]:.1%} "
            f"after the last layer, {sums.logits:.1%} in the logits",
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Return every number as a row of `measure`, `layer`, `position` and `value`."""
        loss, sums = "loss_nats_per_token", self.sums
        numbers: list[tuple[str, int | None, float | None, float]] = [
            (loss, layer, at, value)
            for layer, line in [(None, self.line.whole), *enumerate(self.line.layers)]
            for at, value in zip(line.positions, line.losses, strict=True)
        ]
        numbers += [("departure_share", layer, None, v) for layer, v in enumerate(sums.layers)]
        numbers.append(("departure_logits_share", None, None, sums.logits))
        names = ("measure", "layer", "position", "value")
        return [dict(zip(names, row, strict=True)) for row in numbers]


def measure_linearity(
    base: str,
    task: str,
    language: str,
    text: Path,
    *,
    max_length: int,
    dtype: str,
    device: str,
    **settings: Any,
) -> Linearity:
    """Measure two experts on the texts of a file, with the tokenizer of the base.

    `settings` are those of `connectivity`.
    """
    examples = read_examples(text)
    checkpoint = open_checkpoint(base)
    tokenizer = load_tokenizer(checkpoint.folder, named=checkpoint.identity)
    read = [tokenize(example, tokenizer, max_length) for example in examples]
    if not (texts := [tokens for tokens in read if tokens.predicted]):
        raise EvaluationError(f"{text}: no text has two tokens, so there is nothing to predict")
    line = connectivity(task, language, texts, dtype=dtype, device=device, **settings)
    sums = additivity(base, task, language, texts, dtype=dtype, device=device)
    predicted = sum(len(tokens.predicted) for tokens in texts)
    return Linearity(line, sums, len(texts), len(read) - len(texts), predicted)
