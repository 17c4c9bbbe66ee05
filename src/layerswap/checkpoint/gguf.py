"""The header of a GGUF file, read as hostile input, and written.

The format (llama.cpp, versions 2 and 3, little-endian): the bytes `GGUF`, the version, the numbers
of tensors and of metadata entries, the entries, then name, shape, type and offset of each tensor.
The tensors' bytes follow, each from a multiple of the alignment. The reader reserves no memory for
a size that exceeds the file, and is as strict as llama.cpp: offsets have no gaps.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerswap.checkpoint.header import (
    EMPTY,
    MAX_ELEMENTS,
    MAX_TENSORS,
    TABLES,
    TensorInfo,
    byte_length,
    check_span,
)
from layerswap.checkpoint.read import Handle, open_file, read_bytes
from layerswap.checkpoint.remote import RemoteHandle, WeightFile
from layerswap.ground.errors import CheckpointError, error_context
from layerswap.ground.strict_json import MAX_JSON_BYTES, mistaken, quoted

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
"""Alignment of the tensors in bytes, unless `general.alignment` says otherwise."""
TYPES: dict[int, str] = {number: name for name, number in TABLES["gguf"].items()}
"""Types of tensors, by their number in a file."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_MAX_NAME, _MAX_KEY, _MAX_DIMENSIONS = 63, 65535, 4  # llama.cpp's
_MAX_TEXTS = 1 << 22
"""Most texts of one list, such as the tokens: eight times the largest known vocabulary."""
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


Entry = tuple[str, int, bytes]
"""A metadata entry in the file: key, type and bytes of the value."""


@dataclass(frozen=True)
class Metadata:
    """The metadata of a GGUF file, decoded on access.

    `spans` gives, by key, the type of the value, its first byte in `raw`, and the byte after it.
    `alignment` of the tensors is in bytes.
    """

    raw: bytes
    spans: Mapping[str, tuple[int, int, int]]
    alignment: int

    def __contains__(self, key: object) -> bool:
        return key in self.spans

    def __getitem__(self, key: str) -> Any:
        value_type, start, _ = self.spans[key]
        return _decode(self.raw, value_type, start)[0]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key: a number, a boolean, a text, or a list of them."""
        return self[key] if key in self.spans else default

    def stored(self, key: str) -> tuple[int, bytes] | None:
        """Return the type and bytes of a value; None without such a key."""
        if key not in self.spans:
            return None
        value_type, start, stop = self.spans[key]
        return value_type, self.raw[start:stop]


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a GGUF file: tensors in the order of their bytes, shapes in torch's order."""

    metadata: Metadata
    tensors: Mapping[str, TensorInfo]


