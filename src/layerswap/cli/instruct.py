"""`layerswap instruct`: add what instruction tuning changed to a language model."""

from __future__ import annotations

from typing import Annotated

import typer

from layerswap.cli import options
from layerswap.cli.merge import write_recipe


def instruct(
    *,
    base: options.Base,
    instruct: Annotated[str, typer.Option(metavar="MODEL", help="Base after instruction tuning.")],
    language: Annotated[
        str, typer.Option(metavar="MODEL", help="Base after training on a language.")
    ],
    out: options.OutFolder,
    weight: Annotated[
        str,
        typer.Option(metavar="W[,W...]", help="Weight of the chat vector, first to last layer."),
    ] = "1",
    bottom: Annotated[
        int, typer.Option(min=0, help="Layers without the chat vector at the input.")
    ] = 0,
    top: Annotated[
        int, typer.Option(min=0, help="Layers without the chat vector at the output.")
    ] = 0,
    bottom_transition: Annotated[
        int, typer.Option(min=0, help="Layers with half of it above the bottom zone.")
    ] = 0,
    top_transition: Annotated[
        int, typer.Option(min=0, help="Layers with half of it below the top zone.")
    ] = 0,
    outside: Annotated[
        str, typer.Option(metavar="add|language", help="Embeddings, final norm and head.")
    ] = "add",
    dtype: options.Dtype = None,
    max_shard_size: options.MaxShardSize = None,
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
) -> None:
    """Give a language model the instruction tuning of another: the chat vector, layer by layer.

    Writes the folder OUT: LANGUAGE plus INSTRUCT minus BASE. The tokenizer is that of LANGUAGE, and
    tokens that it added keep their rows.

    Example: layerswap instruct --base llama --instruct llama-chat --language llama-sw --out chat-sw
    """
    from layerswap.compose.recipe import check_recipe
    from layerswap.errors import RecipeError

    try:
        weights = [float(part) for part in weight.split(",")]
    except ValueError:
        raise RecipeError(
            f"--weight is {weight!r}; write a number, or numbers with commas"
        ) from None
    method = {
        "weight": weights, "bottom": bottom, "top": top, "outside": outside,
        "bottom_transition": bottom_transition, "top_transition": top_transition,
    }  # fmt: skip
    written = {"dtype": dtype, "max_shard_size": max_shard_size}
    recipe = {
        "base": base,
        "experts": {"language": language, "instruct": instruct},
        "instruct": method,
        "tokenizer": "language",
        **{key: value for key, value in written.items() if value is not None},
    }
    write_recipe(
        check_recipe(recipe, where="command line"),
        out=out,
        command="instruct",
        overwrite=overwrite,
        threads=threads,
    )
