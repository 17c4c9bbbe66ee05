"""The two plans most people want, without writing a recipe."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from layerswap.compose import Outside
from layerswap.compose.recipe import check_recipe
from layerswap.merge.make import make_plan
from layerswap.merge.plan import Plan

Source = str | os.PathLike[str]
"""A local folder, or a Hub id `owner/name[@revision]`."""


def swap(
    *,
    task: Source,
    language: Source,
    base: Source | None = None,
    bottom: int | None = None,
    top: int | None = None,
    bottom_transition: int = 0,
    top_transition: int = 0,
    outside: Outside = "blend",
    weights: str | Mapping[str, float] = "uniform",
    tokenizer: str | None = None,
    bake: bool = False,
    rank: int | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
) -> Plan:
    """Plan a layer swap of two experts (paper 1, Algorithm 1). Opens headers, writes nothing.

    Args:
        task: the task expert, kept in the middle layers.
        language: the language expert, for the bottom and top layers.
        base: the checkpoint both were fine-tuned from; magnitude weights need it.
        bottom: layers from the language expert at the input; the scaled default when None.
        top: layers from the language expert at the output; the scaled default when None.
        bottom_transition: blended layers above the bottom zone.
        top_transition: blended layers below the top zone.
        outside: what embeddings, final norm and head take.
        weights: of a blend: `uniform`, `magnitude`, or `{"task": w, "language": w}`.
        tokenizer: whose tokenizer the output has where they differ: an expert's name, or
            `union`.
        bake: write full weights even where all experts are adapters.
        rank: largest rank of a merged adapter; exact when None.
        dtype: `float32`, `bfloat16` or `float16`; as stored when None.
        max_shard_size: largest size of an output file.

    Raises:
        LayerswapError: the experts cannot be opened or do not fit together, or the zones do not
            fit them.

    Example: `swap(task="math-expert", language="swahili-expert", bottom=5, top=2)`
    """
    method = {
        "bottom": bottom,
        "top": top,
        "bottom_transition": bottom_transition,
        "top_transition": top_transition,
        "outside": outside,
    }
    data = {
        "experts": {"task": os.fspath(task), "language": os.fspath(language)},
        "base": None if base is None else os.fspath(base),
        "swap": {key: value for key, value in method.items() if value is not None},
        "weights": weights if isinstance(weights, str) else dict(weights),
        "tokenizer": tokenizer,
        "bake": bake,
        "rank": rank,
        "dtype": dtype,
        "max_shard_size": max_shard_size,
    }
    return make_plan(check_recipe(data, where="swap"))


def soup(
    experts: Sequence[Source] | Mapping[str, Source],
    *,
    base: Source | None = None,
    weights: str | Mapping[str, float] = "uniform",
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
        tokenizer: whose tokenizer the output has where they differ: an expert's name, or
            `union`.
        bake: write full weights even where all experts are adapters.
        rank: largest rank of a merged adapter; exact when None.
        dtype: `float32`, `bfloat16` or `float16`; as stored when None.
        max_shard_size: largest size of an output file.

    Raises:
        LayerswapError: the experts cannot be opened or do not fit together.
    """
    if not isinstance(experts, Mapping):
        experts = {f"expert_{i}": source for i, source in enumerate(experts, start=1)}
    data = {
        "experts": {name: os.fspath(source) for name, source in experts.items()},
        "base": None if base is None else os.fspath(base),
        "soup": {"experts": list(experts)},
        "weights": weights if isinstance(weights, str) else dict(weights),
        "tokenizer": tokenizer,
        "bake": bake,
        "rank": rank,
        "dtype": dtype,
        "max_shard_size": max_shard_size,
    }
    return make_plan(check_recipe(data, where="soup"))
