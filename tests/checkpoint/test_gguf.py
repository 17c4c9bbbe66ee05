"""GGUF files: read as by the `gguf` package, or refused in one line."""

import re
import struct

import gguf
import numpy as np
import pytest
from gguf_files import LAYERS, all_of, close, encoded, floats_of, split, tensors_of, write_gguf

import layerswap as ls
from layerswap.checkpoint.gguf import (
    TYPES,
    configuration,
    gguf_header_bytes,
    number_entry,
    read_gguf,
    text_entry,
    texts_entry,
)
from layerswap.checkpoint.header import BLOCKS, block_of
from layerswap.checkpoint.places import place
from layerswap.checkpoint.read import (
    QUANTISED,
    UNREAD,
    narrowed,
    open_file,
    read_floats,
    read_stored,
)
from layerswap.ground.errors import CheckpointError, LayerswapError


def test_the_types_are_those_of_the_package():
    for number, name in TYPES.items():
        kind = gguf.GGMLQuantizationType[name]
        assert (number, block_of(name)) == (kind.value, tuple(gguf.GGML_QUANT_SIZES[kind]))
    assert set(TYPES.values()) >= set(BLOCKS)


def test_types_to_read_and_write_are_those_of_the_package():
    for name, (length, nbytes) in BLOCKS.items():
        kind = gguf.GGMLQuantizationType[name]
        blocks = np.zeros(nbytes, np.uint8)
        if name in UNREAD:
            with pytest.raises(NotImplementedError):
                gguf.quants.dequantize(blocks, kind)
        else:
            assert len(gguf.quants.dequantize(blocks, kind)) == length
        if name in QUANTISED:
            assert len(gguf.quants.quantize(np.zeros(length, np.float32), kind)) == nbytes


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_vector_is_quantised_in_rows_with_the_bytes_of_the_whole(dtype):
    values = (0.02 * np.random.default_rng(0).normal(size=256 * 75)).astype(np.float32)
    whole = gguf.quants.quantize(values, gguf.GGMLQuantizationType[dtype])
    assert (narrowed(values, dtype) == whole).all()


def test_a_file_is_read_as_the_package_reads_it(tmp_path):
    path = write_gguf(tmp_path / "a.gguf")
    checkpoint = ls.open_checkpoint(path)
    expected = tensors_of(path)
    assert list(checkpoint.tensors) == list(expected)
    for name, info in checkpoint.tensors.items():
        data = path.read_bytes()[info.offset :][: info.nbytes]
        assert (info.dtype, data) == expected[name]
    assert checkpoint.layers == LAYERS
    assert checkpoint.config["attention.head_count"] == 4
    reader = gguf.GGUFReader(path)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF."):
            assert checkpoint.metadata[field.name] == field.contents()


def test_every_kind_of_metadata(tmp_path):
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -3, "uint32": 7, "int32": -7,
        "float32": 0.5, "bool": True, "string": "añ", "uint64": 2**63, "int64": -(2**62),
        "float64": 1e300,
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_array("a.texts", ["x", "", "ÿ"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_tensor("token_embd.weight", np.zeros((2, 4), np.float32))
    close(writer)
    metadata = read_gguf(path).metadata
    assert {kind: metadata[f"a.{kind}"] for kind in values} == values
    assert (metadata["a.texts"], metadata["a.numbers"]) == (["x", "", "ÿ"], [1, 2, 3])
    assert metadata.get("b", 3) == 3
    assert metadata.stored("b") is None


@pytest.mark.parametrize(("predicting", "layers"), [(1, 2), (None, 3), ("one", 3)])
def test_layers_that_predict_further_tokens_are_no_layers(tmp_path, predicting, layers):
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "glm4moe")
    writer.add_block_count(3)
    if predicting is not None:
        add = writer.add_uint32 if predicting == 1 else writer.add_string
        add("glm4moe.nextn_predict_layers", predicting)
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.zeros((1, 4), np.float32))
    close(writer)
    assert configuration(read_gguf(path))["num_hidden_layers"] == layers


