"""Merges of every family load in transformers, completely, and compute the same logits."""

import json
from functools import partial

import families
import pytest
import torch
from effort import sampled
from merging import (
    change_config,
    check_equal,
    save_expert,
    save_tokenizer,
    swap_of,
    swapped,
    tensors_of,
    tiny_llama,
)
from refusals import one_line
from tiny_models import NEOX, config_of
from transformers import RobertaConfig, RwkvConfig

import layerswap as ls
from layerswap.ground.errors import CheckpointError, LayerswapError

PLAIN = ("llama", "qwen2", "gpt2", "gpt_neox", "bloom", "mixtral", "opt", "falcon")
FAMILIES = {
    **{name: partial(config_of, name) for name in PLAIN},
    "gemma3_text": partial(config_of, "gemma3"),
    "gemma3": partial(families.config_of, "gemma3"),
}  # fmt: skip


def logits(model):
    ids = torch.tensor([[3, 14, 15, 9, 26, 5]])
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def loaded(folder, **kwargs):
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **kwargs
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not loading[key], (key, loading[key])
    return model


@pytest.mark.parametrize("family", sampled(FAMILIES, "llama", "gemma3", "gpt2", "mixtral"))
def test_disk_memory_and_a_merge_by_hand_give_the_same_logits(family, tmp_path):
    pair = {}
    for seed, name in enumerate(("task", "language")):
        pair[name] = save_expert(tmp_path / name, FAMILIES[family](), seed)
        save_tokenizer(pair[name])
    plan = ls.swap(**pair, bottom=1, top=0, top_transition=1)
    out = plan.save(tmp_path / "out")
    from_disk, in_memory = loaded(out), plan.load()

    task, language = loaded(pair["task"]), loaded(pair["language"])
    only = "language_model" if family == "gemma3" else ""
    states, layers = (task.state_dict(), language.state_dict()), plan.composition.layers
    merged = swapped(*states, layers, bottom=1, top=0, t_u=1, only=only)
    task_logits = logits(task)
    assert not torch.equal(task_logits, logits(language))
    by_hand = loaded(pair["task"])
    by_hand.load_state_dict(merged)

    for name, tensor in by_hand.state_dict().items():
        check_equal(from_disk.state_dict()[name], tensor, name)
        check_equal(in_memory.state_dict()[name], tensor, name)
    check_equal(logits(from_disk), logits(by_hand))
    check_equal(logits(in_memory), logits(by_hand))
    assert not torch.equal(logits(from_disk), task_logits)
    assert not in_memory.training
    assert type(in_memory) is type(from_disk)


RWKV = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "context_length": 64}
NUMBERED = ["rwkv"]
"""Families without known roles; the page on support names them."""


def test_layers_are_swapped_where_no_role_is_known(tmp_path):
    config, stack = RwkvConfig(**RWKV), "rwkv.blocks"
    task, language = (save_expert(tmp_path / f"e{seed}", config, seed) for seed in range(2))
    plan = ls.swap(task=task, language=language, bottom=1, top=0)
    out = plan.save(tmp_path / "out")
    first, second, made, held = (
        model.state_dict() for model in (loaded(task), loaded(language), loaded(out), plan.load())
    )
    in_layers = 0
    for name, tensor in made.items():
        layer = name.removeprefix(f"{stack}.").split(".")[0] if name.startswith(stack) else None
        if layer is None or "shared_transf" in name:  # which several layers have
            expected = (first[name] + second[name]) / 2
        else:
            expected = second[name] if layer == "0" else first[name]
            in_layers += not torch.equal(first[name], second[name])
        check_equal(tensor, expected, name)
        check_equal(held[name], expected, name)
    assert in_layers > 20

    assert plan.to_dict()["layers_by_number"] == stack
    assert json.loads((out / "layerswap.json").read_text())["layers_by_number"] == stack
    assert any(note.startswith(f"takes {stack!r}, the only list of 3") for note in plan.notes)
    assert ls.verify(out, full=True).passed
    attention = [{"layers": 1, "roles": ["attention"], "take": "language"}]
    with pytest.raises(LayerswapError, match=r"the roles of .* are unknown.* say so in the recipe"):
        ls.make_plan(plan.recipe.model_validate({**plan.recipe.model_dump(), "places": attention}))


def test_rows_without_roles_are_aligned_and_layers_do_not_move(tmp_path):
    task, language = (
        save_tokenizer(save_expert(tmp_path / f"e{seed}", RwkvConfig(**RWKV), seed), words)
        for seed, words in enumerate(("a b c d e f", "b a c d e f"))
    )
    plan = ls.swap(task=task, language=language, tokenizer="task", outside="language")
    found, given = (tensors_of(each) for each in (plan.save(tmp_path / "out"), language))
    for name in ("rwkv.embeddings.weight", "head.weight"):
        check_equal(found[name][:7], given[name][[0, 2, 1, 3, 4, 5, 6]])
    save_tokenizer(language)
    source = f"{{sources: [{{model: {task}, layer_range: [0, 1]}}]}}"
    recipe = f"merge_method: passthrough\nslices: [{source}, {source}]"
    with pytest.raises(LayerswapError, match="identified by number alone, so none can move"):
        ls.make_plan(ls.parse_recipe(recipe))


def test_a_bias_of_a_tied_head_is_no_head(tmp_path):
    config = RobertaConfig(**{**NEOX, "num_hidden_layers": 3}, is_decoder=True)
    pair = [save_expert(tmp_path / f"e{seed}", config, seed) for seed in range(2)]
    assert ls.open_checkpoint(pair[0]).places["lm_head.bias"].role == "head"
    assert "lm_head.bias" in {tensor.name for tensor in ls.soup(pair).tensors}


def test_a_mixed_bfloat16_model_has_one_dtype_everywhere(tmp_path):
    pair = [
        save_expert(tmp_path / f"e{seed}", tiny_llama(), seed, dtype=torch.bfloat16)
        for seed in range(2)
    ]
    plan = ls.soup(pair)
    from_disk, in_memory = loaded(plan.save(tmp_path / "out")), plan.load()
    assert in_memory.dtype == from_disk.dtype == torch.bfloat16
    check_equal(logits(in_memory), logits(from_disk))


def test_the_parts_of_a_wrappers_config_agree_on_dtype_and_tying(tmp_path):
    pair = [save_expert(tmp_path / f"e{seed}", FAMILIES["gemma3"](), seed) for seed in range(2)]
    for folder in pair:
        text = json.loads((folder / "config.json").read_text())["text_config"]
        change_config(folder, text_config={**text, "dtype": "float32"})
    out = ls.soup(pair, dtype="bfloat16").save(tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"
    assert {t.dtype for t in loaded(out).state_dict().values() if t.ndim > 1} == {torch.bfloat16}


def test_generation_settings_come_along(pair, tmp_path):
    from transformers import GenerationConfig

    GenerationConfig(max_new_tokens=7).save_pretrained(pair[0])
    plan = swap_of(pair)
    assert plan.load().generation_config.max_new_tokens == 7
    assert loaded(plan.save(tmp_path / "out")).generation_config.max_new_tokens == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["AutoModel"]}, "transformers has no model class"),
        ({"architectures": ["pipeline"]}, "transformers has no model class"),
        ({"model_type": "no-such-type"}, "its configuration cannot be loaded ("),
    ],
)
def test_only_a_model_class_of_transformers_is_ever_loaded(pair, change, message):
    for folder in pair:
        change_config(folder, **change)
    assert message in one_line(CheckpointError, swap_of(pair).load)
