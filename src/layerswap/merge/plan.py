"""Plans: a recipe bound to its checkpoints.

The composition and everything that is written follow from the recipe. A `Format` decides the form
of the output: a safetensors folder, an adapter, or a GGUF file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from layerswap.checkpoint import Checkpoint, Place
from layerswap.checkpoint.header import as_stored, is_gguf
from layerswap.checkpoint.remote import RemoteFile
from layerswap.compose.composition import Composition, draw
from layerswap.compose.presets import Outside, zone_grid
from layerswap.compose.recipe import Recipe
from layerswap.compose.schema import BASE, SwapMethod
from layerswap.ground.commit import existing_parent
from layerswap.ground.errors import MergeError, RecipeError
from layerswap.ground.types import Advance, Log, PathLike
from layerswap.merge.compatibility import (
    check_roles,
    check_tied,
    copy_notes,
    default_notes,
    numbered_notes,
    origin_notes,
    stack_notes,
    sum_notes,
    tied_notes,
    zero_notes,
)
from layerswap.merge.heads import check_heads, label_notes
from layerswap.merge.layout import (
    SMALLEST_RUN,
    OutputTensor,
    Shard,
    Span,
    TermBuilder,
    local_blocks,
    names_digest,
    output_tensors,
    term_builder,
)
from layerswap.merge.sources import Fisher, Stamp, check_unchanged, stamps_of, with_base
from layerswap.merge.target import (
    Layout,
    MergeOptions,
    check_apart,
    check_space,
    refuse_output,
)
from layerswap.merge.terms import merged_tensors, stored_tensors
from layerswap.merge.tokenizers import Alignment, align, chosen_tokenizer, token_id_notes
from layerswap.merge.writer import shareable_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Plan:
    """A merge, decided and checked; nothing has been written.

    Attributes:
        recipe: the recipe.
        composition: the recipe's composition, resolved for these checkpoints.
        experts: the checkpoints by expert name, the method's first and in its order.
        base: the checkpoint that they were fine-tuned from, if the recipe or an adapter names it.
        format: the form of the output.
        depth: number of layers of the experts, before any layers are moved.
        places: places of the experts' tensors, before any layers are moved.
        drop: stored copies of tied embeddings, left out of the output.
        magnitude: measured weights, if the recipe asks for them.
        stamps: size, time and inode of every local weight file and document when it was opened.
        alignment: the rows of embeddings and heads in one vocabulary, if vocabularies differ.
        fishers: the diagonal Fishers by expert, if the recipe names them.
        layout: `shared` if the output is to share blocks with the sources; else `plain`.
        remark: a sentence for the model card.

    Example:
        >>> import layerswap as ls
        >>> plan = ls.swap(task="math-expert", language="swahili-expert", bottom=1, top=1)
        >>> plan.nbytes == plan.to_dict()["output_bytes"]
        True
        >>> plan.save("merged", overwrite=True).name
        'merged'
    """

    recipe: Recipe
    composition: Composition
    experts: Mapping[str, Checkpoint]
    base: Checkpoint | None
    format: Format
    depth: int
    places: Mapping[str, Place]
    drop: frozenset[str]
    magnitude: Mapping[str, float] | None
    stamps: Mapping[Path, Stamp]
    alignment: Alignment | None = None
    fishers: Mapping[str, Fisher] = field(default_factory=dict)
    layout: Literal["plain", "shared"] = "plain"
    remark: str = ""

    def __post_init__(self) -> None:
        self.format.check(self)

    @property
    def used(self) -> dict[str, Checkpoint]:
        """The experts that some place uses, in the order of `experts`.

        All experts if every place takes the base.
        """
        used = {n: c for n, c in self.experts.items() if n in self.composition.experts}
        return used or dict(self.experts)

    @property
    def reference(self) -> Checkpoint:
        """The expert that gives the configuration and the order of the tensors."""
        return next(iter(self.used.values()))

    @property
    def opened(self) -> dict[str, Checkpoint]:
        """Every open checkpoint: the experts, the base and the Fishers."""
        return {**with_base(self.experts, self.base), **fisher_sources(self.fishers)}

    @property
    def sources(self) -> dict[str, Checkpoint]:
        """The checkpoints that decide the output: the experts used, the base, the Fishers used."""
        used = {n: f for n, f in self.fishers.items() if n in self.composition.fishers}
        return {**with_base(self.used, self.base), **fisher_sources(used)}

    @property
    def tokenizer_owner(self) -> Checkpoint:
        """The checkpoint that gives the tokenizer, its chat template and its stop tokens."""
        if self.alignment is not None:
            return with_base(self.experts, self.base)[self.alignment.owner]
        chats = "instruct" if self.recipe.instruct else None
        return self.experts.get(chosen_tokenizer(self.recipe, chats) or "", self.reference)

    @property
    def terms(self) -> TermBuilder:
        """The builder of the terms of output tensors."""
        first = {**self.used, **self.experts}  # the output's labels have the reference's order
        return term_builder(first, self.base, alignment=self.alignment, fishers=self.fishers)

    @cached_property
    def tensors(self) -> list[OutputTensor]:
        """Every tensor of the merged model."""
        return self.format.tensors(self)

    @property
    def equal_tensors(self) -> list[str]:
        """Names of tensors that the recipe blends and the merge copies, as all inputs are equal."""
        if self.format.name != "safetensors":
            return []
        places, composition = self.reference.places, self.composition
        copied = (tensor.name for tensor in self.tensors if tensor.verbatim)
        return [name for name in copied if len(composition[places[name]].members) > 1]

    @cached_property
    def shards(self) -> list[Shard]:
        """The output files."""
        return self.format.shards(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight files that the merge will write."""
        return self.format.nbytes(self)

    @cached_property
    def blocks(self) -> list[Span]:
        """Whole blocks that the output can share with local sources; none if too few."""
        shared = self if self.layout == "shared" else replace(self, layout="shared")
        vars(shared)["tensors"] = self.tensors  # they do not depend on the layout
        local = local_blocks(shared.shards)
        return local if sum(blocks.nbytes for blocks in local) >= SMALLEST_RUN else []

    def shared_bytes(self, folder: Path) -> int:
        """Bytes that an output in this folder shares with the sources; 0 for a plain layout."""
        return shareable_bytes(self.blocks, folder) if self.layout == "shared" else 0

    def laid_out(self, out: PathLike, layout: Layout = "auto") -> Plan:
        """Return the plan with its file layout resolved for an output.

        Args:
            out: the output.
            layout: `auto`: files share blocks with the sources where the filesystem can, and are
                cut for it; `plain`: the same files on every machine.
        """
        shared = replace(self, layout="shared")
        folder = existing_parent(Path(out).expanduser().absolute())
        return shared if layout == "auto" and shared.shared_bytes(folder) else self

    @property
    def account(self) -> dict[str, Any]:
        """Proof that no tensor is lost: the inputs' tensor names against the output's.

        For the output and for each source the number of tensors and the SHA-256 of their sorted
        names; for a source also the names that are missing on either side.
        """
        names = {tensor.name for tensor in self.tensors}
        sources = {}
        for name, checkpoint in with_base(self.used, self.base).items():
            inputs = checkpoint.tensors.keys()
            sources[name] = {
                **names_digest(inputs),
                "not_in_output": sorted(inputs - names),
                "only_in_output": sorted(names - inputs),
            }
        return {"output": names_digest(names), "sources": sources}

    @property
    def needs_whole(self) -> bool:
        """True if a method reads whole models several times, so that they must be on the disk."""
        merged = (
            tensor_part for tensor in self.tensors for tensor_part in merged_tensors(tensor.inputs)
        )
        return any(tensor_part.of_model for tensor_part in merged)

    @cached_property
    def fetched_bytes(self) -> dict[str, int]:
        """Bytes that the merge will fetch from each source that is read in place, by name.

        Whole files if `needs_whole`. Headers, which the plan has read, are not counted.
        """
        fetched: dict[str, int] = {}
        for name, checkpoint in self.opened.items():
            files = {file for file in checkpoint.all_files if isinstance(file, RemoteFile)}
            if not files:
                continue
            if self.needs_whole:
                fetched[name] = sum(file.size for file in files)
                continue
            stored = ({*map(as_stored, stored_tensors(t.inputs))} for t in self.tensors)
            fetched[name] = sum(
                info.nbytes for infos in stored for info in infos if info.file in files
            )
        return fetched

    def downloaded(self) -> Plan:
        """The same plan with every source on the disk.

        Raises:
            CheckpointError: the Hub cannot be reached.
        """
        if not any(checkpoint.in_place for checkpoint in self.opened.values()):
            return self
        experts = {name: checkpoint.downloaded() for name, checkpoint in self.experts.items()}
        base = self.base.downloaded() if self.base else None
        sources = [*with_base(experts, base).values(), *fisher_sources(self.fishers).values()]
        return replace(self, experts=experts, base=base, stamps=stamps_of(sources))

    @property
    def notes(self) -> list[str]:
        """Warnings and remarks on this merge, one per line."""
        return self.format.notes(self)

    def __repr__(self) -> str:
        layers, swap = self.composition.layers, self.recipe.swap
        zones = f", {swap.zones(layers)}" if swap else ""
        return f"<Plan: {self.recipe}{zones}; {layers} layers>"

    def __str__(self) -> str:
        return draw(self.composition)

    def _repr_html_(self) -> str:
        names = (f"{escape(n)}: {escape(c.identity[-80:])}" for n, c in self.used.items())
        sources = "<br>".join([*names][:8])
        return f"{self.composition._repr_html_()}<p>{sources}<br>{self.nbytes / 1e6:,.1f} MB</p>"

    def to_dict(self) -> dict[str, Any]:
        """The content of `layerswap plan --json`."""
        return {
            "composition": self.composition.to_dict(),
            "experts": {name: c.identity for name, c in self.used.items()},
            "model_type": self.reference.config.get("model_type"),
            "layers_by_number": self.reference.numbered and self.reference.numbered.stack,
            **self.format.facts(self),
        }

    def with_recipe(self, recipe: Recipe) -> Plan:
        """Plan another recipe over the same checkpoints.

        Raises:
            RecipeError: the recipe moves other layers, or names an expert that this plan lacks.
        """
        new = recipe.resolve(self.depth, self.magnitude, self.places)
        old = self.composition
        if (new.layers, new.taken) != (old.layers, old.taken):
            raise RecipeError("a plan keeps its layers; make a new plan to move layers")
        unknown = set(new.experts) - set(self.experts) - ({BASE} if self.base else set())
        if unknown:
            raise RecipeError(f"the plan has no expert {min(unknown)!r}")
        return replace(self, recipe=recipe, composition=new)

    def grid(
        self,
        *,
        bottom: int | Iterable[int],
        top: int | Iterable[int],
        bottom_transition: int | Iterable[int] = 0,
        top_transition: int | Iterable[int] = 0,
    ) -> list[Plan]:
        """Plan every combination of zone sizes that fits.

        Args:
            bottom: one size of the bottom zone or several, in layers.
            top: sizes of the top zone.
            bottom_transition: sizes of the blended zone above the bottom zone.
            top_transition: sizes of the blended zone below the top zone.

        Raises:
            RecipeError: the recipe is no swap and no partition, or no combination fits.

        Example:
            >>> import layerswap as ls
            >>> plan = ls.swap(task="math-expert", language="swahili-expert")
            >>> len(plan.grid(bottom=range(3), top=[0, 1]))
            6
        """
        start = self.recipe.swap
        if start is None and (along := self.recipe.partition) is not None:
            inner: Outside = "language" if along.name == "Z" else "task"
            outside = along.outside or inner
            start = SwapMethod(task=along.task, language=along.language, outside=outside)
        if start is None:
            raise RecipeError("only a swap or a partition has zones for a grid")
        layers = self.composition.layers
        sizes = (bottom, top, bottom_transition, top_transition)
        given = ((size,) if isinstance(size, int) else size for size in sizes)
        names = ("bottom", "top", "bottom_transition", "top_transition")
        plans = [
            self.with_recipe(
                self.recipe.model_copy(
                    update={"swap": start.model_copy(update=vars(zones)), "partition": None}
                )
            )
            for zones in zone_grid(layers, **dict(zip(names, given, strict=True)))
        ]
        if not plans:
            raise RecipeError(f"no combination of these zone sizes fits {layers} layers")
        return plans

    def check_target(self, out: PathLike, *, overwrite: bool = False) -> Path:
        """Check the output's path before anything is written; return it absolute.

        Raises:
            LayerswapError: it exists, lies in a source, is of another format, does not fit on the
                disk or cannot be written, or a source changed since the plan was made.
        """
        target = refuse_output(out, overwrite=overwrite)
        writes_gguf = self.format.name == "gguf"
        if is_gguf(target) != writes_gguf:
            raise MergeError(
                f"{target}: GGUF experts merge into a GGUF file; end its name with .gguf"
                if writes_gguf
                else f"{target}: only GGUF experts merge into a GGUF file; give a folder"
            )
        check_apart(target, self.opened)
        folder = existing_parent(target)
        check_space(folder, self.nbytes - self.shared_bytes(folder))
        check_unchanged(self.stamps)
        return target

    def write(self, target: Path, options: MergeOptions) -> int:
        """Write the output to a path that `check_target` returned; see `save`.

        Returns:
            The bytes that it shares with the sources.
        """
        plan = self.downloaded() if self.needs_whole else self
        return plan.format.write(plan, target, options)

    def save(
        self,
        out: PathLike,
        *,
        overwrite: bool = False,
        threads: int | None = None,
        progress: Advance = lambda count: None,
        layout: Layout = "auto",
        log: Log = lambda line: None,
    ) -> Path:
        """Write the merged checkpoint: a folder that transformers and vLLM load.

        Copies verbatim tensors bit for bit; accumulates blends in float32 and rounds once. The
        output appears whole or not at all. A plan over adapters writes an adapter; a plan over
        GGUF files writes a GGUF file.

        Args:
            out: the folder or GGUF file to create.
            overwrite: overwrite an output that layerswap wrote.
            threads: number of workers; the number of usable processors when None.
            progress: called with the number of bytes just written, by any worker.
            layout: `auto` shares blocks with the sources where the filesystem can, in files that
                are cut for it; `plain` writes the same files on every machine.
            log: called with each warning, such as changes that the output's dtype loses.

        Returns:
            The absolute path of the output.

        Raises:
            LayerswapError: the output exists, does not fit on the disk or cannot be written, or
                a source holds NaN or infinity, or changed meanwhile.
        """
        options = MergeOptions(overwrite, threads, progress, log)
        plan = self.laid_out(out, layout)
        target = plan.check_target(out, overwrite=overwrite)
        plan.write(target, options)
        return target

    def load(self) -> PreTrainedModel:
        """Load the merged model in memory, with the weights that `save` would write.

        Returns:
            A transformers model on the CPU, in evaluation mode; a PEFT model from a plan over
            adapters.

        Raises:
            LayerswapError: transformers has no class for the architecture, PEFT is not installed,
                the plan is over GGUF files, or a source changed since the plan was made.
        """
        return self.format.load(self)


