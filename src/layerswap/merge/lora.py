"""Composes adapters: exact blends of low-rank deltas, cut to a smaller rank on request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Checkpoint, LowRank, Place, atomic_folder, header_bytes
from layerswap.checkpoint.adapted import adapted
from layerswap.checkpoint.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, KEY, saved_name
from layerswap.checkpoint.loading import load_adapter, load_causal_lm
from layerswap.checkpoint.names import canonical, in_layers, without_training_words
from layerswap.checkpoint.read import (
    FLOAT_NAMES,
    is_finite,
    narrowed,
    read_matrix,
    read_tensor,
    widened,
)
from layerswap.compose.blend import Operation
from layerswap.compose.recipe import Recipe
from layerswap.ground.commit import write_json
from layerswap.ground.errors import MergeError, RecipeError
from layerswap.merge.folder import FolderFormat, checked_for_loading
from layerswap.merge.heads import label_rows, label_tensors
from layerswap.merge.layout import Shard
from layerswap.merge.metadata import copied_modules, recorded_source, write_adapter_documents
from layerswap.merge.plan import Plan
from layerswap.merge.sources import check_unchanged
from layerswap.merge.target import RECORD, MergeOptions
from layerswap.merge.terms import blend
from layerswap.merge.tokenizers import Alignment

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedModel

    from layerswap.checkpoint.read import Floats, Stored

Parts = Sequence[tuple[LowRank, float]]
"""Adapters' deltas of one module, with their weights."""


@dataclass(frozen=True)
class LowRankDelta:
    """A delta `b @ a`, float64.

    Attributes:
        a: [rank, in].
        b: [out, rank]; weights and scalings are folded into it.
        lost: share of the delta's Frobenius norm that cutting the rank removed.
    """

    a: npt.NDArray[np.float64]
    b: npt.NDArray[np.float64]
    lost: float = 0.0


def concatenate(parts: Parts) -> LowRankDelta:
    """Sum weighted low-rank deltas exactly, by concatenating their ranks.

    `sum_i w_i s_i B_i A_i = [w_1 s_1 B_1, w_2 s_2 B_2, ...] @ [A_1; A_2; ...]`. The scalings s_i
    go into B, so that the result has scaling 1 for any alphas, with rsLoRA too.
    """
    import numpy as np

    a = np.concatenate([read_matrix(low.a) for low, _ in parts])
    b = np.concatenate(
        [read_matrix(low.b) * (low.scaling * weight) for low, weight in parts], axis=1
    )
    return LowRankDelta(a, b)


def truncate(factors: LowRankDelta, rank: int) -> LowRankDelta:
    """Truncate to the nearest delta of at most this rank (Eckart and Young, 1936).

    The singular values come from the two small matrices of a QR decomposition, so the full
    [out, in] delta is never computed. Their square roots go to both sides evenly.
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


class AdapterFormat(FolderFormat):
    """A LoRA adapter, which PEFT and vLLM load.

    Places without a delta of any adapter stay at the base.
    """

    name = "adapter"
    cannot = {"blend_type": FolderFormat.cannot["blend_type"]}
    moves_layers = False

    def aligned(
        self, recipe: Recipe, checkpoints: Mapping[str, Checkpoint], base: Checkpoint | None
    ) -> Alignment | None:
        """Refuse vocabularies of several sizes, whose rows an adapter cannot align."""
        if len({checkpoint.vocabulary_size for checkpoint in checkpoints.values()}) > 1:
            raise RecipeError(
                "adapters with vocabularies of their own need full weights: bake: true"
            )
        return super().aligned(recipe, checkpoints, base)

    def shards(self, plan: Plan) -> list[Shard]:
        """Empty: an adapter is computed and written whole."""
        return []

    def check_source(self, first: Checkpoint) -> None:
        """Nothing: the base's own names and weights stay as they are."""

    def check(self, plan: Plan) -> None:
        """Refuse merge methods, because their results are not low-rank deltas."""
        copied_modules(plan)
        for where in plan.composition.blends.values():
            for member in where.members:
                if isinstance(member, Operation):
                    raise MergeError(
                        f"{member.method} of adapters is not low-rank; ask for full weights with "
                        "`bake: true` (--bake)"
                    )

    def nbytes(self, plan: Plan) -> int:
        """Bytes of the adapter's weights."""
        size = 4 if _dtype(plan) == "float32" else 2
        modules = (parts for _, parts in adapted_modules(plan))
        count = sum(_rank(plan, parts) * sum(parts[0][0].shape) for parts in modules)
        whole = (plan.experts[parts[0][0]].tensors[name] for name, parts in saved_tensors(plan))
        return size * (count + sum(info.elements for info in whole))

    def facts(self, plan: Plan) -> dict[str, Any]:
        """Ranks and sizes."""
        modules = list(adapted_modules(plan))
        return {
            "adapter": True,
            "ranks": ranks_of(plan),
            "tensors": 2 * len(modules) + len(list(saved_tensors(plan))),
            "output_bytes": plan.nbytes,
            "weight_bytes": plan.nbytes,
            "copied_bytes": 0,
            "shards": 1,
        }

    def write(self, plan: Plan, target: Path, options: MergeOptions) -> int:
        """Write the adapter in one thread, since it is small."""
        with atomic_folder(target, marker=RECORD, overwrite=options.overwrite) as folder:
            write_adapter(folder, plan)
            check_unchanged(plan.stamps)
        options.progress(plan.nbytes)
        return 0

    def load(self, plan: Plan) -> PreTrainedModel:
        """The base with the merged adapter on it, as a PEFT model."""
        plan = checked_for_loading(plan)
        assert plan.base is not None, "adapters are opened with their base"
        with TemporaryDirectory() as folder:
            write_adapter(Path(folder), plan, "CAUSAL_LM")
            where = plan.base.source if plan.base.revision else str(plan.base.folder)
            return load_adapter(load_causal_lm(where, revision=plan.base.revision), folder)