@pytest.mark.parametrize("kind", [*QUANTISED, "Q4_K", "Q6_K", "IQ4_NL"])
def test_any_part_of_a_quantised_tensor_can_be_read(tmp_path, kind):
    values = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    dtype = gguf.GGMLQuantizationType[kind]
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.zeros((1, 4), np.float32))
    writer.add_tensor("blk.0.ffn_up.weight", encoded(values, kind), raw_dtype=dtype)
    close(writer)
    info = ls.open_checkpoint(path).tensors["blk.0.ffn_up.weight"]
    whole = floats_of(path)[info.name].reshape(-1)
    with open_file(path) as handle:
        for start, stop in ((0, 1024), (0, 0), (1, 2), (255, 257), (100, 900), (1023, 1024)):
            assert np.array_equal(read_floats(handle, info, start, stop), whole[start:stop])
        length, nbytes = block_of(kind)
        assert len(read_stored(handle, info, length, 2 * length)) == nbytes


ARCHITECTURES = """
    apertus arcee baichuan bailingmoe bitnet bloom chatglm codeshell cohere2 command-r deci
    deepseek deepseek2 dots1 ernie4_5 ernie4_5-moe exaone exaone4 falcon gemma gemma2 gemma3
    gpt-oss gpt2 gptj gptneox granite granitemoe hunyuan-dense hunyuan-moe internlm2 jais llama
    llama4 minicpm minicpm3 minimax-m2 mistral3 mpt nemotron olmo olmo2 olmoe openelm orion phi2
    phi3 phimoe plamo qwen qwen2 qwen2moe qwen3 qwen3moe refact seed_oss smallthinker smollm3
    stablelm starcoder starcoder2 xverse
"""
# Names in the package's table with two meanings, or that no checkpoint has.
AMBIGUOUS = ("feed_forward.up_proj", "experts.gate", "model.embedding_norm")


