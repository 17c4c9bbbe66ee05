"""The output of a merge: every tensor with its terms, and the files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

from layerswap.checkpoint import Checkpoint, TensorInfo, header_bytes
from layerswap.checkpoint.given import INDEX, SINGLE
from layerswap.checkpoint.header import Translated, byte_length
from layerswap.checkpoint.names import method_of
from layerswap.checkpoint.read import FLOAT_DTYPES, FLOAT_NAMES, equal, same_bytes
from layerswap.checkpoint.remote import WeightFile
from layerswap.compose import Blend, Composition
from layerswap.compose.blend import Member
from layerswap.compose.schema import BASE
from layerswap.ground.errors import MergeError
from layerswap.merge.heads import label_rows, label_tensors
from layerswap.merge.sources import Fisher, with_base
from layerswap.merge.terms import (
    Adapted,
    Gathered,
    MergedTensor,
    Run,
    Term,
    Terms,
    sources_of,
    stored_tensors,
)
from layerswap.merge.tokenizers import Alignment

SHORT = ("BF16", "F16")
"""Dtypes of 16 bits, in which a delta can be lost."""


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the merged model.

    Attributes:
        dtype: safetensors dtype of the output, or quantised type in a GGUF file.
        inputs: the weighted sum that it is; the weights sum to 1.
        base: the base's tensor, if the tensor is computed from it and rounded to 16 bits.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    inputs: Terms
    base: TensorInfo | None = None

    @cached_property
    def verbatim(self) -> bool:
        """True if its bytes are one source's bytes."""
        term = self.inputs[0][0]
        if len(self.inputs) > 1 or not isinstance(term, TensorInfo) or isinstance(term, Translated):
            return False
        return term.dtype == self.dtype

    @cached_property
    def copied(self) -> TensorInfo:
        """The one source tensor of a verbatim tensor."""
        return next(stored_tensors(self.inputs))

    @property
    def linear(self) -> bool:
        """True if it is a weighted sum of experts' tensors, so that its chunks are independent."""
        return not any(isinstance(term, MergedTensor) for term, _ in self.inputs)

    @property
    def files(self) -> set[WeightFile]:
        """Files that the tensor is read from."""
        return {info.file for info in stored_tensors(self.inputs)}

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Length in the output, in bytes."""
        return byte_length(self.dtype, self.shape)

    @property
    def stored_dtypes(self) -> list[str]:
        """Distinct dtypes that the tensor is read from."""
        return list(dict.fromkeys(info.dtype for info in stored_tensors(self.inputs)))


@dataclass(frozen=True)
class Shard:
    """One output file, or a part of one.

    Attributes:
        header: its header; empty for a part that is not the first.
        tensors: each tensor with its absolute offset, in bytes.
        nbytes: position of its end, in bytes.
    """

    file: str
    header: bytes
    tensors: tuple[tuple[OutputTensor, int], ...]
    nbytes: int


@dataclass(frozen=True)
class Span:
    """Bytes of one source file that go unchanged to one position in the output file."""

    source: WeightFile
    source_offset: int
    offset: int
    nbytes: int

    def part(self, start: int, stop: int) -> Span:
        """The bytes [start, stop) of the span."""
        return Span(self.source, self.source_offset + start, self.offset + start, stop - start)


def spans(shard: Shard) -> Iterator[Span]:
    """The copied bytes of an output file, neighbours in both files as one span."""
    span: Span | None = None
    for tensor, offset in shard.tensors:
        if not tensor.verbatim or not tensor.nbytes:
            continue
        info = tensor.copied
        if span and (info.file, info.offset, offset) == (
            span.source,
            span.source_offset + span.nbytes,
            span.offset + span.nbytes,
        ):
            span = Span(span.source, span.source_offset, span.offset, span.nbytes + tensor.nbytes)
            continue
        if span:
            yield span
        span = Span(info.file, info.offset, offset, tensor.nbytes)
    if span:
        yield span


Gathereds = Mapping[tuple[str, str], Gathered]
"""Aligned embeddings and heads by expert and tensor."""


@dataclass(frozen=True)
class TermBuilder:
    """Builds the terms of output tensors from the blends of a composition.

    `rows` holds aligned embeddings and heads for blends, `delta_rows` for methods that take deltas,
    and `known` the terms that were built.
    """

    checkpoints: Mapping[str, Checkpoint]
    rows: Gathereds
    delta_rows: Gathereds
    fishers: Mapping[str, Fisher]
    known: dict[tuple[Member, str, bool], Term] = field(default_factory=dict)

    def terms(self, blend: Blend, name: str, *, deltas: bool = False) -> Terms:
        """Build the terms of one tensor of a blend; `deltas`: a method takes deltas from it."""
        return tuple((self._term(member, name, deltas), w) for member, w in blend.weights)

    def _term(self, member: Member, name: str, deltas: bool) -> Term:
        # Equal terms are one object, so that comparing nested ones costs nothing.
        key = member, name, deltas
        if key not in self.known:
            self.known[key] = self._new_term(*key)
        return self.known[key]

    def _new_term(self, member: Member, name: str, deltas: bool) -> Term:
        if isinstance(member, str):
            rows = self.delta_rows if deltas else self.rows
            return rows.get((member, name)) or source_of(self.checkpoints[member], name)
        deltas = deltas or member.base is not None
        inputs = tuple(self.terms(blend, name, deltas=deltas) for blend, _ in member.inputs)
        base = self.terms(member.base, name, deltas=deltas) if member.base else None
        shape = next(sources_of(inputs[0])).shape
        normalised = dict(member.parameters).get("normalise") == "model"
        fishers = (self.fishers[key].terms(name, normalised) for key in member.fishers)
        transposed = any(self.checkpoints[expert].transposes(name) for expert in member.experts)
        return MergedTensor(
            name, shape, member, inputs, base, tuple(filter(None, fishers)), transposed
        )


def source_of(checkpoint: Checkpoint, name: str) -> Adapted | TensorInfo:
    """Return a checkpoint's tensor, with the delta of its adapter if it has one."""
    info = checkpoint.tensors[name]
    low_rank = checkpoint.low_rank.get(name)
    return info if low_rank is None else Adapted(info, low_rank)


