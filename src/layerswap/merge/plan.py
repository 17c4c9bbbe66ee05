"""Plans as data: a composition bound to the checkpoints that it draws from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from html import escape
from typing import Any, Self

from layerswap.checkpoint import Checkpoint
from layerswap.checkpoint.folder import downloaded
from layerswap.checkpoint.header import block_of
from layerswap.checkpoint.read import FLOAT_DTYPES, is_finite, open_file, read_stored
from layerswap.checkpoint.remote import RemoteFile, WeightFile
from layerswap.compose import Composition, Recipe, draw, zone_grid
from layerswap.compose.blend import Operation
from layerswap.compose.composition import changed_places
from layerswap.compose.presets import Outside
from layerswap.compose.recipe import parse_size
from layerswap.compose.schema import BASE, Override, SwapMethod
from layerswap.errors import MergeError, RecipeError
from layerswap.merge.compatibility import (
    check_roles,
    check_tied,
    copy_notes,
    numbered_notes,
    tied_notes,
    tokenizer_notes,
)
from layerswap.merge.fisher import Fisher
from layerswap.merge.layout import (
    OutputTensor,
    Shard,
    aligned_rows,
    output_tensors,
    pack_shards,
)
from layerswap.merge.lazy_tensors import derived_tensors, leaves
from layerswap.merge.trained import training_notes
from layerswap.merge.vocabulary import Alignment

Stamp = tuple[int, int, int] | None
"""Size, time of the last change and inode of a file; None for one that is read in place, which
says with every answer what it is."""


@dataclass(frozen=True)
class MergePlan:
    """What a merge will do, decided and checked; it knows neither writer nor model.

    Attributes:
        recipe: what the user asked for.
        composition: what goes where.
        experts: the checkpoints by expert name, those of the method first and in its order.
        base: the checkpoint they were fine-tuned from, when the recipe names it.
        drop: stored copies of tied embeddings, left out of the output.
        magnitude: measured weights, when the recipe asks for them.
        stamps: size, time and inode of every weight file when it was opened.
        alignment: how embeddings and heads come to one vocabulary, where they differ.
        fishers: the diagonal Fishers that the recipe names, by expert.
    """

    recipe: Recipe
    composition: Composition
    experts: Mapping[str, Checkpoint]
    base: Checkpoint | None
    drop: frozenset[str]
    magnitude: Mapping[str, float] | None
    stamps: Mapping[WeightFile, Stamp]
    alignment: Alignment | None = None
    fishers: Mapping[str, Fisher] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_roles(self.composition, self.reference)
        check_tied(self.composition, self.reference, self.drop)

    @property
    def used(self) -> dict[str, Checkpoint]:
        """The experts that some place takes from, in the order of `experts`.

        All of them where every place is the base's.
        """
        found = {n: c for n, c in self.experts.items() if n in self.composition.experts}
        return found or dict(self.experts)

    @property
    def reference(self) -> Checkpoint:
        """The expert that gives the configuration and the order of the tensors."""
        return next(iter(self.used.values()))

    @property
    def opened(self) -> dict[str, Checkpoint]:
        """Everything that was opened: the experts, the base and the Fishers."""
        return {**with_base(self.experts, self.base), **fisher_sources(self.fishers)}

    @property
    def sources(self) -> dict[str, Checkpoint]:
        """What the output depends on: the experts used, the base, and the Fishers used."""
        used = {n: f for n, f in self.fishers.items() if n in self.composition.fishers}
        return {**with_base(self.used, self.base), **fisher_sources(used)}

    @property
    def tokenizer_owner(self) -> Checkpoint:
        """The checkpoint whose tokenizer the output has."""
        if self.alignment is None:
            return self.reference
        return with_base(self.experts, self.base)[self.alignment.owner]

    @cached_property
    def tensors(self) -> list[OutputTensor]:
        """Every tensor that the merge will write."""
        return output_tensors(
            self.composition,
            self.used,
            base=self.base,
            dtype=self.recipe.dtype,
            drop=self.drop,
            rows=aligned_rows(self.alignment, with_base(self.experts, self.base), self.base),
            fishers=self.fishers,
        )

    @property
    def account(self) -> dict[str, Any]:
        """The proof that no tensor is lost: names of the inputs against those of the output.

        For the output and for each source the number of its tensors, and the SHA-256 of their
        sorted names; for a source also every name that only one of the two has.
        """
        names = {tensor.name for tensor in self.tensors}
        sources = {}
        for name, checkpoint in with_base(self.used, self.base).items():
            own = set(checkpoint.tensors)
            sources[name] = {
                **names_digest(own),
                "not_in_output": sorted(own - names),
                "only_in_output": sorted(names - own),
            }
        return {"output": names_digest(names), "sources": sources}

    @property
    def nbytes(self) -> int:
        """Bytes of the weight files that the merge will write."""
        return sum(shard.nbytes for shard in self.shards)

    @cached_property
    def shards(self) -> list[Shard]:
        """The output files."""
        return pack_shards(self.tensors, parse_size(self.recipe.max_shard_size), {"format": "pt"})

    @cached_property
    def fetched_bytes(self) -> dict[str, int]:
        """Bytes that the merge will fetch from each source that is read in place, by its name.

        Those of whole files where `needs_whole`; headers, which the plan has read, not counted.
        """
        found: dict[str, int] = {}
        for name, checkpoint in self.opened.items():
            files = {file for file in checkpoint.all_files if isinstance(file, RemoteFile)}
            if self.needs_whole:
                found |= {name: sum(file.size for file in files)} if files else {}
            elif files:
                found[name] = sum(
                    info.nbytes
                    for tensor in self.tensors
                    for info in {leaf for leaf in leaves(tensor.inputs) if leaf.file in files}
                )
        return found

    @property
    def needs_whole(self) -> bool:
        """True if a method reads whole models several times, so that they must be on the disk."""
        return any(
            dict(derived.operation.parameters).get("scope") == "model"
            for tensor in self.tensors
            for term, _ in tensor.inputs
            for derived in derived_tensors(term)
        )

    def downloaded(self) -> Self:
        """The same plan with every source on the disk.

        Raises:
            CheckpointError: a source is at a URL, or the Hub cannot be reached.
        """
        if not any(checkpoint.in_place for checkpoint in self.opened.values()):
            return self
        experts = {name: downloaded(checkpoint) for name, checkpoint in self.experts.items()}
        base = downloaded(self.base) if self.base else None
        stamps = stamps_of(
            [*with_base(experts, base).values(), *fisher_sources(self.fishers).values()]
        )
        return replace(self, experts=experts, base=base, stamps=stamps)

    @property
    def notes(self) -> list[str]:
        """What a careful person would want to know of this merge, a line each."""
        found = training_notes(self.recipe, self.composition, self.used)
        found += numbered_notes(self.reference)
        found += copy_notes(self.used, self.base)
        stored = {info.dtype for info in self.reference.tensors.values()}
        baked = any(c.low_rank for c in self.used.values()) and not self.recipe.dtype
        if baked and "F32" not in stored and any(t.dtype == "F32" for t in self.tensors):
            found.append(
                "writes float32, the adapters' dtype: the base's would lose much of their deltas "
                "(--dtype bfloat16 to write that)"
            )
        found += tied_notes(self.composition, self.reference, self.drop)
        found += tokenizer_notes(self.sources, self.tokenizer_owner)
        if self.alignment is not None:
            found.append(f"embedding and head are aligned to {self.alignment.size} rows")
            for name, tokens in self.alignment.added.items():
                found.append(f"{len(tokens)} tokens of {name} are added to the tokenizer")
        if self.needs_whole and self.fetched_bytes:
            found.append("the method ranks whole models, which are downloaded first")
        for name, count in self.fetched_bytes.items():
            whole = self.opened[name].nbytes
            found.append(f"fetches {count / 1e9:,.2f} of {whole / 1e9:,.2f} GB of {name}")
        return found

    def __str__(self) -> str:
        return draw(self.composition)

    def _repr_html_(self) -> str:
        names = (f"{escape(n)}: {escape(c.identity[-80:])}" for n, c in self.used.items())
        sources = "<br>".join([*names][:8])
        return f"{self.composition._repr_html_()}<p>{sources}<br>{self.nbytes / 1e6:,.1f} MB</p>"

    def to_dict(self) -> dict[str, Any]:
        """What `layerswap plan --json` prints."""
        verbatim = sum(tensor.nbytes for tensor in self.tensors if tensor.verbatim)
        return {
            **self._summary(),
            "tensors": len(self.tensors),
            "output_bytes": self.nbytes,
            "weight_bytes": sum(tensor.nbytes for tensor in self.tensors),
            "copied_bytes": verbatim,
            "shards": len(self.shards),
            "fetched_bytes": self.fetched_bytes,
        }

    def _summary(self) -> dict[str, Any]:
        return {
            "composition": self.composition.to_dict(),
            "experts": {name: c.identity for name, c in self.used.items()},
            "model_type": self.reference.config.get("model_type"),
            "layers_by_number": self.reference.numbered and self.reference.numbered.stack,
        }

    def with_composition(self, composition: Composition) -> Self:
        """The same experts composed in another way.

        Raises:
            RecipeError: another number of layers, or an expert that this plan does not have.
        """
        if composition.layers != self.composition.layers:
            raise RecipeError(
                f"a composition of {composition.layers} layers for experts of "
                f"{self.composition.layers}"
            )
        if any(isinstance(m, Operation) for b in composition.blends.values() for m in b.members):
            raise RecipeError("merge methods cannot be given to a plan; write them into a recipe")
        unknown = set(composition.experts) - set(self.experts) - ({BASE} if self.base else set())
        if unknown:
            raise RecipeError(f"the plan has no expert {min(unknown)!r}")
        # The recipe must keep saying what the plan does: `layerswap.json` records it.
        places = [*self.recipe.places, *_as_overrides(self.composition, composition)]
        recipe = self.recipe.model_copy(update={"places": places})
        return replace(self, recipe=recipe, composition=composition)

    def grid(
        self,
        *,
        bottom: int | Iterable[int],
        top: int | Iterable[int],
        bottom_transition: int | Iterable[int] = 0,
        top_transition: int | Iterable[int] = 0,
    ) -> list[Self]:
        """One plan for every combination of zone sizes that fits.

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
            raise RecipeError("only a swap has zones to make a grid of")
        layers = self.composition.layers
        zones = zone_grid(
            layers,
            bottom=_many(bottom),
            top=_many(top),
            bottom_transition=_many(bottom_transition),
            top_transition=_many(top_transition),
        )
        plans = []
        for sizes in zones:
            method = start.model_copy(update=vars(sizes))
            recipe = self.recipe.model_copy(update={"swap": method, "partition": None})
            composition = recipe.resolve(layers, self.magnitude, taken=self.composition.taken)
            plans.append(replace(self, recipe=recipe, composition=composition))
        if not plans:
            raise RecipeError(f"no combination of these zone sizes fits {layers} layers")
        return plans


