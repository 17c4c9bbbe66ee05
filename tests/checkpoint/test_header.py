"""Every rule of the safetensors header, each broken by a file made by hand."""

from __future__ import annotations

import json
import re

import pytest
import safetensors
from handmade import entry, framed, write_file
from refusals import refused

from layerswap.checkpoint import header as header_module
from layerswap.checkpoint.header import DTYPE_BITS, byte_length, header_bytes, read_header
from layerswap.ground.errors import CheckpointError

BIG = 2**63


def refusal(path):
    message = refused(CheckpointError, read_header, path)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 1000 + len(str(path))
    return message.removeprefix(f"{path}: ")


def refused_bytes(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return refusal(path)


# --- the frame ---


def length(claim: int) -> bytes:
    return claim.to_bytes(8, "little")


SHORT = "shorter than a safetensors header (8 bytes)"
START = "the header does not begin with '{'"
MOST = "at most 100000000 allowed"
FRAMES = [
    (b"", "has 0 bytes, as an interrupted download leaves it; download it again"),
    (b"\2\0\0\0\0\0\0", SHORT),
    (bytes(8), START),
    (length(3) + b"{}", "the header claims 3 bytes but the file has 10"),
    (length(100_000_001) + b"{}", f"the header claims 100000001 bytes; {MOST}"),
    (b"\xff" * 8, f"the header claims 18446744073709551615 bytes; {MOST}"),
    (length(100_000_000) + b"{}", "the header claims 100000000 bytes but the file has 10"),
    (framed(b" {}"), START),
    (framed(b"\xef\xbb\xbf{}"), START),
    (framed(b"[]"), START),
    (framed(b"{}\0"), "not valid JSON (Extra data: line 1 column 3 (char 2))"),
]


@pytest.mark.parametrize(("content", "message"), FRAMES, ids=range(len(FRAMES)))
def test_a_bad_frame(tmp_path, content, message):
    assert refused_bytes(tmp_path, content) == message


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(length(16) + b"{}")
    monkeypatch.setattr(header_module, "_header_length", lambda *_: 16)
    assert refusal(path) == "the file ended inside its header"


# --- the entries ---


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ('{"a":%s,"a":%s}', "key 'a' is given twice"),
        ('{"__metadata__":{},"a":%s,"__metadata__":{}}', "key '__metadata__' is given twice"),
    ],
)
def test_duplicates(tmp_path, header, message):
    text = header.replace("%s", json.dumps(entry(0, 2))).encode()
    assert refused_bytes(tmp_path, framed(text, bytes(2))) == message


@pytest.mark.parametrize(
    "metadata", [None, [], "a", 1, {"a": 1}, {"a": None}, {"a": "b", "c": ["d"]}]
)
def test_metadata_is_text_to_text(tmp_path, metadata):
    path = write_file(tmp_path / "x", {"__metadata__": metadata, "a": entry(0, 2)}, bytes(2))
    assert refusal(path) == "__metadata__ is not a mapping from text to text"


FIELDS = "tensor 'a': needs exactly the fields dtype, shape and data_offsets"
SHAPE = "tensor 'a': shape is not a list of whole numbers from 0 to 2**63 - 1"
OFFSETS = "tensor 'a': data_offsets is not a list of whole numbers from 0 to 2**63 - 1"


UNFILLED = "tensor 'a': {} elements of {} do not fill whole bytes"
BYTES = "tensor 'a': 2 bytes do not hold shape {} of {}"
UNORDERED = "tensor 'a': data_offsets {} are not [begin, end]"
ENTRIES = [
    (None, FIELDS),
    ([], FIELDS),
    ("dtype", FIELDS),
    ({}, FIELDS),
    ({"dtype": "U8", "shape": [2]}, FIELDS),
    (entry(0, 2) | {"strides": [1]}, FIELDS),
    (entry(0, 2, dtype="u8"), "tensor 'a': unknown dtype 'u8'"),
    (entry(0, 2, dtype="F" * 90), f"tensor 'a': unknown dtype '{'F' * 38}…"),
    (entry(0, 2) | {"dtype": None}, "tensor 'a': dtype is not text"),
    (entry(0, 2) | {"dtype": ["U8"]}, "tensor 'a': dtype is not text"),
    *(
        (entry(0, 2) | {"shape": shape}, SHAPE)
        for shape in (2, None, {"0": 2}, ["2"], [2.0], [True, 2], [[2]], [-1, -2], [BIG])
    ),
    (entry(0, 2, shape=[0, 10**4000]), SHAPE),
    *(
        (entry(0, 2) | {"data_offsets": offsets}, OFFSETS)
        for offsets in ([0, 10**4000], [False, 2], [-2, 0], "02")
    ),
    *(
        (entry(0, 2) | {"data_offsets": offsets}, UNORDERED.format(offsets))
        for offsets in ([], [0, 1, 2], [2, 0])
    ),
    (entry(0, 2, "U8", [3]), BYTES.format([3], "U8")),
    (entry(0, 2, "F32", []), BYTES.format([], "F32")),
    (entry(0, 2, "F32", [0]), BYTES.format([0], "F32")),
    (entry(0, 2, "F4", [3]), UNFILLED.format(3, "F4")),
    (entry(0, 2, "F6_E2M3", [2]), UNFILLED.format(2, "F6_E2M3")),
]


@pytest.mark.parametrize(("tensor", "message"), ENTRIES, ids=range(len(ENTRIES)))
def test_a_bad_entry(tmp_path, tensor, message):
    path = write_file(tmp_path / "x", {"a": tensor}, bytes(2))
    assert refusal(path) == message


