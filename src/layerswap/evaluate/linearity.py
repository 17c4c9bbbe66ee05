"""How linear fine-tuning was: along the line between two experts, and in the sum of their deltas.

The second paper's section 6 explains why layers of two experts fit together: task vectors add up,
and layers can be interpolated. Both can be measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.compose import Blend, Composition
from layerswap.compose.recipe import check_recipe
from layerswap.errors import EvaluationError
from layerswap.evaluate.requests import Question
from layerswap.evaluate.sweep_engine import Sweep
from layerswap.merge.make import make_plan
from layerswap.merge.plan import Plan

if TYPE_CHECKING:
    import torch

Source = str | os.PathLike[str]
Texts = Sequence[Question]
"""Token ids of contexts, and of what follows them and is measured; neither empty."""


@dataclass(frozen=True)
class Line:
    """Loss along the line from one model to another.

    Attributes:
        positions: from 0, the first, to 1, the second.
        losses: mean negative log-probability per token, in nats, at each position.
    """

    positions: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def barrier(self) -> float:
        """How far the loss rises above the straight line between its ends (Frankle et al., 2020).

        In nats per token; 0 or less where the two are linearly connected.
        """
        first, last = self.losses[0], self.losses[-1]
        pairs = zip(self.positions, self.losses, strict=True)
        return max(loss - ((1 - at) * first + at * last) for at, loss in pairs)


@dataclass(frozen=True)
class Connectivity:
    """Loss between two experts.

    Attributes:
        whole: with every place interpolated.
        layers: per layer, with that layer alone interpolated in the first expert.
    """

    whole: Line
    layers: tuple[Line, ...]


@dataclass(frozen=True)
class Additivity:
    """How far the sum of two deltas is from the sum of their effects.

    `|f(b + d1 + d2) - (f(b + d1) + f(b + d2) - f(b))| / |f(b + d1 + d2) - f(b)|`, over all tokens,
    with f the hidden states after a layer, or the logits. 0 is linear; 1 is as far off as saying
    that the two together change nothing.

    Attributes:
        layers: after each layer, from the input.
        logits: of the logits.
    """

    layers: tuple[float, ...]
    logits: float


def connectivity(
    task: Source, language: Source, texts: Texts, *, steps: int = 4, batch_size: int = 16
) -> Connectivity:
    """Loss on texts along the line between two experts, for the whole model and layer by layer.

    All models are compositions of one sweep: nothing is written.

    Args:
        task: the expert at position 0.
        language: the expert at position 1.
        texts: what the loss is measured on.
        steps: positions between the two, with both ends `steps + 1`.
        batch_size: texts that are read together.

    Raises:
        LayerswapError: the experts do not fit together, or a text is too short.
    """
    _check(texts)
    data = {
        "experts": {"task": os.fspath(task), "language": os.fspath(language)},
        "soup": {"experts": ["task", "language"]},
        "bake": True,
    }
    start = make_plan(check_recipe(data, where="linearity"))
    layers = start.composition.layers
    positions = [step / steps for step in range(steps + 1)]
    whole = [start.with_composition(_line(layers, at, None)) for at in positions]
    single = [
        start.with_composition(_line(layers, at, layer))
        for layer in range(layers)
        for at in positions[1:]
    ]
    losses = _losses([*whole, *single], texts, batch_size)
    first, rest = losses[: len(whole)], losses[len(whole) :]
    lines = [
        Line(tuple(positions), (first[0], *rest[layer * steps : (layer + 1) * steps]))
        for layer in range(layers)
    ]
    return Connectivity(Line(tuple(positions), tuple(first)), tuple(lines))


def additivity(base: Source, task: Source, language: Source, texts: Texts) -> Additivity:
    """How linear the deltas of two experts are in what the model computes.

    Args:
        base: what both were fine-tuned from.
        task: an expert.
        language: another.
        texts: what the models read; each is read alone.

    Raises:
        LayerswapError: the experts do not fit together, or a text is too short.
    """
    _check(texts)
    experts = {"task": os.fspath(task), "language": os.fspath(language)}
    data: dict[str, Any] = {"base": os.fspath(base), "experts": experts, "bake": True}
    places = {"all": None, "base": "base", "task": "task", "language": "language"}
    states = {}
    for name, only in places.items():
        method: dict[str, Any] = (
            {"merge": {"method": "task_arithmetic", "experts": {"task": 1.0, "language": 1.0}}}
            if only is None
            else {"soup": {"experts": ["task"]}, "places": [{"layers": "all", "take": only}]}
        )
        plan = make_plan(check_recipe({**data, **method}, where="linearity"))
        states[name] = _states(plan, texts)
    found = [
        _departure(*(states[name][i] for name in ("all", "task", "language", "base")))
        for i in range(len(states["all"]))
    ]
    return Additivity(tuple(found[:-1]), found[-1])


def _check(texts: Texts) -> None:
    if not texts or not all(context and rest for context, rest in texts):
        raise EvaluationError("linearity needs texts of two tokens and more")


def _line(layers: int, at: float, only: int | None) -> Composition:
    """Position `at` on the line, everywhere or in one layer with the first expert elsewhere."""
    between = Blend.of({"task": 1 - at, "language": at} if 0 < at < 1 else _end(at))
    return Composition.build(
        layers,
        lambda place: between if only is None or place.layer == only else Blend.of("task"),
    )


def _end(at: float) -> str:
    return "language" if at else "task"


def _losses(plans: Sequence[Plan], texts: Texts, batch_size: int) -> list[float]:
    scores = Sweep(plans).loglikelihood(texts, batch_size=batch_size)
    count = sum(len(rest) for _, rest in texts)
    return [-float(row.sum()) / count for row in scores.logprob]


def _states(plan: Plan, texts: Texts) -> list[torch.Tensor]:
    """Hidden states after each layer and the logits, `(tokens of all texts, width)`, float64."""
    import torch

    model = plan.load()
    found: list[list[torch.Tensor]] = []
    with torch.inference_mode():
        for context, rest in texts:
            ids = torch.tensor([[*context, *rest]])
            output = model(ids, output_hidden_states=True)
            # The first is the embedding, which comes before any layer.
            found.append(
                [state[0].double() for state in (*output.hidden_states[1:], output.logits)]
            )
    return [torch.cat(states) for states in zip(*found, strict=True)]


def _departure(
    both: torch.Tensor, first: torch.Tensor, second: torch.Tensor, base: torch.Tensor
) -> float:
    change = float((both - base).norm())
    return float((both - (first + second - base)).norm()) / change if change else 0.0
