"""Plans: a composition bound to the checkpoints it draws from, ready to write or to load."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap._types import Advance
from layerswap.checkpoint import Checkpoint, refuse_target
from layerswap.checkpoint.preconditions import Stamp, check_apart, check_space, check_unchanged
from layerswap.compose import Composition, Recipe, draw, zone_grid
from layerswap.compose.blend import Operation
from layerswap.compose.schema import BASE, Override
from layerswap.compose.validation import parse_size
from layerswap.errors import RecipeError
from layerswap.merge.compatibility import check_tied
from layerswap.merge.fisher import Fisher, stored_fishers
from layerswap.merge.layout import (
    OutputTensor,
    Shard,
    aligned_rows,
    output_tensors,
    pack_shards,
)
from layerswap.merge.metadata import RECORD, record
from layerswap.merge.tokenizer import tokenizer_notes
from layerswap.merge.vocabulary import Alignment
from layerswap.merge.writer import write_plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Plan:
    """What a merge will do, decided and checked; nothing has been written.

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

    Example:
        plan = swap(task="math-expert", language="swahili-expert", bottom=5, top=2)
        print(plan)
        plan.save("merged")
    """

    recipe: Recipe
    composition: Composition
    experts: Mapping[str, Checkpoint]
    base: Checkpoint | None
    drop: frozenset[str]
    magnitude: Mapping[str, float] | None
    stamps: Mapping[Path, Stamp]
    alignment: Alignment | None = None
    fishers: Mapping[str, Fisher] = field(default_factory=dict)

    def __post_init__(self) -> None:
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
    def sources(self) -> dict[str, Checkpoint]:
        """What the output depends on: the experts used, the base, and the Fishers used."""
        used = {n: f for n, f in self.fishers.items() if n in self.composition.fishers}
        return {**with_base(self.used, self.base), **stored_fishers(used)}

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
    def nbytes(self) -> int:
        """Bytes of the weight files that the merge will write."""
        return sum(shard.nbytes for shard in self.shards())

    def shards(self) -> list[Shard]:
        """The output files."""
        return pack_shards(self.tensors, parse_size(self.recipe.max_shard_size), {"format": "pt"})

    @property
    def notes(self) -> list[str]:
        """What a careful person would want to know of this merge, a line each."""
        found = tokenizer_notes(self.sources, self.tokenizer_owner.identity)
        if self.alignment is not None:
            found.append(f"embedding and head are aligned to {self.alignment.size} rows")
            for name, tokens in self.alignment.added.items():
                found.append(f"{len(tokens)} tokens of {name} are added to the tokenizer")
        return found

    def __str__(self) -> str:
        return draw(self.composition)

    def to_dict(self) -> dict[str, Any]:
        """What `layerswap plan --json` prints."""
        verbatim = sum(tensor.nbytes for tensor in self.tensors if tensor.verbatim)
        return {
            "composition": self.composition.to_dict(),
            "experts": {name: c.identity for name, c in self.used.items()},
            "model_type": self.reference.config.get("model_type"),
            "tensors": len(self.tensors),
            "output_bytes": self.nbytes,
            "weight_bytes": sum(tensor.nbytes for tensor in self.tensors),
            "copied_bytes": verbatim,
            "shards": len(self.shards()),
        }

    def with_composition(self, composition: Composition) -> Plan:
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
        bottom: Iterable[int],
        top: Iterable[int],
        bottom_transition: Iterable[int] = (0,),
        top_transition: Iterable[int] = (0,),
    ) -> list[Plan]:
        """One plan for every combination of zone sizes that fits.

        Raises:
            RecipeError: the recipe is not a swap, or no combination fits.
        """
        if self.recipe.swap is None:
            raise RecipeError("only a swap has zones to make a grid of")
        zones = zone_grid(
            self.composition.layers,
            bottom=bottom,
            top=top,
            bottom_transition=bottom_transition,
            top_transition=top_transition,
        )
        plans = []
        for sizes in zones:
            method = self.recipe.swap.model_copy(update=vars(sizes))
            recipe = self.recipe.model_copy(update={"swap": method})
            composition = recipe.resolve(self.composition.layers, self.magnitude)
            plans.append(replace(self, recipe=recipe, composition=composition))
        if not plans:
            layers = self.composition.layers
            raise RecipeError(f"no combination of these zone sizes fits {layers} layers")
        return plans

    def save(
        self,
        out: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        threads: int | None = None,
        progress: Advance | None = None,
        allow_non_finite: bool = False,
        resume: bool = False,
    ) -> Path:
        """Write the merged checkpoint: a folder that transformers and vLLM load.

        Verbatim tensors are copied bit for bit; blends are accumulated in float32 and rounded
        once. The folder appears whole or not at all.

        Args:
            out: the folder to create.
            overwrite: replace a folder that layerswap wrote.
            threads: workers; the number of usable processors when None.
            progress: called with the number of bytes just written, by any of the workers.
            allow_non_finite: let NaN and infinity through arithmetic.
            resume: go on where the same merge was killed, keeping the output files that it
                finished.

        Raises:
            LayerswapError: the output exists, does not fit on the disk or cannot be written, or
                a source holds NaN or infinity, or changed meanwhile.
        """
        target = self.check_target(out, overwrite=overwrite)
        write_plan(
            self,
            target,
            overwrite=overwrite,
            threads=threads or len(os.sched_getaffinity(0)),
            progress=progress or _silent,
            allow_non_finite=allow_non_finite,
            resume=resume,
        )
        return target

    @cached_property
    def record(self) -> dict[str, Any]:
        """The content of `layerswap.json`."""
        return record(self)

    def check_target(self, out: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """The absolute folder that `save` would write, checked without writing anything.

        Raises:
            LayerswapError: it exists, lies in a source, does not fit on the disk or cannot be
                written, or a source changed since the plan was made.
        """
        target = Path(os.path.abspath(os.path.expanduser(out)))  # noqa: PTH100, PTH111
        refuse_target(target, marker=RECORD, overwrite=overwrite)
        everything = {**with_base(self.experts, self.base), **stored_fishers(self.fishers)}
        check_apart(target, everything)
        check_space(target.parent, self.nbytes)
        check_unchanged(self.stamps)
        return target

    def load(self) -> PreTrainedModel:
        """The merged model in memory, without writing it: the same weights as `save` writes.

        Returns:
            A transformers model on the CPU, in evaluation mode.
        """
        from layerswap.merge.load import load_model

        check_unchanged(self.stamps)
        return load_model(self)


def with_base(experts: Mapping[str, Checkpoint], base: Checkpoint | None) -> dict[str, Checkpoint]:
    """The experts and the base by name; an expert may itself be called `base`."""
    if base is None:
        return dict(experts)
    return {**experts, ("base" if "base" not in experts else "the base"): base}


def _as_overrides(old: Composition, new: Composition) -> list[Override]:
    """The places at which two compositions differ, as a recipe's overrides."""
    return [
        Override(
            layers="outside" if place.layer is None else str(place.layer),
            roles=[place.role],
            take={str(expert): weight for expert, weight in blend.weights},
        )
        for place, blend in new.blends.items()
        if old[place] != blend
    ]


def _silent(count: int) -> None:
    """Advance that nobody watches."""