class Format(ABC):
    """Output format: its tensors, files, writer and loader."""

    name: str
    cannot: ClassVar[Mapping[str, str]] = {}
    """Settings of a recipe that the format does not have, with reasons."""
    moves_layers: ClassVar[bool] = False

    def aligned(
        self, recipe: Recipe, checkpoints: Mapping[str, Checkpoint], base: Checkpoint | None
    ) -> Alignment | None:
        """Align the rows of the checkpoints to one vocabulary; None if they share it."""
        return align(recipe, checkpoints, base)

    def check_source(self, first: Checkpoint) -> None:
        """Refuse a first expert without tensors that the output needs, once for all plans."""
        return

    def check(self, plan: Plan) -> None:
        """Refuse a composition that the format cannot hold."""
        check_roles(plan.composition, plan.reference)
        check_tied(plan.composition, plan.reference, plan.drop)
        check_heads(plan.composition, plan.experts, plan.base)

    def tensors(self, plan: Plan) -> list[OutputTensor]:
        """Every tensor of the merged model."""
        return output_tensors(
            plan.composition,
            plan.used,
            plan.terms,
            base=plan.base,
            dtype=plan.recipe.dtype,
            drop=plan.drop,
        )

    @abstractmethod
    def shards(self, plan: Plan) -> list[Shard]:
        """The output files."""

    def nbytes(self, plan: Plan) -> int:
        """Bytes of the weight files."""
        return sum(shard.nbytes for shard in plan.shards)

    def notes(self, plan: Plan) -> list[str]:
        """Warnings and remarks on the merge."""
        sources = with_base(plan.used, plan.base)
        return [
            *(f"{n}: {note}" for n, c in sources.items() for note in c.notes),
            *default_notes(sources),
            *origin_notes(sources),
            *zero_notes(plan.used),
            *numbered_notes(plan.reference),
            *stack_notes(plan.reference),
            *sum_notes(plan.composition),
            *copy_notes(plan.used, plan.base),
            *tied_notes(plan.composition, plan.reference, plan.drop, plan.equal_tensors),
            *label_notes(plan.composition, plan.used, plan.reference),
            *([] if plan.alignment else token_id_notes(plan.used, plan.tokenizer_owner)),
        ]

    def layout_facts(self, plan: Plan) -> dict[str, Any]:
        """Return facts about the file layout that the record stores."""
        return {}

    def facts(self, plan: Plan) -> dict[str, Any]:
        """Sizes for `layerswap plan --json`."""
        verbatim = sum(tensor.nbytes for tensor in plan.tensors if tensor.verbatim)
        return {
            "tensors": len(plan.tensors),
            "output_bytes": plan.nbytes,
            "weight_bytes": sum(tensor.nbytes for tensor in plan.tensors),
            "copied_bytes": verbatim,
            "shards": len(plan.shards),
            "shareable_bytes": sum(blocks.nbytes for blocks in plan.blocks),
            "fetched_bytes": plan.fetched_bytes,
        }

    @abstractmethod
    def write(self, plan: Plan, target: Path, options: MergeOptions) -> int:
        """Write the output to a checked target; return the bytes that it shares with sources."""

    @abstractmethod
    def load(self, plan: Plan) -> PreTrainedModel:
        """The merged model in memory."""


def fetch_notes(plan: Plan) -> list[str]:
    """The bytes that a merge fetches, by source."""
    notes = []
    if plan.needs_whole and plan.fetched_bytes:
        notes.append("the method ranks whole models, which are downloaded first")
    for name, count in plan.fetched_bytes.items():
        whole = plan.opened[name].nbytes
        notes.append(f"fetches {count / 1e9:,.2f} of {whole / 1e9:,.2f} GB of {name}")
    return notes


def fisher_sources(fishers: Mapping[str, Fisher]) -> dict[str, Checkpoint]:
    """The stored tensors of Fishers, by their names in messages and records."""
    return {f"fisher of {name}": fisher.stored for name, fisher in fishers.items()}