def ranks_of(plan: Plan) -> list[int]:
    """The distinct ranks of the output's modules."""
    return sorted({_rank(plan, parts) for _, parts in adapted_modules(plan)})


def adapted_modules(plan: Plan) -> Iterator[tuple[str, Parts]]:
    """Every module that the output adapts, by a path in an adapter, with its deltas."""
    for name in dict.fromkeys(name for c in plan.used.values() for name in c.low_rank):
        parts = [
            (plan.experts[expert].low_rank[name], weight)
            for expert, weight in _weights(plan, name)
            if name in plan.experts[expert].low_rank
        ]
        if parts:
            match = KEY.fullmatch(without_training_words(parts[0][0].a.name))
            assert match is not None, "the adapter reader let another name through"
            yield match["module"], parts


def saved_tensors(plan: Plan) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Every tensor that the output replaces whole, with its experts and their weights."""
    adapters = {name: adapted(c).adapter for name, c in plan.used.items()}
    changed = {name for c in plan.used.values() for name in c.low_rank}
    for name in dict.fromkeys(name for a in adapters.values() for name in a.saved):
        if name in changed:  # a copy of the base's embedding, stored with its adapter
            continue
        if all(name not in c.tensors for c in plan.used.values()):  # a head that is left out
            continue
        weights = _weights(plan, name)
        if not any(name in adapters[expert].saved for expert, _ in weights):
            continue
        without = [expert for expert, _ in weights if name not in plan.experts[expert].tensors]
        if without:
            raise MergeError(
                f"{name!r} is trained whole in one adapter but not in {without[0]}; give the "
                "base as a local folder to blend it"
            )
        yield name, weights


def _read_saved(plan: Plan, expert: str, name: str) -> Floats:
    """Read a tensor of an adapter, with the rows of its labels in the output's order."""
    checkpoint = plan.experts[expert]
    value = widened(read_tensor(checkpoint.tensors[name]), checkpoint.tensors[name].dtype)
    order = label_rows(checkpoint, plan.reference)
    return value[order] if order and name in label_tensors(checkpoint) else value


def _weights(plan: Plan, name: str) -> list[tuple[str, float]]:
    where = next(c.places[name] for c in plan.used.values() if name in c.places)
    weights = plan.composition[Place(*where)].weights
    # The base adds nothing; its weight reduces the other weights.
    return [(str(member), weight) for member, weight in weights if str(member) in plan.experts]


def _rank(plan: Plan, parts: Parts) -> int:
    total = sum(low.rank for low, _ in parts)
    return total if plan.recipe.rank is None else min(total, plan.recipe.rank)


