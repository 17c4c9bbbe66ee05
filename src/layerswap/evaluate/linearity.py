"""Loss along the line between two experts: linear mode connectivity, as a whole and by layer.

The second paper's section 6 explains why layers of two experts fit together: task vectors add up
(`evaluate.additivity`), and layers can be interpolated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from layerswap.compose.recipe import check_recipe
from layerswap.compose.schema import Override
from layerswap.errors import EvaluationError
from layerswap.evaluate.additivity import Additivity, additivity
from layerswap.evaluate.examples import Text, Tokens, as_tokens
from layerswap.evaluate.sweep_engine import Sweep
from layerswap.merge.make import make_plan
from layerswap.merge.plan import Plan

if TYPE_CHECKING:
    import torch

__all__ = ["Additivity", "Connectivity", "Line", "additivity", "connectivity"]

Source = str | os.PathLike[str]
Elsewhere = Literal["task", "language", "base"]
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
    elsewhere: Elsewhere = "task"


def connectivity(
    task: Source,
    language: Source,
    texts: Sequence[Text],
    *,
    base: Source | None = None,
    elsewhere: Elsewhere = "task",
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
        task: Source,
        language: Source,
        base: Source | None,
        elsewhere: Elsewhere,
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
        return replace(plan, recipe=recipe, composition=recipe.resolve(self.layers))

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