def read_gguf(path: WeightFile, find: Callable[[str], WeightFile] | None = None) -> GGUFHeader:
    """Read the header of a GGUF file; for a split file, all parts as one.

    `find` finds the other parts by name; it raises FileNotFoundError, or returns a path that does
    not exist. By default they lie in the first file's folder.
    """
    first = read_gguf_header(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    pattern = _PART.fullmatch(path.name)
    if pattern is None or int(pattern["count"]) != count:
        raise CheckpointError(
            f"{path}: one of {count} parts, so its name must end with -00001-of-{count:05d}.gguf"
        )
    if find is None:
        assert isinstance(path, Path), "parts on the Hub need `find`"
        find = path.with_name
    tensors: dict[str, TensorInfo] = {}
    metadata = first.metadata
    for number in range(count):
        name = f"{pattern['stem']}-{number + 1:05d}-of-{count:05d}.gguf"
        other_file: WeightFile | None = None
        with suppress(FileNotFoundError):
            other_file = find(name)
        if other_file is None or (isinstance(other_file, Path) and not other_file.is_file()):
            raise CheckpointError(f"{other_file or name}: missing; the model is in {count} parts")
        header = first if other_file == path else read_gguf_header(other_file)
        claim = header.metadata.get("split.no"), header.metadata.get("split.count")
        if claim != (number, count):
            raise CheckpointError(f"{other_file}: its header says part {claim[0]} of {claim[1]}")
        if duplicates := tensors.keys() & header.tensors.keys():
            name = quoted(min(duplicates))
            raise CheckpointError(f"{other_file}: tensor {name} is also in an earlier part")
        tensors.update(header.tensors)
        metadata = header.metadata if number == 0 else metadata
    total = metadata.get("split.tensors.count")
    if total is not None and total != len(tensors):
        raise CheckpointError(f"{path}: its parts hold {len(tensors)} of {total} tensors")
    return GGUFHeader(metadata, tensors)


def read_gguf_header(path: WeightFile) -> GGUFHeader:
    """Read the header of one GGUF file, or of one part of a split file.

    Checks every size against the file before reserving memory for it.
    """
    with open_file(path) as handle, error_context(str(path)):
        size = handle.file.size if isinstance(handle, RemoteHandle) else os.fstat(handle).st_size
        return _header(_Cursor(handle, size, path), size)


def configuration(header: GGUFHeader, *, any_architecture: bool = False) -> dict[str, Any]:
    """Return a language model's hyperparameters, under their `config.json` names where known.

    Keys lose their architecture prefix. A file counts as a decoder if it has an embedding, and a
    final norm or a head; with `any_architecture`, every architecture is accepted.
    """
    metadata = header.metadata
    file_type, name = metadata.get("general.type", "model"), metadata.get("general.architecture")
    if file_type == "adapter":
        raise CheckpointError("a LoRA adapter in GGUF; merge it with llama-export-lora first")
    if file_type != "model":
        raise CheckpointError(f"general.type is {quoted(file_type, 40)}, not a language model")
    ends = header.tensors.keys() & {"output_norm.weight", "output.weight"}
    decodes = "token_embd.weight" in header.tensors and ends
    if not isinstance(name, str) or not (any_architecture or decodes):
        raise CheckpointError(
            f"architecture {quoted(name, 40)} is not known; if it is a decoder, place its "
            "tensors with `patterns` in the recipe"
        )
    prefix = f"{name}."
    settings = {
        key.removeprefix(prefix): metadata[key] for key in metadata.spans if key.startswith(prefix)
    }
    layers = settings.get("block_count")
    if type(layers) is not int:
        raise CheckpointError(f"has no {name}.block_count")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None:
        settings["vocab_size"] = embedding.shape[0]
    if type(more := settings.pop("nextn_predict_layers", None)) is int:
        layers -= more
    depth = {"block_count": layers, "num_hidden_layers": layers}
    return {**settings, "model_type": name, **depth}


# --- writing ---


def gguf_header_bytes(
    entries: Iterable[Entry],
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    alignment: int,
) -> tuple[bytes, list[int], int]:
    """Build a GGUF header of version 3, padded to the first tensor.

    Each tensor has name, type and shape, in the order of the tensors' bytes. Returns the header,
    the absolute offset of each tensor, and the length of the file, in bytes.
    """
    listed = [
        _text(key) + struct.pack("<I", value_type) + value for key, value_type, value in entries
    ]
    infos, offsets, position = [], [], 0
    for name, dtype, shape in tensors:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos.append(_text(name) + sizes + struct.pack("<IQ", TABLES["gguf"][dtype], position))
        offsets.append(position)
        position += padded(byte_length(dtype, shape), alignment)
    counts = struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(listed))
    header = b"".join([MAGIC, counts, *listed, *infos])
    header += bytes(padded(len(header), alignment) - len(header))
    return header, [len(header) + offset for offset in offsets], len(header) + position


def text_entry(key: str, value: str) -> Entry:
    """Make a metadata entry of a text, for `gguf_header_bytes`."""
    return key, _STRING, _text(value)


def texts_entry(key: str, values: Sequence[str]) -> Entry:
    """Make a metadata entry of a list of texts."""
    return key, _ARRAY, struct.pack("<IQ", _STRING, len(values)) + b"".join(map(_text, values))


def number_entry(key: str, value: int) -> Entry:
    """Make a metadata entry of an unsigned 32-bit number."""
    return key, _UINT32, struct.pack("<I", value)


