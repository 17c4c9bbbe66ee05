"""`layerswap merge`: write a composition as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerswap.cli import options, output

if TYPE_CHECKING:
    from layerswap.compose import Recipe


@options.takes_recipe
def merge(
    recipe: Recipe,
    *,
    follow_training: bool,
    out: options.OutFolder,
    allow_pickle: options.AllowPickle = False,
    overwrite: options.Overwrite = False,
    allow_non_finite: Annotated[
        bool, typer.Option("--allow-non-finite", help="Accept NaN and infinity in the arithmetic.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the same merge after it was killed.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload the output to the Hub.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make the upload of --push public.")
    ] = False,
    modelfile: Annotated[
        bool, typer.Option("--modelfile", help="Write a Modelfile for Ollama beside a GGUF output.")
    ] = False,
    download: Annotated[
        bool,
        typer.Option("--download", help="Download whole Hub checkpoints to the local cache first."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and write nothing.")
    ] = False,
    threads: options.Threads = None,
) -> None:
    """Merge two experts layer by layer into a checkpoint that transformers and vLLM load.

    Give a recipe, or --task-expert and --language-expert. Writes the folder OUT; from GGUF
    files, the GGUF file OUT.

    Example: layerswap merge --task-expert math-expert --language-expert swahili-expert --out merged
    """
    write_recipe(
        recipe,
        out=out,
        follow_training=follow_training,
        allow_pickle=allow_pickle,
        overwrite=overwrite,
        allow_non_finite=allow_non_finite,
        resume=resume,
        push=push,
        public=public,
        modelfile=modelfile,
        download=download,
        dry_run=dry_run,
        threads=threads,
    )


def write_recipe(
    recipe: Recipe,
    *,
    out: Path,
    command: str = "merge",
    follow_training: bool = False,
    allow_pickle: bool = False,
    overwrite: bool = False,
    allow_non_finite: bool = False,
    resume: bool = False,
    push: str | None = None,
    public: bool = False,
    modelfile: bool = False,
    download: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
) -> None:
    """Write what a recipe describes, with progress and notes, for the command of that name."""
    from rich.filesize import decimal

    from layerswap.checkpoint import read_json_object
    from layerswap.checkpoint.header import is_gguf
    from layerswap.checkpoint.remote import check_hub_id, push_folder
    from layerswap.cli.progress import byte_progress
    from layerswap.errors import RecipeError
    from layerswap.merge.gguf import check_modelfile, write_modelfile
    from layerswap.merge.metadata import RECORD
    from layerswap.merge.planner import make_plan
    from layerswap.merge.rounding import LOST_TO_DTYPE
    from layerswap.merge.writer import refuse_output

    if push is not None:
        check_hub_id(push)
    elif public:
        raise RecipeError("--public says who sees what --push uploads; give --push as well")
    if is_gguf(out) and push is not None:
        raise RecipeError("--push uploads a folder; upload a GGUF file with `hf upload`")
    if modelfile:
        if not is_gguf(out):
            raise RecipeError("--modelfile goes with a GGUF output; end --out with .gguf")
        check_modelfile(out)
    # Before the sources are opened: opening may download them.
    refuse_output(out, overwrite=overwrite)
    plan = make_plan(
        recipe,
        allow_pickle=allow_pickle,
        follow_training=follow_training,
        in_place=not download,
        log=output.log,
    )
    if dry_run:
        from layerswap.cli.plan import described

        output.finish(command, plan.to_dict(), described(plan))
        return
    output.say(plan)
    for note in plan.notes:
        output.say(f"note: {note}")
    with byte_progress("merging", plan.nbytes) as progress:
        written = plan.save(
            out,
            overwrite=overwrite,
            threads=threads,
            progress=progress,
            allow_non_finite=allow_non_finite,
            resume=resume,
            log=lambda note: output.say(f"warning: {note}"),
        )
    output.say(f"wrote {written} ({decimal(plan.nbytes)})")
    facts = {**plan.to_dict(), ("file" if is_gguf(out) else "folder"): str(written)}
    if output.settings.json and not is_gguf(out):
        facts[LOST_TO_DTYPE] = read_json_object(written / RECORD).get(LOST_TO_DTYPE)
    if modelfile:
        facts["modelfile"] = str(write_modelfile(written))
        output.say(f"wrote {facts['modelfile']}")
    if push is not None:
        facts["uploaded"] = push_folder(written, push, private=not public)
        output.say(f"uploaded to {facts['uploaded']}")
    output.finish(command, facts)
