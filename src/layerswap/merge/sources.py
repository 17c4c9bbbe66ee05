"""Opens a recipe's sources and their Fishers, and detects changed sources."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from layerswap.checkpoint import (
    Adapter,
    Checkpoint,
    TensorInfo,
    adapt,
    fingerprint,
    is_adapter,
    open_checkpoint,
    open_configuration,
    read_adapter,
    read_header,
    read_json_object,
)
from layerswap.checkpoint.checkpoint import renamed_like, without_unshared
from layerswap.checkpoint.folder import downloaded, quantisation_in
from layerswap.checkpoint.gguf_view import as_transformers
from layerswap.checkpoint.given import INDEX, SINGLE, fetch_checkpoint, is_folder
from layerswap.checkpoint.header import is_gguf
from layerswap.checkpoint.hub import BESIDE_WEIGHTS, HUB_ID
from layerswap.checkpoint.read import FLOAT_DTYPES
from layerswap.checkpoint.views import as_4_bits, restack
from layerswap.compose import Recipe
from layerswap.compose.schema import Expert
from layerswap.ground.commit import PARTIAL
from layerswap.ground.errors import MergeError, error_context
from layerswap.ground.strict_json import quoted
from layerswap.ground.types import Log
from layerswap.merge.compatibility import untied
from layerswap.merge.tokenizers import check_gguf_vocabulary
from layerswap.merge.trained import with_revision

Stamp = tuple[int, int, int]
"""Size, time of the last change and inode of a file."""


@dataclass(frozen=True)
class Sources:
    """The open sources of a recipe."""

    experts: Mapping[str, Checkpoint]
    base: Checkpoint | None
    adapters_only: bool

    def on_disk(self, log: Log) -> Sources:
        """Return the sources with all weights downloaded."""

        def whole(name: str, checkpoint: Checkpoint) -> Checkpoint:
            if checkpoint.in_place:
                size = checkpoint.nbytes / 1e9
                log(f"magnitude weights read whole models: downloading {size:.2f} GB of {name}")
            return downloaded(checkpoint)

        experts = {name: whole(name, checkpoint) for name, checkpoint in self.experts.items()}
        return replace(self, experts=experts, base=self.base and whole("base", self.base))

    def without_unshared(self) -> Sources:
        """Return the sources without ignored tensors that only some of them have."""
        experts, base = without_unshared(self.experts, self.base)
        return replace(self, experts=experts, base=base)

    def untied(self) -> Sources:
        """Return the sources with heads of their own if one of them has one."""
        named = untied(with_base(self.experts, self.base))
        experts = {name: named.pop(name) for name in self.experts}
        return replace(self, experts=experts, base=next(iter(named.values()), None))

    def restacked(self, taken: Sequence[int]) -> Sources:
        """Return the sources restacked to these layers."""
        experts = {name: restack(expert, taken) for name, expert in self.experts.items()}
        base = self.base and restack(self.base, taken)
        return replace(self, experts=experts, base=base)


def open_sources(recipe: Recipe, *, in_place: bool = False) -> Sources:
    """Open the experts and the base of a recipe."""
    return _Opener(recipe, in_place).open()


def with_base(experts: Mapping[str, Checkpoint], base: Checkpoint | None) -> dict[str, Checkpoint]:
    """Map names to the experts and the base; an expert may be named `base`."""
    if base is None:
        return dict(experts)
    return {**experts, ("base" if "base" not in experts else "the base"): base}


@dataclass(frozen=True)
class _Opener:
    recipe: Recipe
    in_place: bool

    def open(self) -> Sources:
        opened: dict[str, tuple[Adapter | Checkpoint, str | None]] = {}
        for name in self.recipe.experts_in_order:
            expert = self.recipe.experts[name]
            if expert.source is not None:
                with error_context(name):
                    opened[name] = self._open_expert(expert, expert.source)
        adapters = {name: a for name, (a, _) in opened.items() if isinstance(a, Adapter)}
        only = len(adapters) == len(opened) and not self.recipe.bake
        elsewhere = any(opened[name][1] for name in adapters)
        base = self._open_base(adapters, only, from_elsewhere=elsewhere)
        if adapters and base is not None and base.gguf is not None:
            raise MergeError("base: adapters cannot be added to a GGUF file; give its safetensors")
        if self.recipe.base_as is not None and not adapters:
            raise MergeError("base_as: no expert is an adapter; leave base_as out")
        over = self._trained_over(base, only=only)
        if len(adapters) == len(opened):
            base = over
        experts: dict[str, Checkpoint] = {}
        for name, (source, commit) in opened.items():
            if isinstance(source, Checkpoint):
                experts[name] = source
                continue
            assert over is not None, "adapters were opened without their base"
            given = str(self.recipe.experts[name].source)
            with error_context(name):
                experts[name] = self._adapt(
                    over,
                    source,
                    (given.partition("@")[0] if commit else "") or given,
                    commit,
                )
        return Sources(*_in_one_layout(experts, base), only)

    def _trained_over(self, base: Checkpoint | None, *, only: bool) -> Checkpoint | None:
        """The base that adapters are added to: as it is, or in 4 bits."""
        if self.recipe.base_as is None:
            return base
        if only or base is None:
            raise MergeError("base_as: adapters are not added to their base here; give bake: true")
        with error_context("base"):
            return as_4_bits(base, double=self.recipe.base_as == "nf4-double")

    def _open_expert(self, expert: Expert, source: str) -> tuple[Checkpoint | Adapter, str | None]:
        """An adapter or a full checkpoint, and its commit if it is from the Hub."""
        _refuse_unfinished(source, Path(source))
        folder, commit = Path(source), None
        if not is_gguf(folder):
            folder, commit = fetch_checkpoint(source, expert.revision, weights=not self.in_place)
        _refuse_unfinished(source, folder.resolve())
        if is_adapter(folder):
            if expert.adapter is not None:
                raise MergeError(
                    "adapter: the source is an adapter itself; give the model as the source"
                )
            if self.in_place and commit:
                folder, commit = fetch_checkpoint(source, commit)
            return read_adapter(folder), commit
        model = self._open(expert, (folder, commit))
        if expert.adapter is None:
            return model, commit
        return self._with_adapter(model, expert.adapter), commit

    def _with_adapter(self, model: Checkpoint, adapter: str) -> Checkpoint:
        """A full checkpoint with an adapter added to it, as one full checkpoint."""
        if model.gguf is not None:
            raise MergeError("adapter: cannot be added to a GGUF file")
        folder, _ = fetch_checkpoint(adapter)
        if not is_adapter(folder):
            raise MergeError(f"adapter: {adapter} is not a LoRA adapter")
        adapted = self._adapt(model, read_adapter(folder), model.source, None)
        # The record names the model as the source; the recipe in it names the adapter.
        return replace(adapted, revision=model.revision, folder=model.folder, adapter=None)

    def _adapt(
        self, base: Checkpoint, adapter: Adapter, source: str, commit: str | None
    ) -> Checkpoint:
        patterns = self.recipe.place_patterns
        return adapt(base, adapter, source=source, revision=commit, patterns=patterns)

    def _open_base(
        self, adapters: Mapping[str, Adapter], only: bool, *, from_elsewhere: bool
    ) -> Checkpoint | None:
        recipe = self.recipe
        if recipe.base is not None and recipe.base.source is not None:
            entry, context = recipe.base, "base"
        elif adapters:
            entry = _named_base(adapters, from_elsewhere=from_elsewhere)
            context = "the base that the adapters name"
        else:
            return None
        with error_context(context):
            _refuse_unfinished(str(entry.source), Path(str(entry.source)))
            if only and recipe.weights != "magnitude" and not _has_weights(entry):
                return open_configuration(str(entry.source), revision=entry.revision)
            return self._open(entry)

    def _open(self, expert: Expert, fetched: tuple[Path, str | None] | None = None) -> Checkpoint:
        return open_checkpoint(
            str(expert.source),
            revision=expert.revision,
            patterns=self.recipe.place_patterns,
            in_place=self.in_place,
            quantised=True,
            fetched=fetched,
        )


def _in_one_layout(
    experts: Mapping[str, Checkpoint], base: Checkpoint | None
) -> tuple[dict[str, Checkpoint], Checkpoint | None]:
    """Give all checkpoints the names of the recipe's first safetensors; translate GGUF files."""
    opened = [*experts.values(), *([base] if base is not None else [])]
    like = next((c for c in opened if c.gguf is None and c.tensors), None)
    if like is None:
        return dict(experts), base

    def translated(name: str, checkpoint: Checkpoint) -> Checkpoint:
        if like.quantised and checkpoint.gguf is not None:
            raise MergeError(f"{name} is a GGUF file, and others are quantised safetensors")
        if checkpoint.gguf is None:
            return renamed_like(checkpoint, like)
        with error_context(name):
            view = as_transformers(checkpoint, like)
        check_gguf_vocabulary(name, checkpoint, like)
        return view

    named = {name: translated(name, checkpoint) for name, checkpoint in experts.items()}
    return named, None if base is None else translated("base", base)


