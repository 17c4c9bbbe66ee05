"""Adapters on disk: LoRA and rsLoRA are read, others are refused in one line."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from refusals import one_line, refused
from safetensors.torch import save_file

from layerswap.checkpoint import Checkpoint, Place, TensorInfo, open_expert, read_adapter
from layerswap.checkpoint.adapted import AdaptedModel
from layerswap.checkpoint.adapter import MORE_THAN_LORA, STARTS, match_tensors
from layerswap.checkpoint.given import Given
from layerswap.ground.errors import CheckpointError

UP = "model.layers.0.mlp.up_proj"


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], **config) -> Path:
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", **config}
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    if tensors:
        save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def pair(path: str = UP, rank: int = 2, out: int = 5, inside: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        f"base_model.model.{path}.lora_A.weight": torch.randn(rank, inside),
        f"base_model.model.{path}.lora_B.weight": torch.randn(out, rank),
    }


def refusal(folder: Path) -> str:
    return one_line(CheckpointError, read_adapter, folder).removeprefix(str(folder))


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4 / 2**0.5),
        ({"lora_alpha": 0}, 0.0),
        ({"alpha_pattern": {"mlp.up_proj": 6}}, 3.0),
        ({"r": 8, "rank_pattern": {".*up_proj": 2}, "lora_alpha": 2}, 1.0),
        ({"alpha_pattern": {"up": 6}}, 2.0),
        ({"target_modules": ["up_proj", "q_proj"], "layers_to_transform": 0}, 2.0),
        ({"alpha_pattern": {"layers.0.mlp.up_proj": 2, "up_proj": 6}}, 1.0),
    ],
)
def test_scaling_is_that_of_peft(tmp_path, config, scaling):
    low = read_adapter(write_adapter(tmp_path / "a", pair(), **config)).modules[UP]
    assert low.scaling == pytest.approx(scaling)
    assert (low.rank, low.shape, low.transposed) == (2, (5, 3), False)


@pytest.mark.parametrize("transposed", [False, True])
def test_any_part_of_a_delta_is_the_part_of_the_whole(tmp_path, transposed):
    tensors = pair(out=700, inside=9)
    folder = write_adapter(tmp_path / "a", tensors, fan_in_fan_out=transposed)
    low = read_adapter(folder).modules[UP]
    a, b = (t.double() for t in tensors.values())
    dense = (2.0 * b @ a).T if transposed else 2.0 * b @ a
    flat = low.elements(low.factors(), 0, dense.numel())
    assert np.array_equal(flat, dense.float().reshape(-1).numpy())
    for start, stop in [(0, 1), (5, 2310), (2303, 2305), (6200, 6300), (10, 10)]:
        assert np.array_equal(low.elements(low.factors(), start, stop), flat[start:stop])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"peft_type": "IA3"},
            ": peft_type is IA3, not LORA; merge it into its base with PEFT's merge_and_unload "
            "first",
        ),
        (
            {"peft_type": "P_TUNING"},
            ": peft_type is P_TUNING, not LORA; PEFT cannot merge it into its base either",
        ),
        ({"peft_type": None}, ": peft_type is None, not LORA"),
        (
            {"use_dora": True},
            ": DoRA (use_dora) is more than LoRA; merge it into its base with PEFT's "
            "merge_and_unload first",
        ),
        (
            {"bias": "all"},
            ": trains biases (bias: all); merge it into its base with PEFT's merge_and_unload "
            "first",
        ),
        (
            {"init_lora_weights": "pissa_niter_4"},
            ": was initialised with pissa_niter_4, which may change the base too; save it again "
            "with PEFT's path_initial_model_for_weight_conversion, which needs the adapter as it "
            "was before its training",
        ),
        (
            {"peft_type": None, "lora_parameters": {}},
            ": an adapter of MLX; fuse it into its base with mlx_lm.fuse",
        ),
        (
            {"r": 3},
            f": adapter_config.json gives '{UP}' rank 3, but lora_A [2, 3], lora_B [5, 2]",
        ),
        ({"r": "two"}, f": adapter_config.json has no r for '{UP}'"),
        (
            {"alora_invocation_tokens": [1]},
            ": activated LoRA (alora_invocation_tokens) is more than LoRA; PEFT cannot merge it "
            "into its base either",
        ),
        ({"lora_alpha": -1}, f": adapter_config.json has no lora_alpha for '{UP}'"),
        (
            {"alpha_pattern": {"(": 2}},
            ": '(' cannot be used: missing ), unterminated subpattern at position 0",
        ),
        (
            {"rank_pattern": {"q{1000000000000}": 2}},
            ": 'q{1000000000000}' cannot be used: the repetition number is too large",
        ),
        (
            {"rank_pattern": {r"([\w.]+)+!": 2}},  # would be tried for years
            r": '([\\w.]+)+!' cannot be used: it repeats a group, has over 4 repeats, "
            "or over 8 '?'",
        ),
    ],
)
def test_other_adapters_are_refused(tmp_path, config, message):
    assert refusal(write_adapter(tmp_path / "a", pair(), **config)) == message


CHANGE_THE_BASE = {"pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"}
ONLY_TRAINING = {
    "auto_mapping", "peft_version", "inference_mode", "lora_dropout", "megatron_core",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "runtime_config", "ensure_weight_tying", "task_type",
}  # fmt: skip
READ = {
    "peft_type", "base_model_name_or_path", "revision", "r", "lora_alpha", "fan_in_fan_out", "bias",
    "use_rslora", "init_lora_weights", "rank_pattern", "alpha_pattern", "modules_to_save",
    "target_modules", "layers_to_transform",
}  # fmt: skip
SEEN_IN_THE_WEIGHTS = {"exclude_modules", "layers_pattern"}


def known_starts() -> set[str]:
    """The names to which the code of the installed PEFT compares `init_lora_weights`."""
    names: set[str] = set()
    for file in Path(inspect.getfile(peft.tuners.lora)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            compared = node.left if isinstance(node, ast.Compare) else None
            called = node.func if isinstance(node, ast.Call) else None
            if "init_lora_weights" in ast.unparse(compared or called or ast.Constant(0)):
                constants = (n for n in ast.walk(node) if isinstance(n, ast.Constant))
                names |= {n.value for n in constants if isinstance(n.value, str)}
    return names - {"_niter_"}


def test_every_initialisation_of_peft_is_known(tmp_path):
    assert known_starts() | {"pissa_niter_4"} == STARTS | CHANGE_THE_BASE
    for start in (True, False, None, *STARTS, "Gaussian"):
        assert read_adapter(write_adapter(tmp_path / "a", pair(), init_lora_weights=start)).modules
    for start in (*CHANGE_THE_BASE, "a new one", 7):
        folder = write_adapter(tmp_path / "a", pair(), init_lora_weights=start)
        assert refusal(folder).startswith(f": was initialised with {start}, which may change the")


def test_every_setting_of_peft_is_known(tmp_path):
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields == ONLY_TRAINING | READ | SEEN_IN_THE_WEIGHTS | set(MORE_THAN_LORA)
    for name in MORE_THAN_LORA:
        folder = write_adapter(tmp_path / "a", pair(), **{name: {"x": 1}})
        assert f"({name}) is more than LoRA" in refusal(folder)
    folder = write_adapter(tmp_path / "a", pair(), kasa_config={})
    assert "KaSA (kasa_config) is more than LoRA" in refusal(folder)


def test_weights_that_do_not_fit_together(tmp_path):
    tensors = pair()
    name = f"base_model.model.{UP}.lora_B.weight"
    folder = tmp_path / "a"
    assert refusal(write_adapter(folder, {**tensors, name: torch.zeros(5, 3)})) == (
        f": '{UP}': shapes do not fit together, lora_A [2, 3], lora_B [5, 3]"
    )
    deep = {key: tensor[..., None] for key, tensor in tensors.items()}
    assert "is a convolution, lora_A [2, 3, 1]" in refusal(write_adapter(folder, deep))
    half = {key: value for key, value in tensors.items() if key != name}
    assert (
        refusal(write_adapter(folder, half)) == f": '{UP}' needs exactly one lora_A and one lora_B"
    )
    assert refusal(write_adapter(folder, {**tensors, "strange": torch.zeros(1)})) == (
        ": tensor 'strange' is not part of a LoRA adapter"
    )
    whole = {f"base_model.model.{UP}.weight": torch.zeros(5, 3)}
    assert refusal(write_adapter(folder, whole)) == ": the adapter has no LoRA weights"


def test_no_weights_or_pickled_ones(tmp_path):
    folder = write_adapter(tmp_path / "a", {})
    assert refusal(folder) == ": the adapter has no adapter_model.safetensors"
    (folder / "adapter_model.bin").write_bytes(b"")
    assert refusal(folder) == (
        ": has only pickled weights (.bin); load it with PEFT and save it again"
    )


@pytest.mark.parametrize(
    "stored",
    [f"pretrained_model.{UP}.weight", f"language_model.{UP}.weight", "layers.0.mlp.up_proj.weight"],
)
def test_names_on_disk_may_lack_or_add_outer_words(tmp_path, stored):
    beside = {"base_model.model.lm_head.original_module.weight": torch.zeros(1)}
    adapter = read_adapter(write_adapter(tmp_path / "a", {**pair(), **beside}))
    assert match_tensors(adapter, [stored]) == {UP: stored}
    assert not adapter.saved


@pytest.mark.parametrize("module", ["model.unembed_tokens", "layers.0.mlp.experts.w1"])
def test_adapters_of_tinker_are_named(tmp_path, module):
    said = refusal(write_adapter(tmp_path / "a", pair(module)))
    assert said.endswith("convert the adapter with tinker_cookbook.weights.build_lora_adapter")


@pytest.mark.parametrize("stored", [["mlp.up_proj.weight.x"], ["other.weight"], []])
def test_a_module_missing_in_the_base(tmp_path, stored):
    adapter = read_adapter(write_adapter(tmp_path / "a", pair()))
    with pytest.raises(CheckpointError, match=r"adapts 'model\.layers\.0\.mlp\.up_proj\.weight'"):
        match_tensors(adapter, stored)


def frame(tmp_path: Path, shape: tuple[int, ...], **config) -> Checkpoint:
    name = f"{UP}.weight"
    info = TensorInfo(name, "F32", shape, tmp_path / "model.safetensors", 0, 60)
    return Checkpoint("base", None, tmp_path, config, {name: info}, {name: Place(0, "mlp")})


def test_a_base_of_another_width(tmp_path):
    folder = str(write_adapter(tmp_path / "a", pair()))
    message = refused(CheckpointError, open_expert, folder, frame(tmp_path, (5, 4)))
    assert message == f"{folder}: changes '{UP}.weight' of shape [5, 3]; in base it is [5, 4]"


@pytest.mark.parametrize(
    ("path", "tying", "remedy"),
    [("lm_head", True, "PEFT does not merge"), ("model.embed_tokens", False, "give its base a")],
)
def test_an_adapted_embedding_or_head_where_they_are_tied(tmp_path, path, tying, remedy):
    # PEFT adds the tied module to the weights and not to the targets.
    config = {"target_modules": ["up_proj"], "ensure_weight_tying": tying}
    folder = write_adapter(tmp_path / "a", {**pair(), **pair(path)}, **config)
    with pytest.raises(CheckpointError, match=f"changes '{path}', but .* \\(tied\\); {remedy}"):
        open_expert(str(folder), frame(tmp_path, (5, 3), tie_word_embeddings=True))


def test_modules_that_the_base_stores_in_one_tensor_need_other_adapters(tmp_path):
    stored, path = "encoder.layers.0.attn.Wqkv.weight", "nomic_bert.layers.0.self_attn.q_proj"
    info = TensorInfo(stored, "F32", (15, 3), tmp_path / "model.safetensors", 0, 180)
    where = {stored: Place(0, "attention")}
    config = {"model_type": "nomic_bert"}
    base = Checkpoint("base", None, tmp_path, config, {stored: info}, where)
    folder = str(write_adapter(tmp_path / "a", pair(path)))
    message = refused(CheckpointError, open_expert, folder, base)
    assert f"adapts '{path}', which the base stores in one tensor" in message
    alone = AdaptedModel.open(Given(folder)).over(base, alone=True)
    assert alone.places[f"{path}.weight"] == Place(0, "attention")
    assert [*alone.low_rank] == [f"{path}.weight"]
