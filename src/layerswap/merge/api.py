"""Plans without a recipe file: layer swaps, soups, partitions and reverts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from layerswap._types import PathLike
from layerswap.compose import Outside
from layerswap.compose.recipe import check_recipe
from layerswap.deltas.measure import Axis
from layerswap.errors import RecipeError
from layerswap.merge.planner import Plan, make_plan

Weighting = str | Mapping[str, float]
"""Weights of a blend: `uniform`, `magnitude`, or a weight per expert."""


def swap(
    *,
    task: PathLike,
    language: PathLike,
    base: PathLike | None = None,
    preset: Literal["layer-swapping", "reasoning"] | None = None,
    bottom: int | None = None,
    top: int | None = None,
    bottom_transition: int = 0,
    top_transition: int = 0,
    outside: Outside | None = None,
    weights: Weighting = "uniform",
    tokenizer: str | None = None,
    bake: bool = False,
    rank: int | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
) -> Plan:
    """Plan a layer swap of two experts (paper 1, Algorithm 1). Opens headers, writes nothing.

    Where nothing says what goes where, and the experts were trained on one partition of the second
    paper (`layerswap-training.json`), they are composed along it.

    Args:
        task: the task expert, kept in the middle layers.
        language: the language expert, for the bottom and top layers.
        base: the checkpoint both were fine-tuned from; magnitude weights need it.
        preset: where the defaults of zones and `outside` are from: the paper's, or `reasoning`,
            which gives a native specialist the middle of an English reasoner (2605.26735).
        bottom: layers from the language expert at the input; the scaled default when None.
        top: layers from the language expert at the output; the scaled default when None.
        bottom_transition: blended layers above the bottom zone.
        top_transition: blended layers below the top zone.
        outside: what embeddings, final norm and head take; the blend when None.
        weights: weights of a blend: `uniform`, `magnitude`, or `{"task": w, "language": w}`.
        tokenizer: the expert whose tokenizer the output has where they differ, or `union`.
        bake: write full weights even where all experts are adapters.
        rank: largest rank of a merged adapter; exact when None.
        dtype: `float32`, `bfloat16` or `float16`; as stored when None.
        max_shard_size: largest size of an output file.

    Raises:
        LayerswapError: the experts cannot be opened or do not fit together, or the zones do not
            fit them.

    Example:
        >>> import layerswap as ls
        >>> plan = ls.swap(task="math-expert", language="swahili-expert", bottom=1, top=1)
        >>> print(plan)
        head, final norm ▒▒▒▒▒▒▒▒▒▒ 0.5 language + 0.5 task
                       2 ██████████ language
                       1 ░░░░░░░░░░ task
                       0 ██████████ language
               embedding ▒▒▒▒▒▒▒▒▒▒ 0.5 language + 0.5 task
        >>> plan.save("merged", overwrite=True).name
        'merged'
    """
    method = {
        "preset": preset,
        "bottom": bottom,
        "top": top,
        "bottom_transition": bottom_transition or None,
        "top_transition": top_transition or None,
        "outside": outside,
    }
    return _plan(
        "swap",
        {"task": task, "language": language},
        base,
        swap={key: value for key, value in method.items() if value is not None},
        weights=weights if isinstance(weights, str) else dict(weights),
        tokenizer=tokenizer,
        bake=bake,
        rank=rank,
        dtype=dtype,
        max_shard_size=max_shard_size,
    )


def soup(
    experts: Sequence[PathLike] | Mapping[str, PathLike],
    *,
    base: PathLike | None = None,
    weights: Weighting = "uniform",
    tokenizer: str | None = None,
    bake: bool = False,
    rank: int | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
) -> Plan:
    """Plan a model soup: the same blend at every place (Wortsman et al., 2022).

    Args:
        experts: the experts, or the experts by name; without names they are `expert_1` and on.
        base: the checkpoint they were fine-tuned from; magnitude weights need it.
        weights: `uniform`, `magnitude`, or a weight per name.
        tokenizer: as in `swap`.
        bake: as in `swap`.
        rank: as in `swap`.
        dtype: as in `swap`.
        max_shard_size: as in `swap`.

    Raises:
        LayerswapError: the experts cannot be opened or do not fit together.

    Example:
        >>> import layerswap as ls
        >>> plan = ls.soup(["math-expert", "swahili-expert"])
        >>> plan.composition.experts
        ('expert_1', 'expert_2')
    """
    if isinstance(experts, str | os.PathLike):
        raise RecipeError("a soup needs a list of experts, or a mapping from names to experts")
    if not isinstance(experts, Mapping):
        experts = {f"expert_{i}": source for i, source in enumerate(experts, start=1)}
    return _plan(
        "soup",
        experts,
        base,
        soup={"experts": list(experts)},
        weights=weights if isinstance(weights, str) else dict(weights),
        tokenizer=tokenizer,
        bake=bake,
        rank=rank,
        dtype=dtype,
        max_shard_size=max_shard_size,
    )


def partition(
    name: Literal["A", "B", "C", "Z"],
    *,
    task: PathLike,
    language: PathLike,
    base: PathLike | None = None,
    outside: Literal["language", "task"] | None = None,
    tokenizer: str | None = None,
    bake: bool = False,
    rank: int | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
) -> Plan:
    """Plan a merge along a partition of the second paper (section 3.3).

    Args:
        name: `A`, `B`, `C` or `Z`; see `compose.presets.partition`.
        task: the task expert.
        language: the language expert.
        base: the checkpoint both were fine-tuned from.
        outside: the expert that the places outside the layers take; the partition's when None.
        tokenizer: as in `swap`.
        bake: as in `swap`.
        rank: as in `swap`.
        dtype: as in `swap`.
        max_shard_size: as in `swap`.

    Raises:
        LayerswapError: the experts cannot be opened or do not fit together, or there is no such
            partition.

    Example:
        >>> import layerswap as ls
        >>> print(ls.partition("B", task="math-expert", language="swahili-expert"))
        head, final norm ░░░░░░░░░░ task
                       2 ██████████ language
                       1 ░░░░░░░░░░ task
                       0 ██████████ language
               embedding ░░░░░░░░░░ task
    """
    return _plan(
        "partition",
        {"task": task, "language": language},
        base,
        partition={"name": name, "outside": outside},
        tokenizer=tokenizer,
        bake=bake,
        rank=rank,
        dtype=dtype,
        max_shard_size=max_shard_size,
    )


def instruct(
    *,
    base: PathLike,
    instruct: PathLike,
    language: PathLike,
    weight: float | Sequence[float] = 1.0,
    bottom: int = 0,
    top: int = 0,
    bottom_transition: int = 0,
    top_transition: int = 0,
    outside: Literal["add", "language"] = "add",
    tokenizer: str = "language",
    dtype: str | None = None,
    max_shard_size: str = "5GB",
) -> Plan:
    """Plan a language model with the instruction tuning of another (2310.04799; 2603.28263).

    The chat vector, `instruct` minus `base`, is added to the language model layer by layer.

    Args:
        base: what both models were made from.
        instruct: the base after instruction tuning.
        language: the base after training on a language.
        weight: of the chat vector, or several weights from the first to the last layer.
        bottom: layers without the chat vector at the input.
        top: layers without it at the output.
        bottom_transition: layers with half of it above the bottom zone.
        top_transition: layers with half of it below the top zone.
        outside: `add` for embeddings, final norm and head too, or `language` for the language
            model's own.
        tokenizer: whose tokenizer the output has where they differ; tokens that the language
            model added keep their rows.
        dtype: as in `swap`.
        max_shard_size: as in `swap`.

    Raises:
        LayerswapError: the models cannot be opened or do not fit together.

    Example:
        >>> import layerswap as ls
        >>> models = {"instruct": "math-expert", "language": "swahili-expert"}
        >>> plan = ls.instruct(base="base", **models, top=1)
        >>> plan.composition[ls.Place(2, "mlp")] == ls.Blend.of("language")
        True
    """
    method = {
        "weight": weight if isinstance(weight, int | float) else list(weight),
        "bottom": bottom, "top": top, "outside": outside,
        "bottom_transition": bottom_transition, "top_transition": top_transition,
    }  # fmt: skip
    models = {"language": language, "instruct": instruct}
    written = {"tokenizer": tokenizer, "dtype": dtype, "max_shard_size": max_shard_size}
    return _plan("instruct", models, base, instruct=method, **written)


def revert(
    base: PathLike,
    expert: PathLike,
    *,
    keep: float | None = None,
    threshold: float | None = None,
    axis: Axis = "input",
    scope: Literal["tensor", "model"] = "tensor",
    layers: str | int | Sequence[str | int] | None = None,
    roles: str | Sequence[str] | None = None,
    partition: str | None = None,
    part: Literal["task", "language"] | None = None,
    tokenizer: str | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
) -> Plan:
    """Plan an expert of which a part is the base's again. Opens headers, writes nothing.

    Either by magnitude (paper 1, section 3.3: rows that changed little go back), or by place
    (paper 2, Table 2: all but one part of a partition goes back; or chosen layers and roles).
    What stays and what goes back is copied bit for bit.

    Args:
        base: what the expert was fine-tuned from.
        expert: a full checkpoint or an adapter.
        keep: the share of rows to keep, those with the largest MAV.
        threshold: the MAV from which a row is kept.
        axis: what a row is; the papers' is an input feature.
        scope: `tensor` if `keep` ranks the rows of each tensor, `model` if those of all together.
        layers: layers to put back, as numbers and ranges such as `3-7`, `outside` or `all`.
        roles: only these roles of those layers; all layers when `layers` is None.
        partition: a partition of the second paper, `A`, `B`, `C` or `Z`.
        part: the part of the partition that the expert keeps.
        tokenizer: whose tokenizer the output has where they differ: `expert`, `base` or `union`.
        dtype: `float32`, `bfloat16` or `float16`; as stored when None.
        max_shard_size: largest size of an output file.

    Raises:
        LayerswapError: the checkpoints cannot be opened or do not fit together, or the part to
            put back is not given, or given twice.

    Example:
        >>> import layerswap as ls
        >>> print(ls.revert("base", "math-expert", layers="0-1"))
        head, final norm ██████████ expert
                       2 ██████████
                       1 ░░░░░░░░░░ base
                       0 ░░░░░░░░░░
               embedding ██████████ expert
    """
    by_size = {"keep": keep, "threshold": threshold}
    by_size = {name: value for name, value in by_size.items() if value is not None}
    by_place = layers is not None or roles is not None
    if [*(True for _ in by_size), by_place, partition is not None].count(True) != 1:
        raise RecipeError(
            "say what to put back, in one way: keep or threshold; layers or roles; or partition"
        )
    if part is not None and partition is None:
        raise RecipeError("a part is one of a partition; say which partition")
    method: dict[str, Any]
    if by_size:
        settings = {"axis": axis, "scope": scope, **by_size}
        method = {"merge": {"method": "revert", "experts": ["expert"], **settings}}
    elif by_place:
        only = {"roles": _listed(roles)} if roles else {}
        places = [{"layers": at, "take": "base", **only} for at in _listed(layers) or ("all",)]
        method = {"soup": {"experts": ["expert"]}, "places": places}
    else:
        if part not in ("task", "language"):
            raise RecipeError("say which part of the partition the expert keeps: task or language")
        sides = {"task": "base", "language": "base", part: "expert"}
        method = {"partition": {"name": partition, **sides}}
    output = {
        "bake": True, "tokenizer": tokenizer, "dtype": dtype, "max_shard_size": max_shard_size,
    }  # fmt: skip
    return _plan("revert", {"expert": expert}, base, **method, **output)


def _plan(
    where: str, experts: Mapping[str, PathLike], base: PathLike | None, **settings: Any
) -> Plan:
    data = {
        "experts": {name: os.fspath(source) for name, source in experts.items()},
        "base": None if base is None else os.fspath(base),
        **settings,
    }
    return make_plan(check_recipe(data, where=where), follow_training=True, in_place=True)


def _listed(value: str | int | Sequence[str | int] | None) -> list[str | int]:
    if value is None:
        return []
    return [value] if isinstance(value, str | int) else list(value)