TOO_LARGE = [
    [2**32, 2**32], [BIG - 1, 2], [0, BIG - 1, 4], [BIG - 1, 4, 0], [4, 0, BIG - 1], [BIG - 1] * 50
]  # fmt: skip


@pytest.mark.parametrize("shape", TOO_LARGE, ids=range(len(TOO_LARGE)))
def test_a_shape_too_large_is_refused_in_any_order(tmp_path, shape):
    path = write_file(tmp_path / "x", {"a": entry(0, 0, "F32", shape)})
    assert refusal(path) in (
        f"tensor 'a': shape {shape} has too many elements",
        f"tensor 'a': shape {str(shape)[:199]}… has too many elements",
    )


@pytest.mark.parametrize(("name", "shown"), [("", "''"), ("\0", r"'\x00'"), ("a\0b", r"'a\x00b'")])
def test_names_that_are_not_allowed(tmp_path, name, shown):
    path = write_file(tmp_path / "x", {name: entry(0, 2)}, bytes(2))
    assert refusal(path) == f"tensor name {shown} is not allowed"


@pytest.mark.parametrize("ending", ["", "\0"])
def test_a_megabyte_of_name_is_clipped(tmp_path, ending):
    path = write_file(tmp_path / "x", {"\n" * 1_000_000 + ending: entry(1, 3)}, bytes(3))
    assert "…" in refusal(path)


# --- the layout of the bytes ---


LAYOUTS = [
    ([(0, 4), (2, 6)], 6, "tensor 'b': begins at 2, which overlaps the tensor before it"),
    ([(0, 4), (0, 4)], 4, "tensor 'b': begins at 0, which overlaps the tensor before it"),
    ([(0, 4), (1, 2)], 4, "tensor 'b': begins at 1, which overlaps the tensor before it"),
    ([(0, 4), (2, 2)], 4, "tensor 'b': begins at 2, which overlaps the tensor before it"),
    ([(0, 2), (3, 5)], 5, "tensor 'b': begins at 3, which leaves a gap"),
    ([(1, 3), (3, 5)], 5, "tensor 'a': begins at 1, which leaves a gap"),
    ([(0, 2), (4, 4)], 4, "tensor 'b': begins at 4, which leaves a gap"),
    ([(0, 2), (2, 4)], 5, "1 bytes follow the last tensor"),
    ([], 3, "3 bytes follow the last tensor"),
    ([(0, 0)], 1, "1 bytes follow the last tensor"),
    ([(0, 2), (2, 4)], 3, "tensor 'b': ends at byte 4 of 3; the file is cut short"),
    ([(0, 2)], 0, "tensor 'a': ends at byte 2 of 0; the file is cut short"),
    ([(0, BIG - 1)], 2, f"tensor 'a': ends at byte {BIG - 1} of 2; the file is cut short"),
]


@pytest.mark.parametrize(("spans", "size", "message"), LAYOUTS, ids=range(len(LAYOUTS)))
@pytest.mark.parametrize("reverse", [False, True])
def test_bytes_that_are_not_laid_end_to_end(tmp_path, spans, size, message, reverse):
    entries = {name: entry(*span) for name, span in zip("ab", spans, strict=False)}
    if reverse and len(set(spans)) == len(spans):
        entries = dict(reversed(entries.items()))
    path = write_file(tmp_path / "x", entries, bytes(size))
    assert refusal(path) == message


def test_the_order_is_that_of_the_bytes(tmp_path):
    entries = {"z": entry(4, 6), "a": entry(0, 4), "empty": entry(4, 4, "F32", [3, 0])}
    path = write_file(tmp_path / "x", entries, bytes(6))
    tensors = read_header(path)
    start = path.stat().st_size - 6
    assert [(t.name, t.offset - start, t.nbytes) for t in tensors.values()] == [
        ("a", 0, 4),
        ("empty", 4, 0),
        ("z", 4, 2),
    ]
    assert tensors["empty"].elements == 0
    assert tensors["empty"].shape == (3, 0)


@pytest.mark.parametrize(("dtype", "shape", "nbytes"), [("F4", [2], 1), ("F6_E3M2", [4, 3], 9)])
def test_sub_byte_dtypes_that_fill_whole_bytes(tmp_path, dtype, shape, nbytes):
    path = write_file(tmp_path / "x", {"a": entry(0, nbytes, dtype, shape)}, bytes(nbytes))
    assert read_header(path)["a"].nbytes == nbytes
    assert byte_length(dtype, shape) == nbytes


# --- against the library ---


def test_every_dtype_of_the_library_is_known_with_its_size():
    content = framed(json.dumps({"a": entry(0, 0, "?")}).encode())
    message = refused(safetensors.SafetensorError, safetensors.deserialize, content)
    dtypes = set(re.findall("`([A-Z0-9_]+)`", message))
    assert {"F32", "BF16", "F8_E4M3"} <= dtypes
    assert dtypes <= set(DTYPE_BITS)
    for dtype in dtypes:
        bits = DTYPE_BITS[dtype]  # eight elements take as many bytes as one takes bits
        content = framed(json.dumps({"a": entry(0, bits, dtype, [8])}).encode(), bytes(bits))
        assert safetensors.deserialize(content)[0][0] == "a"


def test_a_header_is_aligned_and_its_metadata_are_read_by_the_library(tmp_path):
    """Tensors of every dtype and shape are compared in test_header_fuzz.py."""
    metadata = {"format": "pt", "é\n": '"'}
    for name in ("a", "ab"):
        header = header_bytes([(name, "U8", (2,), 2)], metadata)
        assert len(header) % 8 == 0
        (tmp_path / "x").write_bytes(header + bytes(2))
        with safetensors.safe_open(tmp_path / "x", "pt") as opened:
            assert (opened.metadata(), list(opened.keys())) == (metadata, [name])
