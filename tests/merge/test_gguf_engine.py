"""Merged GGUF files in llama.cpp: its log-probabilities against those of the composition.

The oracles: the same composition of files that were dequantised beforehand, and the transformers
model of the same merge.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_conversion import FAMILIES, convert, save_model
from gguf_files import TOKENS, all_of, close, floats_of, k_mix, write_gguf

import layerswap as ls

xllamacpp = pytest.importorskip("xllamacpp")  # a wheel of llama.cpp, which not every machine has
pytestmark = pytest.mark.slow

PROMPT = [1, 5, 260, 261, 70, 285, 271, 262, 9]
NO_BYTES = [[3 + byte, False] for byte in range(128, 256)]
"""Tokens not to generate: the server holds the bytes of a letter back until it is whole."""
OUTSIDE = ("token_embd.weight", "output_norm.weight", "output.weight")


def logprobs(path: Path, prompt: list[int] = PROMPT, tokens: int = 4) -> np.ndarray:
    """Log-probabilities of every token, at each greedy step, by llama.cpp. [tokens, vocabulary]."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 64, 1, False, -1
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True,
             "n_probs": len(TOKENS), "cache_prompt": False, "logit_bias": NO_BYTES}  # fmt: skip
    answer = server.handle_completions(asked)
    steps = answer["choices"][0]["logprobs"]["content"]
    result = np.full((len(steps), len(TOKENS)), -np.inf)
    for row, step in zip(result, steps, strict=True):
        for entry in step["top_logprobs"]:
            row[entry["id"]] = entry["logprob"]
    return result


def dequantised(path: Path, tensors: dict[str, np.ndarray], like: Path) -> Path:
    """A file of float32 with the metadata of another."""
    reader = gguf.GGUFReader(like)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, inner)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    close(writer)
    return path


def mixed(name: str) -> str:
    """A type of its own for every layer, and for tensors of one layer."""
    if "norm" in name:
        return "F32"
    kinds = {"blk.0": "Q5_0", "blk.1": "Q4_1", "blk.2": "F16"}
    return kinds.get(name[:5], "Q8_0") if "ffn_down" not in name else "IQ4_NL"


@pytest.mark.parametrize("language_types", [mixed, all_of("Q4_0"), k_mix], ids=["mixed", "q4", "k"])
def test_layers_of_different_types_are_computed_as_they_were_quantised(tmp_path, language_types):
    task = write_gguf(tmp_path / "task.gguf", 1, k_mix, base=0)
    language = write_gguf(tmp_path / "language.gguf", 2, language_types, base=0)
    made = ls.swap(task=task, language=language, bottom=1, top=1).save(tmp_path / "made.gguf")
    parts = floats_of(task), floats_of(language)
    expected = {}
    for name, values in parts[0].items():
        if name in OUTSIDE:
            expected[name] = 0.5 * values + 0.5 * parts[1][name]
        else:
            expected[name] = values if name.startswith("blk.1.") else parts[1][name]
    oracle = logprobs(dequantised(tmp_path / "oracle.gguf", expected, task))
    result, experts = logprobs(made), [logprobs(path) for path in (task, language)]
    # llama.cpp quantises activations too, so that a quantised layer is never exactly its floats:
    # the merged file may differ from its oracle by about as much as the experts from theirs.
    floats = logprobs(dequantised(tmp_path / "floats.gguf", parts[0], task))
    noise = np.abs(experts[0][0] - floats[0]).max()
    error = np.abs(result[0] - oracle[0]).max()
    assert error < 3 * noise < 0.5
    assert min(np.abs(result[0] - expert[0]).max() for expert in experts) > 5 * error
    assert result.shape == oracle.shape == (4, len(TOKENS))


def transformers_logprobs(folder: Path) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, rows = list(PROMPT), []
    with torch.no_grad():
        for _ in range(4):
            row = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).numpy()
            rows.append(row)
            ids.append(int(row.argmax()))
    return np.stack(rows)


@pytest.mark.parametrize("kind", ["F32", "F16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_merge_of_float_files_is_the_transformers_model_of_the_same_merge(tmp_path, family, kind):
    """For every family: also the proof that the tests' conversion is llama.cpp's."""
    folders = [save_model(tmp_path / name, family, seed) for seed, name in enumerate("ab")]
    files = [convert(f, tmp_path / f"{f.name}.gguf", family, kind) for f in folders]
    plain = ls.swap(task=folders[0], language=folders[1], bottom=1, top=1).save(tmp_path / "plain")
    made = ls.swap(task=files[0], language=files[1], bottom=1, top=1).save(tmp_path / "made.gguf")
    expected, result = transformers_logprobs(plain), logprobs(made)
    assert np.abs(result[0] - expected[0]).max() < (2e-3 if kind == "F32" else 2e-2)
    assert (result[0].argmax() == expected[0].argmax()).all()
    other = transformers_logprobs(folders[0])
    assert np.abs(result[0] - other[0]).max() > 10 * np.abs(result[0] - expected[0]).max()


def test_a_gguf_expert_beside_safetensors_is_the_model_that_llama_cpp_has(tmp_path):
    """An expert as GGUF, merged into safetensors, converted, and computed by llama.cpp."""
    task, language = (save_model(tmp_path / name, "llama", seed) for seed, name in enumerate("ab"))
    file = convert(language, tmp_path / "language.gguf", "llama", "F16")
    merged = ls.swap(task=task, language=file, bottom=1, top=1).save(tmp_path / "merged")
    result = logprobs(convert(merged, tmp_path / "merged.gguf", "llama"))
    assert np.abs(result[0] - transformers_logprobs(merged)[0]).max() < 2e-3
