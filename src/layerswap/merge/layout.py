"""What a merge will write: every output tensor, where its bytes come from, and the shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType

from layerswap.checkpoint import Checkpoint, TensorInfo, header_bytes
from layerswap.checkpoint.folder import INDEX, SINGLE
from layerswap.checkpoint.header import Translated, byte_length
from layerswap.checkpoint.read import FLOAT_DTYPES, FLOAT_NAMES, same_bytes
from layerswap.checkpoint.remote import WeightFile
from layerswap.compose import Blend, Composition
from layerswap.compose.blend import Member
from layerswap.compose.schema import BASE
from layerswap.errors import MergeError
from layerswap.merge.fisher import Fisher
from layerswap.merge.lazy_tensors import (
    Adapted,
    Gathered,
    MergedTensor,
    Run,
    Term,
    Terms,
    expert_tensors,
    leaves,
)
from layerswap.merge.vocabulary import Alignment

SHORT = ("BF16", "F16")
"""Dtypes of 16 bits, which can lose a delta."""
Gathereds = dict[tuple[str, str], Gathered]
"""Aligned embeddings and heads by expert and tensor."""
AlignedRows = tuple[Gathereds, Gathereds]
"""Those for blends, and those for methods that take deltas."""


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the merged model.

    Attributes:
        name: its name.
        dtype: safetensors dtype of the output, or its quantised type in a GGUF file.
        shape: its shape.
        inputs: what it is a weighted sum of; weights sum to 1.
        base: the base's tensor, where it is computed from that and rounded to 16 bits.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    inputs: Terms
    base: TensorInfo | None = None

    @property
    def verbatim(self) -> bool:
        """Whether its bytes are one source's bytes."""
        term = self.inputs[0][0]
        if len(self.inputs) > 1 or not isinstance(term, TensorInfo) or isinstance(term, Translated):
            return False
        return term.dtype == self.dtype

    @property
    def linear(self) -> bool:
        """Whether it is a weighted sum of experts' tensors, so that its chunks are independent."""
        return not any(isinstance(term, MergedTensor) for term, _ in self.inputs)

    @property
    def files(self) -> set[WeightFile]:
        """Every file that it is read from."""
        return {info.file for info in leaves(self.inputs)}

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Length in the output, in bytes."""
        return byte_length(self.dtype, self.shape)

    @property
    def stored_dtypes(self) -> list[str]:
        """The dtypes that it is read from, each once."""
        return list(dict.fromkeys(info.dtype for info in leaves(self.inputs)))


@dataclass(frozen=True)
class Shard:
    """One output file, or a part of one.

    Attributes:
        file: its name.
        header: its header; empty for a part that is not the first.
        tensors: each tensor with its absolute offset, in bytes.
        nbytes: where it ends, in bytes.
    """

    file: str
    header: bytes
    tensors: tuple[tuple[OutputTensor, int], ...]
    nbytes: int


def output_tensors(
    composition: Composition,
    experts: Mapping[str, Checkpoint],
    *,
    base: Checkpoint | None = None,
    dtype: str | None = None,
    drop: frozenset[str] = frozenset(),
    rows: AlignedRows = ({}, {}),
    fishers: Mapping[str, Fisher] = MappingProxyType({}),
) -> list[OutputTensor]:
    """Every tensor of the merged model, in the byte order of the first expert's files.

    That order lets neighbouring tensors of one source be copied as one span.

    Args:
        composition: what goes where, over the names of `experts`.
        experts: the experts, all with the same tensors.
        base: what operations take deltas from.
        dtype: dtype of the floating-point outputs, `float32`, `bfloat16` or `float16`; when None
            each tensor gets the widest dtype that an expert stores it in, and with adapters the
            widest of all tensors and of the adapters, whose deltas narrower ones would lose.
        drop: tensors to leave out (a stored copy of tied embeddings).
        rows: what `aligned_rows` gave.
        fishers: diagonal Fishers by the expert of the recipe that they are of.

    Raises:
        MergeError: a tensor that cannot be averaged (integer, boolean, 8 bits and less) lies in
            a blended place and differs between the experts.
    """
    first = next(iter(experts.values()))
    target = FLOAT_NAMES[dtype] if dtype else _baked_dtype(experts)
    checkpoints = everyone(experts, base)
    outputs = []
    for name, info in first.tensors.items():
        if name in drop:
            continue
        blend = composition[first.places[name]]
        inputs = terms_of(blend, name, checkpoints, rows, fishers)
        stored_inputs = list(leaves(inputs))
        if any(tensor.dtype not in FLOAT_DTYPES for tensor in stored_inputs):
            only = unblendable(stored_inputs)
            outputs.append(OutputTensor(name, only.dtype, info.shape, ((only, 1.0),)))
            continue
        stored = {checkpoint.tensors[name].dtype for checkpoint in experts.values()}
        wide = target or widest(stored & set(FLOAT_DTYPES))
        shape = next(iter(expert_tensors(inputs))).shape
        reference = base.tensors.get(name) if base is not None and wide in SHORT else None
        kept = reference if reference in stored_inputs and reference.shape == shape else None
        outputs.append(OutputTensor(name, wide, shape, inputs, kept))
    return outputs


def _baked_dtype(experts: Mapping[str, Checkpoint]) -> str | None:
    """The dtype of full weights that adapters are added to; None without adapters.

    One for all tensors: a model is loaded in one.
    """
    factors = {info.dtype for c in experts.values() for low in c.low_rank.values()
               for info in (low.a, low.b)}  # fmt: skip
    stored = {info.dtype for c in experts.values() for info in c.tensors.values()}
    return widest((factors | stored) & set(FLOAT_DTYPES)) if factors else None


def aligned_rows(
    alignment: Alignment | None, checkpoints: Mapping[str, Checkpoint], base: Checkpoint | None
) -> AlignedRows:
    """Embeddings and heads in the vocabulary of an alignment; those that are in it are left out.

    Args:
        alignment: where each row is found.
        checkpoints: the experts and the base, by the names that the alignment has for them.
        base: which of them is the base.
    """
    blends: Gathereds = {}
    deltas: Gathereds = {}
    for name, checkpoint in checkpoints.items() if alignment else ():
        member = BASE if checkpoint is base else name
        for tensor in checkpoint.vocabulary_tensors:
            info = checkpoint.tensors[tensor]
            if alignment is None or alignment.is_identity(name, info.shape[0]):
                continue
            for found, rows in ((blends, alignment.rows), (deltas, alignment.deltas)):
                runs = tuple(
                    Run(_source(checkpoints[whose], tensor), first, count)
                    for whose, first, count in rows[name]
                )
                shape = (alignment.size, *info.shape[1:])
                found[member, tensor] = Gathered(tensor, shape, info.dtype, runs)
    return blends, deltas


def pack_shards(
    tensors: Sequence[OutputTensor], max_bytes: int, metadata: Mapping[str, str]
) -> list[Shard]:
    """The output files: tensors in order, each file as full as `max_bytes` allows.

    One file is `model.safetensors`; several are `model-00001-of-0000N.safetensors`. A tensor
    larger than `max_bytes` gets a file of its own.
    """
    groups = list(_groups(tensors, max_bytes))
    count = len(groups)
    shards = []
    for number, group in enumerate(groups, start=1):
        file = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        header = header_bytes([(t.name, t.dtype, t.shape, t.nbytes) for t in group], metadata)
        placed, offset = [], len(header)
        for tensor in group:
            placed.append((tensor, offset))
            offset += tensor.nbytes
        shards.append(Shard(file, header, tuple(placed), offset))
    return shards


def index_of(shards: Sequence[Shard]) -> tuple[str, dict[str, object]] | None:
    """Name and content of the index file; None for a single shard, which needs none."""
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


def everyone(experts: Mapping[str, Checkpoint], base: Checkpoint | None) -> dict[str, Checkpoint]:
    """The experts and the base, by the names that a composition has for them."""
    # An expert may be called `base` where no delta is taken from the base.
    return {**({BASE: base} if base else {}), **experts}


def terms_of(
    blend: Blend,
    name: str,
    checkpoints: Mapping[str, Checkpoint],
    rows: AlignedRows = ({}, {}),
    fishers: Mapping[str, Fisher] = MappingProxyType({}),
) -> Terms:
    """One tensor of a blend, as terms over what is stored."""
    return tuple(
        (_term(member, name, checkpoints, rows, fishers), w) for member, w in blend.weights
    )


def _term(
    member: Member,
    name: str,
    checkpoints: Mapping[str, Checkpoint],
    rows: AlignedRows,
    fishers: Mapping[str, Fisher],
) -> Term:
    if isinstance(member, str):
        return rows[0].get((member, name)) or _source(checkpoints[member], name)
    if member.base is not None:
        rows = rows[1], rows[1]
    inputs = tuple(terms_of(blend, name, checkpoints, rows, fishers) for blend, _ in member.inputs)
    base = terms_of(member.base, name, checkpoints, rows, fishers) if member.base else None
    shape = next(iter(expert_tensors(inputs[0]))).shape
    normalised = dict(member.parameters).get("normalise") == "model"
    precisions = (fishers[key].terms(name, normalised) for key in member.fishers)
    transposed = any(checkpoints[expert].transposes(name) for expert in member.experts)
    fisher_terms = tuple(filter(None, precisions))
    return MergedTensor(name, shape, member, inputs, base, fisher_terms, transposed)


def _source(checkpoint: Checkpoint, name: str) -> Adapted | TensorInfo:
    info = checkpoint.tensors[name]
    low_rank = checkpoint.low_rank.get(name)
    return info if low_rank is None else Adapted(info, low_rank)


def unblendable(stored: Sequence[TensorInfo]) -> TensorInfo:
    """The one tensor that stored ones which cannot be averaged all are.

    Raises:
        MergeError: they differ.
    """
    first = stored[0]
    for other in stored[1:]:
        if not same_bytes(first, other):
            raise MergeError(
                f"tensor {first.name!r} is {first.dtype} and differs between the experts; "
                "only floating-point tensors of 16 bits and more can be blended"
            )
    return first


def widest(dtypes: Set[str]) -> str:
    """The narrowest floating-point dtype that holds the numbers of all of these."""
    # bfloat16 has the range and float16 the precision; only float32 holds both.
    if dtypes == {"BF16", "F16"}:
        return "F32"
    return min(dtypes, key=FLOAT_DTYPES.index)
