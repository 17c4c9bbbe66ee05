"""Small GGUF files, written by the `gguf` package's own writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, quants

WIDTH, INNER, HEADS, KV_HEADS, LAYERS = 256, 512, 4, 2, 3
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "▁the", "er", "on", "in"]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
SCALES: Mapping[str, tuple[int, ...]] = {
    "Q3_K": (108,), "IQ4_XS": (0,), "IQ4_NL": (0,),
}  # fmt: skip
"""Where the float16 scales of a block are, for types that nothing here quantises to."""


def shapes(layers: int = LAYERS, *, head: bool = True) -> dict[str, tuple[int, ...]]:
    """Every tensor of the small Llama."""
    kv = WIDTH * KV_HEADS // HEADS
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), WIDTH)}
    for layer in range(layers):
        stem = f"blk.{layer}"
        found |= {
            f"{stem}.attn_norm.weight": (WIDTH,),
            f"{stem}.attn_q.weight": (WIDTH, WIDTH),
            f"{stem}.attn_k.weight": (kv, WIDTH),
            f"{stem}.attn_v.weight": (kv, WIDTH),
            f"{stem}.attn_output.weight": (WIDTH, WIDTH),
            f"{stem}.ffn_norm.weight": (WIDTH,),
            f"{stem}.ffn_gate.weight": (INNER, WIDTH),
            f"{stem}.ffn_up.weight": (INNER, WIDTH),
            f"{stem}.ffn_down.weight": (WIDTH, INNER),
        }
    found["output_norm.weight"] = (WIDTH,)
    return {**found, "output.weight": (len(TOKENS), WIDTH)} if head else found


def values_of(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 weights of a tensor; those of a norm are near 1."""
    draws = np.random.default_rng(seed)
    values = draws.normal(0, 0.05, shape).astype(np.float32)
    return values + np.float32(1) if len(shape) == 1 else values


def encoded(values: np.ndarray, kind: str, seed: int = 0) -> np.ndarray:
    """Values in a type; random blocks of about their size where the type has no quantiser."""
    dtype = GGMLQuantizationType[kind]
    if kind == "F64":
        return values.astype(np.float64)
    if kind in ("Q4_K", "Q6_K"):
        blocks = {"Q4_K": q4_k, "Q6_K": q6_k}[kind](values.reshape(-1, 256))
        return blocks.reshape(*values.shape[:-1], -1)
    try:
        return quants.quantize(values, dtype)
    except NotImplementedError:
        length, nbytes = GGML_QUANT_SIZES[dtype]
        draws = np.random.default_rng(seed)
        blocks = draws.integers(0, 256, (values.size // length, nbytes), np.uint8)
        for at in SCALES[kind]:
            scales = draws.uniform(1e-4, 3e-4, len(blocks)).astype(np.float16)
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
        return blocks.reshape(*values.shape[:-1], -1)


def q4_k(values: np.ndarray) -> np.ndarray:
    """Blocks of Q4_K, which the package only reads: scales and minima by the range alone."""
    parts = values.reshape(-1, 8, 32)
    low = np.minimum(parts.min(2), 0)
    spread = (parts.max(2) - low) / 15
    d, dmin = ((x.max(1, keepdims=True) / 63).astype(np.float16) for x in (spread, -low))
    wide = [x.astype(np.float32) + np.float32(1e-12) for x in (d, dmin)]
    scales = np.clip(np.rint(spread / wide[0]), 0, 63).astype(np.uint8)
    minima = np.clip(np.rint(-low / wide[1]), 0, 63).astype(np.uint8)
    step = np.maximum(wide[0] * scales, 1e-12)[..., None]
    numbers = np.clip(np.rint((parts + (wide[1] * minima)[..., None]) / step), 0, 15)
    numbers = numbers.astype(np.uint8)
    packed = np.concatenate([
        scales[:, :4] | (scales[:, 4:] >> 4 << 6),
        minima[:, :4] | (minima[:, 4:] >> 4 << 6),
        (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4),
    ], axis=1)  # fmt: skip
    pairs = (numbers[:, 0::2] | (numbers[:, 1::2] << 4)).reshape(len(parts), -1)
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), packed, pairs], axis=1)


