"""Tiny experts, and a second implementation of merging, straight from the definition."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain_checkpoints import random_fisher, write_fisher
from refusals import refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file

LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")


def tiny_llama(**changes: Any) -> Any:
    """A Llama configuration of 4 layers, 24 wide."""
    from transformers import LlamaConfig

    settings = {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "vocab_size": 50,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
        "max_position_embeddings": 64,
    }  # fmt: skip
    return LlamaConfig(**{**settings, **changes})


def save_expert(
    folder: Path,
    config: Any,
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    noise: float = 0.05,
    shard: str = "5GB",
) -> Path:
    """A model of this configuration with random weights, norms and biases included."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * noise)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def save_near(
    folder: Path, base: Path, seed: int, scale: float = 0.01, *, share: float = 1.0
) -> Path:
    """An expert near its base, as training leaves it: a share of the entries has changed."""
    draws = torch.Generator().manual_seed(seed)
    changes = {}
    for name, tensor in tensors_of(base).items():
        moved = torch.rand(tensor.shape, generator=draws) < share
        changes[name] = tensor + scale * moved * torch.randn(tensor.shape, generator=draws)
    return change_tensors(copied(base, folder), changes)


def save_adapter(folder: Path, base: Path, seed: int, **settings: Any) -> Path:
    """An adapter of `base` with random weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(seed)
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(parameter + torch.randn(parameter.shape) * 0.1)
    adapted.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, words: str = "a b c d e f") -> Path:
    """A tokenizer that knows these words, in this order, beside the weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate(["<unk>", *words.split()])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(folder)
    return folder


def save_fisher(folder: Path, expert: Path, seed: int = 0) -> Path:
    """A made-up diagonal Fisher of an expert of one file: uneven, and 0 in places."""
    shapes = {name: tuple(tensor.shape) for name, tensor in sorted(tensors_of(expert).items())}
    return write_fisher(folder, expert, random_fisher(shapes, seed))


def swap_of(experts: Any, **settings: Any) -> Any:
    """The plan of a swap of two experts, in a mapping or as a pair."""
    import layerswap as ls

    named = isinstance(experts, Mapping)
    task, language = (experts["task"], experts["language"]) if named else experts
    return ls.swap(task=task, language=language, **settings)


def composed(plan: Any, composition: Any) -> Any:
    """The plan of another composition of the same experts, whose recipe says it place by place."""
    places = [
        {
            "layers": "outside" if place.layer is None else place.layer,
            "roles": [place.role],
            "take": dict(blend.weights),
        }
        for place, blend in composition.blends.items()
    ]
    return plan.with_recipe(plan.recipe.changed({"places": places}, where="test"))


def recipe_plan(data: Mapping[str, Any] | None = None, /, **keys: Any) -> Any:
    """The plan of a recipe as data, or of its keys; a path stands for its text."""
    from layerswap.compose.recipe import check_recipe
    from layerswap.merge.api import make_plan

    plain = json.loads(json.dumps({**(data or {}), **keys}, default=str))
    return make_plan(check_recipe(plain, where="test"))


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message, of one line, with which a call is refused."""
    from layerswap.ground.errors import LayerswapError

    message = refused(LayerswapError, call, *args, **kwargs)
    assert "\n" not in message
    return message


def copied(source: Path, folder: Path) -> Path:
    """A copy of an expert to spoil."""
    shutil.copytree(source, folder)
    return folder


def change_config(
    folder: Path, drop: str | None = None, file: str = "config.json", **changes: Any
) -> Path:
    """Edit `config.json`, or another file of settings."""
    path = folder / file
    config = {**json.loads(path.read_text()), **changes}
    config.pop(drop, None)
    path.write_text(json.dumps(config))
    return folder


def save_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """A checkpoint of these tensors in one file, with this configuration."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    return folder


def change_tensors(folder: Path, changes: Mapping[str, torch.Tensor | None]) -> Path:
    """Replace tensors of a single-file checkpoint; None removes one."""
    path = folder / "model.safetensors"
    tensors = {name: t for name, t in {**load_file(path), **changes}.items() if t is not None}
    path.unlink()
    save_file(tensors, path, {"format": "pt"})
    return folder


