"""Opens a recipe's sources and their Fishers, and detects changed sources."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from layerswap.checkpoint import (
    Checkpoint,
    TensorInfo,
    fingerprint,
    open_configuration,
    read_header,
    read_json_object,
)
from layerswap.checkpoint.adapted import with_adapter
from layerswap.checkpoint.given import INDEX, SINGLE, Given, is_folder
from layerswap.checkpoint.header import is_gguf
from layerswap.checkpoint.hub import BESIDE_WEIGHTS, HUB_ID
from layerswap.checkpoint.kinds import open_any
from layerswap.checkpoint.quantised import quantisation_in
from layerswap.checkpoint.read import FLOAT_DTYPES
from layerswap.checkpoint.views import as_4_bits
from layerswap.compose.recipe import Recipe
from layerswap.compose.schema import Expert
from layerswap.ground.commit import refuse_unfinished
from layerswap.ground.errors import MergeError, error_context
from layerswap.ground.strict_json import quoted
from layerswap.merge.trained import with_revision

Stamp = tuple[int, int, int]
"""Size, time of the last change and inode of a file."""


@dataclass(frozen=True)
class Sources:
    """The open sources of a recipe: the experts by name, and the base behind them."""

    together: Mapping[str, Checkpoint]
    names: Collection[str]
    adapters_only: bool

    @property
    def experts(self) -> dict[str, Checkpoint]:
        """The experts."""
        return {name: self.together[name] for name in self.names}

    @property
    def base(self) -> Checkpoint | None:
        """The checkpoint that is no expert."""
        return next((c for name, c in self.together.items() if name not in self.names), None)

    @property
    def form(self) -> str:
        """The form of the output: that of all sources, or else safetensors."""
        forms = {checkpoint.form for checkpoint in self.together.values()}
        if self.adapters_only:
            return "adapter"
        return forms.pop() if len(forms) == 1 else "safetensors"

    def each(self, change: Callable[[str, Checkpoint], Checkpoint]) -> Sources:
        """Return the sources after a change of each, by its name."""
        return replace(self, together={n: change(n, c) for n, c in self.together.items()})


def with_base(experts: Mapping[str, Checkpoint], base: Checkpoint | None) -> dict[str, Checkpoint]:
    """Map names to the experts and the base; an expert may be named `base`."""
    if base is None:
        return dict(experts)
    return {**experts, ("base" if "base" not in experts else "the base"): base}


@dataclass(frozen=True)
class Opener:
    """Opens the sources of a recipe; `in_place` does not download weights."""

    recipe: Recipe
    in_place: bool

    def open(self) -> Sources:
        """Open the experts and the base."""
        opened: dict[str, Checkpoint] = {}
        for name in self.recipe.experts_in_order:
            expert = self.recipe.experts[name]
            if expert.source is not None:
                with error_context(name):
                    opened[name] = self._open(expert, expert.adapter)
        adapters = {name: c for name, c in opened.items() if c.needs_base}
        only = len(adapters) == len(opened) and not self.recipe.bake
        base = self._open_base(adapters, only)
        if self.recipe.base_as is not None and not adapters:
            raise MergeError("base_as: no expert is an adapter; leave base_as out")
        over = base
        if self.recipe.base_as is not None:
            if only or base is None:
                raise MergeError(
                    "base_as: adapters are not added to their base here; give bake: true"
                )
            with error_context("base"):
                over = as_4_bits(base, double=self.recipe.base_as == "nf4-double")
        if len(adapters) == len(opened):
            base = over
        for name, checkpoint in adapters.items():
            assert over is not None, "adapters were opened without their base"
            with error_context(name):
                opened[name] = checkpoint.over(over, self.recipe.place_patterns, alone=only)
        return _in_one_layout(Sources(with_base(opened, base), opened.keys(), only))

    def _open_base(self, adapters: Mapping[str, Checkpoint], only: bool) -> Checkpoint | None:
        recipe = self.recipe
        if recipe.base is not None and recipe.base.source is not None:
            entry, context = recipe.base, "base"
        elif adapters:
            entry, context = _named_base(adapters), "the base that the adapters name"
        else:
            return None
        with error_context(context):
            if only and recipe.weights != "magnitude" and not _has_weights(entry):
                return open_configuration(str(entry.source), revision=entry.revision)
            return self._open(entry, whole=True)

    def _open(
        self, entry: Expert, adapter: str | None = None, *, whole: bool = False
    ) -> Checkpoint:
        """A source of any kind, with an adapter added to it if one is given."""
        source, patterns = str(entry.source), self.recipe.place_patterns
        refuse_unfinished(Path(source))
        opened = open_any(Given(source, entry.revision, patterns, self.in_place, whole))
        if adapter is None:
            return opened
        with error_context("adapter"):
            return with_adapter(opened, adapter, patterns)


def _in_one_layout(sources: Sources) -> Sources:
    """Give all checkpoints the names of the recipe's first safetensors."""
    opened = sources.together.values()
    like = next((c for c in opened if c.form == "safetensors" and c.places), None)
    if like is None:
        return sources

    def matched(name: str, checkpoint: Checkpoint) -> Checkpoint:
        with error_context(name):
            view = checkpoint.matched(like)
        view.check_tokens(name, like)
        return view

    return sources.each(matched)


def _named_base(adapters: Mapping[str, Checkpoint]) -> Expert:
    """Find the one base that all adapters name; only a Hub id is fetched unasked."""
    named = {name: adapter.named_base for name, adapter in adapters.items()}
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
    from_elsewhere = any(adapter.revision for adapter in adapters.values())
    here = is_folder(str(source)) or is_gguf(str(source))
    if not (HUB_ID.fullmatch(name) or (here and not from_elsewhere)):
        raise MergeError(
            f"{first}: the adapter names the base {quoted(source)}, which is neither a Hub id nor "
            "a folder here; give the base with `base` (--base)"
        )
    return Expert(source=source, revision=revision)


def _has_weights(entry: Expert) -> bool:
    folder = Path(str(entry.source)).expanduser()
    if folder.is_file():  # a GGUF file
        return True
    # Adapters alone need only the configuration of a base, and QLoRA's is often quantised.
    return quantisation_in(folder) is None and any(
        (folder / name).is_file() for name in (SINGLE, INDEX)
    )


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
    given = Given(source)
    folder, commit = given.fetched
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
    if own and not expert.low_rank:  # the Fisher of a soup or an adapter cannot be checked
        about = record.get("checkpoint")
        marks = about.get("fingerprints") if isinstance(about, dict) else None
        if marks != {file.name: fingerprint(file) for file in expert.files}:
            raise MergeError(
                f"{folder}: is of another version of {expert.identity}; estimate it again"
            )
    norm = record.get("norm")
    if not isinstance(norm, int | float) or not 0 < norm < math.inf:
        raise MergeError(f"{folder / FISHER_RECORD}: norm is {norm!r:.40}, not a number above 0")
    return Fisher(Checkpoint(given.name, commit, folder, {}, tensors, {}), float(norm))