def _dtype(plan: Plan) -> str:
    # Folding a scaling into B rounds; float32 keeps that rounding far below the training's.
    return plan.recipe.dtype or "float32"


def write_adapter(folder: Path, plan: Plan, task: str | None = None) -> None:
    """Write the weights, the configuration and the documents of a merged adapter.

    With `task`, for the class of that task; otherwise for the class of the first adapter's.
    """
    dtype = FLOAT_NAMES[_dtype(plan)]
    tensors: dict[str, Stored] = {}
    ranks: dict[str, int] = {}
    lost: dict[str, float] = {}
    config, names = adapted(plan.reference).merged([*map(adapted, plan.used.values())], task)
    for module, parts in adapted_modules(plan):
        own = f"{module}.weight"
        path = names.get(canonical(own), own).removesuffix(".weight")
        factors, embedding = concatenate(parts), ".lora_embedding_" in parts[0][0].a.name
        if plan.recipe.rank is not None:
            factors = truncate(factors, plan.recipe.rank)
        ranks[path], lost[path] = factors.a.shape[0], factors.lost
        for side, matrix in (("A", factors.a), ("B", factors.b)):
            kind = "embedding_" + side if embedding else f"{side}.weight"
            tensors[f"base_model.model.{path}.lora_{kind}"] = narrowed(matrix, dtype)
    whole = []
    for stored, weights in saved_tensors(plan):
        name = _in_memory(plan, stored)
        whole.append(names.get(canonical(name), name))
        value = blend([_read_saved(plan, n, stored) for n, _ in weights], [w for _, w in weights])
        tensors[f"base_model.model.{whole[-1]}"] = narrowed(value, dtype)
    for name, tensor in tensors.items():
        if not is_finite(tensor, dtype):
            raise MergeError(f"tensor {name!r} of the adapter holds NaN or infinity")
    _write_weights(folder / ADAPTER_WEIGHTS, tensors, dtype)
    write_json(folder / ADAPTER_CONFIG, {**config, **_config(plan, ranks, whole)})
    write_adapter_documents(folder, plan, max(lost.values(), default=0.0))


def _write_weights(path: Path, tensors: Mapping[str, Stored], dtype: str) -> None:
    import numpy as np

    order = sorted(tensors)
    with path.open("wb") as file:
        entries = [(name, dtype, tensors[name].shape, tensors[name].nbytes) for name in order]
        file.write(header_bytes(entries, {"format": "pt"}))
        for name in order:
            file.write(np.ascontiguousarray(tensors[name]).data)


def _in_memory(plan: Plan, name: str) -> str:
    """The name in memory of a tensor that is saved whole; on disk it may have another prefix."""
    saved = (adapted(c).adapter.saved for c in plan.used.values())
    return next(saved_name(each[name].name) for each in saved if name in each)


def _saved_modules(plan: Plan, names: list[str]) -> list[str]:
    """Return the modules of whole saved tensors, under the adapters' names."""
    configs = [adapted(c).adapter.config for c in plan.used.values()]
    known = {str(module) for config in configs for module in config.get("modules_to_save") or ()}
    found = []
    for name in names:
        module = next((m for m in known if f".{m}." in f".{name}"), name.rpartition(".")[0])
        # In layers by its path: PEFT looks for the tensors of every module of a name.
        before = f".{name}".partition(f".{module}.")[0]
        found.append(f"{before}.{module}"[1:] if in_layers(name) else module)
    return list(dict.fromkeys(found))


def _config(plan: Plan, ranks: dict[str, int], whole: list[str]) -> dict[str, Any]:
    """The settings of the merged adapter; alpha equals the rank, so every scaling is 1."""
    assert plan.base is not None
    # Readers without patterns (vLLM) take r as the largest rank, and alpha / r as 1.
    most = max(ranks.values(), default=1)
    usual = Counter(ranks.values())
    patterns = {path: rank for path, rank in ranks.items() if len(usual) > 1 and rank != most}
    return {
        # As in the record, from which `verify` writes it again.
        "base_model_name_or_path": recorded_source(plan.base),
        "revision": plan.base.revision,
        "r": most,
        "lora_alpha": most,
        "use_rslora": False,
        "rank_pattern": patterns,
        "alpha_pattern": dict(patterns),
        "target_modules": list(ranks),
        "modules_to_save": _saved_modules(plan, whole) or None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "exclude_modules": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