def _named_base(adapters: Mapping[str, Adapter], *, from_elsewhere: bool) -> Expert:
    """Find the one base that all adapters name; only a Hub id is fetched unasked."""
    named = {name: (a.base, a.base_revision) for name, a in adapters.items()}
    for name, (base, _) in named.items():
        if base is None:
            raise MergeError(f"{name}: the adapter names no base; give one with `base` (--base)")
    first = next(iter(named))
    # `./smol` and `smol` are one folder.
    spelt = {name: (os.path.normpath(str(base)), rev) for name, (base, rev) in named.items()}
    for name, identity in named.items():
        if spelt[name] != spelt[first]:
            raise MergeError(
                f"{first} adapts {with_revision(*named[first])} and {name} adapts "
                f"{with_revision(*identity)}; if they are the same model, choose one with `base` "
                "(--base)"
            )
    source, revision = named[first]
    name = str(source).partition("@")[0]
    # A folder is what PEFT writes for a base on the disk; a downloaded adapter cannot know any.
    if not (HUB_ID.fullmatch(name) or (is_folder(str(source)) and not from_elsewhere)):
        raise MergeError(
            f"{first}: the adapter names the base {quoted(source)}, which is neither a Hub id nor "
            "a folder here; give the base with `base` (--base)"
        )
    return Expert(source=source, revision=revision)


