"""The header of a GGUF file, read as if it came from an adversary, and written.

The format (llama.cpp, versions 2 and 3, little-endian): the bytes `GGUF`, the version, the numbers
of tensors and of metadata entries, the entries, the tensors' names, shapes, types and offsets, and
then the tensors' bytes, each from a multiple of the alignment on. The reader takes no size from a
file that the file is not long enough for, and is as strict as llama.cpp's: offsets have no gaps.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerswap.checkpoint.header import MAX_ELEMENTS, TensorInfo, byte_length
from layerswap.checkpoint.read import Handle, open_file, read_into
from layerswap.checkpoint.strict_json import MAX_JSON_BYTES, clipped, regular_size
from layerswap.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
"""Alignment of the tensors, in bytes, where `general.alignment` says nothing else."""
TYPES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""The types of tensors by their number in a file."""

ARCHITECTURES = frozenset(
    """
    apertus arcee baichuan bailingmoe bitnet bloom chatglm codeshell cohere2 command-r deci
    deepseek deepseek2 dots1 ernie4_5 ernie4_5-moe exaone exaone4 falcon gemma gemma2 gemma3
    gpt-oss gpt2 gptj gptneox granite granitemoe hunyuan-dense hunyuan-moe internlm2 jais llama
    llama4 minicpm minicpm3 minimax-m2 mistral3 mpt nemotron olmo olmo2 olmoe openelm orion phi2
    phi3 phimoe plamo qwen qwen2 qwen2moe qwen3 qwen3moe refact seed_oss smallthinker smollm3
    stablelm starcoder starcoder2 xverse
    """.split()  # noqa: SIM905
)
"""The architectures whose tensors `places` knows: llama.cpp's decoders of transformer layers."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_UINT32, _STRING, _ARRAY = 4, 8, 9
_MAX_NAME, _MAX_KEY, _MAX_DIMENSIONS = 63, 65535, 4  # llama.cpp's
_MAX_TEXTS = 1 << 22
"""Texts of one list, such as the tokens: eight times as many as any known vocabulary has."""
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


Entry = tuple[str, int, bytes]
"""A metadata entry as it is stored: key, type and bytes of the value."""


@dataclass(frozen=True)
class Metadata:
    """The metadata of a GGUF file: entries are found when it is opened and decoded when asked for.

    Attributes:
        raw: the bytes of all entries.
        spans: by key, the type of the value, and its first byte and one past its last in `raw`.
        alignment: of the tensors, in bytes.

    Example: `metadata["general.architecture"]` gives `"llama"`.
    """

    raw: bytes
    spans: Mapping[str, tuple[int, int, int]]
    alignment: int

    def __contains__(self, key: object) -> bool:
        return key in self.spans

    def __getitem__(self, key: str) -> Any:
        kind, start, _ = self.spans[key]
        return _decode(self.raw, kind, start)[0]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key: a number, a boolean, a text, or a list of them."""
        return self[key] if key in self.spans else default

    def stored(self, key: str) -> tuple[int, bytes] | None:
        """The type of a value and its bytes; None where there is no such key."""
        if key not in self.spans:
            return None
        kind, start, stop = self.spans[key]
        return kind, self.raw[start:stop]


@dataclass(frozen=True)
class GGUFHeader:
    """What the header of one GGUF file says.

    Attributes:
        metadata: its entries.
        tensors: its tensors in the order of their bytes, their shapes in torch's order.
    """

    metadata: Metadata
    tensors: Mapping[str, TensorInfo]