def padded(length: int, alignment: int) -> int:
    """Round a length up to a multiple of the alignment."""
    return -(-length // alignment) * alignment


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


# --- reading ---


MOST_PADDING = 1 << 12
"""Largest padding after the last tensor, in zero bytes; some converters pad twice."""


class _Cursor:
    """A position in a header; bytes are fetched as needed."""

    def __init__(self, handle: Handle, size: int, path: WeightFile) -> None:
        self.handle, self.path = handle, path
        self._limit = min(size, MAX_JSON_BYTES)
        self._limit_is_end = size <= MAX_JSON_BYTES
        self.data = bytearray()
        self.position = 0

    def take(self, count: int) -> int:
        """Make the next `count` bytes available; return the position of the first."""
        start = self.position
        if start + count > len(self.data):
            self._fetch(start + count)
        self.position = start + count
        return start

    def _fetch(self, stop: int) -> None:
        if stop > self._limit:
            ended = "the file ended inside its header"
            raise CheckpointError(ended if self._limit_is_end else "the header is too long")
        read = len(self.data)
        stop = min(self._limit, max(stop, read * 2, 1 << 16))
        self.data += read_bytes(self.handle, read, stop, self.path)

    def number(self, code: str) -> Any:
        """Read a number, by its `struct` code."""
        return struct.unpack_from(f"<{code}", self.data, self.take(struct.calcsize(code)))[0]

    def text(self, limit: int, label: str) -> str:
        """Read a text of at most `limit` bytes."""
        length = self.number("Q")
        if length > limit:
            raise CheckpointError(f"{label} of {length} bytes; at most {limit} allowed")
        start = self.take(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{label} is not UTF-8 text") from None

    def skip(self, kind: int) -> None:
        """Skip a value of a type."""
        if kind in _SCALARS:
            start = self.take(struct.calcsize(_SCALARS[kind]))
            if kind == _BOOL and self.data[start] > 1:
                raise CheckpointError("a boolean that is neither 0 nor 1")
        elif kind == _STRING:
            self.take(self.number("Q"))
        elif kind == _ARRAY:
            self._skip_array()
        else:
            raise CheckpointError(f"unknown type {kind} of a value")

    def _skip_array(self) -> None:
        value_type, count = self.number("I"), self.number("Q")
        if value_type in _SCALARS:
            self.take(min(count, MAX_JSON_BYTES + 1) * struct.calcsize(_SCALARS[value_type]))
            return
        if value_type != _STRING:
            raise CheckpointError(f"a list of values of type {value_type}")
        if count > _MAX_TEXTS:
            raise CheckpointError(f"a list of {count} texts; at most {_MAX_TEXTS} allowed")
        length, data = struct.Struct("<Q").unpack_from, self.data
        position = self.position
        for _ in range(count):  # every text takes bytes: a false count ends at the file's end
            try:
                position += 8 + length(data, position)[0]
            except (struct.error, OverflowError):  # beyond the fetched bytes, or any file
                self._fetch(position + 8)
                position += 8 + length(data, position)[0]
        if position > len(data):
            self._fetch(position)
        self.position = position


def _header(cursor: _Cursor, size: int) -> GGUFHeader:
    if cursor.data[cursor.take(min(size, 4)) :][:4] != MAGIC:
        start = bytes(cursor.data[:200])
        if not size:
            raise CheckpointError(EMPTY)
        raise CheckpointError(mistaken(start) or "does not begin with 'GGUF'; not a GGUF file")
    version = cursor.number("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        written = "big-endian" if swapped else f"of version {version}"
        raise CheckpointError(f"GGUF {written}; little-endian files of version 2 or 3 are read")
    tensors, entries = cursor.number("Q"), cursor.number("Q")
    metadata = _metadata(cursor, entries)
    # A false count ends at the file's end, since every entry takes bytes.
    listed = [_tensor_entry(cursor) for _ in range(min(tensors, MAX_TENSORS + 1))]
    if len(listed) > MAX_TENSORS:
        raise CheckpointError(f"holds more than {MAX_TENSORS:,} tensors")
    return GGUFHeader(metadata, _tensors(listed, cursor, metadata.alignment, size))


def _metadata(cursor: _Cursor, count: int) -> Metadata:
    first, spans = cursor.position, {}
    for _ in range(min(count, MAX_JSON_BYTES)):
        key = cursor.text(_MAX_KEY, "a metadata key")
        if not key or not key.isprintable():
            raise CheckpointError(f"metadata key {quoted(key)} is not allowed")
        if key in spans:
            raise CheckpointError(f"metadata key {quoted(key)} is given twice")
        value_type, start = cursor.number("I"), cursor.position
        with error_context(f"metadata {quoted(key)}"):
            cursor.skip(value_type)
        spans[key] = value_type, start - first, cursor.position - first
    raw = bytes(memoryview(cursor.data)[first : cursor.position])
    alignment = Metadata(raw, spans, ALIGNMENT).get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        shown = quoted(alignment, 40)
        raise CheckpointError(f"general.alignment is {shown}, not a power of two")
    return Metadata(raw, spans, alignment)


def _tensor_entry(cursor: _Cursor) -> TensorInfo:
    """Read one entry; its offset counts from the first tensor."""
    name = cursor.text(_MAX_NAME, "a tensor's name")
    if not name or "\0" in name:
        raise CheckpointError(f"tensor name {quoted(name)} is not allowed")
    with error_context(f"tensor {quoted(name)}"):
        dimensions = cursor.number("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(f"{dimensions} dimensions; from 1 to {_MAX_DIMENSIONS} allowed")
        sizes = [cursor.number("Q") for _ in range(dimensions)]
        number, offset = cursor.number("I"), cursor.number("Q")
        if number not in TYPES:
            raise CheckpointError(f"unknown quantisation type {number}")
        dtype, shape = TYPES[number], tuple(reversed(sizes))
        if 0 in sizes or max(sizes) > MAX_ELEMENTS:
            raise CheckpointError(f"shape {quoted(list(shape))} is not allowed")
        byte_length(dtype, (sizes[0],))  # blocks do not cross rows
        return TensorInfo(name, dtype, shape, cursor.path, offset, byte_length(dtype, shape))


def _tensors(
    entries: Sequence[TensorInfo], cursor: _Cursor, alignment: int, size: int
) -> dict[str, TensorInfo]:
    start = padded(cursor.position, alignment)
    tensors: dict[str, TensorInfo] = {}
    expected = 0
    for info in entries:
        offset = info.offset
        if info.name in tensors:
            raise CheckpointError(f"tensor {quoted(info.name)}: given twice")
        check_span(info.name, offset, expected, start + offset + info.nbytes, size)
        expected = offset + padded(info.nbytes, alignment)
        tensors[info.name] = replace(info, offset=start + offset)
    if size > max(start + expected, cursor.position):
        first = max(start + expected, cursor.position)
        if size - first > MOST_PADDING or any(read_bytes(cursor.handle, first, size, cursor.path)):
            raise CheckpointError(f"{size - first} bytes follow the last tensor")
    return tensors


def _decode(raw: bytes, value_type: int, start: int) -> tuple[Any, int]:
    """Decode a value whose bytes were checked; return it with the position after it."""
    if value_type in _SCALARS:
        code = f"<{_SCALARS[value_type]}"
        return struct.unpack_from(code, raw, start)[0], start + struct.calcsize(code)
    length = struct.unpack_from("<Q", raw, start + (4 if value_type == _ARRAY else 0))[0]
    if value_type == _STRING:
        return raw[start + 8 : start + 8 + length].decode("utf-8", "replace"), start + 8 + length
    inner, position = struct.unpack_from("<I", raw, start)[0], start + 12
    if inner in _SCALARS:
        return list(struct.unpack_from(f"<{length}{_SCALARS[inner]}", raw, position)), position
    values = []
    for _ in range(length):
        value, position = _decode(raw, inner, position)
        values.append(value)
    return values, position
