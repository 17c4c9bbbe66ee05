"""Whether the effects of two deltas add up in what a model computes, layer by layer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.compose.recipe import check_recipe
from layerswap.evaluate.examples import Text, as_tokens, batches
from layerswap.evaluate.stack import Stack
from layerswap.evaluate.virtual import VirtualModel
from layerswap.merge.make import make_plan
from layerswap.merge.plan import Plan

if TYPE_CHECKING:
    import torch

Source = str | os.PathLike[str]
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
    base: Source,
    task: Source,
    language: Source,
    texts: Sequence[Text],
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
    stack = Stack(virtual.switch(BASE), virtual.layers, virtual.device)
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


def _plans(base: Source, task: Source, language: Source, dtype: str) -> list[Plan]:
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
    stack: Stack,
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