def read_gguf(path: Path) -> GGUFHeader:
    """The header of a GGUF file; of a split one, all parts together.

    Raises:
        CheckpointError: naming the file and the first rule that it breaks, or the part that is
            missing.
    """
    first = read_gguf_header(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    named = _PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise CheckpointError(
            f"{path}: one of {count} parts, so its name must end with -00001-of-{count:05d}.gguf"
        )
    tensors: dict[str, TensorInfo] = {}
    metadata = first.metadata
    for number in range(count):
        part = path.with_name(f"{named['stem']}-{number + 1:05d}-of-{count:05d}.gguf")
        if not part.is_file():
            raise CheckpointError(f"{part}: missing; the model is in {count} parts")
        header = read_gguf_header(part)
        found = header.metadata.get("split.no"), header.metadata.get("split.count")
        if found != (number, count):
            raise CheckpointError(f"{part}: says that it is part {found[0]} of {found[1]}")
        if twice := tensors.keys() & header.tensors.keys():
            raise CheckpointError(f"{part}: {_tensor(min(twice))} is in an earlier part too")
        tensors.update(header.tensors)
        metadata = header.metadata if number == 0 else metadata
    total = metadata.get("split.tensors.count")
    if total is not None and total != len(tensors):
        raise CheckpointError(f"{path}: its parts hold {len(tensors)} tensors of {total}")
    return GGUFHeader(metadata, tensors)


def read_gguf_header(path: Path) -> GGUFHeader:
    """The header of one GGUF file, or of one part of a split one.

    Nothing in it is trusted: every size is checked against the bytes that are there before
    memory is taken for it, and every tensor lies inside the file, behind the one before it.

    Raises:
        CheckpointError: naming the file and the first rule that it breaks.
    """
    try:
        size = regular_size(path)
        with open_file(path) as handle:
            return _header(_Cursor(handle, size, path), size, path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def configuration(header: GGUFHeader, *, any_architecture: bool = False) -> dict[str, Any]:
    """What a header says of the model: its hyperparameters, without the architecture in front.

    Model type, layers and vocabulary have the names that `config.json` has for them. An
    architecture that is not known is taken for a decoder where it has the embedding and the final
    norm of one.

    Args:
        header: of a whole model.
        any_architecture: accept architectures whose tensors have no known places.

    Raises:
        CheckpointError: it is no language model: an adapter, a projector, a calibration matrix;
            or its architecture is not known.
    """
    metadata = header.metadata
    kind, name = metadata.get("general.type", "model"), metadata.get("general.architecture")
    if kind == "adapter":
        raise CheckpointError("a LoRA adapter as GGUF; add it to its model with llama-export-lora")
    if kind != "model":
        raise CheckpointError(f"general.type is {clipped(repr(kind), 40)}, not a language model")
    decodes = {"token_embd.weight", "output_norm.weight"} <= header.tensors.keys()
    if name not in ARCHITECTURES and not (isinstance(name, str) and (any_architecture or decodes)):
        raise CheckpointError(
            f"architecture {clipped(repr(name), 40)} is not known; if it is a decoder, place its "
            "tensors with `patterns` in the recipe"
        )
    found = {
        key.removeprefix(f"{name}."): metadata[key]
        for key in metadata.spans
        if key.startswith(f"{name}.")
    }
    layers = found.get("block_count")
    if type(layers) is not int:
        raise CheckpointError(f"has no {name}.block_count")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None:
        found["vocab_size"] = embedding.shape[0]
    return {**found, "model_type": name, "num_hidden_layers": layers}


def gguf_header_bytes(
    entries: Iterable[Entry],
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    alignment: int,
) -> tuple[bytes, list[int], int]:
    """A whole GGUF header of version 3, padded to the first tensor.

    Args:
        entries: key, type and bytes of every metadata entry.
        tensors: name, type and shape of each tensor, in the order of their bytes.
        alignment: of the tensors, in bytes.

    Returns:
        The header, the absolute offset of each tensor, and the length of the file, in bytes.
    """
    numbers = {name: number for number, name in TYPES.items()}
    listed = [_text(key) + struct.pack("<I", kind) + value for key, kind, value in entries]
    infos, offsets, position = [], [], 0
    for name, dtype, shape in tensors:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos.append(_text(name) + sizes + struct.pack("<IQ", numbers[dtype], position))
        offsets.append(position)
        position += padded(byte_length(dtype, shape), alignment)
    counts = struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(listed))
    header = b"".join([MAGIC, counts, *listed, *infos])
    header += bytes(padded(len(header), alignment) - len(header))
    return header, [len(header) + offset for offset in offsets], len(header) + position


def text_entry(key: str, value: str) -> Entry:
    """A metadata entry that holds a text, as `gguf_header_bytes` takes it."""
    return key, _STRING, _text(value)


def texts_entry(key: str, values: Sequence[str]) -> Entry:
    """A metadata entry that holds a list of texts."""
    return key, _ARRAY, struct.pack("<IQ", _STRING, len(values)) + b"".join(map(_text, values))


def number_entry(key: str, value: int) -> Entry:
    """A metadata entry that holds a number of 32 bits without a sign."""
    return key, _UINT32, struct.pack("<I", value)


def padded(length: int, alignment: int) -> int:
    """The least multiple of `alignment` that is not below `length`."""
    return -(-length // alignment) * alignment


class _Cursor:
    """The bytes of a header, fetched as far as they are asked for and not further."""

    def __init__(self, handle: Handle, size: int, path: Path) -> None:
        self._handle, self._path = handle, path
        self._limit = min(size, MAX_JSON_BYTES)
        self._cut = size <= MAX_JSON_BYTES
        self.data = bytearray()
        self.position = 0

    def take(self, count: int) -> int:
        """Make the next `count` bytes available; gives the position of the first."""
        start = self.position
        if start + count > len(self.data):
            self._fetch(start + count)
        self.position = start + count
        return start

    def _fetch(self, stop: int) -> None:
        if stop > self._limit:
            why = "the file ended inside its header" if self._cut else "the header is too long"
            raise CheckpointError(f"{self._path}: {why}")
        known = len(self.data)
        more = bytearray(min(self._limit, max(stop, known * 2, 1 << 16)) - known)
        read_into(self._handle, known, memoryview(more), self._path)
        self.data += more

    def number(self, code: str) -> Any:
        """The next number, by its `struct` code."""
        return struct.unpack_from(f"<{code}", self.data, self.take(struct.calcsize(code)))[0]

    def text(self, limit: int, what: str) -> str:
        """The next text, of at most `limit` bytes."""
        length = self.number("Q")
        if length > limit:
            raise CheckpointError(f"{what} of {length} bytes; at most {limit} allowed")
        start = self.take(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{what} is not UTF-8 text") from None

    def skip(self, kind: int) -> None:
        """Pass one value."""
        if kind in _SCALARS:
            start = self.take(struct.calcsize(_SCALARS[kind]))
            if kind == 7 and self.data[start] > 1:
                raise CheckpointError("a boolean that is neither 0 nor 1")
        elif kind == _STRING:
            self.take(self.number("Q"))
        elif kind == _ARRAY:
            self._skip_array()
        else:
            raise CheckpointError(f"unknown type {kind} of a value")

    def _skip_array(self) -> None:
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            self.take(min(count, MAX_JSON_BYTES + 1) * struct.calcsize(_SCALARS[kind]))
            return
        if kind != _STRING:
            raise CheckpointError(f"a list of values of type {kind}")
        if count > _MAX_TEXTS:
            raise CheckpointError(f"a list of {count} texts; at most {_MAX_TEXTS} allowed")
        length, data = struct.Struct("<Q").unpack_from, self.data
        position = self.position
        for _ in range(count):  # every text takes bytes: a false count ends at the file's end
            try:
                position += 8 + length(data, position)[0]
            except (struct.error, OverflowError):  # beyond what was fetched, or any file
                self._fetch(position + 8)
                position += 8 + length(data, position)[0]
        if position > len(data):
            self._fetch(position)
        self.position = position


def _header(cursor: _Cursor, size: int, path: Path) -> GGUFHeader:
    if cursor.data[cursor.take(min(size, 4)) :][:4] != MAGIC:
        raise CheckpointError(f"{path}: does not begin with 'GGUF'; not a GGUF file")
    version = cursor.number("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        kind = "big-endian" if swapped else f"of version {version}"
        raise CheckpointError(
            f"{path}: GGUF {kind}; little-endian files of version 2 or 3 are read"
        )
    counts = cursor.number("Q"), cursor.number("Q")
    try:
        metadata = _metadata(cursor, counts[1])
        infos = [_info(cursor) for _ in _counted(counts[0], cursor)]
        return GGUFHeader(metadata, _placed(infos, cursor, metadata.alignment, size, path))
    except CheckpointError as error:
        raise error if str(error).startswith(f"{path}: ") else error.within(str(path)) from None


def _counted(count: int, cursor: _Cursor) -> Iterable[int]:
    # `range` takes no memory, and every round takes bytes of the file.
    return range(min(count, MAX_JSON_BYTES))


def _metadata(cursor: _Cursor, count: int) -> Metadata:
    first, spans = cursor.position, {}
    for _ in _counted(count, cursor):
        key = cursor.text(_MAX_KEY, "a metadata key")
        if not key or not key.isprintable():
            raise CheckpointError(f"metadata key {clipped(repr(key))} is not allowed")
        if key in spans:
            raise CheckpointError(f"metadata key {clipped(repr(key))} is given twice")
        kind, start = cursor.number("I"), cursor.position
        try:
            cursor.skip(kind)
        except CheckpointError as error:
            raise error.within(f"metadata {clipped(repr(key))}") from None
        spans[key] = kind, start - first, cursor.position - first
    raw = bytes(memoryview(cursor.data)[first : cursor.position])
    alignment = Metadata(raw, spans, ALIGNMENT).get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        shown = clipped(repr(alignment), 40)
        raise CheckpointError(f"general.alignment is {shown}, not a power of two")
    return Metadata(raw, spans, alignment)


def _info(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int, int]:
    name = cursor.text(_MAX_NAME, "a tensor's name")
    if not name or "\0" in name:
        raise CheckpointError(f"tensor name {clipped(repr(name))} is not allowed")
    try:
        dimensions = cursor.number("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(f"{dimensions} dimensions; from 1 to {_MAX_DIMENSIONS} allowed")
        sizes = [cursor.number("Q") for _ in range(dimensions)]
        number, offset = cursor.number("I"), cursor.number("Q")
        if number not in TYPES:
            raise CheckpointError(f"unknown quantisation type {number}")
        dtype, shape = TYPES[number], tuple(reversed(sizes))
        if 0 in sizes or max(sizes) > MAX_ELEMENTS:
            raise CheckpointError(f"shape {clipped(str(list(shape)))} is not allowed")
        byte_length(dtype, (sizes[0],))  # blocks do not cross rows
        return name, dtype, shape, offset, byte_length(dtype, shape)
    except CheckpointError as error:
        raise error.within(_tensor(name)) from None


def _placed(
    infos: Sequence[tuple[str, str, tuple[int, ...], int, int]],
    cursor: _Cursor,
    alignment: int,
    size: int,
    path: Path,
) -> dict[str, TensorInfo]:
    start = padded(cursor.position, alignment)
    tensors: dict[str, TensorInfo] = {}
    expected = end = 0
    for name, dtype, shape, offset, nbytes in infos:
        if name in tensors:
            raise CheckpointError(f"{_tensor(name)}: given twice")
        if offset != expected:
            fault = "overlaps the tensor before it" if offset < expected else "leaves a gap"
            raise CheckpointError(f"{_tensor(name)}: begins at {offset}, which {fault}")
        end = start + offset + nbytes
        if end > size:
            raise CheckpointError(
                f"{_tensor(name)}: ends at byte {end} of {size}; the file is cut short"
            )
        expected = offset + padded(nbytes, alignment)
        tensors[name] = TensorInfo(name, dtype, shape, path, start + offset, nbytes)
    if size > max(start + expected, cursor.position):
        raise CheckpointError(f"{size - start - expected} bytes follow the last tensor")
    return tensors


def _decode(raw: bytes, kind: int, start: int) -> tuple[Any, int]:
    """A value, and the position behind it; its bytes are known to be there."""
    if kind in _SCALARS:
        code = f"<{_SCALARS[kind]}"
        return struct.unpack_from(code, raw, start)[0], start + struct.calcsize(code)
    length = struct.unpack_from("<Q", raw, start + (4 if kind == _ARRAY else 0))[0]
    if kind == _STRING:
        return raw[start + 8 : start + 8 + length].decode("utf-8", "replace"), start + 8 + length
    inner, position = struct.unpack_from("<I", raw, start)[0], start + 12
    if inner in _SCALARS:
        return list(struct.unpack_from(f"<{length}{_SCALARS[inner]}", raw, position)), position
    values = []
    for _ in range(length):
        value, position = _decode(raw, inner, position)
        values.append(value)
    return values, position


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _tensor(name: str) -> str:
    return f"tensor {clipped(repr(name))}"
