"""Plans: a composition bound to the checkpoints it draws from, ready to write or to load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Checkpoint, atomic_folder, open_checkpoint, refuse_target
from layerswap.checkpoint.commit import PARTIAL
from layerswap.compose import Composition, Recipe, draw, zone_grid
from layerswap.compose.mistakes import parse_size
from layerswap.compose.schema import SwapMethod
from layerswap.delta.magnitude import magnitude_weights
from layerswap.errors import LayerswapError, MergeError, RecipeError
from layerswap.merge.check import check_together
from layerswap.merge.documents import RECORD, write_documents
from layerswap.merge.engine import Progress, write_shard
from layerswap.merge.outputs import OutputTensor, Shard, index_of, output_tensors, pack_shards
from layerswap.merge.tokenizer import check_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Plan:
    """What a merge will do, decided and checked; nothing has been written.

    Attributes:
        recipe: what the user asked for.
        composition: what goes where.
        experts: the checkpoints by expert name, the first one giving configuration and order.
        base: the checkpoint they were fine-tuned from, when the recipe names it.
        drop: stored copies of tied embeddings, left out of the output.
        magnitude: measured weights, when the recipe asks for them.

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

    @property
    def reference(self) -> Checkpoint:
        """The expert that gives the configuration and the order of the tensors."""
        return next(iter(self.experts.values()))

    @cached_property
    def tensors(self) -> list[OutputTensor]:
        """Every tensor that the merge will write."""
        return output_tensors(
            self.composition, self.experts, dtype=self.recipe.dtype, drop=self.drop
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the weight files that the merge will write."""
        return sum(shard.nbytes for shard in self.shards())

    def shards(self) -> list[Shard]:
        """The output files."""
        return pack_shards(self.tensors, parse_size(self.recipe.max_shard_size), {"format": "pt"})

    def __str__(self) -> str:
        return draw(self.composition)

    def to_dict(self) -> dict[str, Any]:
        """What `layerswap plan --json` prints."""
        verbatim = sum(tensor.nbytes for tensor in self.tensors if tensor.verbatim)
        return {
            "composition": self.composition.to_dict(),
            "experts": {name: c.identity for name, c in self.experts.items()},
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
        unknown = set(composition.experts) - set(self.experts)
        if unknown:
            raise RecipeError(f"the plan has no expert {min(unknown)!r}")
        return replace(self, composition=composition)

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
            RecipeError: the recipe is not a swap.
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
        return plans

    def save(
        self,
        out: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        threads: int | None = None,
        progress: Progress | None = None,
        allow_non_finite: bool = False,
    ) -> Path:
        """Write the merged checkpoint: a folder that transformers and vLLM load.

        Verbatim tensors are copied bit for bit; blends are accumulated in float32 and rounded
        once. The folder appears whole or not at all.

        Args:
            out: the folder to create.
            overwrite: replace a folder that layerswap wrote.
            threads: workers; the number of usable processors when None.
            progress: called with the number of bytes just written.
            allow_non_finite: let NaN and infinity through arithmetic.

        Raises:
            LayerswapError: the output exists, does not fit on the disk or cannot be written, or
                a source holds NaN or infinity, or changed meanwhile.
        """
        target = Path(os.path.abspath(os.path.expanduser(out)))  # noqa: PTH100, PTH111
        shards = self.shards()
        self._check_target(target, shards, overwrite)
        stamps = self._stamps()
        workers = threads or len(os.sched_getaffinity(0))
        with atomic_folder(target, marker=RECORD, overwrite=overwrite) as folder:
            for shard in shards:
                write_shard(
                    folder / shard.file,
                    shard,
                    threads=workers,
                    progress=progress or _silent,
                    allow_non_finite=allow_non_finite,
                )
            index = index_of(shards)
            if index:
                (folder / index[0]).write_text(json.dumps(index[1], indent=2) + "\n", "utf-8")
            write_documents(folder, self)
            self._check_unchanged(stamps)
        return target

    def load(self) -> PreTrainedModel:
        """The merged model in memory, without writing it: the same weights as `save` writes.

        Returns:
            A transformers model on the CPU, in evaluation mode.
        """
        from layerswap.merge.memory import load_model

        return load_model(self)

    def _check_target(self, target: Path, shards: list[Shard], overwrite: bool) -> None:
        refuse_target(target, marker=RECORD, overwrite=overwrite)
        for name, checkpoint in self._sources().items():
            source = checkpoint.folder.resolve()
            if target == source or source in target.parents or target in source.parents:
                raise MergeError(f"{target}: would write into the checkpoint of {name}")
        need = sum(shard.nbytes for shard in shards)
        free = shutil.disk_usage(target.parent).free
        if free < need:
            raise MergeError(
                f"{target.parent}: needs {need / 1e9:.2f} GB, only {free / 1e9:.2f} GB free"
            )

    def _sources(self) -> dict[str, Checkpoint]:
        return {**self.experts, **({"base": self.base} if self.base else {})}

    def _stamps(self) -> dict[Path, tuple[int, int, int]]:
        files = {t.file for c in self.experts.values() for t in c.tensors.values()}
        return {file: _stamp(file) for file in files}

    def _check_unchanged(self, stamps: Mapping[Path, tuple[int, int, int]]) -> None:
        for file, stamp in stamps.items():
            if _stamp(file) != stamp:
                raise MergeError(f"{file}: changed while it was being merged; nothing was kept")


def make_plan(recipe: Recipe) -> Plan:
    """Open the sources of a recipe, check them against each other, and resolve it.

    Reads headers and JSON only, except that magnitude weights read every tensor.

    Raises:
        LayerswapError: a source cannot be opened, the sources do not fit together, or the
            recipe does not fit them.
    """
    sources: dict[str, Checkpoint] = {}
    for name, expert in recipe.experts.items():
        if expert.source is not None:
            sources[name] = _open(name, expert.source, expert.revision, recipe)
    base = None
    if recipe.base is not None and recipe.base.source is not None:
        base = _open("base", recipe.base.source, recipe.base.revision, recipe)
    together = {**sources, **({"base": base} if base else {})}
    drop = check_together(together)
    check_tokenizers(together)
    magnitude = _measure(recipe, sources, base)
    layers = next(iter(sources.values())).layers
    composition = recipe.resolve(layers, magnitude)
    used = {name: sources[name] for name in sources if name in composition.experts}
    return Plan(recipe, composition, used, base, drop, magnitude)


def _open(name: str, source: str, revision: str | None, recipe: Recipe) -> Checkpoint:
    if PARTIAL in Path(source).name:
        raise MergeError(f"{name}: {source} is an unfinished merge")
    try:
        return open_checkpoint(source, revision=revision, patterns=recipe.place_patterns)
    except LayerswapError as error:
        raise error.within(name) from None


def _measure(
    recipe: Recipe, sources: Mapping[str, Checkpoint], base: Checkpoint | None
) -> dict[str, float] | None:
    if recipe.weights != "magnitude" or base is None:
        return None
    method = recipe.method
    names = (
        [method.task, method.language]
        if isinstance(method, SwapMethod)
        else list(getattr(method, "experts", ()))
    )
    parts = {
        name: [(sources[part], weight) for part, weight in recipe.flat(name).weights]
        for name in names
    }
    return magnitude_weights(base, parts)


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        status = file.stat()
    except OSError as error:
        raise MergeError(f"{file}: vanished ({error.strerror})") from None
    return status.st_size, status.st_mtime_ns, status.st_ino


def _silent(count: int) -> None:
    """Progress that nobody watches."""