def tensors_of(folder: Path | str) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, read by the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors = load_file(file)
        assert not set(tensors) & set(found), "a tensor lies in two shards"
        found.update(tensors)
    return found


def same_tensors(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> bool:
    """True for equal tensors of equal names."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint in float64."""
    return {name: tensor.double().numpy() for name, tensor in tensors_of(folder).items()}


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def check_equal(found: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    """Raise unless dtype, shape and every byte agree."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        raise AssertionError(f"{name}: {found.dtype} {found.shape} is not {expected.dtype}")
    if raw(found) != raw(expected):
        raise AssertionError(f"{name}: the bytes differ")


def takes(layer: int | None, layers: int, bottom: int, top: int, t_b: int = 0, t_u: int = 0) -> str:
    """The source of a layer in a swap: `language`, `task` or `blend` (paper 1, Algorithm 1)."""
    if layer is None:
        return "blend"
    if layer < bottom or layer >= layers - top:
        return "language"
    if layer < bottom + t_b or layer >= layers - top - t_u:
        return "blend"
    return "task"


def layer_of(name: str, only: str = "") -> int | None:
    """The layer in a tensor's name; names without `only` have none."""
    match = LAYER.search(name)
    return int(match[1]) if match and only in name else None


def half(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The even blend of two tensors: float32, rounded once to the dtype of `a`."""
    return (a.float() * 0.5 + b.float() * 0.5).to(a.dtype)


def swapped(
    task: Mapping[str, torch.Tensor], language: Mapping[str, torch.Tensor], layers: int, *,
    bottom: int, top: int, t_b: int = 0, t_u: int = 0, only: str = "",
) -> dict[str, torch.Tensor]:  # fmt: skip
    """A swap of two state dicts, tensor by tensor."""
    merged = {}
    for name, a in task.items():
        source = takes(layer_of(name, only), layers, bottom, top, t_b, t_u)
        b = language[name]
        merged[name] = {"task": a, "language": b}[source] if source != "blend" else half(a, b)
    return merged


def check_rounded(found: torch.Tensor, parts: list[tuple[torch.Tensor, float]], name: str) -> None:
    """Raise unless `found` is the float64 sum, but for float32 accumulation and one rounding."""
    terms = [part.double().numpy() * weight for part, weight in parts]
    expected, size = np.sum(terms, axis=0), np.sum(np.abs(terms), axis=0)
    half_step = torch.finfo(found.dtype).eps / 2
    allowed = half_step * np.abs(expected) * (1 + half_step) + 2 * len(parts) * 2.0**-24 * size
    error = np.abs(found.double().numpy() - expected)
    if error.shape != expected.shape or np.any(error > allowed):
        raise AssertionError(f"{name}: off by {np.max(error)}")


def check_close(folder: Path, expected: Mapping[str, Any], rtol: float, atol: float) -> None:
    """Raise unless the tensors of a checkpoint are these, but for rounding."""
    found = arrays(folder)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=rtol, atol=atol, err_msg=name)


def weight_bytes(folder: Path) -> dict[str, str]:
    """SHA-256 of every weight file and index."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.glob("*.safetensors*"))
    }


def metadata_of(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    with safe_open(file, "pt") as handle:
        return handle.metadata()


def keep_largest(x, share):
    """The `share` of entries with the largest magnitude, at least one, by sorting."""
    return keep_first(x, max(1, int(share * len(x))))


def keep_first(x, count):
    order = np.argsort(-np.abs(x), kind="stable")
    kept = np.zeros_like(x)
    kept[order[:count]] = x[order[:count]]
    return kept


def elect_and_average(parts, weights, disjoint="mean"):
    total = sum(w * x for w, x in zip(weights, parts, strict=True))
    result = np.zeros_like(total)
    for i, gamma in enumerate(np.sign(total)):
        chosen = [(w, x[i]) for w, x in zip(weights, parts, strict=True) if x[i] * gamma > 0]
        if chosen:
            share = sum(w for w, _ in chosen) if disjoint == "mean" else 1.0
            result[i] = sum(w * v for w, v in chosen) / share
    return result
