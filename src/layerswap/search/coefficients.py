"""Learned coefficients: how much of each expert's delta every place takes, without labels.

Expert Merging (2509.25712): the merged weights are `base + sum_k a_k (expert_k - base)` with a
coefficient for each expert and place, and the coefficients are learned so that the merge behaves on
an expert's own prompts as that expert does, in its hidden states and its logits. Only coefficients
have gradients: the experts' tensors are those of the virtual model, and are never copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from layerswap._types import Advance, PathLike
from layerswap.checkpoint import Place
from layerswap.compose import Blend, Composition
from layerswap.compose.composition import all_places
from layerswap.compose.recipe import check_recipe
from layerswap.compose.schema import BASE
from layerswap.engine.virtual import VirtualModel
from layerswap.errors import EvaluationError
from layerswap.merge import make_plan

if TYPE_CHECKING:
    import torch

    Ids = Sequence[int]
    Parameters = dict[Place, dict[str, list[torch.Tensor]]]
    """By place and parameter: the base's tensor, then the experts'."""

DIGITS = 6
"""Digits of a coefficient in a recipe."""


@dataclass(frozen=True)
class LearningSettings:
    """How coefficients are learned.

    Attributes:
        steps: updates, each on all prompts.
        learning_rate: of Adam, for the logits of the coefficients.
        start: the coefficient that all begin with; 0.5 of two experts is their soup.
        temperature: that the logits are softened by.
        hidden: weight of the hidden states' mean squared error.
        regularise: weight of the coefficients' mean distance to `start`, times the experts.
        layer: the layer whose output is matched, from 0; the middle one when None.
        device: where the models run.
    """

    steps: int = 60
    learning_rate: float = 0.1
    start: float = 0.5
    temperature: float = 3.0
    hidden: float = 0.1
    regularise: float = 0.1
    layer: int | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class LearnedCoefficients:
    """The coefficients of every place at which an expert differs from the base.

    Attributes:
        sources: checkpoints by expert, and the base's under `base`.
        coefficients: by place and expert, in 0..1; an expert that changed nothing there has none.
        losses: before every step, and after the last.
    """

    sources: Mapping[str, str]
    coefficients: Mapping[Place, Mapping[str, float]]
    losses: tuple[float, ...]

    def recipe(self) -> dict[str, Any]:
        """The merge as a recipe: task arithmetic with its own weights at every place."""
        experts = [name for name in self.sources if name != BASE]
        data: dict[str, Any] = {
            BASE: self.sources[BASE],
            "experts": {name: self.sources[name] for name in experts},
            "soup": {"experts": experts},
            "places": [{"layers": "all", "take": BASE}],
        }
        begun: set[int | None] = set()
        for place, weights in self.coefficients.items():
            kept = {name: round(weight, DIGITS) for name, weight in weights.items()}
            kept = {name: weight for name, weight in kept.items() if weight > 0}
            take = BASE
            if kept:
                take = f"{place.role}_{'outside' if place.layer is None else place.layer}"
                operation = {"method": "task_arithmetic", "experts": kept}
                data["experts"][take] = {"merge": operation}
            where = "outside" if place.layer is None else place.layer
            # What else is in the layer did not change, so that any blend of it is the base.
            only = {"roles": [place.role]} if place.layer in begun else {}
            begun.add(place.layer)
            data["places"].append({"layers": where, **only, "take": take})
        return data


def learn_coefficients(
    base: PathLike,
    experts: Mapping[str, PathLike],
    prompts: Mapping[str, Sequence[Ids]],
    *,
    settings: LearningSettings | None = None,
    progress: Advance | None = None,
) -> LearnedCoefficients:
    """Learn the coefficients of a merge from a few prompts of each expert (2509.25712, section 3).

    The loss of a prompt of expert k is the cross-entropy to the expert's softened logits, times
    the squared temperature and less the least that it can be, plus the mean squared error of the
    hidden states.

    Args:
        base: the checkpoint that the experts were fine-tuned from.
        experts: two or more checkpoints by name.
        prompts: by expert, token ids of texts such as it was fine-tuned on; no labels.
        settings: of the learning.
        progress: called with the number of steps just done.

    Raises:
        LayerswapError: the checkpoints do not fit together, or an expert has no prompts.
    """
    settings = settings or LearningSettings()
    sources = {**{name: str(source) for name, source in experts.items()}, BASE: str(base)}
    if set(prompts) != set(experts) or not all(prompts.values()):
        raise EvaluationError("every expert needs prompts that it was fine-tuned for, and no other")
    merged = CoefficientModel(sources, settings)
    losses = merged.learn(prompts, progress or (lambda count: None))
    return LearnedCoefficients(sources, merged.values(), tuple(losses))


class CoefficientModel:
    """The experts as one virtual model, and a merge of them that coefficients describe.

    Args:
        sources: checkpoints by name, the base under `base`.
        settings: of the learning.
    """

    def __init__(self, sources: Mapping[str, str], settings: LearningSettings) -> None:
        import torch

        self.experts = [name for name in sources if name != BASE]
        self._settings = settings
        recipe = {
            BASE: sources[BASE], "bake": True,
            "experts": {name: sources[name] for name in self.experts},
            "soup": {"experts": self.experts},
        }  # fmt: skip
        plan = make_plan(check_recipe(recipe, where="coefficients"))
        layers = plan.composition.layers
        plans = [
            plan.with_composition(Composition.build(layers, _always(name)))
            for name in (BASE, *self.experts)
        ]
        self._virtual = VirtualModel(plans, device=settings.device, dtype="float32")
        self._layer = layers // 2 if settings.layer is None else settings.layer
        if not 0 <= self._layer < layers:
            raise EvaluationError(f"layer {self._layer} is not inside 0-{layers - 1}")
        self.parameters = self._read(plan.reference.places, layers)
        start = torch.tensor(settings.start, dtype=torch.float64).logit()
        # Coefficients in float64: they are few, and steps are small.
        self.logits = {
            place: start.repeat(len(self.experts)).to(settings.device).requires_grad_()
            for place in self.parameters
        }

    def learn(self, prompts: Mapping[str, Sequence[Ids]], progress: Advance) -> list[float]:
        """Take all steps; returns the losses."""
        import torch

        lessons = [
            (self.teach(name, ids), torch.tensor([ids], device=self._settings.device), len(asked))
            for name, asked in prompts.items()
            for ids in asked
        ]
        optimizer = torch.optim.Adam(self.logits.values(), lr=self._settings.learning_rate)
        losses = []
        for step in range(self._settings.steps + 1):
            optimizer.zero_grad()
            total = 0.0
            # Merged once a step; texts go through one after the other, so memory is that of one.
            mixed = self.merged()
            leaves = {name: one.detach().requires_grad_() for name, one in mixed.items()}
            for taught, ids, count in lessons:
                loss = self.loss(ids, taught, leaves) / count / len(prompts)
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            torch.autograd.backward(
                [mixed[name] for name in leaves], [one.grad for one in leaves.values()]
            )
            penalty = self.penalty()
            penalty.backward()  # type: ignore[no-untyped-call]
            losses.append(total + float(penalty.detach()))
            if step < self._settings.steps:
                optimizer.step()
                progress(1)
        return losses

    def teach(self, expert: str, ids: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """An expert's logits and hidden states on a text, `(tokens, ...)`."""
        import torch

        model: Any = self._virtual.switch(1 + self.experts.index(expert))
        asked = torch.tensor([ids], device=self._settings.device)
        with torch.no_grad():
            found = model(input_ids=asked, output_hidden_states=True, use_cache=False)
        return found.logits[0], found.hidden_states[1 + self._layer][0]

    def loss(
        self,
        ids: torch.Tensor,
        taught: tuple[torch.Tensor, torch.Tensor],
        merged: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """The loss of one text.

        Args:
            ids: int64 `(1, tokens)`.
            taught: what the expert makes of it; see `teach`.
            merged: the parameters; see the method `merged`.
        """
        import torch
        from torch.nn import functional

        model = self._virtual.switch(0)
        inputs = {"input_ids": ids, "output_hidden_states": True, "use_cache": False}
        found: Any = torch.func.functional_call(model, dict(merged), kwargs=inputs)
        heat = self._settings.temperature
        own = functional.log_softmax(found.logits[0].float() / heat, dim=-1)
        theirs = functional.log_softmax(taught[0].float() / heat, dim=-1)
        divergence = functional.kl_div(own, theirs, reduction="batchmean", log_target=True)
        hidden = functional.mse_loss(found.hidden_states[1 + self._layer][0].float(), taught[1])
        return heat**2 * divergence + self._settings.hidden * hidden

    def penalty(self) -> torch.Tensor:
        """The distance of the coefficients to where they began."""
        import torch

        spread = torch.cat([(one.sigmoid() - self._settings.start).abs()
                            for one in self.logits.values()])  # fmt: skip
        return self._settings.regularise * len(self.experts) * spread.mean()

    def merged(self) -> dict[str, torch.Tensor]:
        """The merged parameters by name, which have the gradient of the coefficients."""
        mix = _mix()
        return {
            name: mix(self.logits[place].sigmoid(), *tensors)
            for place, named in self.parameters.items()
            for name, tensors in named.items()
        }

    def values(self) -> dict[Place, dict[str, float]]:
        """The coefficients, of experts that changed the place."""
        found = {}
        for place, named in self.parameters.items():
            weights = self.logits[place].detach().sigmoid().tolist()
            found[place] = {
                name: weight
                for i, (name, weight) in enumerate(zip(self.experts, weights, strict=True), start=1)
                if any(not tensors[i].equal(tensors[0]) for tensors in named.values())
            }
        return found

    def _read(self, places: Mapping[str, Place], layers: int) -> Parameters:
        """The floating-point parameters that differ between the models, in the order of places."""
        slots = (*self._virtual.map.outside, *(g for s in self._virtual.map.layers for g in s))
        states = []
        for number in range(1 + len(self.experts)):
            state = self._virtual.switch(number).state_dict(keep_vars=True)
            states.append({name: tensor.detach() for name, tensor in state.items()})
        found: Parameters = {}
        for group in slots:
            for name in group.targets:
                tensors = [state[name] for state in states]
                differs = any(not tensor.equal(tensors[0]) for tensor in tensors[1:])
                if tensors[0].is_floating_point() and differs:
                    found.setdefault(places[group.sources[0]], {})[name] = tensors
        if not found:
            raise EvaluationError("the experts do not differ from the base")
        return {place: found[place] for place in all_places(layers) if place in found}


def _always(name: str) -> Callable[[Place], Blend]:
    return lambda place: Blend.of(name)


@cache
def _mix() -> Callable[..., torch.Tensor]:
    """The merged tensor, whose backward pass keeps no copy of a delta."""
    import torch

    class Mix(torch.autograd.Function):
        """`base + sum_k a_k (expert_k - base)`, with the gradient of the coefficients alone."""

        @staticmethod
        def forward(context: Any, weights: Any, base: Any, *experts: Any) -> Any:
            context.save_for_backward(base, *experts)
            mixed = base.clone()
            for weight, expert in zip(weights.tolist(), experts, strict=True):
                mixed.add_(expert - base, alpha=weight)
            return mixed

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            (gradient,) = gradients
            base, *experts = context.saved_tensors
            found = [(gradient * (expert - base)).sum(dtype=torch.float64) for expert in experts]
            return torch.stack(found), *[None] * (1 + len(experts))

    return Mix.apply
