"""Commands that plan, write and verify merges, from `layerswap plan` to `layerswap verify`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from layerswap.cli import commands, options, output
from layerswap.ground.errors import MergeError, RecipeError

if TYPE_CHECKING:
    from layerswap.compose.recipe import Recipe
    from layerswap.merge.plan import Plan
    from layerswap.merge.target import MergeOptions


class RecipeOptions(options.OutputFormat, options.Zones, options.PairOptions, panel="Composition"):
    """A recipe, as a file or as options.

    Options:
        file [RECIPE.yaml]: Recipe or mergekit configuration.
        partition A|B|C|Z: Partition that replaces the zones. (default: the experts' own, if any)
    """

    file: Annotated[Path | None, Argument(rich_help_panel="Arguments")] = None
    base: options.AnyBase = None
    partition: str | None = None

    def recipe(self) -> Recipe:
        """The checked recipe."""
        from layerswap.compose.recipe import check_recipe, read_recipe

        composed = self.given()
        composed.pop("file", None)
        output = {
            name: composed.pop(name) for name in options.OutputFormat.options() if name in composed
        }
        if "languages" in output:
            output["languages"] = [code.strip() for code in output["languages"].split(",")]
        if self.file is None:
            return check_recipe({**_described(composed), **output}, where="command line")
        if composed:
            flag = _flag(next(iter(composed)))
            raise RecipeError(
                f"{flag} cannot be combined with a recipe file; write it into {self.file}"
            )
        return read_recipe(self.file).changed(output, where=str(self.file))


def _described(composed: dict[str, Any]) -> dict[str, Any]:
    """The recipe of a swap or a partition that options describe."""
    if not {"task_expert", "language_expert"} <= set(composed):
        raise RecipeError("give a recipe file, or both --task-expert and --language-expert")
    pair = [composed[name] for name in ("task_expert", "language_expert")]
    if pair[0] == pair[1] or Path(pair[0]).resolve() == Path(pair[1]).resolve():
        raise RecipeError(
            f"--task-expert and --language-expert are both {pair[0]}; a merge needs two experts"
        )
    data: dict[str, Any] = {
        "experts": {name: composed.pop(f"{name}_expert") for name in ("task", "language")}
    }
    if "base" in composed:
        data["base"] = composed.pop("base")
    if "partition" not in composed:
        weights = _read_weights(composed.pop("weights", "uniform"))
        return {**data, "weights": weights, "swap": composed}
    name = composed.pop("partition")
    if zones := set(composed) - {"outside"}:
        flag = _flag(min(zones))
        raise RecipeError(f"{flag} cannot be combined with --partition")
    return {**data, "partition": {"name": name, **composed}}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read_weights(text: str) -> str | dict[str, float]:
    """The value of `--weights`: a word, or the weights of both experts."""
    if "," not in text:
        return text
    try:
        task, language = map(float, text.split(","))
    except ValueError:
        raise RecipeError(
            f"--weights: {text!r} is not uniform, magnitude or two numbers like 0.6,0.4"
        ) from None
    return {"task": task, "language": language}


def plan(*, described: RecipeOptions) -> None:
    """Draw a composition, and list the size and the sources of its merge.

    Takes the arguments of merge. Reads headers, and compares tensors that look equal in all
    experts. Prints the plan; nothing is written.

    Example: layerswap plan --task math-expert --language swahili-expert --bottom 5
    """
    from layerswap.merge.api import make_plan

    planned = make_plan(described.recipe(), follow_training=described.file is None, in_place=True)
    output.finish("plan", planned.to_dict(), _summary(planned))
    output.suggest("merge", *sys.argv[2:], "--out", output.unused("merged"))


def _summary(planned: Plan) -> list[object]:
    """The drawing, notes, sources and sizes of a plan."""
    from rich.filesize import decimal

    facts = planned.to_dict()
    files = f"{facts['shards']} file{'s' if facts['shards'] > 1 else ''}"
    copied = facts["copied_bytes"] / max(1, facts["weight_bytes"])
    sharing = ""
    if shareable := facts.get("shareable_bytes"):
        sharing = f", {decimal(shareable)} to share where reflinks work (XFS, btrfs)"
    return [
        planned, "",
        *(f"note: {note}" for note in planned.notes),
        *(f"{name}: {identity}" for name, identity in facts["experts"].items()),
        f"{facts['tensors']} tensors, {decimal(facts['output_bytes'])} in {files}; "
        f"{copied:.0%} copied bit for bit{sharing}"
    ]  # fmt: skip


def merge(
    *,
    out: options.OutFolder,
    described: RecipeOptions,
    overwrite: options.Overwrite = False,
    push: str | None = None,
    public: bool = False,
    download: bool = False,
    layout: options.Layout = "auto",
    threads: options.Threads = None,
) -> None:
    """Merge two experts layer by layer into a checkpoint that transformers and vLLM load.

    Give a recipe, or --task-expert and --language-expert. Writes the folder OUT, or the file OUT if
    the experts are GGUF files.

    Example: layerswap merge --task math-expert --language swahili-expert --out merged

    Options:
        push OWNER/NAME: Upload the output to the Hub.
        public: Make the upload of --push public.
        download: Download whole Hub checkpoints to the local cache first.
    """
    from layerswap.checkpoint.header import is_gguf
    from layerswap.checkpoint.hub import check_hub_id, push_folder
    from layerswap.merge.api import make_plan
    from layerswap.merge.metadata import for_upload
    from layerswap.merge.target import MergeOptions, refuse_output

    if push is not None:
        check_hub_id(push)
    elif public:
        raise RecipeError("--public belongs to --push; give --push as well")
    if is_gguf(out) and push is not None:
        raise RecipeError("--push uploads a folder; upload a GGUF file with `hf upload`")
    recipe = described.recipe()
    # Before the sources are opened: opening may download them.
    refuse_output(out, overwrite=overwrite)
    planned = make_plan(recipe, follow_training=described.file is None, in_place=not download)
    settings = MergeOptions(overwrite=overwrite, threads=threads)
    facts = _write(planned.laid_out(out, layout), out, settings)
    if push is not None:
        folder = Path(facts["folder"])
        texts = for_upload(folder)
        facts["uploaded"] = push_folder(folder, push, private=not public, texts=texts)
        output.say(f"uploaded to {facts['uploaded']}")
    output.finish("merge", facts)
    output.suggest("verify", out)
    if push is None and out.is_dir():  # not of a GGUF file
        for words in _uses(out, described, overwrite=overwrite):
            output.suggest(*words)


def _uses(out: Path, described: RecipeOptions, *, overwrite: bool) -> list[list[str]]:
    """The uses of a merged folder."""
    from layerswap.checkpoint import open_configuration
    from layerswap.checkpoint.adapter import ADAPTER_CONFIG
    from layerswap.merge.metadata import uses

    given = described.given()
    experts = [word for name in ("base", "task_expert", "language_expert") if name in given
               for word in (_flag(name), given[name])]  # fmt: skip
    composition = [str(described.file)] if described.file else experts
    push = [*sys.argv[1:], *([] if overwrite else ["--overwrite"])]
    commands = uses(out, composition, push=push)
    if (out / ADAPTER_CONFIG).is_file():  # `deploy` needs full weights; the last --out counts
        commands[1] = [*sys.argv[1:], "--bake", "--out", f"{out}-full"]
    elif not open_configuration(str(out)).writes:  # the others ask for text
        return commands[2:3]
    return commands


def _write(planned: Plan, out: Path, settings: MergeOptions) -> dict[str, Any]:
    """Write a plan, with its drawing, its notes and a progress bar; the facts for JSON."""
    from dataclasses import replace

    from rich.filesize import decimal

    from layerswap.checkpoint import read_json_object
    from layerswap.checkpoint.header import is_gguf
    from layerswap.merge.target import RECORD
    from layerswap.merge.writer import LOST_TO_DTYPE, SHARED_BYTES

    target = planned.check_target(out, overwrite=settings.overwrite)
    output.say(planned)
    for note in planned.notes:
        output.say(f"note: {note}")
    with output.step_progress("writing", planned.nbytes, "bytes") as progress:
        shared = planned.write(
            target,
            replace(settings, progress=progress, log=lambda note: output.say(f"warning: {note}")),
        )
    size = decimal(planned.nbytes)
    if shared or is_gguf(out):  # in a GGUF file positions agree by chance
        size += f", {f'{decimal(shared)} of it' if shared else 'nothing'} shared with the experts"
    output.say(f"wrote {target} ({size})")
    facts = {
        **planned.to_dict(), SHARED_BYTES: shared,
        ("file" if is_gguf(out) else "folder"): str(target),
    }  # fmt: skip
    if output.settings.json and not is_gguf(out):
        facts[LOST_TO_DTYPE] = read_json_object(target / RECORD).get(LOST_TO_DTYPE)
    return facts


class ChatVector(commands.OptionGroup):
    """The part of a language model that receives the chat vector.

    Options:
        bottom: Layers without the chat vector at the input.
        top: Layers without the chat vector at the output.
        bottom_transition: Layers with half the chat vector above the bottom zone.
        top_transition: Layers with half the chat vector below the top zone.
        outside add|language: Embeddings, final norm and head.
    """

    bottom: Annotated[int, Option(min=0)] = 0
    top: Annotated[int, Option(min=0)] = 0
    bottom_transition: Annotated[int, Option(min=0)] = 0
    top_transition: Annotated[int, Option(min=0)] = 0
    outside: str = "add"


def instruct(
    *,
    base: options.Base,
    instruct: Annotated[str, Option(rich_help_panel=options.EXPERTS)],
    language_expert: options.LanguageExpert,
    out: options.OutFolder,
    weight: Annotated[float, Option(min=0)] = 1.0,
    places: ChatVector,
    form: options.WeightFormat,
    layout: options.Layout = "auto",
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
) -> None:
    """Give a language model the instruction tuning of another: the chat vector, layer by layer.

    Writes the folder OUT: LANGUAGE plus INSTRUCT minus BASE. The tokenizer is INSTRUCT's, with its
    chat template; if LANGUAGE has other tokens it is LANGUAGE's, and those keep their rows.

    Example: layerswap instruct --base llama --instruct llama-chat --language llama-sw --out chat-sw

    Options:
        instruct MODEL: Base after instruction tuning.
        weight: Weight of the chat vector.
    """
    from layerswap.merge.api import instruct as plan_instruct
    from layerswap.merge.target import MergeOptions, refuse_output

    refuse_output(out, overwrite=overwrite)
    planned = plan_instruct(
        base=base, instruct=instruct, language=language_expert, weight=weight,
        **places.given(), **form.given()
    )  # fmt: skip
    settings = MergeOptions(overwrite=overwrite, threads=threads)
    output.finish("instruct", _write(planned.laid_out(out, layout), out, settings))
    output.suggest("verify", out)


class Reverted(commands.OptionGroup):
    """The part of an expert that returns to the base.

    Options:
        keep: Share of rows to keep, the most changed first (0 to 1).
        threshold: Smallest mean absolute change of a row to keep.
        scope: Set of rows that are ranked together.
        layers: Layers to revert: 0-3,30, outside or all.
        roles: Roles to revert in these layers: attention,mlp.
        partition A|B|C|Z: Partition of which one part is kept.
        part task|language: Part of the partition to keep.
    """

    keep: float | None = None
    threshold: float | None = None
    axis: options.Axis = "input"
    scope: Literal["tensor", "model"] = "tensor"
    layers: str | None = None
    roles: str | None = None
    partition: str | None = None
    part: str | None = None

    def settings(self) -> dict[str, Any]:
        """The arguments of `layerswap.revert`."""
        lists = {name: getattr(self, name) for name in ("layers", "roles")}
        return self.given() | {k: v.split(",") for k, v in lists.items() if v is not None}


def revert(
    *,
    base: options.Base,
    experts: options.Experts,
    out: options.OutFolder,
    reset: Reverted,
    tokenizer: str | None = None,
    form: options.WeightFormat,
    layout: options.Layout = "auto",
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
) -> None:
    """Revert a part of an expert to the base, by magnitude or by place.

    Give one expert, and one way: --keep or --threshold; --layers or --roles; or --partition. Writes
    the expert into the folder OUT.

    Example: layerswap revert --base llama --expert math-expert --keep 0.2 --out sparse

    Options:
        tokenizer expert|base|union: Tokenizer of the output where the two differ.
    """
    from layerswap.checkpoint import refuse_target
    from layerswap.merge.api import revert as plan_revert
    from layerswap.merge.target import RECORD, MergeOptions

    expert = experts.only()
    refuse_target(out, marker=RECORD, overwrite=overwrite)
    planned = plan_revert(base, expert, **reset.settings(), tokenizer=tokenizer, **form.given())
    settings = MergeOptions(overwrite=overwrite, threads=threads)
    _write(planned.laid_out(out, layout), out, settings)
    output.suggest("verify", out)


def verify(
    folder: Path,
    *,
    against: str | None = None,
    full: bool = False,
    sample: float = 0.1,
    seed: int = 0,
    source: list[str] | None = None,
    threads: options.Threads = None,
) -> None:
    """Verify a merged checkpoint against its sources.

    Compares copied tensors bit for bit and recomputes a sample of the others. Prints the findings,
    and exits with code 0 if there are none, else 2.

    With --against, compares a model that another program merged with a recipe, and prints the
    expert that each layer comes from.

    Example: layerswap verify merged --full

    Options:
        folder OUT: Folder or GGUF file that merge wrote.
        against MODEL: Compare another program's merge with OUT's recipe, or a recipe.
        full: Recompute every tensor, not only a sample.
        sample SHARE: Share of each computed tensor to recompute.
        seed: Seed of the sample.
        source NAME=PATH: Current folder of a source. Repeatable.
    """
    from layerswap.merge.verification import verify as check

    settings: Any = {
        "share": 1.0 if full else sample, "seed": seed,
        "threads": threads, "progress": output.step_progress,
    }  # fmt: skip
    moved = options.read_pairs("--source", source, "NAME=PATH")
    if against is not None:
        _verify_against(folder, against, moved, settings)
        return
    report = check(folder, full=full, sources=moved, **settings)
    output.finish("verify", report.to_dict(), [report])
    if not report.passed:
        raise MergeError(*report.problems)


def _verify_against(
    planned: Path, model: str, moved: dict[str, str], settings: dict[str, Any]
) -> None:
    from layerswap.compose.recipe import read_recipe
    from layerswap.merge.api import make_plan
    from layerswap.merge.compare import verify_against
    from layerswap.merge.verification import read_record

    if planned.suffix in (".yaml", ".yml"):
        plan = make_plan(read_recipe(planned), in_place=True)
    else:
        plan = read_record(planned).plan_again(moved)
    origins = verify_against(plan, model, **settings)
    output.finish("verify", origins.to_dict(), [origins])
    if not origins.passed:
        raise MergeError(f"{model}: {len(origins.different)} tensors are not as planned")
