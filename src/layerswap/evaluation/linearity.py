"""Whether the effects of two deltas add up in what a model computes, layer by layer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from layerswap._types import PathLike
from layerswap.checkpoint import open_checkpoint
from layerswap.checkpoint.loading import load_tokenizer
from layerswap.compose.recipe import check_recipe
from layerswap.compose.schema import Override
from layerswap.engine.scoring import batches
from layerswap.engine.split import SplitModel
from layerswap.engine.sweep import Sweep
from layerswap.engine.virtual import VirtualModel
from layerswap.errors import EvaluationError
from layerswap.evaluation.examples import (
    Tokenized,
    Tokens,
    as_tokens,
    read_examples,
    tokenize,
)
from layerswap.merge import Plan, make_plan

if TYPE_CHECKING:
    import torch


BASE, TASK, LANGUAGE, BOTH = range(4)
"""The four models, by their position in the virtual model."""


@dataclass(frozen=True)
class Additivity:
    """How far the sum of two deltas is from the sum of their effects.

    `|f(b + d1 + d2) - (f(b + d1) + f(b + d2) - f(b))| / |f(b + d1 + d2) - f(b)|`, Euclidean norms
    over all tokens. 0 is linear; 1 is as far off as saying that the two together change nothing.
    The second paper (section 6) expects the deltas of fine-tuning to be nearly linear in this
    sense, above all within a layer.

    Attributes:
        layers: with f the hidden state that leaves each layer, counted from the input; all
            weights of the model changed, so that departures of earlier layers are passed on.
        logits: with f the logits.
        alone: with f what each layer makes of the hidden state that it has in the base, only that
            layer's weights changed (Dai et al., 2025). Empty for a model whose layers cannot be
            run one by one.
    """

    layers: tuple[float, ...]
    logits: float
    alone: tuple[float, ...]


def additivity(
    base: PathLike,
    task: PathLike,
    language: PathLike,
    texts: Sequence[Tokenized],
    *,
    batch_size: int = 8,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
) -> Additivity:
    """How linear the deltas of two experts are in what the model computes.

    Memory holds the four models and the hidden states of one batch, however many texts there are.

    Args:
        base: what both were fine-tuned from.
        task: an expert.
        language: another.
        texts: what the models read, as token ids.
        batch_size: texts that are read together.
        dtype: of weights and arithmetic. In less than float32 the rounding of small deltas is
            measured too.
        device: where the models run.

    Raises:
        LayerswapError: the experts do not fit together, or a text is too short.
    """
    import torch

    read = as_tokens(texts)
    plans = _plans(base, task, language, dtype)
    virtual = VirtualModel(plans, device=device)
    stack = SplitModel(virtual.switch(BASE), virtual.layers, virtual.device)
    sums = _Sums()
    exact = True
    with torch.inference_mode():
        for ids, mask in batches([text.ids for text in read], batch_size):
            inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
            states = [_states(virtual, index, inputs) for index in range(len(plans))]
            real = inputs["attention_mask"].bool()
            for step in range(len(states[BASE])):
                sums.add(("whole", step), [found[step][real] for found in states])
            del states[TASK:]
            if exact:
                exact = _add_alone(virtual, stack, inputs, states[BASE], sums)
    layers = len(stack.layers)
    return Additivity(
        tuple(sums.departure(("whole", layer)) for layer in range(layers)),
        sums.departure(("whole", layers)),
        tuple(sums.departure(("alone", layer)) for layer in range(layers)) if exact else (),
    )


def _plans(base: PathLike, task: PathLike, language: PathLike, dtype: str) -> list[Plan]:
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
    both = {"method": "task_arithmetic", "experts": ["task", "language"]}
    methods.append({"merge": both})
    return [make_plan(check_recipe({**data, **m}, where="linearity")) for m in methods]


def _states(
    virtual: VirtualModel, index: int, inputs: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """The hidden state that leaves each layer, then the logits, `(rows, tokens, width)`.

    Taken from the layers themselves: the last of transformers' `hidden_states` has been through
    the final norm.
    """
    model = virtual.switch(index)
    found: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        del module, args
        found.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(keep) for layer in virtual.layers]
    try:
        logits = model(**inputs, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return [*found, logits]


def _add_alone(
    virtual: VirtualModel,
    stack: SplitModel,
    inputs: Mapping[str, torch.Tensor],
    states: Sequence[torch.Tensor],
    sums: _Sums,
) -> bool:
    """Add what each layer alone makes of the base's hidden states; False where that fails."""
    import torch

    virtual.switch(BASE)
    entry = stack.before(**inputs, use_cache=False)
    real = inputs["attention_mask"].bool()
    for layer, module in enumerate(stack.layers):
        entering = states[layer - 1] if layer else entry.hidden
        found = []
        for path in virtual.paths:
            virtual.use_layer(layer, path[1 + layer])
            found.append(entry.calls[layer](module, entering)[real])
        if not torch.allclose(found[BASE], states[layer][real], rtol=1e-3, atol=1e-5):
            warnings.warn(
                f"the layers of {type(virtual.model).__name__} cannot be run one by one; "
                "their departures alone are left out",
                stacklevel=3,
            )
            return False
        sums.add(("alone", layer), found)
    return True


