"""The header reader against arbitrary files.

Any bytes give either tensors that fill the file, which the safetensors library reads in the same
way, or a `CheckpointError` of one line. No input may hang the reader, or cost more memory than the
header is long.

A long run: `LAYERSWAP_FUZZ_EXAMPLES=200000 pytest tests/checkpoint/test_header_fuzz.py`.
"""

from __future__ import annotations

import pytest
import safetensors
from fuzzing import FUZZ, at_most, both_kinds, file_with, mutated, read_or_refuse
from handmade import framed
from hypothesis import given
from hypothesis import strategies as st

from layerswap.checkpoint.header import DTYPE_BITS, header_bytes, read_header


def check(content: bytes) -> bool:
    """Read the bytes as a file and check every promise; True if they are accepted."""
    with file_with(content, ".safetensors") as path:
        tensors = read_or_refuse(read_header, path)
    if tensors is None:
        return False
    position = 8 + int.from_bytes(content[:8], "little")
    for name, tensor in tensors.items():
        assert name == tensor.name
        assert tensor.offset == position
        assert tensor.nbytes * 8 == tensor.elements * DTYPE_BITS[tensor.dtype]
        position += tensor.nbytes
    assert position == len(content)
    in_library = {
        name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
        for name, tensor in safetensors.deserialize(content)
    }
    assert in_library == {
        tensor.name: (tensor.dtype, tensor.shape, content[tensor.offset :][: tensor.nbytes])
        for tensor in tensors.values()
    }
    return True


# --- headers by a grammar ---


@st.composite
def honest_files(draw):
    """Names, dtypes, shapes and byte lengths agree."""
    tensors = []
    for name in draw(st.lists(st.text(max_size=5), unique=True, max_size=6)):
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        bits = DTYPE_BITS[dtype]
        for size in shape:
            bits *= size
        if bits % 8 == 0 and name not in ("", "__metadata__") and "\0" not in name:
            tensors.append((name, dtype, shape, bits // 8))
    size = sum(nbytes for *_, nbytes in tensors)
    metadata = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
    return header_bytes(tensors, metadata) + draw(st.binary(min_size=size, max_size=size))


PIECES = st.binary(max_size=8) | st.sampled_from([b'"', b"{}", b"9" * 30])


@FUZZ
@given(st.binary(max_size=300), st.binary(max_size=20))
def test_random_headers(header, data):
    check(framed(b"{" + header, data))


@FUZZ
@given(honest_files())
def test_honest_files_are_accepted(content):
    assert check(content)


@FUZZ
@given(mutated(honest_files(), PIECES))
def test_mutated_files(content):
    check(content)


def test_the_mutations_make_files_of_both_kinds():
    assert both_kinds(check, mutated(honest_files(), PIECES), 200)


# --- time and memory ---


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":' + b"[" * 1_000_000,
        b'{"a":"' + b"\\ud800" * 200_000 + b'"}',
        b'{"a":{"dtype":"U8","shape":[' + b"1," * 500_000 + b'1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 4_000_000 + b'],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[' + b"1e308," * 200_000 + b"1]}}",
        b"{" + b'"a":1,' * 500_000 + b'"a":1}',
        b"{" + b" " * 5_000_000,
    ],
    ids=["deep", "surrogates", "long shape", "long number", "floats", "duplicates", "blanks"],
)
def test_megabytes_of_malice_cost_little(header):
    with at_most(seconds=5, mib=300):
        check(framed(header, b"x"))


def test_a_header_that_claims_the_limit_is_not_allocated():
    with at_most(seconds=5, mib=20):
        for claim in (100_000_000, 2**40, 2**64 - 1):
            assert not check(claim.to_bytes(8, "little") + b"{}")
