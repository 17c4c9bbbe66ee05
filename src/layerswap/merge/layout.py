"""The output of a merge: every tensor with its terms, and the files."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from layerswap.checkpoint import Checkpoint, TensorInfo, header_bytes
from layerswap.checkpoint.given import INDEX, SINGLE
from layerswap.checkpoint.header import Translated, byte_length
from layerswap.checkpoint.names import method_of
from layerswap.checkpoint.read import FLOAT_DTYPES, FLOAT_NAMES, equal, equal_anywhere
from layerswap.checkpoint.remote import WeightFile
from layerswap.compose.blend import Blend, Member
from layerswap.compose.composition import Composition
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
BLOCK = 4096
"""Bytes of a block that two files can share; both begin at a multiple of it."""
SMALLEST_RUN = 1 << 20
"""Fewest neighbouring bytes of one source that get their own file to share blocks."""
MOST_FILES = 64
"""Most files that a layout with shared blocks has more than its bytes need."""


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

    @property
    def blocks(self) -> Span | None:
        """The whole blocks, which both files can share; None if their positions differ."""
        start = -self.offset % BLOCK
        stop = self.nbytes - (self.offset + self.nbytes) % BLOCK
        agree = (self.source_offset - self.offset) % BLOCK == 0
        return self.part(start, stop) if agree and start < stop else None


def spans(shard: Shard) -> list[Span]:
    """The copied bytes of an output file, neighbours in both files as one span."""
    joined: list[Span] = []
    for tensor, offset in shard.tensors:
        if not tensor.verbatim or not tensor.nbytes:
            continue
        info = tensor.copied
        span = Span(info.file, info.offset, offset, tensor.nbytes)
        if joined and joined[-1].part(joined[-1].nbytes, joined[-1].nbytes + span.nbytes) == span:
            joined[-1] = joined[-1].part(0, joined[-1].nbytes + span.nbytes)
        else:
            joined.append(span)
    return joined


def local_blocks(shards: Iterable[Shard]) -> list[Span]:
    """Find the whole blocks that output files can share with local sources."""
    runs = (span.blocks for shard in shards for span in spans(shard))
    return [blocks for blocks in runs if blocks and isinstance(blocks.source, Path)]


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
            for tensor in checkpoint.vocabulary_rows:
                info = checkpoint.tensors[tensor]
                if alignment.is_identity(name, checkpoint.vocabulary_size):
                    continue
                bias = tensor not in checkpoint.vocabulary_tensors
                shape = (1, alignment.size) if bias else (alignment.size, *info.shape[1:])
                for gathered, rows in ((blends, alignment.rows), (deltas, alignment.deltas)):
                    runs = tuple(
                        Run(source_of(owners[owner], tensor), first, count)
                        for owner, first, count in rows[name]
                    )
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
    if aligned or any(not equal_anywhere(stored[0], other) for other in stored[1:]):
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
    return _shards([_Group(group) for group in _groups(tensors, max_bytes)], metadata)


def pack_shared_shards(
    tensors: Sequence[OutputTensor],
    max_bytes: int,
    metadata: Mapping[str, str],
    sources: Iterable[Checkpoint],
) -> list[Shard]:
    """Pack output files in which copied tensors share blocks with the sources.

    A shared block has one position in both files, modulo its size. Padding the header gives the
    first tensor of a file its position; each further run of a source goes where its position
    agrees. A run that fits nowhere gets a file of its own, or is written with the computed tensors
    if it is small. A source file that is taken whole stays a file, which the Hub can copy.
    """
    sizes: Counter[WeightFile] = Counter()
    for source in sources:
        for info in source.tensors.values():
            sizes[info.file] += info.nbytes
    groups: list[_Group] = []
    most = MOST_FILES + sum(tensor.nbytes for tensor in tensors) // max_bytes
    left = []
    for run in _runs(tensors):
        nbytes = sum(tensor.nbytes for tensor in run)
        opens = nbytes >= SMALLEST_RUN and len(groups) < most
        if opens and nbytes == sizes[run[0].copied.file] <= max_bytes:
            groups.append(_Group(run, run[0].copied.offset % BLOCK, nbytes=max_bytes))  # full
            continue
        left.append(_place(run, groups, max_bytes, opens=opens))
    for run in left:
        _place(run, groups, max_bytes, opens=False)
    shared = {tensor.name for group in groups for tensor in group.tensors}
    rest = [tensor for tensor in tensors if tensor.name not in shared]
    if rest or not groups:
        groups += [_Group(group) for group in _groups(rest, max_bytes)]
    return _shards(groups, metadata)


@dataclass
class _Group:
    """The tensors of one file.

    `start` is the first one's position modulo `BLOCK`, None if any will do; `end` is the position
    after the last one, and `nbytes` their length.
    """

    tensors: list[OutputTensor] = field(default_factory=list)
    start: int | None = None
    end: int = 0
    nbytes: int = 0

    def takes(self, tensor: OutputTensor, max_bytes: int) -> bool:
        """True if a copied tensor can follow, at its source's position modulo `BLOCK`."""
        fits = self.nbytes + tensor.nbytes <= max_bytes
        return fits and (self.end - tensor.copied.offset) % BLOCK == 0