def q6_k(values: np.ndarray) -> np.ndarray:
    """Blocks of Q6_K, which the package only reads: scales by the largest number alone."""
    parts = values.reshape(-1, 16, 16)
    largest = np.abs(parts).max(2) / 31
    d = (largest.max(1, keepdims=True) / 127).astype(np.float16)
    scales = np.clip(np.rint(largest / (d.astype(np.float32) + np.float32(1e-12))), 1, 127)
    step = np.maximum(d.astype(np.float32) * scales, 1e-12)[..., None]
    numbers = (np.clip(np.rint(parts / step), -32, 31) + 32).astype(np.uint8)
    quarters = numbers.reshape(-1, 2, 4, 32)
    low, high = quarters & 15, quarters >> 4
    nibbles = np.concatenate(
        [low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], 2
    )
    bits = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    flat = [x.reshape(len(parts), -1) for x in (nibbles, bits, scales.astype(np.uint8))]
    return np.concatenate([*flat, d.view(np.uint8)], axis=1)


def k_mix(name: str) -> str:
    """The types of a Q4_K_M file, more or less."""
    if "norm" in name:
        return "F32"
    return "Q6_K" if name in ("output.weight", "token_embd.weight") or "_v." in name else "Q4_K"


def all_of(kind: str) -> Callable[[str], str]:
    """One type for every matrix."""
    return lambda name: "F32" if "norm" in name else kind


def write_gguf(
    path: Path,
    seed: int = 0,
    type_of: Callable[[str], str] = k_mix,
    *,
    layers: int = LAYERS,
    head: bool = True,
    base: int | None = None,
    tokens: list[str] | None = None,
    entries: Mapping[str, Any] | None = None,
    predicting: bool = False,
) -> Path:
    """A small Llama that llama.cpp loads; with the seed of a base, a fine-tune of that base.

    `predicting` adds a layer that predicts a further token.
    """
    writer = GGUFWriter(path, "llama")
    writer.add_name((entries or {}).get("general.name", f"tiny {seed}"))
    writer.add_block_count(layers + predicting)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    add_vocabulary(writer, tokens or TOKENS)
    for key, value in (entries or {}).items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif key != "general.name":
            writer.add_string(key, value)
    for number, (name, shape) in enumerate(shapes(layers, head=head).items()):
        values = values_of(1000 * (seed if base is None else base) + number, shape)
        if base is not None:
            values += np.float32(0.02) * (
                values_of(1000 * seed + 500 + number, shape) - (len(shape) == 1)
            )
        kind = type_of(name)
        data = encoded(values, kind, 1000 * seed + number)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    if predicting:
        writer.add_uint32("llama.nextn_predict_layers", 1)
        writer.add_tensor(f"blk.{layers}.nextn.eh_proj.weight", np.ones((WIDTH, WIDTH), np.float32))
    close(writer)
    return path


def add_vocabulary(writer: GGUFWriter, tokens: list[str]) -> None:
    """A SentencePiece vocabulary of bytes and a few pieces."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(
        [0.0] * (3 + len(BYTES)) + [-float(i) for i in range(len(tokens) - 259)]
    )
    writer.add_token_types([2, 3, 3] + [6] * len(BYTES) + [1] * (len(tokens) - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)


def split(folder: Path, *, total: int | None = None) -> list[Path]:
    """A file in three parts, as llama-gguf-split writes it, the first without tensors."""
    tensors = list(GGUFReader(write_gguf(folder / "whole.gguf")).tensors)
    paths = []
    for number, chosen in enumerate(([], tensors[:10], tensors[10:])):
        paths.append(folder / f"part-{number + 1:05d}-of-00003.gguf")
        writer = GGUFWriter(paths[-1], "llama")
        if number == 0:
            writer.add_block_count(LAYERS)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(tensors) if total is None else total)
        for tensor in chosen:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        close(writer)
    return paths


def close(writer: GGUFWriter) -> None:
    """Write everything, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(path: Path) -> dict[str, tuple[str, bytes]]:
    """The type and the bytes of every tensor, as the `gguf` package reads them."""
    return {t.name: (t.tensor_type.name, t.data.tobytes()) for t in GGUFReader(path).tensors}


def floats_of(path: Path) -> dict[str, np.ndarray]:
    """Every tensor in float32, as the `gguf` package dequantises it."""
    return {
        t.name: quants.dequantize(t.data, t.tensor_type).reshape([int(n) for n in t.shape[::-1]])
        for t in GGUFReader(path).tensors
    }
