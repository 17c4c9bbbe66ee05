"""`layerswap plan`: draw what `merge` would do, and write nothing."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from layerswap.cli import options


def plan(
    recipe: options.RecipeFile = None,
    *,
    task: options.Task = None,
    language: options.Language = None,
    base: options.Base = None,
    bottom: options.Bottom = None,
    top: options.Top = None,
    bottom_transition: options.BottomTransition = None,
    top_transition: options.TopTransition = None,
    outside: options.OutsideLayers = None,
    weights: options.Weights = None,
    tokenizer: options.Tokenizer = None,
    bake: options.Bake = None,
    rank: options.Rank = None,
    dtype: options.Dtype = None,
    max_shard_size: options.MaxShardSize = None,
    allow_pickle: options.AllowPickle = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Draw a composition and say what it would write; writes nothing.

    Example: layerswap plan --task math-expert --language swahili-expert --bottom 5 --top 2
    """
    from rich.filesize import decimal

    from layerswap.merge import make_plan

    flags = {
        "task": task, "language": language, "base": base, "bottom": bottom, "top": top,
        "bottom_transition": bottom_transition, "top_transition": top_transition,
        "outside": outside, "weights": weights, "dtype": dtype, "max_shard_size": max_shard_size,
        "tokenizer": tokenizer, "bake": bake, "rank": rank,
    }  # fmt: skip
    made = make_plan(options.build_recipe(recipe, flags), allow_pickle=allow_pickle)
    facts = made.to_dict()
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    typer.echo(str(made))
    typer.echo()
    for note in made.notes:
        typer.echo(f"note: {note}")
    for name, identity in facts["experts"].items():
        typer.echo(f"{name}: {identity}")
    copied = facts["copied_bytes"] / max(1, facts["weight_bytes"])
    typer.echo(
        f"{facts['tensors']} tensors, {decimal(facts['output_bytes'])} in {facts['shards']} "
        f"file{'s' if facts['shards'] > 1 else ''}; {copied:.0%} copied bit for bit"
    )