@pytest.mark.parametrize("architecture", ARCHITECTURES.split())
def test_the_places_are_those_of_transformers_names(architecture):
    """The package's tables give the names of each tensor in other formats."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.tensor_mapping.TensorNameMap
    elsewhere = {**names.mappings_cfg, **names.block_mappings_cfg}
    for tensor in gguf.MODEL_TENSORS[arch]:
        where = place(gguf.TENSOR_NAMES[tensor].format(bid=7) + ".weight")
        assert where is not None, tensor
        for other in elsewhere.get(tensor, ()):
            if other.startswith(("model.layers.", "model.embed", "model.norm", "lm_head")):
                theirs = place(other.format(bid=7, xid=0) + ".weight")
                if theirs is not None and not any(word in other for word in AMBIGUOUS):
                    assert theirs == where, (tensor, other)


def test_a_split_file_is_read_whole_by_any_part(tmp_path):
    paths = split(tmp_path)
    whole = ls.open_checkpoint(tmp_path / "whole.gguf")
    for path in paths:
        checkpoint = ls.open_checkpoint(path)
        assert list(checkpoint.tensors) == list(whole.tensors)
        assert {info.file for info in checkpoint.tensors.values()} == set(paths[1:])
        assert checkpoint.config["block_count"] == LAYERS
    name = "blk.2.ffn_down.weight"
    values = [c.elements(name, 0, 500) for c in (whole, ls.open_checkpoint(paths[0]))]
    assert np.array_equal(*values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p[1].unlink(), r"part-00002-of-00003.gguf: missing; the model is in 3 parts"),
        (lambda p: p[1].write_bytes(p[2].read_bytes()), r"00002.*: its header says part 2 of 3"),
        (lambda p: p[0].rename(p[0].with_name("x.gguf")), r"x.gguf: one of 3 parts, so its name"),
    ],
    ids=["missing", "swapped", "renamed"],
)
def test_a_split_file_that_is_not_whole(tmp_path, change, message):
    paths = split(tmp_path)
    change(paths)
    path = paths[0] if paths[0].exists() else tmp_path / "x.gguf"
    with pytest.raises(CheckpointError, match=message):
        ls.open_checkpoint(path)


def test_a_split_file_that_counts_wrong(tmp_path):
    with pytest.raises(CheckpointError, match="its parts hold 30 of 31 tensors"):
        ls.open_checkpoint(split(tmp_path, total=31)[0])


# --- headers that lie ---


def header(tensors=(("token_embd.weight", (32,), 0, 0),), entries=(), version=3, counts=None):
    """A header by hand: tensors as name, sizes, type and offset."""
    tensors, entries = list(tensors), list(entries)
    counts = counts or (len(tensors), len(entries))
    data = b"GGUF" + struct.pack("<IQQ", version, *counts)
    for key, kind, value in entries:
        data += (
            struct.pack("<Q", len(key.encode())) + key.encode() + struct.pack("<I", kind) + value
        )
    for name, sizes, kind, offset in tensors:
        raw = name if isinstance(name, bytes) else name.encode()
        data += struct.pack("<Q", len(raw)) + raw
        data += struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        data += struct.pack("<IQ", kind, offset)
    return data + bytes(-len(data) % 32)


A = ("a", (32,), 0, 0)  # 128 bytes
B = ("b", (32,), 0, 128)
WHOLE = bytes(128)
LIES = [
    (b"", "has 0 bytes, as an interrupted download leaves it"),
    (b"GGU", "does not begin with 'GGUF'"),
    (b"GGML" + bytes(40), "does not begin with 'GGUF'"),
    (b"GGUF\0\0\0\3" + bytes(40), "GGUF big-endian; little-endian files of version 2 or 3"),
    (header(version=1), "GGUF of version 1; little-endian"),
    (header([A])[:40], "the file ended inside its header"),
    (header([A]) + WHOLE[:-1], "tensor 'a': ends at byte 192 of 191; the file is cut short"),
    (header([A]) + WHOLE + b"\0\1", "2 bytes follow the last tensor"),
    (header([A, ("a", (32,), 0, 128)]) + WHOLE * 2, "tensor 'a': given twice"),
    (header([A, ("b", (32,), 0, 160)]) + WHOLE * 3, "'b': begins at 160, which leaves a gap"),
    (header([A, ("b", (32,), 0, 96)]) + WHOLE * 2, "'b': begins at 96, which overlaps the tensor"),
    (header([("a", (32,), 0, 2**64 - 32)]) + WHOLE, "which leaves a gap"),
    (header([("a", (32,), 99, 0)]) + WHOLE, "tensor 'a': unknown quantisation type 99"),
    (header([("a", (33,), 2, 0)]) + WHOLE, "tensor 'a': 33 elements of Q4_0 do not fill whole"),
    (header([("a", (16, 2), 2, 0)]) + WHOLE, "tensor 'a': 16 elements of Q4_0 do not fill whole"),
    (header([("a", (0,), 0, 0)]) + WHOLE, r"tensor 'a': shape \[0\] is not allowed"),
    (header([("a", (), 0, 0)]) + WHOLE, "tensor 'a': 0 dimensions; from 1 to 4 allowed"),
    (header([("a", (1,) * 5, 0, 0)]) + WHOLE, "tensor 'a': 5 dimensions; from 1 to 4 allowed"),
    (header([("a", (2**40, 2**40), 0, 0)]) + WHOLE, "tensor 'a': shape .* has too many elements"),
    (header([("a", (2**64 - 1,), 0, 0)]) + WHOLE, "tensor 'a': shape .* is not allowed"),
    (header([("", (32,), 0, 0)]) + WHOLE, "tensor name '' is not allowed"),
    (header([("a\0", (32,), 0, 0)]) + WHOLE, r"tensor name 'a\\x00' is not allowed"),
    (header([("a" * 64, (32,), 0, 0)]) + WHOLE, "a tensor's name of 64 bytes; at most 63 allowed"),
    (header([(b"\xff", (32,), 0, 0)]) + WHOLE, "a tensor's name is not UTF-8 text"),
    (header([A], counts=(2**60, 0)) + WHOLE, "the file ended inside its header|not allowed|bytes"),
    (header([A], counts=(1, 2**60)) + WHOLE, "metadata key '' is not allowed"),
    (header([A], [("k", 0, b"\1"), ("k", 0, b"\1")]) + WHOLE, "metadata key 'k' is given twice"),
    (header([A], [("k\n", 0, b"\1")]) + WHOLE, r"metadata key 'k\\n' is not allowed"),
    (header([A], [("k", 13, b"\1")]) + WHOLE, "metadata 'k': unknown type 13 of a value"),
    (header([A], [("k", 7, b"\2")]) + WHOLE, "metadata 'k': a boolean that is neither 0 nor 1"),
    (header([A], [("k", 8, struct.pack("<Q", 2**63))]) + WHOLE, "the file ended inside"),
    (header([A], [("k", 9, struct.pack("<IQ", 9, 1))]) + WHOLE, "'k': a list of values of type 9"),
    (header([A], [("k", 9, struct.pack("<IQ", 8, 2**23))]) + WHOLE, "a list of 8388608 texts; at"),
    (header([A], [("k", 9, struct.pack("<IQ", 8, 999))]) + WHOLE, "the file ended inside"),
    (header([A], [("k", 9, struct.pack("<IQ", 4, 2**62))]) + WHOLE, "the file ended inside"),
    (header([A], [("general.alignment", 4, struct.pack("<I", 24))]) + WHOLE, "is 24, not a power"),
    (header([A], [("general.alignment", 4, struct.pack("<I", 0))]) + WHOLE, "is 0, not a power"),
    (header([A], [("general.alignment", 8, struct.pack("<Q", 0))]) + WHOLE, "is '', not a power"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), LIES, ids=range(len(LIES)))
def test_a_header_that_lies(tmp_path, content, message):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}: .*({message})"):
        read_gguf(path)


def test_an_honest_header(tmp_path):
    (tmp_path / "a.gguf").write_bytes(header([A, B], version=2) + WHOLE * 2)
    assert list(read_gguf(tmp_path / "a.gguf").tensors) == ["a", "b"]


def test_a_written_header_is_read_by_the_package_and_back(tmp_path):
    entries = [text_entry("general.architecture", "llama"), texts_entry("k", ["é", ""]),
               number_entry("general.alignment", 64)]  # fmt: skip
    tensors = [("a", "Q4_K", (3, 256)), ("b", "F32", (5,)), ("c", "F16", (2, 3, 4))]
    head, offsets, size = gguf_header_bytes(entries, tensors, 64)
    path = tmp_path / "a.gguf"
    path.write_bytes(head + bytes(size - len(head)))
    found = read_gguf(path)
    assert [(t.name, t.dtype, t.shape) for t in found.tensors.values()] == tensors
    assert [t.offset for t in found.tensors.values()] == offsets
    assert all(offset % 64 == 0 for offset in offsets)
    theirs = gguf.GGUFReader(path)
    assert [t.data_offset for t in theirs.tensors] == offsets
    assert theirs.fields["k"].contents() == found.metadata["k"] == ["é", ""]


# --- files of something else ---


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"general.type": "adapter"}, "a LoRA adapter in GGUF; merge it with llama-export-lora"),
        ({"general.type": "mmproj"}, "general.type is 'mmproj', not a language model"),
        ({"general.architecture": "clip"}, "architecture 'clip' is not known"),
        ({"general.architecture": "bert"}, "architecture 'bert' is not known"),
        ({"general.architecture": None}, "architecture None is not known"),
    ],
    ids=["adapter", "projector", "unknown", "encoder", "none"],
)
def test_a_file_that_is_no_language_model(tmp_path, entries, message):
    path = tmp_path / "a.gguf"
    texts = {"general.architecture": "llama", **entries}
    head, _, size = gguf_header_bytes(
        [text_entry(key, value) for key, value in texts.items() if value is not None],
        [("blk.0.attn_q.weight", "F32", (4,))],
        32,
    )
    path.write_bytes(head + bytes(size - len(head)))
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}: {message}"):
        ls.open_checkpoint(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [("none.gguf", "none.gguf: .*No such file"), (".", "not a GGUF|no config.json")],
)
def test_a_missing_file(tmp_path, source, message):
    with pytest.raises(LayerswapError, match=message):
        ls.open_checkpoint(tmp_path / source)


def test_a_file_has_no_revision(tmp_path):
    with pytest.raises(CheckpointError, match="a file has no revision"):
        ls.open_checkpoint(write_gguf(tmp_path / "a.gguf"), revision="main")


def test_a_layer_that_is_missing(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", type_of=all_of("Q8_0"), layers=2)
    data = path.read_bytes().replace(b"llama.block_count\4\0\0\0\2", b"llama.block_count\4\0\0\0\3")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="1 of 3 layers have no tensors: 2"):
        ls.open_checkpoint(path)
