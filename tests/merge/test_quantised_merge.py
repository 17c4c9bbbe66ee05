"""Quantised safetensors: whole layers are copied with their scales, and nothing is computed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.merging import (
    change_config,
    change_tensors,
    recipe_plan,
    refusal,
    save_tensors,
    tensors_of,
)
from tests.helpers.plain_checkpoints import write_adapter, write_family
from tests.helpers.true_shapes import quantised

import layerswap as ls

NAMES = ("task", "language")
WIDTH, INNER, LAYERS, TOKENS, EXPERTS = 256, 512, 3, 64, 4
LINEAR = {
    "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (WIDTH // 2, WIDTH),
    "self_attn.v_proj": (WIDTH // 2, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
}  # fmt: skip


GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}}}
FORMATS = {
    "fp8": {"weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "gptq": {"bits": 4, "group_size": 128, "desc_act": True, "sym": True},
    "awq": {"bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "compressed-tensors": {"format": "pack-quantized", "config_groups": GROUPS},
}
DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


def write(folder: Path, kind: str, seed: int, **settings) -> Path:
    """A small Llama whose linear layers are quantised, with random numbers."""
    draws = torch.Generator().manual_seed(seed)
    norms = ("input_layernorm", "post_attention_layernorm")
    inside = LINEAR | dict.fromkeys(norms, (WIDTH,))
    shapes = {f"model.layers.{i}.{n}": shape for i in range(LAYERS) for n, shape in inside.items()}
    shapes |= {"model.embed_tokens": (TOKENS, WIDTH), "model.norm": (WIDTH,)}
    plain = {f"{n}.weight": ("BF16", s) for n, s in {**shapes, "lm_head": (TOKENS, WIDTH)}.items()}
    tensors = {
        name: torch.randn(shape, generator=draws).to(DTYPES[dtype])
        if dtype[0] != "I"
        else torch.randint(1 << 20, shape, generator=draws, dtype=DTYPES[dtype])
        for name, (dtype, shape) in quantised(plain, kind).items()
    }
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS,
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": False, "vocab_size": TOKENS,
        "dtype": "bfloat16", "max_position_embeddings": 64,
        "quantization_config": {"quant_method": kind, **FORMATS[kind], **settings},
    }  # fmt: skip
    return save_tensors(folder, tensors, **config)


def swapped(task, language, bottom=1, top=1):
    """The tensors of a swap by the definition: by the number in the name."""
    task, language = tensors_of(task), tensors_of(language)
    layers = {*range(bottom), *range(LAYERS - top, LAYERS)}

    def source(name):
        words = name.split(".")
        return language if words[1] == "layers" and int(words[2]) in layers else task

    return {name: source(name)[name] for name in task}


def same_bytes(found, expected):
    return found.keys() == expected.keys() and all(
        tensor.dtype == expected[n].dtype
        and tensor.shape == expected[n].shape
        and tensor.view(torch.uint8).equal(expected[n].view(torch.uint8))
        for n, tensor in found.items()
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_a_swap_copies_whole_layers(tmp_path, kind):
    task, language = (write(tmp_path / n, kind, i) for i, n in enumerate(NAMES))
    plan = ls.swap(task=task, language=language, bottom=1, top=1, outside="task")
    out = plan.save(tmp_path / "out")
    assert same_bytes(tensors_of(out), swapped(task, language))
    assert ls.verify(out).passed
    written = json.loads((out / "config.json").read_text())
    assert written == json.loads((task / "config.json").read_text())


@pytest.mark.parametrize("kind", FORMATS)
def test_arithmetic_is_refused_by_name(tmp_path, kind):
    task, language = (write(tmp_path / n, kind, i) for i, n in enumerate(NAMES))
    plan = ls.swap(task=task, language=language, bottom=1, top=1, bottom_transition=1)
    message = refusal(lambda: plan.tensors)
    assert message.startswith("'model.layers.1.")
    assert f"is quantised ({kind}), so it can only be copied" in message
    assert "take its place from one expert" in message
    merge = {"method": "ties", "experts": ["a", "b"]}
    plan = recipe_plan(experts={"a": task, "b": language}, base=task, merge=merge)
    assert "is quantised" in refusal(lambda: plan.tensors)


def test_plain_tensors_beside_quantised_ones_are_blended(tmp_path):
    task, language = (write(tmp_path / n, "fp8", i) for i, n in enumerate(NAMES))
    out = ls.swap(task=task, language=language, bottom=1, top=1).save(tmp_path / "out")
    name = "model.embed_tokens.weight"
    mean = (tensors_of(task)[name].float() + tensors_of(language)[name].float()) / 2
    assert tensors_of(out)[name].equal(mean.bfloat16())


def test_what_does_not_fit_together(tmp_path):
    task = write(tmp_path / "task", "gptq", 0)
    other = write(tmp_path / "awq", "awq", 1)
    groups = write(tmp_path / "groups", "gptq", 1, group_size=64, dataset="c4")
    calibrated = write(tmp_path / "calibrated", "gptq", 1, dataset="c4")
    plain = json.loads((task / "config.json").read_text())
    del plain["quantization_config"]
    norms = {f"model.layers.{i}.input_layernorm.weight": torch.ones(WIDTH) for i in range(LAYERS)}
    plain = save_tensors(tmp_path / "plain", norms, **plain)

    def plan_of(language, **settings):
        return ls.swap(task=task, language=language, bottom=1, top=1, outside="task", **settings)

    assert plan_of(calibrated).tensors
    assert "task is quantised (gptq) and language is quantised (awq)" in refusal(plan_of, other)
    assert "group_size differs: 128 in task, 64 in language" in refusal(plan_of, groups)
    assert refusal(plan_of, plain) == (
        "task is quantised (gptq) and language is not quantised; give checkpoints in one form"
    )
    assert "dtype: task is quantised" in refusal(plan_of, calibrated, dtype="float16")
    assert "can only be copied" in refusal(plan_of(calibrated).load)
    assert "can only be copied" in refusal(ls.delta, task, calibrated)
    config = json.loads((task / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "bitsandbytes"
    (other / "config.json").write_text(json.dumps(config))
    assert "bitsandbytes" in refusal(plan_of, other)


def test_experts_in_one_tensor_of_four_bits(tmp_path):
    """MXFP4 of gpt-oss, against modules that transformers swaps in memory."""
    from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

    config = GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=LAYERS, vocab_size=TOKENS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=EXPERTS,
        num_experts_per_tok=2, max_position_embeddings=64, dtype="bfloat16",
    )  # fmt: skip
    folders = {}
    for seed, name in enumerate(NAMES):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        folders[name] = tmp_path / name
        model.save_pretrained(folders[name])
        tensors, draws = tensors_of(folders[name]), np.random.default_rng(seed)
        for key in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
            experts, inside, outside = tensors[key].shape
            blocks = draws.integers(0, 256, (experts, outside, inside // 32, 16), np.uint8)
            scales = draws.integers(118, 124, (experts, outside, inside // 32), np.uint8)
            tensors |= {
                key: None,
                f"{key}_blocks": torch.from_numpy(blocks),
                f"{key}_scales": torch.from_numpy(scales),
            }
        quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        change_config(change_tensors(folders[name], tensors), quantization_config=quantised)
    plan = ls.swap(**folders, bottom=1, top=1, outside="task")
    out = plan.save(tmp_path / "out")
    assert same_bytes(tensors_of(out), swapped(folders["task"], folders["language"]))

    def load(folder):
        quantised = Mxfp4Config(dequantize=True)
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantised)

    expected, language, found = load(folders["task"]), load(folders["language"]), load(out)
    for layer in (0, LAYERS - 1):
        expected.model.layers[layer] = language.model.layers[layer]
    expected = expected.state_dict()
    assert all(tensor.equal(expected[n]) for n, tensor in found.state_dict().items())


@pytest.mark.parametrize("method", ["bitsandbytes", "fp8"])
def test_adapters_over_a_quantised_base(tmp_path, method):
    """Alone they merge by its configuration; full weights need the unquantised base."""
    base = write_family(tmp_path, "BF16")["base"]
    adapters = {n: write_adapter(tmp_path / f"a-{n}", base, i, 4) for i, n in enumerate(NAMES)}
    expected = ls.swap(**adapters, bottom=1, top=1, outside="task").save(tmp_path / "expected")
    change_config(base, quantization_config={"quant_method": method})
    out = ls.swap(**adapters, bottom=1, top=1, outside="task").save(tmp_path / "out")
    found, wanted = (load_file(f / "adapter_model.safetensors") for f in (out, expected))
    assert same_bytes(found, wanted)
    assert "quantised" in refusal(lambda: ls.swap(**adapters, bake=True))