def _runs(tensors: Sequence[OutputTensor]) -> list[list[OutputTensor]]:
    """Group copied tensors that are neighbours in one source file, ordered by the first."""
    uses: Counter[tuple[str, int]] = Counter()
    copied = []
    for number, tensor in enumerate(tensors):
        if tensor.verbatim and tensor.nbytes:
            at = str(tensor.copied.file), tensor.copied.offset
            copied.append((at[0], uses[at], at[1], number))
            uses[at] += 1  # a layer may be taken twice
    runs: list[list[int]] = []
    expected: tuple[str, int, int] | None = None
    for file, use, offset, number in sorted(copied):
        if expected != (file, use, offset):
            runs.append([])
        runs[-1].append(number)
        expected = file, use, offset + tensors[number].nbytes
    return [[tensors[number] for number in run] for run in sorted(runs, key=min)]


def _place(
    run: list[OutputTensor], groups: list[_Group], max_bytes: int, *, opens: bool
) -> list[OutputTensor]:
    """Add a run to the last groups that take it, or to new ones; return what no group takes."""
    group: _Group | None = None
    for number, tensor in enumerate(run):
        if group is None or not group.takes(tensor, max_bytes):
            group = next((g for g in reversed(groups) if g.takes(tensor, max_bytes)), None)
        if group is None and not opens:
            return run[number:]
        if group is None:
            group = _Group(start=tensor.copied.offset % BLOCK, end=tensor.copied.offset)
            groups.append(group)
        group.tensors.append(tensor)
        group.end += tensor.nbytes
        group.nbytes += tensor.nbytes
    return []


def _shards(groups: Sequence[_Group], metadata: Mapping[str, str]) -> list[Shard]:
    count = len(groups)
    shards = []
    for number, group in enumerate(groups, start=1):
        file = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        entries = [(t.name, t.dtype, t.shape, t.nbytes) for t in group.tensors]
        multiple, remainder = (8, 0) if group.start is None else (BLOCK, group.start)
        header = header_bytes(entries, metadata, multiple=multiple, remainder=remainder)
        placed, offset = [], len(header)
        for tensor in group.tensors:
            placed.append((tensor, offset))
            offset += tensor.nbytes
        shards.append(Shard(file, header, tuple(placed), offset))
    return shards


def names_digest(names: Iterable[str]) -> dict[str, Any]:
    """The number of tensors, and the SHA-256 of their sorted names, one per line."""
    text = "".join(f"{name}\n" for name in sorted(names))
    return {"count": text.count("\n"), "names_sha256": sha256(text.encode()).hexdigest()}


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the index of a model in several files; a model in one file has none."""
    if len(shards) > 1:
        weight_map = {tensor.name: shard.file for shard in shards for tensor, _ in shard.tensors}
        total = sum(tensor.nbytes for shard in shards for tensor, _ in shard.tensors)
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_bytes((json.dumps(content, indent=2) + "\n").encode())


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
        # A BatchNorm counts its training steps, and only training reads the number.
        if not (first.name.endswith("num_batches_tracked") or equal_anywhere(first, other)):
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