class _Sums:
    """Squared norms of departures and changes, added up over batches in float64."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], tuple[float, float]] = {}

    def add(self, key: tuple[str, int], found: Sequence[torch.Tensor]) -> None:
        base, task, language, both = (state.double() for state in found)
        change = both - base
        departure = change - (task - base) - (language - base)
        before = self._sums.get(key, (0.0, 0.0))
        self._sums[key] = (
            before[0] + float(departure.square().sum()),
            before[1] + float(change.square().sum()),
        )

    def departure(self, key: tuple[str, int]) -> float:
        departure, change = self._sums[key]
        return float((departure / change) ** 0.5) if change else 0.0


__all__ = ["Additivity", "Connectivity", "Line", "additivity", "connectivity"]

OtherLayers = Literal["task", "language", "base"]
ORIGIN = "origin"
"""What the recipes call the base, where it stands beside an interpolated layer."""


@dataclass(frozen=True)
class Line:
    """Loss along the line from one model to another.

    Attributes:
        positions: ascending, 0 for the first model and 1 for the second, beyond where the line
            is extrapolated.
        losses: mean negative log-probability per predicted token, in nats, at each position.
    """

    positions: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def barrier(self) -> float:
        """How far the loss between 0 and 1 rises above the straight line between its values there.

        In nats per token; 0 where the two are linearly connected (Frankle et al., 2020).
        """
        loss_at = dict(zip(self.positions, self.losses, strict=True))
        first, last = loss_at[0.0], loss_at[1.0]
        return max(
            loss - ((1 - at) * first + at * last) for at, loss in loss_at.items() if 0 <= at <= 1
        )


@dataclass(frozen=True)
class Connectivity:
    """Loss between two experts.

    Attributes:
        whole: with every place interpolated.
        layers: per layer, with that layer alone interpolated.
        elsewhere: what all other places have meanwhile.
    """

    whole: Line
    layers: tuple[Line, ...]
    elsewhere: OtherLayers = "task"


def connectivity(
    task: PathLike,
    language: PathLike,
    texts: Sequence[Tokenized],
    *,
    base: PathLike | None = None,
    elsewhere: OtherLayers = "task",
    steps: int = 4,
    beyond: int = 0,
    batch_size: int = 16,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
) -> Connectivity:
    """Loss on texts along the line between two experts, for the whole model and layer by layer.

    At position a the weights are `(1 - a) task + a language`. All models are compositions of one
    sweep: nothing is written, and they share the work of layers that they have in common.

    Args:
        task: the expert at position 0.
        language: the expert at position 1.
        texts: what the loss is measured on: token ids, or `Tokens` of which only those that are
            to be predicted count.
        base: what both were fine-tuned from; needed where it stands elsewhere.
        elsewhere: what the other places have while one layer is interpolated (Adilova et al.,
            2024, interpolate one layer in a trained model).
        steps: positions between the two, with both ends `steps + 1`.
        beyond: steps of the same size past each end.
        batch_size: texts that are read together.
        dtype: of weights and arithmetic.
        device: where the models run.

    Raises:
        LayerswapError: the experts do not fit together, or a text is too short.
    """
    if steps < 1 or beyond < 0:
        raise EvaluationError(f"a line has 1 step or more and none below 0, not {steps}, {beyond}")
    read = as_tokens(texts)
    line = _Line(task, language, base, elsewhere, dtype)
    positions = tuple(step / steps for step in range(-beyond, steps + beyond + 1))
    layers = line.layers
    plans = [line.plan(at, layer) for layer in (None, *range(layers)) for at in positions]
    losses = _losses(Sweep(plans, device=device), read, batch_size)
    count = len(positions)
    lines = [
        Line(positions, tuple(losses[start : start + count]))
        for start in range(0, len(losses), count)
    ]
    return Connectivity(lines[0], tuple(lines[1:]), elsewhere)


class _Line:
    """Makes the plan of every position, opening each checkpoint once."""

    def __init__(
        self,
        task: PathLike,
        language: PathLike,
        base: PathLike | None,
        elsewhere: OtherLayers,
        dtype: str,
    ) -> None:
        if elsewhere not in ("task", "language", "base"):
            raise EvaluationError(f"elsewhere is {elsewhere!r}; it is task, language or base")
        if elsewhere == "base" and base is None:
            raise EvaluationError("elsewhere is the base; give the base")
        self._experts = {"task": os.fspath(task), "language": os.fspath(language)}
        self._other = elsewhere if elsewhere != "base" else ORIGIN
        if elsewhere == "base" and base is not None:
            self._experts[ORIGIN] = os.fspath(base)
        self._data: dict[str, Any] = {
            "soup": {"experts": ["task"]},
            "bake": True,
            "dtype": dtype,
        }
        self._between = self._made({"experts": self._experts})
        self._past: dict[float, Plan] = {}

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return self._between.composition.layers

    def plan(self, at: float, layer: int | None) -> Plan:
        """Position `at`, everywhere or in one layer alone."""
        plan, take = self._between, _weights(at)
        if not 0 <= at <= 1:
            plan, take = self._beyond(at), {"past": 1.0}
        places = [Override(layers="all", take=take if layer is None else {self._other: 1.0})]
        if layer is not None:
            places.append(Override(layers=str(layer), take=take))
        recipe = plan.recipe.model_copy(update={"places": places})
        return plan.with_recipe(recipe)

    def _beyond(self, at: float) -> Plan:
        """A plan with an expert past the end: from the far end, more than the way to the near one.

        Blends have no negative weights, so it is task arithmetic with an expert as the base.
        """
        if at not in self._past:
            far, near, scale = ("language", "task", 1 - at) if at < 0 else ("task", "language", at)
            past = {"method": "task_arithmetic", "experts": [near], "scale": scale}
            experts = {**self._experts, "past": {"merge": past}}
            self._past[at] = self._made({"experts": experts, "base": self._experts[far]})
        return self._past[at]

    def _made(self, data: Mapping[str, Any]) -> Plan:
        return make_plan(check_recipe({**self._data, **data}, where="linearity"))


def _weights(at: float) -> dict[str, float]:
    return {name: w for name, w in (("task", 1 - at), ("language", at)) if w}


def _losses(sweep: Sweep, texts: Sequence[Tokens], batch_size: int) -> list[float]:
    requests = [(text.ids[: text.predicted.start], text.ids[text.predicted.start :])
                for text in texts]  # fmt: skip
    scores = sweep.loglikelihood(requests, batch_size=batch_size)
    count = sum(len(text.predicted) for text in texts)
    return [-float(row.sum()) / count for row in scores.logprob]


@dataclass(frozen=True)
class Linearity:
    """Two experts measured on the same texts.

    Attributes:
        line: loss along the line between them.
        sums: how far the effects of their deltas add up.
        texts: how many texts were measured on.
        left_out: how many were too short to predict a token of.
        predicted: tokens predicted.
    """

    line: Connectivity
    sums: Additivity
    texts: int
    left_out: int
    predicted: int

    def lines(self) -> list[str]:
        """The result in words, a line each."""
        whole, layers, sums = self.line.whole, self.line.layers, self.sums
        loss_at = dict(zip(whole.positions, whole.losses, strict=True))
        worst = max(range(len(layers)), key=lambda layer: layers[layer].barrier)
        left_out = f", {self.left_out} left out" if self.left_out else ""
        found = [
            f"{self.texts} texts{left_out}, {self.predicted} tokens predicted",
            f"loss: task expert {loss_at[0.0]:.4f}, language expert {loss_at[1.0]:.4f}; "
            f"barrier {whole.barrier:.4f} nats per token",
            f"largest barrier of one layer: {layers[worst].barrier:.4f} in layer {worst}",
            f"both deltas at once depart from the sum of their effects by {sums.layers[-1]:.1%} "
            f"after the last layer, {sums.logits:.1%} in the logits",
        ]
        if sums.alone:
            low, high = min(sums.alone), max(sums.alone)
            found.append(f"within one layer they depart by {low:.1%} to {high:.1%}")
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Every number as a row of `measure`, `layer`, `position` and `value`."""
        rows: list[dict[str, Any]] = [
            {"measure": "loss_nats_per_token", "layer": layer, "position": at, "value": loss}
            for layer, one in [(None, self.line.whole), *enumerate(self.line.layers)]
            for at, loss in zip(one.positions, one.losses, strict=True)
        ]
        departures: list[tuple[str, int | None, float]] = [
            *(("departure_share", at, v) for at, v in enumerate(self.sums.layers)),
            *(("departure_alone_share", at, v) for at, v in enumerate(self.sums.alone)),
            ("departure_logits_share", None, self.sums.logits),
        ]
        return rows + [
            {"measure": measure, "layer": layer, "position": None, "value": value}
            for measure, layer, value in departures
        ]


