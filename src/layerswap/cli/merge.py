"""Commands that plan, write and verify merges, from `layerswap merge` to `layerswap verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerswap.cli import options, output
from layerswap.errors import MergeError, RecipeError

if TYPE_CHECKING:
    from layerswap.compose import Recipe
    from layerswap.merge.plan import Plan
    from layerswap.merge.target import MergeOptions


@options.takes_recipe
def merge(
    recipe: Recipe,
    *,
    follow_training: bool,
    out: options.OutFolder,
    allow_pickle: options.AllowPickle = False,
    overwrite: options.Overwrite = False,
    allow_non_finite: Annotated[
        bool, typer.Option("--allow-non-finite", help="Accept NaN and infinity in the experts.")
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
    from layerswap.checkpoint.header import is_gguf
    from layerswap.checkpoint.remote import check_hub_id, push_folder
    from layerswap.merge.api import make_plan
    from layerswap.merge.gguf import check_modelfile, write_modelfile
    from layerswap.merge.target import MergeOptions, refuse_output

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
    made = make_plan(
        recipe,
        allow_pickle=allow_pickle,
        follow_training=follow_training,
        in_place=not download,
        log=output.log,
    )
    if dry_run:
        made.check_target(out, overwrite=overwrite)
        output.finish("merge", made.to_dict(), described(made))
        return
    options = MergeOptions(
        overwrite=overwrite, allow_non_finite=allow_non_finite, resume=resume, threads=threads
    )
    facts = write_plan(made, out, options, "merging")
    if modelfile:
        facts["modelfile"] = str(write_modelfile(out))
        output.say(f"wrote {facts['modelfile']}")
    if push is not None:
        facts["uploaded"] = push_folder(Path(facts["folder"]), push, private=not public)
        output.say(f"uploaded to {facts['uploaded']}")
    output.finish("merge", facts)


def write_plan(made: Plan, out: Path, options: MergeOptions, label: str) -> dict[str, Any]:
    """Write a plan, with its drawing, its notes and a progress bar; the facts for JSON."""
    from dataclasses import replace

    from rich.filesize import decimal

    from layerswap.checkpoint import read_json_object
    from layerswap.checkpoint.header import is_gguf
    from layerswap.merge.target import RECORD
    from layerswap.merge.writer import LOST_TO_DTYPE

    target = made.check_target(out, overwrite=options.overwrite)
    output.say(made)
    for note in made.notes:
        output.say(f"note: {note}")
    with output.byte_progress(label, made.nbytes) as progress:
        written = made.write(
            target,
            replace(options, progress=progress, log=lambda note: output.say(f"warning: {note}")),
        )
    output.say(f"wrote {written} ({decimal(made.nbytes)})")
    facts = {**made.to_dict(), ("file" if is_gguf(out) else "folder"): str(written)}
    if output.settings.json and not is_gguf(out):
        facts[LOST_TO_DTYPE] = read_json_object(written / RECORD).get(LOST_TO_DTYPE)
    return facts


@options.takes_recipe
def plan(
    recipe: Recipe,
    *,
    follow_training: bool,
    allow_pickle: options.AllowPickle = False,
) -> None:
    """Draw a composition and list the size and the sources of its merge.

    Takes the arguments of merge, reads only headers, and writes nothing.

    Example: layerswap plan --task-expert math-expert --language-expert swahili-expert --bottom 5
    """
    from layerswap.merge.api import make_plan

    made = make_plan(
        recipe,
        allow_pickle=allow_pickle,
        follow_training=follow_training,
        in_place=True,
        log=output.log,
    )
    output.finish("plan", made.to_dict(), described(made))


def described(made: Plan) -> list[object]:
    """A plan for people: its drawing, notes, sources and sizes, as `output.finish` takes them."""
    from rich.filesize import decimal

    facts = made.to_dict()
    files = f"{facts['shards']} file{'s' if facts['shards'] > 1 else ''}"
    copied = facts["copied_bytes"] / max(1, facts["weight_bytes"])
    return [
        made, "",
        *(f"note: {note}" for note in made.notes),
        *(f"{name}: {identity}" for name, identity in facts["experts"].items()),
        f"{facts['tensors']} tensors, {decimal(facts['output_bytes'])} in {files}; "
        f"{copied:.0%} copied bit for bit",
    ]  # fmt: skip


ZONES = ("bottom", "top", "bottom_transition", "top_transition", "outside")


@options.takes("base", *ZONES, "weights", "rank")
def adapters(
    *,
    task_experts: Annotated[
        list[str],
        typer.Option(
            "--task-experts", "--tasks", metavar="[NAME=]FOLDER", help="Task adapter. Repeatable."
        ),
    ],
    language_experts: Annotated[
        list[str],
        typer.Option(
            "--language-experts", "--languages", metavar="[NAME=]FOLDER",
            help="Language adapter. Repeatable.",
        ),
    ],
    out: options.OutFolder,
    base: str | None = None,
    bottom: int | None = None,
    top: int | None = None,
    bottom_transition: int | None = None,
    top_transition: int | None = None,
    outside: str | None = None,
    weights: str | None = None,
    rank: int | None = None,
    dtype: options.Dtype = None,
    overwrite: options.Overwrite = False,
) -> None:  # fmt: skip
    """Write the swap of every task adapter with every language adapter as a PEFT adapter.

    A server such as vLLM holds all of them over one base. Writes the folder OUT with one adapter
    in each subfolder, a card, `serve.json` and `serve.sh`. `layerswap eval OUT` evaluates them.

    Example: layerswap adapters --tasks math --languages sw --languages te --out served
    """
    from layerswap.merge.adapters import SCRIPT, write_adapters

    sizes = (bottom, top, bottom_transition, top_transition, outside)
    zones = {name: size for name, size in zip(ZONES, sizes, strict=True) if size is not None}
    tasks = options.named_folders("--task-experts", task_experts)
    languages = options.named_folders("--language-experts", language_experts)
    with output.step_progress("composing adapters", len(tasks) * len(languages)) as progress:
        served = write_adapters(
            tasks, languages, out, base=base, method=zones,
            weights=options.read_weights(weights or "uniform"), rank=rank, dtype=dtype,
            overwrite=overwrite, progress=progress,
        )  # fmt: skip
    facts = {
        "adapters": list(served.plans), "base": served.base, "rank": served.rank,
        "folder": str(served.folder),
    }  # fmt: skip
    notes = (f"note: {name}: {note}" for name, plan in served.plans.items() for note in plan.notes)
    lines = [
        *notes,
        f"adapters of {served.base}: {len(served.plans)}, rank {served.rank} at most",
        f"wrote {served.folder}",
        f"serve them: sh {served.folder / SCRIPT}",
    ]
    output.finish("adapters", facts, lines)


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
    from layerswap.merge.api import instruct as plan_instruct
    from layerswap.merge.target import MergeOptions, refuse_output

    try:
        weights = [float(part) for part in weight.split(",")]
    except ValueError:
        raise RecipeError(
            f"--weight is {weight!r}; write a number, or numbers with commas"
        ) from None
    zones: dict[str, Any] = {
        "bottom": bottom, "top": top, "outside": outside,
        "bottom_transition": bottom_transition, "top_transition": top_transition,
    }  # fmt: skip
    refuse_output(out, overwrite=overwrite)
    made = plan_instruct(
        base=base, instruct=instruct, language=language, weight=weights, **zones, dtype=dtype,
        max_shard_size=max_shard_size or "5GB",
    )  # fmt: skip
    options = MergeOptions(overwrite=overwrite, threads=threads)
    output.finish("instruct", write_plan(made, out, options, "merging"))


def revert(
    *,
    base: options.Base,
    expert: Annotated[str, typer.Option(help="Expert: a folder or a Hub id.")],
    out: options.OutFolder,
    keep: Annotated[
        float | None, typer.Option(help="Share of rows to keep, the most changed first (0 to 1).")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Smallest mean absolute change of a row to keep.")
    ] = None,
    axis: options.Axis = "input",
    scope: Annotated[
        str, typer.Option(metavar="tensor|model", help="Set of rows that are ranked together.")
    ] = "tensor",
    layers: Annotated[
        str | None, typer.Option(help="Layers to revert: 0-3,30, outside or all.")
    ] = None,
    roles: Annotated[
        str | None, typer.Option(help="Roles to revert in these layers: attention,mlp.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(metavar="A|B|C|Z", help="Partition of which one part is kept.")
    ] = None,
    part: Annotated[
        str | None, typer.Option(metavar="task|language", help="Part of the partition to keep.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Whose the output has: expert, base or union."),
    ] = None,
    dtype: options.Dtype = None,
    max_shard_size: options.MaxShardSize = None,
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
) -> None:
    """Revert a part of an expert to the base, by magnitude or by place.

    Choose one way: --keep or --threshold; --layers or --roles; or --partition. Writes the expert
    into the folder OUT.

    Example: layerswap revert --base llama --expert math-expert --keep 0.2 --out sparse
    """
    from layerswap.checkpoint import refuse_target
    from layerswap.merge.api import revert as plan_revert
    from layerswap.merge.target import RECORD, MergeOptions

    refuse_target(out, marker=RECORD, overwrite=overwrite)
    settings: dict[str, Any] = {
        "keep": keep, "threshold": threshold, "axis": axis, "scope": scope,
        "layers": layers.split(",") if layers else None,
        "roles": roles.split(",") if roles else None,
        "partition": partition, "part": part, "tokenizer": tokenizer, "dtype": dtype,
        "max_shard_size": max_shard_size or "5GB",
    }  # fmt: skip
    options = MergeOptions(overwrite=overwrite, threads=threads)
    write_plan(plan_revert(base, expert, **settings), out, options, "writing")


def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder or GGUF file that merge wrote.")
    ],
    *,
    full: Annotated[
        bool, typer.Option("--full", help="Recompute every tensor in place of a sample.")
    ] = False,
    sample: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of each computed tensor to recompute.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="Present folder of a source. Repeatable."),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Record the SHA-256 of every file if all is well.")
    ] = False,
    allow_pickle: options.AllowPickle = False,
    threads: options.Threads = None,
) -> None:
    """Verify a merged checkpoint against its sources.

    Compares copied tensors bit for bit and recomputes a sample of the others. Exits with code 0
    if all is well, and 2 if not.

    Example: layerswap verify merged --full
    """
    from layerswap.merge import verify as check

    report = check(
        folder,
        full=full,
        share=sample,
        seed=seed,
        sources=options.read_pairs("--source", source or []),
        record=record,
        allow_pickle=allow_pickle,
        threads=threads,
        progress=output.byte_progress,
    )
    output.finish("verify", report.to_dict(), [report])
    if not report.passed:
        raise MergeError(*report.problems)
