"""What a checkpoint is: its configuration, its tensors and their places, with no tensor loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.adapter import Adapter, LowRank
from layerswap.checkpoint.configuration import configured_layers
from layerswap.checkpoint.gguf import Metadata
from layerswap.checkpoint.header import TensorInfo
from layerswap.checkpoint.names import method_of, quantised_names, renaming, text_config
from layerswap.checkpoint.places import Numbered, Place, count_layers
from layerswap.checkpoint.read import as_torch, narrowed, open_file, read_floats, read_tensor
from layerswap.checkpoint.remote import RemoteFile, WeightFile
from layerswap.ground.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from layerswap.checkpoint.read import Floats

CONV1D_TYPES = ("gpt2", "openai-gpt", "decision_transformer", "imagegpt")
"""Model types whose matrices are stored [in, out] (transformers' Conv1D)."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, with no tensor loaded.

    Attributes:
        source: name that the user gave: a folder, a file, or a Hub id.
        revision: the Hub commit, None for a local folder.
        folder: folder with the files.
        config: the content of `config.json`.
        tensors: every tensor by name, in the order of files and of bytes within a file. With an
            adapter they are its base's; `low_rank` is added to them.
        places: the place of every tensor.
        adapter: the adapter, if the checkpoint is one over its base.
        low_rank: the adapter's low-rank deltas, by tensor.
        gguf: the metadata of a GGUF file; `folder` is then that file, and `config` comes from its
            header.
        numbered: how layers were identified when names do not reveal every role; else None.
        ignored: tensors that transformers does not load: of multi-token prediction, and buffers.
        notes: remarks on how the files were read.

    Example:
        >>> import layerswap as ls
        >>> expert = ls.open_checkpoint("math-expert")
        >>> expert.tensors["model.norm.weight"].shape
        (64,)
    """

    source: str
    revision: str | None
    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    places: Mapping[str, Place]
    adapter: Adapter | None = None
    low_rank: Mapping[str, LowRank] = field(default_factory=dict)
    gguf: Metadata | None = None
    numbered: Numbered | None = None
    ignored: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        size = f"{len(self.tensors)} tensors, {self.nbytes / 1e6:,.1f} MB"
        return f"<Checkpoint {self.identity}: {self.layers} layers, {size}>"

    @cached_property
    def layers(self) -> int:
        """Number of transformer layers."""
        return configured_layers(self.config) or count_layers(self.places)

    @property
    def files(self) -> list[WeightFile]:
        """The weight files; for an adapter, without the base's."""
        tensors = [*self.tensors.values()]
        tensors += [info for low in self.low_rank.values() for info in (low.a, low.b)]
        if self.adapter is not None:
            lows = self.adapter.modules.values()
            tensors = [*(low.a for low in lows), *self.adapter.saved.values()]
        return sorted({tensor.file for tensor in tensors}, key=str)

    @property
    def all_files(self) -> list[WeightFile]:
        """All weight files; for an adapter, with the base's."""
        return sorted({*self.files, *(info.file for info in self.tensors.values())}, key=str)

    @property
    def in_place(self) -> bool:
        """True if weights are read in place, from the Hub."""
        return any(isinstance(file, RemoteFile) for file in self.all_files)

    @cached_property
    def vocabulary_tensors(self) -> tuple[str, ...]:
        """Names of the tensors with one row per token: the embedding, the head and its bias."""
        size = text_config(self.config).get("vocab_size")
        return tuple(
            name
            for name, place in self.places.items()
            if place.role in ("embedding", "head")
            and name in self.tensors
            and self.tensors[name].shape[:1] == (size,)
            and not any(word in name for word in ("position", "wpe"))
        )

    @cached_property
    def quantised(self) -> frozenset[str]:
        """Names of the tensors of quantised weights, which can only be copied."""
        return quantised_names(self.tensors) if method_of(self.config) else frozenset()

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding; 0 for a checkpoint opened without tensors."""
        names = self.vocabulary_tensors
        return self.tensors[names[0]].shape[0] if names else 0

    def transposes(self, name: str) -> bool:
        """True for a matrix stored [in, out], as transformers' Conv1D does.

        Embedding and head are never Conv1D, even if the layers are.
        """
        return self.config.get("model_type") in CONV1D_TYPES and self.places[name].layer is not None

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor in its stored dtype, for torch; `elements` reads part of a tensor.

        Raises:
            CheckpointError: there is no such tensor, or it cannot be read.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.source}: no tensor {name!r}")
        info = self.tensors[name]
        if name not in self.low_rank:
            return as_torch(read_tensor(info), info.dtype)
        whole = narrowed(self.elements(name, 0, info.elements), info.dtype)
        return as_torch(whole, info.dtype).reshape(info.shape)

    def elements(self, name: str, start: int, stop: int) -> Floats:
        """Read elements [start, stop) of a floating-point tensor in row-major order, as a vector.

        The dtype is float32; or float64 for a tensor stored so without an adapter.

        Raises:
            CheckpointError: the file cannot be read.
        """
        info = self.tensors[name]
        with open_file(info.file) as handle:
            stored = read_floats(handle, info, start, stop)
        if name not in self.low_rank:
            return stored
        low = self.low_rank[name]
        delta = low.elements(low.factors(), start, stop)
        delta += stored
        return delta

    @property
    def identity(self) -> str:
        """Name of the checkpoint in messages and records."""
        return self.source if self.revision is None else f"{self.source}@{self.revision}"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def without_unshared(
    experts: Mapping[str, Checkpoint], base: Checkpoint | None
) -> tuple[dict[str, Checkpoint], Checkpoint | None]:
    """Drop ignored tensors that some of the sources lack.

    The Hub's base has layers of multi-token prediction, and its fine-tunes lost them when
    transformers saved them. Older checkpoints store buffers that newer ones compute.
    """
    opened = [c for c in (*experts.values(), *([base] if base else [])) if c.tensors]
    ignored = frozenset[str]().union(*(c.ignored for c in opened))
    unshared = {name for name in ignored if any(name not in c.tensors for c in opened)}
    kept = {name: _without(expert, unshared) for name, expert in experts.items()}
    return kept, base and _without(base, unshared)


def _without(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    gone = checkpoint.tensors.keys() & names
    if not gone:
        return checkpoint
    note = (
        f"leaves out {len(gone)} tensors that transformers does not load, such as {min(gone)!r}: "
        "not all sources have them"
    )
    return replace(
        checkpoint,
        tensors={n: info for n, info in checkpoint.tensors.items() if n not in gone},
        places={n: place for n, place in checkpoint.places.items() if n not in gone},
        ignored=checkpoint.ignored - gone,
        notes=(*checkpoint.notes, note),
    )


def renamed_like(checkpoint: Checkpoint, like: Checkpoint) -> Checkpoint:
    """Return a checkpoint with another's names for tensors that transformers reads as the same."""
    if checkpoint.gguf is not None or like.gguf is not None or not like.tensors:
        return checkpoint
    new = renaming(checkpoint.places.keys(), like.places.keys())
    if not new:
        return checkpoint
    first = min(new)
    note = (
        f"{len(new)} names of {checkpoint.identity} are read as in {like.identity} "
        f"({first!r} as {new[first]!r}), as transformers reads them"
    )
    return replace(
        checkpoint,
        tensors={new.get(n, n): info for n, info in checkpoint.tensors.items()},
        places={new.get(n, n): place for n, place in checkpoint.places.items()},
        low_rank={new.get(n, n): low for n, low in checkpoint.low_rank.items()},
        ignored=frozenset(new.get(n, n) for n in checkpoint.ignored),
        notes=(*checkpoint.notes, note),
    )
