"""Composing adapters: exact blends of low-rank deltas, and back to a smaller rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerswap.checkpoint import LowRank
from layerswap.checkpoint.adapter import KEY
from layerswap.checkpoint.read import open_file, read_elements

if TYPE_CHECKING:
    import torch

Parts = Sequence[tuple[LowRank, float]]
"""Adapters' deltas at one module, with the weight of each."""


@dataclass(frozen=True)
class Factors:
    """A delta `b @ a`, float64.

    Attributes:
        a: [rank, in].
        b: [out, rank]; weights and scalings are folded into it.
        lost: what cutting the rank took away, as a share of the delta's Frobenius norm.
    """

    a: torch.Tensor
    b: torch.Tensor
    lost: float = 0.0


def concatenate(parts: Parts) -> Factors:
    """The weighted sum of low-rank deltas, exactly: their ranks side by side.

    `sum_i w_i s_i B_i A_i = [w_1 s_1 B_1, w_2 s_2 B_2, ...] @ [A_1; A_2; ...]`. The scalings s_i
    go into B, so that the result has scaling 1 whatever the adapters' alphas and whether they
    are rsLoRA.
    """
    import torch

    a = torch.cat([_matrix(low, "a") for low, _ in parts], dim=0)
    b = torch.cat([_matrix(low, "b") * (low.scaling * weight) for low, weight in parts], dim=1)
    return Factors(a, b)


def truncate(factors: Factors, rank: int) -> Factors:
    """The nearest delta of at most this rank (Eckart and Young, 1936).

    The singular values come from the two small matrices of a QR decomposition, so the full
    [out, in] delta is never made. Their square roots go to both sides evenly.
    """
    import torch

    if factors.a.shape[0] <= rank:
        return factors
    q_b, r_b = torch.linalg.qr(factors.b)
    q_a, r_a = torch.linalg.qr(factors.a.T)
    u, sizes, v = torch.linalg.svd(r_b @ r_a.T)
    root = sizes[:rank].sqrt()
    total = float(sizes.square().sum())
    lost = math.sqrt(float(sizes[rank:].square().sum()) / total) if total else 0.0
    return Factors((root[:, None] * v[:rank]) @ q_a.T, (q_b @ u[:, :rank]) * root, lost)


def module_of(low: LowRank) -> str:
    """The path in the model of the module that a low-rank delta belongs to."""
    found = KEY.fullmatch(low.a.name)
    assert found is not None, "the adapter reader let another name through"
    return found["module"]


def key_of(low: LowRank, side: str) -> str:
    """The name under which PEFT stores side `A` or `B` of the module."""
    name = low.a.name
    return f"{name[: name.rindex('_A')]}_{side}{name[name.rindex('_A') + 2 :]}"


def _matrix(low: LowRank, side: str) -> torch.Tensor:
    info = low.a if side == "a" else low.b
    with open_file(info.file) as handle:
        return read_elements(handle, info, 0, info.elements).double().reshape(info.shape)