def measure_linearity(
    base: str,
    task: str,
    language: str,
    text: Path,
    *,
    max_length: int = 256,
    dtype: str = "float32",
    device: str = "cpu",
    **settings: Any,
) -> Linearity:
    """Measure two experts on the texts of a file.

    Args:
        base: the checkpoint that both were fine-tuned from; its tokenizer reads the texts.
        task: an expert.
        language: another.
        text: texts, one on each line or as JSON Lines; of a completion after a prompt only the
            completion counts for the loss.
        max_length: most tokens of a text.
        dtype: dtype of weights and arithmetic.
        device: device of the models.
        settings: `elsewhere`, `steps` and `beyond` of `connectivity`.

    Raises:
        LayerswapError: the sources or the texts cannot be read.
    """
    examples = read_examples(text)
    checkpoint = open_checkpoint(base)
    tokenizer = load_tokenizer(checkpoint.folder, named=checkpoint.identity)
    read = [tokenize(example, tokenizer, max_length) for example in examples]
    texts = [tokens for tokens in read if tokens.predicted]
    line = connectivity(task, language, texts, base=base, dtype=dtype, device=device, **settings)
    sums = additivity(base, task, language, texts, dtype=dtype, device=device)
    predicted = sum(len(tokens.predicted) for tokens in texts)
    return Linearity(line, sums, len(texts), len(read) - len(texts), predicted)
