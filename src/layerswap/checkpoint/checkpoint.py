"""A checkpoint: its configuration, its tensors and their places, with no tensor loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from layerswap.checkpoint.adapter import LowRank
from layerswap.checkpoint.classes import CLASSES, LABELLED
from layerswap.checkpoint.configuration import configured_layers
from layerswap.checkpoint.given import Given, fetch_checkpoint
from layerswap.checkpoint.header import TensorInfo, Translated
from layerswap.checkpoint.loading import filled_config, missing_tensors
from layerswap.checkpoint.names import class_of, method_of, renaming, text_config
from layerswap.checkpoint.places import HEAD, Numbered, Pattern, Place, count_layers
from layerswap.checkpoint.read import (
    FLOAT_DTYPES,
    as_torch,
    narrowed,
    open_file,
    read_floats,
    read_tensor,
    zero_samples,
)
from layerswap.checkpoint.remote import RemoteFile, WeightFile
from layerswap.ground.errors import CheckpointError, MergeError

if TYPE_CHECKING:
    import torch

    from layerswap.checkpoint.read import Floats

BASE_MODEL = re.compile(r"(?<!Head)(?<!Heads)(?<!MT)(?<!Decoder)Model$")
"""Matches classes without a head, such as `BertModel`, and not `GPT2LMHeadModel`."""
CONV1D_TYPES = ("gpt2", "openai-gpt", "decision_transformer", "imagegpt")
"""Model types whose matrices are stored [in, out] (transformers' Conv1D)."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, with no tensor loaded.

    Each kind of input is a subclass in a module of its own, listed in `checkpoint.kinds`. It opens
    a source, checks itself and the others, reads its tensors under the others' names, and refuses
    unsuitable settings.

    Attributes:
        source: name that the user gave: a folder, a file, or a Hub id.
        revision: the Hub commit, None for a local folder.
        folder: folder with the files.
        config: the content of `config.json`.
        tensors: every tensor by name, in the order of files and of bytes within a file.
        places: the place of every tensor.
        low_rank: low-rank deltas that are added to tensors, by their names.
        numbered: how layers were identified when names do not reveal every role; else None.
        ignored: tensors that transformers does not load: of multi-token prediction, buffers, and
            modules of other classes.
        borrowed: tensors of another checkpoint's head, which replaces its own.
        notes: remarks on how the files were read.

    Example:
        >>> import layerswap as ls
        >>> expert = ls.open_checkpoint("math-expert")
        >>> expert.tensors["model.norm.weight"].shape
        (64,)
    """

    cannot: ClassVar[Mapping[str, str]] = {}
    """Settings of a recipe that this kind cannot follow, as `key` or `key=value`, with reasons."""
    no_adapter: ClassVar[str | None] = None
    """Reason to refuse an adapter over this kind; None for no refusal."""
    needs_base: ClassVar[bool] = False
    """True if it is no model without its base."""

    source: str
    revision: str | None
    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    places: Mapping[str, Place]
    low_rank: Mapping[str, LowRank] = field(default_factory=dict)
    numbered: Numbered | None = None
    ignored: frozenset[str] = frozenset()
    borrowed: frozenset[str] = frozenset()
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
        """The weight files that the source itself has."""
        return sorted({info.file for info in self.own.values()}, key=str)

    @property
    def all_files(self) -> list[WeightFile]:
        """All weight files that its tensors are read from."""
        return sorted({*self.files, *(info.file for info in self.tensors.values())}, key=str)

    @property
    def own(self) -> Mapping[str, TensorInfo]:
        """The stored tensors of the source itself, by name; without the base's for an adapter."""
        lows = {i.name: i for low in self.low_rank.values() for i in (low.a, low.b)}
        return {**self.tensors, **lows} if lows else self.tensors

    @property
    def changed(self) -> Collection[str]:
        """Names of the tensors that the source itself gives or changes."""
        return self.tensors

    @property
    def in_place(self) -> bool:
        """True if weights are read in place, from the Hub."""
        return any(isinstance(file, RemoteFile) for file in self.all_files)

    @cached_property
    def vocabulary_tensors(self) -> tuple[str, ...]:
        """Names of the tensors with one row per token: the embedding, the head and its bias."""
        size, roleless = text_config(self.config).get("vocab_size"), self.roleless
        return tuple(
            name
            for name, place in self.places.items()
            if (place.role in ("embedding", "head") or (name in roleless and place.layer is None))
            and name in self.tensors
            and self.tensors[name].shape[:1] == (size,)
            and not of_positions(name)
        )

    @cached_property
    def vocabulary_rows(self) -> tuple[str, ...]:
        """The same, and biases with one column per token (BART, Marian)."""
        shape = 1, text_config(self.config).get("vocab_size")
        biases = (n for n, i in self.tensors.items() if i.shape == shape and n in self.places)
        return *self.vocabulary_tensors, *(n for n in biases if self.places[n] == HEAD)

    @cached_property
    def roleless(self) -> frozenset[str]:
        """Names of the tensors without a known role."""
        return (self.numbered.roleless if self.numbered else frozenset()).intersection(self.places)

    @property
    def quantised(self) -> frozenset[str]:
        """Names of the tensors that can only be copied."""
        return frozenset()

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
        """Read elements [start, stop) of a floating-point tensor; see `reader`."""
        with self.reader(name) as read:
            return read(start, stop)

    @contextmanager
    def reader(self, name: str) -> Iterator[Callable[[int, int], Floats]]:
        """Open a tensor, to read ranges [start, stop) of its row-major elements as vectors.

        The dtype is float32; or float64 for a floating-point tensor stored so without an adapter.

        Raises:
            CheckpointError: the file cannot be read.
        """
        info, low = self.tensors[name], self.low_rank.get(name)
        factors = low.factors() if low else None

        def read(start: int, stop: int) -> Floats:
            stored = read_floats(handle, info, start, stop)
            if low is None or factors is None:
                return stored
            delta = low.elements(factors, start, stop)
            delta += stored
            return delta

        with open_file(info.file) as handle:
            yield read

    @property
    def identity(self) -> str:
        """Name of the checkpoint in messages and records."""
        return self.source if self.revision is None else f"{self.source}@{self.revision}"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def without(self, names: Collection[str], note: str) -> Self:
        """Return the checkpoint without these tensors, and with a note on them."""
        return replace(
            self,
            tensors={n: info for n, info in self.tensors.items() if n not in names},
            places={n: place for n, place in self.places.items() if n not in names},
            ignored=self.ignored.difference(names),
            numbered=self.numbered if self.roleless.difference(names) else None,
            notes=(*self.notes, note),
        )

    # --- what each kind does in its own way ---

    @property
    def form(self) -> str:
        """The form of the output if all sources have this one."""
        return "safetensors"

    @classmethod
    def takes(cls, given: Given) -> bool:
        """True for an input of this kind."""
        raise NotImplementedError

    @classmethod
    def open(cls, given: Given) -> Self:
        """Open an input of this kind.

        Raises:
            CheckpointError: it is incomplete, ambiguous or damaged, or has tensors that no layout
                places.
        """
        raise NotImplementedError

    @property
    def named_base(self) -> tuple[str | None, str | None]:
        """The base that the source names, and its revision."""
        return None, None

    def over(
        self, base: Checkpoint, patterns: Sequence[Pattern] = (), *, alone: bool = False
    ) -> Checkpoint:
        """Return the source added to its base."""
        return self

    def check(self, name: str) -> None:
        """Refuse weights and a configuration that contradict each other."""
        if any(self.places[tensor].layer is None for tensor in self.roleless):
            return  # head and embedding may have other names
        rows = {
            tensor: info.shape[0]
            for tensor, info in self.tensors.items()
            if self.places[tensor].role == "embedding"
            and len(info.shape) == 2
            and not of_positions(tensor)
        }
        size = text_config(self.config).get("vocab_size")
        # Mllama and Moshi embed more tokens than their heads, which have a row for each, write.
        known = {*rows.values(), *(self.tensors[n].shape[0] for n in self.heads & {*self.tensors})}
        if rows and isinstance(size, int) and size not in known:
            tensor, count = next(iter(rows.items()))
            raise MergeError(
                f"{name}: its config has vocab_size {size}, but {tensor!r} {count} rows"
            )
        if self.writes and self.tensors and not self.heads and self.tied is False:
            raise MergeError(
                f"{name} has no head, but its config does not tie it to the embedding "
                "(tie_word_embeddings is false): the output's head would be random"
            )

    def check_beside(self, name: str, other: Checkpoint, other_name: str) -> None:
        """Refuse a source in a form that cannot be merged with this one."""
        methods = [method_of(c.config) for c in (self, other)]
        if methods[0] != methods[1]:
            named = [f"is quantised ({m})" if m else "is not quantised" for m in methods]
            raise MergeError(
                f"{name} {named[0]} and {other_name} {named[1]}; give checkpoints in one form"
            )

    def check_tokens(self, name: str, like: Checkpoint) -> None:
        """Refuse tokens other than those of a checkpoint of another kind."""

    def matched(self, like: Checkpoint) -> Checkpoint:
        """Return the checkpoint with another's names for the same tensors."""
        new = renaming(self.places.keys(), like.places.keys())
        if (own := self.only_matrix) and (other := like.only_matrix) and own != other:
            new[own] = other
        if not new:
            return self
        first = min(new)
        note = (
            f"{len(new)} names of {self.identity} are read as in {like.identity} "
            f"({first!r} as {new[first]!r}), as transformers reads them"
        )
        return replace(
            self,
            tensors={new.get(n, n): info for n, info in self.tensors.items()},
            places={
                new.get(n, n): like.places.get(new.get(n, ""), p) for n, p in self.places.items()
            },
            low_rank={new.get(n, n): low for n, low in self.low_rank.items()},
            ignored=frozenset(new.get(n, n) for n in self.ignored),
            notes=(*self.notes, note),
        )

    @property
    def filled(self) -> Mapping[str, Any] | None:
        """The configuration with the defaults of its class; None if they are unknown."""
        return filled_config(self.config)

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder of its tokenizer; None for a kind that compares tokenizers itself."""
        return self.folder

    def zeros(self) -> str | None:
        """Say that the weights, or some of them, seem to be only zeros; None if they are not."""
        stored = (info for _, info in self.matrices() if type(info) is TensorInfo)
        zero = next(zero_samples(stored), None)
        if zero is None:
            return None
        return f"seems to hold only zeros in {zero.name!r}; check how it was saved"

    def downloaded(self) -> Checkpoint:
        """Return the checkpoint with its weights on the disk."""
        if not self.in_place:
            return self
        folder = self.download()

        def here(info: TensorInfo) -> TensorInfo:
            file = folder / info.file.name
            if isinstance(info, Translated):
                return replace(info, file=file, stored=here(info.stored))
            return replace(info, file=file)

        return replace(self, tensors={n: here(i) for n, i in self.tensors.items()})

    def download(self) -> Path:
        """Download the weights; return their folder."""
        return fetch_checkpoint(self.source, self.revision)[0]

    # --- heads and embeddings ---

    @property
    def class_name(self) -> str | None:
        """The class of transformers that the configuration names."""
        return class_of(self.config)

    @property
    def labelled(self) -> bool:
        """True for a class that answers with labels."""
        return self.class_name in LABELLED

    @property
    def tied(self) -> Any:
        """`tie_word_embeddings` of a class that can tie; None if there is no such key."""
        if self.class_name in CLASSES["untied"]:
            return False
        text = text_config(self.config)
        return self.config.get("tie_word_embeddings", text.get("tie_word_embeddings"))

    @property
    def only_matrix(self) -> str | None:
        """The one matrix with a row per token that a tied model stores; None for other models.

        Accelerate's `save_model` stores it as the head.
        """
        matrices = [n for n in self.vocabulary_tensors if len(self.tensors[n].shape) == 2]
        return matrices[0] if self.tied and len(matrices) == 1 else None

    @property
    def writes(self) -> bool:
        """True for a class of causal language models."""
        return "CausalLM" in (self.class_name or "")

    @property
    def headless(self) -> bool:
        """True for a class without a head."""
        return BASE_MODEL.search(self.class_name or "") is not None

    @property
    def heads(self) -> set[str]:
        """The matrices of a language model's head; a tied head may have a bias of its own."""
        size = text_config(self.config).get("vocab_size")

        def is_matrix(name: str) -> bool:
            shape = self.tensors[name].shape
            return len(shape) > 1 and (shape[0] == size or not isinstance(size, int))

        heads = [n for n, place in self.places.items() if place == HEAD and not self.labelled]
        return {name for name in heads if name not in self.tensors or is_matrix(name)}

    @property
    def embeddings(self) -> list[TensorInfo]:
        """The embeddings, and tensors of unknown role that may be one."""
        return [
            self.tensors[name]
            for name, place in self.places.items()
            if place.role == "embedding" or (name in self.roleless and place.layer is None)
        ]

    def with_head(self, head: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Self:
        """Return the checkpoint with another head, and the configuration for it."""
        kept = {name: place for name, place in self.places.items() if place != HEAD}
        return replace(
            self,
            config=config,
            tensors={**{n: i for n, i in self.tensors.items() if n in kept}, **head},
            places={**kept, **dict.fromkeys(head, HEAD)},
            low_rank={n: low for n, low in self.low_rank.items() if n in kept},
        )

    def matrices(self) -> Iterator[tuple[str, TensorInfo]]:
        """Yield names and headers of the float matrices in the layers."""
        for name, info in self.tensors.items():
            layer = self.places[name].layer
            if layer is not None and len(info.shape) == 2 and info.dtype in FLOAT_DTYPES:
                yield name, info


def of_positions(name: str) -> bool:
    """True for an embedding of positions."""
    return "position" in name or "wpe" in name


def without_unshared(checkpoints: Mapping[str, Checkpoint]) -> dict[str, Checkpoint]:
    """Drop tensors that transformers does not load and some sources lack.

    The Hub's base has layers of multi-token prediction, and its fine-tunes lost them when
    transformers saved them. Older checkpoints store buffers that newer ones compute. Where the
    tables do not decide, transformers is asked if the tensors that all sources have are a model.
    """
    opened = [c for c in checkpoints.values() if c.tensors]
    ignored = frozenset[str]().union(*(c.ignored for c in opened))
    names = [c.tensors.keys() for c in opened]
    shared = set(names[0]).intersection(*names) if names else set[str]()
    more = set[str]().union(*names) - shared
    unshared = more & ignored
    heads = frozenset[str]().union(*(c.heads for c in opened))  # which may be tied in one
    if (rest := more - ignored - heads) and opened[0].form == "safetensors":
        shapes = {n: i.shape for n, i in opened[0].tensors.items() if n in shared}
        if missing_tensors(opened[0].config, shapes) == set():
            unshared |= rest

    kept = dict(checkpoints)
    for name, checkpoint in checkpoints.items():
        if gone := checkpoint.tensors.keys() & unshared:
            note = f"{len(gone)} tensors that transformers does not load, such as {min(gone)!r}"
            kept[name] = checkpoint.without(gone, f"leaves out {note}: not all sources have them")
    return kept