def term_builder(
    experts: Mapping[str, Checkpoint],
    base: Checkpoint | None,
    *,
    alignment: Alignment | None,
    fishers: Mapping[str, Fisher],
) -> TermBuilder:
    """The builder for a plan's experts and base, with their rows aligned to one vocabulary."""
    # An expert may be called `base` if no delta is taken from the base.
    checkpoints = {**({BASE: base} if base else {}), **experts}
    blends: dict[tuple[str, str], Gathered] = {}
    deltas: dict[tuple[str, str], Gathered] = {}
    first = next(iter(experts.values()))
    for name, checkpoint in experts.items():
        if order := label_rows(checkpoint, first):
            for tensor in label_tensors(checkpoint):
                source = source_of(checkpoint, tensor)
                runs = tuple(Run(source, row, 1) for row in order)
                blends[name, tensor] = Gathered(checkpoint.tensors[tensor].shape, runs)
    if alignment is not None:
        owners = with_base(experts, base)
        for name, checkpoint in owners.items():
            member = BASE if checkpoint is base else name
            for tensor in checkpoint.vocabulary_tensors:
                info = checkpoint.tensors[tensor]
                if alignment.is_identity(name, info.shape[0]):
                    continue
                for gathered, rows in ((blends, alignment.rows), (deltas, alignment.deltas)):
                    runs = tuple(
                        Run(source_of(owners[owner], tensor), first, count)
                        for owner, first, count in rows[name]
                    )
                    shape = (alignment.size, *info.shape[1:])
                    gathered[member, tensor] = Gathered(shape, runs)
    return TermBuilder(checkpoints, blends, deltas, fishers)


def output_tensors(
    composition: Composition,
    experts: Mapping[str, Checkpoint],
    builder: TermBuilder,
    *,
    base: Checkpoint | None = None,
    dtype: str | None = None,
    drop: frozenset[str] = frozenset(),
) -> list[OutputTensor]:
    """Every tensor of the merged model, in the byte order of the first expert's files.

    In that order neighbouring tensors of one source can be copied as one span.

    Without `dtype` each tensor gets the widest dtype in which an expert stores it. With adapters,
    all tensors get the widest dtype of tensors and adapters, so that no delta is lost. The deltas
    from `base` are compared with their rounded values.
    """
    first = next(iter(experts.values()))
    target = FLOAT_NAMES[dtype] if dtype else _baked_dtype(experts)
    short = any(info.dtype in SHORT for info in first.tensors.values())
    outputs = []
    for name in first.tensors:
        if name in drop:
            continue
        inputs = builder.terms(composition[first.places[name]], name)
        stored_inputs = list(stored_tensors(inputs))
        if name in first.quantised:
            _check_copied(first, name, inputs)
        if name in first.quantised or any(t.dtype not in FLOAT_DTYPES for t in stored_inputs):
            only = unblendable(stored_inputs)
            outputs.append(OutputTensor(name, only.dtype, only.shape, ((only, 1.0),)))
            continue
        stored = {checkpoint.tensors[name].dtype for checkpoint in experts.values()}
        wide = target or widest(stored & set(FLOAT_DTYPES))
        if dtype and wide in SHORT and stored == {"F32"} and short:
            wide = "F32"  # such as the corrections of a router, which 16 bits would make equal
        if _blend_copies(inputs, wide):
            inputs = ((inputs[0][0], 1.0),)
        shape = next(sources_of(inputs)).shape
        reference = base.tensors.get(name) if base is not None and wide in SHORT else None
        kept = reference if reference in stored_inputs and reference.shape == shape else None
        outputs.append(OutputTensor(name, wide, shape, inputs, kept))
    return outputs


