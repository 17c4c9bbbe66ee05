"""`layerswap merge`: write a composition as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli import options


def merge(
    recipe: options.RecipeFile = None,
    *,
    out: Annotated[Path, typer.Option(help="The folder to create.")],
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
    overwrite: options.Overwrite = False,
    allow_non_finite: Annotated[
        bool, typer.Option("--allow-non-finite", help="Let NaN and infinity through arithmetic.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where the same merge was killed.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the output to the Hub.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="With --push: let everybody see it.")
    ] = False,
    threads: options.Threads = None,
) -> None:
    """Merge two experts layer by layer into a checkpoint that transformers and vLLM load.

    Example: layerswap merge --task math-expert --language swahili-expert --out merged
    """
    from rich.filesize import decimal

    from layerswap.checkpoint import refuse_target
    from layerswap.cli.progress import byte_progress
    from layerswap.errors import RecipeError
    from layerswap.merge import make_plan
    from layerswap.merge.metadata import RECORD
    from layerswap.merge.push import check_hub_id, push_folder

    flags = {
        "task": task, "language": language, "base": base, "bottom": bottom, "top": top,
        "bottom_transition": bottom_transition, "top_transition": top_transition,
        "outside": outside, "weights": weights, "dtype": dtype, "max_shard_size": max_shard_size,
        "tokenizer": tokenizer, "bake": bake, "rank": rank,
    }  # fmt: skip
    if push is not None:
        check_hub_id(push)
    elif public:
        raise RecipeError("--public says who sees what --push uploads; give --push as well")
    checked = options.build_recipe(recipe, flags)
    # Before the sources are opened: opening may download them.
    refuse_target(Path(out).expanduser().absolute(), marker=RECORD, overwrite=overwrite)
    plan = make_plan(checked, allow_pickle=allow_pickle)
    plan.check_target(out, overwrite=overwrite)
    typer.echo(str(plan))
    for note in plan.notes:
        typer.echo(f"note: {note}")
    with byte_progress("merging", plan.nbytes) as progress:
        written = plan.save(
            out,
            overwrite=overwrite,
            threads=threads,
            progress=progress,
            allow_non_finite=allow_non_finite,
            resume=resume,
        )
    typer.echo(f"wrote {written} ({decimal(plan.nbytes)})")
    if push is not None:
        typer.echo(f"uploaded to {push_folder(written, push, private=not public)}")