def stamps_of(checkpoints: Iterable[Checkpoint]) -> dict[WeightFile, Stamp]:
    """The stamp of every weight file of the checkpoints.

    Raises:
        MergeError: a file has vanished.
    """
    return {file: _stamp(file) for checkpoint in checkpoints for file in checkpoint.all_files}


def check_unchanged(stamps: Mapping[WeightFile, Stamp]) -> None:
    """Refuse weight files that changed since they were stamped.

    Raises:
        MergeError: naming the first file that changed or vanished.
    """
    for file, stamp in sorted(stamps.items(), key=lambda item: str(item[0])):
        if isinstance(file, RemoteFile):
            if file.commit is None:  # of a commit nothing can change
                file.check_unchanged()
        elif _stamp(file) != stamp:
            raise MergeError(f"{file}: changed since the merge was planned; plan it again")


PROBED_BYTES = 1 << 14
"""How much of a verbatim tensor is looked at before a merge: a whole norm of 8,192 in bfloat16."""


def check_finite(tensors: Iterable[OutputTensor]) -> None:
    """Refuse to copy from weights that diverged, as far as the beginnings of tensors tell.

    Training that diverges leaves NaN nearly everywhere. Tensors on another machine are not read,
    and nothing is said of those that arithmetic reads whole.

    Raises:
        MergeError: the beginning of a verbatim tensor holds NaN or infinity.
    """
    sources = [next(leaves(tensor.inputs)) for tensor in tensors if tensor.verbatim]
    local = [
        info
        for info in sources
        if info.dtype in FLOAT_DTYPES and not isinstance(info.file, RemoteFile)
    ]
    with ExitStack() as stack:
        handles = {file: stack.enter_context(open_file(file)) for file in {i.file for i in local}}
        for info in local:
            count = min(info.elements, PROBED_BYTES // block_of(info.dtype)[1])
            if not is_finite(read_stored(handles[info.file], info, 0, count), info.dtype):
                raise MergeError(f"{info.file}: tensor {info.name!r} holds NaN or infinity")


def names_digest(names: Iterable[str]) -> dict[str, Any]:
    """The number of tensors, and the SHA-256 of their sorted names, one a line."""
    text = "".join(f"{name}\n" for name in sorted(names))
    return {"count": text.count("\n"), "names_sha256": sha256(text.encode()).hexdigest()}


def with_base(experts: Mapping[str, Checkpoint], base: Checkpoint | None) -> dict[str, Checkpoint]:
    """The experts and the base by name; an expert may itself be called `base`."""
    if base is None:
        return dict(experts)
    return {**experts, ("base" if "base" not in experts else "the base"): base}


def fisher_sources(fishers: Mapping[str, Fisher]) -> dict[str, Checkpoint]:
    """The stored tensors of Fishers, by the name that messages and records have for them."""
    return {f"fisher of {name}": fisher.stored for name, fisher in fishers.items()}


def _many(sizes: int | Iterable[int]) -> Iterable[int]:
    return (sizes,) if isinstance(sizes, int) else sizes


def _as_overrides(old: Composition, new: Composition) -> list[Override]:
    """The places at which two compositions differ, as a recipe's overrides."""
    return [
        Override(
            layers="outside" if place.layer is None else str(place.layer),
            roles=[place.role],
            take={str(expert): weight for expert, weight in blend.weights},
        )
        for place, blend in changed_places(old, new).items()
    ]


def _stamp(file: WeightFile) -> Stamp:
    if isinstance(file, RemoteFile):
        return None
    try:
        status = file.stat()
    except OSError as error:
        raise MergeError(f"{file}: vanished ({error.strerror})") from None
    return status.st_size, status.st_mtime_ns, status.st_ino
