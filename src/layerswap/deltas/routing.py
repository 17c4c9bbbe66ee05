"""Routing divergence: how differently two mixtures of one architecture choose their experts.

Read from the weights alone. A router sees the output of a norm, whose direction is not known
without data; inputs of random direction, scaled by each model's own norm, stand for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Checkpoint
from layerswap.checkpoint.folder import text_config
from layerswap.checkpoint.read import READ_DTYPES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

INPUTS = 512
"""Random inputs that two routers are compared on; always the same ones."""
TOP_KEYS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
"""What configurations call the number of experts that a token is sent to."""
NORMS = (
    "pre_feedforward_layernorm_2", "pre_feedforward_layernorm", "pre_ff_layernorm",
    "pre_mlp_layernorm", "ffn_norm", "post_attention_layernorm", "norm",
)  # fmt: skip
"""Norms of a layer whose output the router sees; the first that a layer has."""
BALANCE = ("e_score_correction_bias", "expert_bias", "moe_statics")
"""Biases that balance loads; models with them weigh experts by sigmoids."""


@dataclass(frozen=True)
class Routing:
    """How differently two models route in one layer.

    Attributes:
        expert: a model.
        other: another.
        layer: its layer.
        experts: experts of the mixture.
        top: experts that a token is sent to.
        jensen_shannon_bits: mean Jensen-Shannon divergence between the weights that the two
            routers give all experts, 0 to 1.
        top_in_common_share: of the experts that one model sends an input to, those that the other
            sends it to as well. Unrelated routers have `top / experts`.
    """

    expert: str
    other: str
    layer: int
    experts: int
    top: int
    jensen_shannon_bits: float
    top_in_common_share: float


def routing_divergence(
    first: tuple[str, Checkpoint], second: tuple[str, Checkpoint]
) -> Iterator[Routing]:
    """Compare the routers of two checkpoints, layer by layer; nothing without mixtures.

    Weights are the softmax of the logits, or sigmoids divided by their sum where a bias balances
    loads; that bias counts for the choice alone, as in DeepSeek-V3 (2412.19437, equation 16).

    Args:
        first: a name and a checkpoint.
        second: another, of the same tensors.
    """
    (name, one), (other_name, other) = first, second
    top = _top(one)
    for layer, router in routers(one).items():
        if router not in other.tensors:
            continue
        (weights, choice), (others, chosen) = (_route(c, layer, router) for c in (one, other))
        count = min(top, weights.shape[1])
        shared = _top_of(choice, count) & _top_of(chosen, count)
        yield Routing(
            expert=name,
            other=other_name,
            layer=layer,
            experts=weights.shape[1],
            top=count,
            jensen_shannon_bits=round(jensen_shannon(weights, others), 9),
            top_in_common_share=float(shared.sum(axis=1).mean() / count),
        )


def routers(checkpoint: Checkpoint) -> dict[int, str]:
    """The matrix [experts, hidden] of the router in each layer that has one."""
    found: dict[int, str] = {}
    for name, place in checkpoint.places.items():
        info = checkpoint.tensors.get(name)
        if place.role != "router" or place.layer is None or info is None:
            continue
        is_matrix = len(info.shape) == 2 and info.shape[0] > 1 and info.dtype in READ_DTYPES
        if is_matrix and not any(word in name for word in BALANCE):
            found[place.layer] = name
    return found


def jensen_shannon(first: Array, second: Array) -> float:
    """Mean Jensen-Shannon divergence of distributions in rows, in bits."""
    import numpy as np

    middle = (first + second) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = [np.where(p > 0, p * np.log2(p / middle), 0.0).sum(axis=1) for p in (first, second)]
    return float(np.mean((parts[0] + parts[1]) / 2))


def _route(checkpoint: Checkpoint, layer: int, router: str) -> tuple[Array, Array]:
    """The weights of all experts for each input, and what they are chosen by."""
    import numpy as np

    shape = checkpoint.tensors[router].shape
    # A generator by layer: the same inputs for every model and on every machine.
    inputs = np.random.default_rng([0, layer]).standard_normal((INPUTS, shape[1]))
    inputs /= np.sqrt((inputs**2).mean(axis=1, keepdims=True))
    norm = next(filter(None, (_named(checkpoint, layer, word) for word in NORMS)), None)
    if norm is not None and checkpoint.tensors[norm].elements == shape[1]:
        inputs *= _vector(checkpoint, norm)
    logits = inputs @ _vector(checkpoint, router).reshape(shape).T
    bias = f"{router.removesuffix('.weight')}.bias"
    if bias in checkpoint.tensors:
        logits += _vector(checkpoint, bias)
    balance = next(filter(None, (_named(checkpoint, layer, word) for word in BALANCE)), None)
    if balance is not None:
        scores = 1 / (1 + np.exp(-logits))
        return scores / scores.sum(axis=1, keepdims=True), scores + _vector(checkpoint, balance)
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True), logits


def _named(checkpoint: Checkpoint, layer: int, word: str) -> str | None:
    places = checkpoint.places
    return next((n for n, p in places.items() if p.layer == layer and word in n.split(".")), None)


def _vector(checkpoint: Checkpoint, name: str) -> Array:
    import numpy as np

    return checkpoint.elements(name, 0, checkpoint.tensors[name].elements).astype(np.float64)


def _top_of(scores: Array, count: int) -> Any:
    import numpy as np

    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    found = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(found, chosen, True, axis=1)
    return found


def _top(checkpoint: Checkpoint) -> int:
    config = text_config(checkpoint.config)
    values = (config.get(key) for key in TOP_KEYS)
    numbers = (v[0] if isinstance(v, list) and v else v for v in values)
    return next((int(v) for v in numbers if type(v) is int and v > 0), 1)