def _has_weights(entry: Expert) -> bool:
    folder = Path(str(entry.source)).expanduser()
    # Adapters alone need only the configuration of a base, and QLoRA's is often quantised.
    return quantisation_in(folder) is None and any(
        (folder / name).is_file() for name in (SINGLE, INDEX)
    )


def _refuse_unfinished(source: str, folder: Path) -> None:
    if PARTIAL in folder.name:
        raise MergeError(f"{source} is an unfinished merge; merge it again")


def stamps_of(checkpoints: Iterable[Checkpoint]) -> dict[Path, Stamp]:
    """Stamp all local weights and the documents in their folders, except cards.

    Files of a commit on the Hub cannot change. Raises a MergeError if a file has vanished.
    """
    files: set[Path] = set()
    for checkpoint in checkpoints:
        beside = (checkpoint.folder / name for name in BESIDE_WEIGHTS if name != "README.md")
        files.update(file for file in checkpoint.all_files if isinstance(file, Path))
        files.update(file for file in beside if file.is_file())
    return {file: _stamp(file) for file in files}


def check_unchanged(stamps: Mapping[Path, Stamp]) -> None:
    """Refuse files that changed or vanished since they were stamped."""
    for file, stamp in sorted(stamps.items()):
        if _stamp(file) != stamp:
            raise MergeError(f"{file}: changed since the merge was planned; plan it again")


def _stamp(file: Path) -> Stamp:
    try:
        status = file.stat()
    except OSError as error:
        raise MergeError(f"{file}: vanished ({error.strerror})") from None
    return status.st_size, status.st_mtime_ns, status.st_ino


FISHER_WEIGHTS = "fisher.safetensors"
FISHER_RECORD = "fisher.json"
"""The record next to the weights: checkpoint, data, and norm of the whole Fisher."""


@dataclass(frozen=True)
class Fisher:
    """The diagonal Fisher of an expert, with the Euclidean norm over all its tensors."""

    stored: Checkpoint
    norm: float

    def terms(self, name: str, normalised: bool) -> tuple[tuple[TensorInfo, float], ...]:
        """One of its tensors as a weighted sum; empty if the tensor cannot be blended."""
        info = self.stored.tensors.get(name)
        if info is None:
            return ()
        return ((info, 1 / self.norm if normalised else 1.0),)


def open_fishers(
    recipe: Recipe, experts: Mapping[str, Checkpoint], drop: frozenset[str], *, aligned: bool
) -> dict[str, Fisher]:
    """The diagonal Fishers of the recipe, by expert."""
    fishers = {}
    for name, expert in recipe.experts.items():
        if expert.fisher is None:
            continue
        if aligned:
            raise MergeError(f"{name}: a Fisher needs experts of one vocabulary")
        like = experts.get(name, next(iter(experts.values())))
        with error_context(f"fisher of {name}"):
            fishers[name] = _open(expert.fisher, like, drop, own=name in experts)
    return fishers


def _open(source: str, expert: Checkpoint, drop: frozenset[str], *, own: bool) -> Fisher:
    folder, commit = fetch_checkpoint(source)
    path = folder / FISHER_WEIGHTS
    if not path.is_file():
        raise MergeError(
            f"{folder}: has no {FISHER_WEIGHTS}; make it with `layerswap analyse fisher`"
        )
    record = read_json_object(folder / FISHER_RECORD)
    tensors = read_header(path)
    stored, wanted = (
        {(n, t.shape) for n, t in found.items() if t.dtype in FLOAT_DTYPES and n not in drop}
        for found in (tensors, expert.tensors)
    )
    if wrong := stored ^ wanted:
        raise MergeError(f"{path}: {min(wrong)[0]!r} is not as in {expert.identity}")
    if own and expert.adapter is None:  # the Fisher of a soup or an adapter cannot be checked
        about = record.get("checkpoint")
        marks = about.get("fingerprints") if isinstance(about, dict) else None
        if marks != {file.name: fingerprint(file) for file in expert.files}:
            raise MergeError(
                f"{folder}: is of another version of {expert.identity}; estimate it again"
            )
    norm = record.get("norm")
    if not isinstance(norm, int | float) or not 0 < norm < math.inf:
        raise MergeError(f"{folder / FISHER_RECORD}: norm is {norm!r:.40}, not a number above 0")
    name = source.partition("@")[0] if commit else source
    return Fisher(Checkpoint(name, commit, folder, {}, tensors, {}), float(norm))
