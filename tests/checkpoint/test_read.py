"""Positioned reads: whole tensors of every dtype, short reads, files that end early."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused
from safetensors.torch import save_file

from layerswap.checkpoint import read_header
from layerswap.checkpoint.header import DTYPE_BITS, TensorInfo
from layerswap.checkpoint.read import (
    as_torch,
    first_floats,
    glance_is_finite,
    is_finite,
    narrowed,
    read_tensor,
    same_bytes,
    torch_dtype,
    widened,
)
from layerswap.ground.errors import CheckpointError

TENSORS = {
    "f64": torch.tensor([1.5, float("nan"), float("-inf")], dtype=torch.float64),
    "f32": torch.randn(3, 5),
    "f16": torch.tensor([[1.0], [-0.0]], dtype=torch.float16),
    "bf16": torch.randn(2, 3, 4).bfloat16(),
    "f8": torch.randn(5).to(torch.float8_e4m3fn),
    "i64": torch.tensor([2**62 + 1, -1]),
    "i8": torch.tensor(-3, dtype=torch.int8),
    "u8": torch.arange(256, dtype=torch.uint8),
    "u16": torch.tensor([65535], dtype=torch.uint16),
    "bool": torch.tensor([True, False, True]),
    "c64": torch.tensor([1 + 2j]),
    "empty": torch.empty(0, 4),
}


@pytest.fixture
def stored(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return read_header(tmp_path / "model.safetensors")


def tensor(info):
    return as_torch(read_tensor(info), info.dtype)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_floats_are_converted_as_torch_converts_them(dtype):
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 1 << 32, 1 << 20, np.uint32)
    edges = [
        0, 0x80000000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x33000000, 0x477FF000,
        0x477FEFFF, 0x3F808000, 0x3F818000, 1, 0x7FFFFFFF,
    ]  # fmt: skip
    values = np.concatenate([bits, np.array(edges, np.uint32)]).view(np.float32)
    stored = narrowed(values, dtype)
    expected = torch.from_numpy(values).to(torch_dtype(dtype))
    same = torch.isnan(expected) | (as_torch(stored, dtype) == expected)
    assert bool(same.all())
    assert bool((torch.isnan(as_torch(stored, dtype)) == torch.isnan(expected)).all())
    back = torch.from_numpy(widened(stored, dtype))
    assert bool((torch.isnan(expected) | (back == expected.to(back.dtype))).all())
    assert is_finite(stored[:0], dtype)
    finite = np.isfinite(values) & (np.abs(values) < 60000)
    assert is_finite(stored[finite], dtype)
    for wrong in (np.float32("inf"), np.float32("-inf"), np.float32("nan")):
        bad = narrowed(np.array([1, wrong, 2], np.float32), dtype)
        assert not is_finite(bad, dtype)
        assert not glance_is_finite(bad.tobytes(), dtype)
    assert glance_is_finite(stored[np.abs(values) < 60000].tobytes(), dtype)


@pytest.mark.parametrize("name", ["f64", "f32", "f16", "bf16"])
def test_the_first_floats_are_those_of_the_tensor(stored, name):
    size = TENSORS[name].numel() - 1
    expected = TENSORS[name].flatten()[:size].tolist()
    assert str(first_floats(stored[name], size)) == str(tuple(expected))


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_read_as_it_was_stored(stored, name):
    found, expected = tensor(stored[name]), TENSORS[name]
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if expected.numel():
        assert torch.equal(
            found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
        )


def test_short_reads_are_completed(stored, monkeypatch):
    whole, calls = os.preadv, []

    def short(handle, buffers, offset):
        calls.append(offset)
        return whole(handle, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert torch.equal(tensor(stored["f32"]), TENSORS["f32"])
    assert len(calls) == -(-60 // 7)


def test_a_file_that_ends_early_is_named(stored):
    file = stored["f64"].file
    os.truncate(file, stored["f64"].offset + 3)
    message = refused(CheckpointError, read_tensor, stored["f64"])
    assert message == f"{file}: ended while it was being read"


def test_a_file_that_is_gone_is_named(stored):
    file = stored["f64"].file
    file.unlink()
    message = refused(CheckpointError, read_tensor, stored["f64"])
    assert message == f"{file}: cannot be read (No such file or directory)"


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_of_the_format_is_torchs_or_refused(dtype):
    if dtype in ("F4", "F6_E2M3", "F6_E3M2"):
        message = f"torch cannot hold a tensor of dtype {dtype}"
        assert refused(CheckpointError, torch_dtype, dtype) == message
    else:
        assert torch_dtype(dtype).itemsize * 8 == DTYPE_BITS[dtype]


def at(path: Path, data: bytes, offset: int, dtype: str = "U8", shape=None) -> TensorInfo:
    path.write_bytes(bytes(offset) + data + b"after")
    return TensorInfo("x", dtype, shape or (len(data),), path, offset, len(data))


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
@pytest.mark.parametrize("differing", [None, 0, 3, 8, 9])
def test_same_bytes_compares_every_byte(tmp_path, chunk, differing):
    data, other = bytes(range(10)), bytearray(range(10))
    if differing is not None:
        other[differing] ^= 1
    a, b = at(tmp_path / "a", data, 5), at(tmp_path / "b", bytes(other), 11)
    assert same_bytes(a, b, chunk) is (differing is None)


def test_same_bytes_compares_dtype_and_shape(tmp_path):
    a = at(tmp_path / "a", b"1234", 0)
    assert not same_bytes(a, at(tmp_path / "b", b"1234", 0, "I8"))
    assert not same_bytes(a, at(tmp_path / "c", b"1234", 0, shape=(2, 2)))
    assert same_bytes(at(tmp_path / "d", b"", 0), at(tmp_path / "e", b"", 3))
