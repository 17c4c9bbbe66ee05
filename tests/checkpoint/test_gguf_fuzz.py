"""The GGUF reader against arbitrary files.

Any bytes give either aligned tensors inside the file, one after the other, which the `gguf` package
reads in the same way, or a `CheckpointError` of one line.

A long run: `LAYERSWAP_FUZZ_EXAMPLES=200000 pytest tests/checkpoint/test_gguf_fuzz.py`.
"""

from __future__ import annotations

import os
import struct

import gguf
import pytest
from fuzzing import FUZZ, at_most, both_kinds, file_with, mutated, read_or_refuse
from hypothesis import given
from hypothesis import strategies as st

from layerswap.checkpoint.gguf import TYPES, gguf_header_bytes, padded, read_gguf_header, text_entry
from layerswap.checkpoint.header import block_of, byte_length
from layerswap.ground.errors import CheckpointError


def check(content: bytes, *, compare: bool = False) -> bool:
    """Read the bytes as a file and check every promise; True if they are accepted."""
    with file_with(content, ".gguf") as path:
        header = read_or_refuse(read_gguf_header, path)
        if header is None:
            return False
        position = None
        for name, tensor in header.tensors.items():
            assert name == tensor.name
            assert tensor.nbytes == byte_length(tensor.dtype, tensor.shape) > 0
            assert tensor.offset % header.metadata.alignment == 0
            assert position is None or tensor.offset == position
            assert tensor.offset + tensor.nbytes <= len(content)
            position = tensor.offset + padded(tensor.nbytes, header.metadata.alignment)
        for key in header.metadata.spans:
            header.metadata[key]
        if compare:
            theirs = gguf.GGUFReader(path)
            assert [(t.name, t.tensor_type.name, int(t.data_offset)) for t in theirs.tensors] == [
                (t.name, t.dtype, t.offset) for t in header.tensors.values()
            ]
    return True


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("C",)), min_size=1, max_size=9)


@st.composite
def honest_files(draw):
    """Headers of the writer, with their data."""
    tensors = []
    for name in draw(st.lists(NAMES, unique=True, max_size=5)):
        dtype = draw(st.sampled_from(sorted(TYPES.values())))
        rows = draw(st.lists(st.integers(1, 3), max_size=2))
        tensors.append((name, dtype, (*rows, block_of(dtype)[0] * draw(st.integers(1, 2)))))
    keys = draw(st.lists(NAMES.filter(str.isprintable), unique=True, max_size=3))
    entries = [text_entry(f"x.{key}", draw(st.text(max_size=4))) for key in keys]
    alignment = 32
    head, _, size = gguf_header_bytes(entries, tensors, alignment)
    return head + bytes(size - len(head))


NUMBERS = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1])
PIECES = st.binary(max_size=8) | NUMBERS.map(lambda number: struct.pack("<Q", number))
MUTATED = mutated(honest_files(), PIECES, reach=400)


@FUZZ
@given(st.integers(0, 4), st.integers(0, 4), st.binary(max_size=300))
def test_random_headers(tensors, entries, content):
    check(b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + content)


@FUZZ
@given(honest_files())
def test_honest_files_are_accepted(content):
    assert check(content)


@pytest.mark.slow  # the package takes its time
@FUZZ
@given(honest_files().filter(lambda content: content[8] > 0))
def test_honest_files_are_read_as_the_package_reads_them(content):
    assert check(content, compare=True)


@FUZZ
@given(MUTATED)
def test_mutated_files(content):
    check(content)


def test_the_mutations_make_files_of_both_kinds():
    assert both_kinds(check, MUTATED, 40)


# --- time and memory ---

START = b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60)
KEY = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    "content",
    [
        START + KEY + struct.pack("<IIQ", 9, 8, 2**22) + bytes(20_000_000),
        START + KEY + struct.pack("<IIQ", 9, 0, 2**63),
        START + KEY + struct.pack("<IIQ", 9, 12, 2**64 - 1) + bytes(1000),
        START + KEY + struct.pack("<IQ", 8, 2**64 - 1) + bytes(1000),
        START + b"".join(struct.pack("<Q", 8) + b"%8d" % i + bytes(5) for i in range(100_000)),
        b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(10_000_000),
    ],
    ids=["texts", "numbers", "floats", "text", "keys", "tensors"],
)
def test_megabytes_of_malice_cost_little(content):
    with at_most(seconds=5, mib=300):
        assert not check(content)


def test_a_file_that_is_longer_than_any_header_is_not_read_whole(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(START + KEY + struct.pack("<IIQ", 9, 0, 2**36))
    os.truncate(path, 1 << 40)  # sparse: a terabyte, of which the list claims a sixteenth
    longer = pytest.raises(CheckpointError, match="the header is too long")
    with at_most(seconds=5, mib=1000), longer:
        read_gguf_header(path)