def _check_copied(checkpoint: Checkpoint, name: str, inputs: Terms) -> None:
    """Refuse to compute with a quantised weight."""
    stored = list(stored_tensors(inputs))
    aligned = any(isinstance(source, Gathered) for source in sources_of(inputs))
    if aligned or any(not same_bytes(stored[0], other) for other in stored[1:]):
        raise MergeError(
            f"{name!r} is quantised ({method_of(checkpoint.config)}), so it can only be copied: "
            "take its place from one expert, or merge the unquantised checkpoints"
        )


def _blend_copies(inputs: Terms, dtype: str) -> bool:
    """True if the inputs of a blend are equal, and rounding their sum gives back their bytes.

    In 16 bits it does for all weights, whose sum is 1 within float32's rounding. In float32 only
    two halves add up exactly; other blends of equal numbers may differ from them in the last bit.
    """
    first, *others = (term for term, _ in inputs)
    if not others or (dtype not in SHORT and [w for _, w in inputs] != [0.5, 0.5]):
        return False
    # The stored bytes of a subclass, such as a translated tensor, differ from the output's.
    return all(
        type(term) is TensorInfo and term.dtype == dtype and equal(term, first)  # type: ignore[arg-type]
        for term in (first, *others)
    )


def _baked_dtype(experts: Mapping[str, Checkpoint]) -> str | None:
    """The one dtype of full weights that adapters are added to; None without adapters."""
    factors = {info.dtype for c in experts.values() for low in c.low_rank.values()
               for info in (low.a, low.b)}  # fmt: skip
    stored = {info.dtype for c in experts.values() for info in c.tensors.values()}
    return widest((factors | stored) & set(FLOAT_DTYPES)) if factors else None


def pack_shards(
    tensors: Sequence[OutputTensor], max_bytes: int, metadata: Mapping[str, str]
) -> list[Shard]:
    """Pack tensors into output files in order, each as full as `max_bytes` allows.

    One file is `model.safetensors`; several are `model-00001-of-0000N.safetensors`. A tensor
    larger than `max_bytes` gets a file of its own.
    """
    groups = [*_groups(tensors, max_bytes)]
    count = len(groups)
    shards = []
    for number, group in enumerate(groups, start=1):
        file = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        entries = [(t.name, t.dtype, t.shape, t.nbytes) for t in group]
        header = header_bytes(entries, metadata)
        placed, offset = [], len(header)
        for tensor in group:
            placed.append((tensor, offset))
            offset += tensor.nbytes
        shards.append(Shard(file, header, tuple(placed), offset))
    return shards


def names_digest(names: Iterable[str]) -> dict[str, Any]:
    """The number of tensors, and the SHA-256 of their sorted names, one per line."""
    text = "".join(f"{name}\n" for name in sorted(names))
    return {"count": text.count("\n"), "names_sha256": sha256(text.encode()).hexdigest()}


def index_of(shards: Sequence[Shard]) -> tuple[str, dict[str, object]] | None:
    """Return name and content of the index file; None for a single shard."""
    if len(shards) == 1:
        return None
    weight_map = {tensor.name: shard.file for shard in shards for tensor, _ in shard.tensors}
    total = sum(tensor.nbytes for shard in shards for tensor, _ in shard.tensors)
    return INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}


def _groups(tensors: Sequence[OutputTensor], max_bytes: int) -> Iterator[list[OutputTensor]]:
    group: list[OutputTensor] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.nbytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.nbytes
    yield group


def unblendable(stored: Sequence[TensorInfo]) -> TensorInfo:
    """Return the first of these tensors, which cannot be averaged; refuse different bytes."""
    first = stored[0]
    for other in stored[1:]:
        if not same_bytes(first, other):
            raise MergeError(
                f"tensor {first.name!r} is {first.dtype} and differs between the experts; "
                "only floating-point tensors of 16 bits and more can be blended"
            )
    return first


def widest(dtypes: Set[str]) -> str:
    """Return the narrowest floating-point dtype that represents all values of these."""
    # bfloat16 has the range and float16 the precision; only float32 holds both.
    if dtypes == {"BF16", "F16"}:
        return "F32"
    return min(dtypes, key=FLOAT_DTYPES.index)
