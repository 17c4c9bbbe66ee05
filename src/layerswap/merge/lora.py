"""Composes adapters: exact blends of low-rank deltas, cut to a smaller rank on request."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import LowRank, Place, TensorInfo, header_bytes
from layerswap.checkpoint.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, KEY
from layerswap.checkpoint.read import (
    FLOAT_NAMES,
    is_finite,
    narrowed,
    read_matrix,
    read_tensor,
    widened,
)
from layerswap.compose.blend import Operation
from layerswap.errors import MergeError
from layerswap.merge.lazy_tensors import blend
from layerswap.merge.metadata import write_adapter_documents
from layerswap.merge.plan import MergePlan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from layerswap.checkpoint.read import Stored

Parts = Sequence[tuple[LowRank, float]]
"""Adapters' deltas at one module, with the weight of each."""


@dataclass(frozen=True)
class LowRankDelta:
    """A delta `b @ a`, float64.

    Attributes:
        a: [rank, in].
        b: [out, rank]; weights and scalings are folded into it.
        lost: what cutting the rank took away, as a share of the delta's Frobenius norm.
    """

    a: npt.NDArray[np.float64]
    b: npt.NDArray[np.float64]
    lost: float = 0.0


def concatenate(parts: Parts) -> LowRankDelta:
    """The weighted sum of low-rank deltas, exactly: their ranks side by side.

    `sum_i w_i s_i B_i A_i = [w_1 s_1 B_1, w_2 s_2 B_2, ...] @ [A_1; A_2; ...]`. The scalings s_i
    go into B, so that the result has scaling 1 whatever the adapters' alphas and whether they
    are rsLoRA.
    """
    import numpy as np

    a = np.concatenate([read_matrix(low.a) for low, _ in parts])
    b = np.concatenate(
        [read_matrix(low.b) * (low.scaling * weight) for low, weight in parts], axis=1
    )
    return LowRankDelta(a, b)


def truncate(factors: LowRankDelta, rank: int) -> LowRankDelta:
    """The nearest delta of at most this rank (Eckart and Young, 1936).

    The singular values come from the two small matrices of a QR decomposition, so the full
    [out, in] delta is never made. Their square roots go to both sides evenly.
    """
    import numpy as np

    if factors.a.shape[0] <= rank:
        return factors
    q_b, r_b = np.linalg.qr(factors.b)
    q_a, r_a = np.linalg.qr(factors.a.T)
    u, sizes, v = np.linalg.svd(r_b @ r_a.T)
    root = np.sqrt(sizes[:rank])
    total = float(np.square(sizes).sum())
    lost = math.sqrt(float(np.square(sizes[rank:]).sum()) / total) if total else 0.0
    a, b = (root[:, None] * v[:rank]) @ q_a.T, (q_b @ u[:, :rank]) * root
    return LowRankDelta(a, b, lost)


def module_of(low: LowRank) -> str:
    """The path in the model of the module that a low-rank delta belongs to."""
    found = KEY.fullmatch(low.a.name)
    assert found is not None, "the adapter reader let another name through"
    return found["module"]


def key_of(low: LowRank, side: str) -> str:
    """The name under which PEFT stores side `A` or `B` of the module."""
    name = low.a.name
    return f"{name[: name.rindex('_A')]}_{side}{name[name.rindex('_A') + 2 :]}"


@dataclass(frozen=True)
class AdapterMergePlan(MergePlan):
    """A plan over adapters only, whose output is an adapter.

    Places at which no adapter adds anything stay at the base.
    """

    def __post_init__(self) -> None:
        for where in self.composition.blends.values():
            for member in where.members:
                if isinstance(member, Operation):
                    raise MergeError(
                        f"{member.method} of adapters is no adapter; ask for full weights with "
                        "`bake: true` (--bake)"
                    )

    @property
    def account(self) -> dict[str, Any]:
        """Nothing: the tensors of adapters are those of the modules that each of them adapts."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that the merge will write."""
        size = 4 if self.dtype == "float32" else 2
        count = sum(self._rank(parts) * sum(parts[0][0].shape) for _, parts in self.modules())
        return size * (count + sum(parts[0][0].elements for _, parts in self.saved()))

    def modules(self) -> Iterator[tuple[str, Parts]]:
        """Every module that the output adapts, with what goes into it."""
        names = dict.fromkeys(name for c in self.used.values() for name in c.low_rank)
        for name in names:
            parts = [
                (self.experts[str(member)].low_rank[name], weight)
                for member, weight in self._blend(name)
                if name in self.experts[str(member)].low_rank
            ]
            if parts:
                yield module_of(parts[0][0]), parts

    def saved(self) -> Iterator[tuple[str, list[tuple[TensorInfo, float]]]]:
        """Every tensor that the output replaces whole, with what goes into it."""
        adapters = {n: c.adapter for n, c in self.used.items() if c.adapter is not None}
        adapted = {name for c in self.used.values() for name in c.low_rank}
        for name in dict.fromkeys(name for a in adapters.values() for name in a.saved):
            if name in adapted:  # a copy of the base's embedding, beside its adapter
                continue
            shares = self._blend(name)
            if not any(name in adapters[str(member)].saved for member, _ in shares):
                continue
            without = [str(m) for m, _ in shares if name not in self.experts[str(m)].tensors]
            if without:
                raise MergeError(
                    f"{name!r} is trained whole in one adapter but not in {without[0]}; give the "
                    "base as a local folder to blend it"
                )
            yield name, [(self.experts[str(member)].tensors[name], w) for member, w in shares]

    def to_dict(self) -> dict[str, Any]:
        """What `layerswap plan --json` prints."""
        modules = list(self.modules())
        return {
            **self._summary(),
            "adapter": True,
            "ranks": sorted({self._rank(parts) for _, parts in modules}),
            "tensors": 2 * len(modules) + len(list(self.saved())),
            "output_bytes": self.nbytes,
            "weight_bytes": self.nbytes,
            "copied_bytes": 0,
            "shards": 1,
        }

    @property
    def dtype(self) -> str:
        """Dtype of the adapter's matrices."""
        # Folding a scaling into B rounds; float32 keeps that rounding far below the training's.
        return self.recipe.dtype or "float32"

    def _blend(self, name: str) -> list[tuple[object, float]]:
        where = next(c.places[name] for c in self.used.values() if name in c.places)
        weights = self.composition[Place(*where)].weights
        # The base adds nothing, and so takes only its share away.
        return [(member, weight) for member, weight in weights if str(member) in self.experts]

    def _rank(self, parts: Parts) -> int:
        total = sum(low.rank for low, _ in parts)
        return total if self.recipe.rank is None else min(total, self.recipe.rank)


def write_adapter(folder: Path, plan: AdapterMergePlan, *, allow_non_finite: bool) -> None:
    """Write the weights, the configuration and the documents of a merged adapter.

    Raises:
        MergeError: a tensor holds NaN or infinity.
    """
    import numpy as np

    dtype = FLOAT_NAMES[plan.dtype]
    tensors: dict[str, Stored] = {}
    ranks: dict[str, int] = {}
    lost: dict[str, float] = {}
    for path, parts in plan.modules():
        factors = concatenate(parts)
        if plan.recipe.rank is not None:
            factors = truncate(factors, plan.recipe.rank)
        ranks[path], lost[path] = factors.a.shape[0], factors.lost
        for side, matrix in (("A", factors.a), ("B", factors.b)):
            tensors[key_of(parts[0][0], side)] = narrowed(matrix, dtype)
    whole = dict(plan.saved())
    for name, inputs in whole.items():
        read = [widened(read_tensor(info), info.dtype) for info, _ in inputs]
        value = blend(read, [weight for _, weight in inputs])
        tensors[f"base_model.model.{name}"] = narrowed(value, dtype)
    for name, tensor in tensors.items():
        if not allow_non_finite and not is_finite(tensor, dtype):
            raise MergeError(f"tensor {name!r} of the adapter holds NaN or infinity")
    order = sorted(tensors)
    with (folder / ADAPTER_WEIGHTS).open("wb") as file:
        entries = [(name, dtype, tensors[name].shape, tensors[name].nbytes) for name in order]
        file.write(header_bytes(entries, {"format": "pt"}))
        for name in order:
            file.write(np.ascontiguousarray(tensors[name]).data)
    config = json.dumps(_config(plan, ranks, list(whole)), indent=2, ensure_ascii=False)
    (folder / ADAPTER_CONFIG).write_text(config + "\n", "utf-8")
    write_adapter_documents(folder, plan, max(lost.values(), default=0.0))


def _config(plan: AdapterMergePlan, ranks: dict[str, int], whole: list[str]) -> dict[str, Any]:
    """`adapter_config.json`: scaling 1 everywhere, so that alpha is the rank."""
    assert plan.reference.adapter is not None
    assert plan.base is not None
    # Readers that know no patterns (vLLM) take r as the largest rank, and alpha / r as 1.
    most = max(ranks.values(), default=1)
    usual = Counter(ranks.values())
    patterns = {path: rank for path, rank in ranks.items() if len(usual) > 1 and rank != most}
    return {
        **plan.reference.adapter.config,
        "base_model_name_or_path": plan.base.source,
        "revision": plan.base.revision,
        "r": most,
        "lora_alpha": most,
        "use_rslora": False,
        "rank_pattern": patterns,
        "alpha_pattern": dict(patterns),
        "target_modules": list(ranks),
        "modules_to_save": [name.removesuffix(".weight") for name in whole] or None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "exclude_modules": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
