"""The numbers: verbatim bytes, blends, dtypes, tied embeddings, shards."""

import json

import numpy as np
import pytest
import torch
from merging import (
    change_config,
    change_tensors,
    check_equal,
    check_rounded,
    half,
    metadata_of,
    raw,
    recipe_plan,
    refusal,
    save_expert,
    swap_of,
    swapped,
    tensors_of,
    tiny_llama,
)
from safetensors.torch import load_file

import layerswap as ls
from layerswap.checkpoint.read import narrowed, widened
from layerswap.ground.errors import LayerswapError, RecipeError
from layerswap.merge import layout
from layerswap.merge.folder import load_tensor
from layerswap.merge.terms import blend

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NORM = "model.layers.1.input_layernorm.weight"


def check_tensors(result, expected):
    assert set(result) == set(expected)
    for name, tensor in expected.items():
        check_equal(result[name], tensor, name)


@pytest.mark.parametrize(
    "zones",
    [
        {"bottom": 1, "top": 1},
        {"bottom": 0, "top": 0},
        {"bottom": 4, "top": 0},
        {"bottom": 1, "top": 1, "t_b": 1, "t_u": 1},
        {"bottom": 0, "top": 1, "t_b": 2, "t_u": 0},
        {"bottom": 0, "top": 0, "t_b": 0, "t_u": 3},
    ],
)
def test_every_tensor_of_a_swap_is_what_the_algorithm_says(experts, tmp_path, zones):
    names = {"t_b": "bottom_transition", "t_u": "top_transition"}
    plan = swap_of(experts, **{names.get(key, key): value for key, value in zones.items()})
    out = plan.save(tmp_path / "out")
    a, b = tensors_of(experts["task"]), tensors_of(experts["language"])
    check_tensors(tensors_of(out), swapped(a, b, 4, **zones))


def test_weighted_blends_are_within_one_rounding_of_float64(experts, tmp_path):
    weights = {"a": 0.7, "b": 0.2, "c": 0.1}
    sources = {"a": experts["task"], "b": experts["language"], "c": experts["third"]}
    result = tensors_of(ls.soup(sources, weights=weights).save(tmp_path / "out"))
    parts = {name: tensors_of(folder) for name, folder in sources.items()}
    for name, tensor in result.items():
        check_rounded(tensor, [(parts[e][name], w) for e, w in weights.items()], name)


def test_a_blend_in_bfloat16_is_rounded_once(tmp_path):
    folders = [
        save_expert(tmp_path / f"e{seed}", tiny_llama(), seed, dtype=torch.bfloat16)
        for seed in range(3)
    ]
    result = tensors_of(ls.soup(folders).save(tmp_path / "out"))
    parts = [tensors_of(folder) for folder in folders]
    third = torch.tensor(1 / 3, dtype=torch.float32)
    for name, tensor in result.items():
        wide = sum((p[name].float() * third for p in parts[1:]), parts[0][name].float() * third)
        twice = sum((p[name] / 3 for p in parts[1:]), parts[0][name] / 3)
        check_rounded(tensor, [(p[name], 1 / 3) for p in parts], name)
        check_equal(tensor, wide.bfloat16(), name)
        if tensor.numel() > 500:
            assert not torch.equal(tensor, twice), "no different from blending in bfloat16"


@pytest.mark.parametrize(
    ("one", "other", "dtype"),
    [
        ("bfloat16", "float32", None),
        ("bfloat16", "float16", None),
        ("float32", "float32", "bfloat16"),
        ("float32", "float32", "float16"),
    ],
)
def test_mixed_dtypes_widen_without_loss_and_a_given_one_converts(tmp_path, one, other, dtype):
    task = save_expert(tmp_path / "task", tiny_llama(), 0, dtype=getattr(torch, one))
    language = save_expert(tmp_path / "language", tiny_llama(), 1, dtype=getattr(torch, other))
    zones = {"bottom": 1, "top": 1}
    out = ls.swap(task=task, language=language, **zones, dtype=dtype).save(tmp_path / "out")
    wide = ({name: t.float() for name, t in tensors_of(f).items()} for f in (task, language))
    written = dtype or "float32"
    expected = {n: t.to(getattr(torch, written)) for n, t in swapped(*wide, 4, **zones).items()}
    check_tensors(tensors_of(out), expected)
    assert json.loads((out / "config.json").read_text())["dtype"] == written


def test_integers_of_an_expert_that_is_not_taken_do_not_matter(pair, tmp_path):
    task, language = pair
    change_tensors(language, {NORM: torch.ones(24, dtype=torch.int8)})
    out = ls.swap(task=task, language=language, bottom=1, top=1).save(tmp_path / "out")
    check_equal(tensors_of(out)[NORM], tensors_of(task)[NORM])


BUFFERS = {
    "model.layers.1.self_attn.causal_mask": torch.tensor([[True, False], [True, True]]),
    "model.layers.1.self_attn.masked_bias": torch.tensor([2**62 + 1, -3]),
    "model.rotary_emb.inv_freq": torch.tensor(7, dtype=torch.int16),
    "model.layers.2.self_attn.inv_freq": torch.empty(0, dtype=torch.int32),
}


def test_integer_and_boolean_buffers_are_copied(pair, tmp_path):
    for folder in pair:
        change_tensors(folder, BUFFERS)
    plan = ls.soup(list(pair))
    result = tensors_of(plan.save(tmp_path / "out"))
    for name, buffer in BUFFERS.items():
        check_equal(result[name], buffer, name)
        check_equal(load_tensor(next(t for t in plan.tensors if t.name == name)), buffer, name)


def tied(folder, seed, dtype=torch.float32):
    return save_expert(folder, tiny_llama(tie_word_embeddings=True), seed, dtype)


def test_tied_embeddings_stay_tied(tmp_path):
    pair = [tied(tmp_path / f"e{seed}", seed) for seed in range(2)]
    out = ls.soup(pair).save(tmp_path / "out")
    result = tensors_of(out)
    assert HEAD not in result
    check_equal(result[EMBEDDING], half(*(tensors_of(folder)[EMBEDDING] for folder in pair)))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize(
    "weights", [[0.5, 0.5], [0.3, 0.7], [1 / 3] * 3, [0.1] * 10, [1e-9, 1 - 1e-9]]
)
def test_a_blend_of_equal_numbers_of_16_bits_is_that_number(dtype, weights):
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    stored = every if dtype == "BF16" else every.view(np.float16)
    stored = stored[np.isfinite(widened(stored, dtype))]
    blended = blend([widened(stored, dtype) for _ in weights], weights)
    assert narrowed(blended, dtype).tobytes() == stored.tobytes()


@pytest.mark.parametrize(
    ("dtype", "weight", "copies"),
    [("bfloat16", 0.3, True), ("float32", 0.5, True), ("float32", 0.3, False)],
)
def test_tensors_that_no_expert_changed_are_copied(tmp_path, monkeypatch, dtype, weight, copies):
    pair = [tied(tmp_path / f"e{seed}", seed, getattr(torch, dtype)) for seed in range(2)]
    change_tensors(pair[1], {EMBEDDING: tensors_of(pair[0])[EMBEDDING]})

    def planned():
        return swap_of(pair, bottom=1, top=1, weights={"task": weight, "language": 1 - weight})

    assert (EMBEDDING in planned().equal_tensors) is copies
    assert any("(tied)" in line for line in planned().notes) is not copies
    out = planned().save(tmp_path / "out")
    report = ls.verify(out, full=True)
    assert report.passed
    assert report.computed.tensors == 2 - copies  # the final norm differs
    monkeypatch.setattr(layout, "_blend_copies", lambda inputs, dtype: False)
    check_tensors(tensors_of(out), tensors_of(planned().save(tmp_path / "blended")))


@pytest.mark.parametrize("says_tied", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_a_stored_copy_of_a_tied_head_is_left_out(tmp_path, first, says_tied):
    pair = [tied(tmp_path / f"e{seed}", seed) for seed in range(2)]
    change_tensors(pair[0], {HEAD: tensors_of(pair[0])[EMBEDDING].clone()})
    change_config(pair[0], tie_word_embeddings=says_tied)
    out = ls.soup([pair[first], pair[1 - first]]).save(tmp_path / "out")
    assert HEAD not in tensors_of(out)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True


def test_heads_and_sizes_that_the_configuration_contradicts(pair, tmp_path):
    def message(task, language=pair[1]):
        return refusal(ls.swap, task=task, language=language)

    headless = tied(tmp_path / "tied", 1)
    change_config(headless, tie_word_embeddings=False)
    assert message(headless, headless).startswith("task has no head, but its config does not tie")
    change_config(pair[0], tie_word_embeddings=True)
    assert message(pair[0]) == (
        "task has a head of its own ('lm_head.weight') but the config of task ties it to the "
        "embedding; set tie_word_embeddings to false if the head is meant"
    )
    change_config(pair[0], tie_word_embeddings=False, vocab_size=9)
    assert message(pair[0]).startswith("task: its config has vocab_size 9, but 'model.embed")
    head = {"lm_head.weight": tensors_of(pair[0])["lm_head.weight"][:9]}
    for folder in pair:  # as Mllama, which embeds more tokens than it writes
        change_config(change_tensors(folder, head), vocab_size=9)
    assert ls.swap(task=pair[0], language=pair[1]).nbytes


def test_a_tied_head_cannot_be_taken_from_elsewhere(tmp_path):
    sources = {n: tied(tmp_path / n, seed) for seed, n in enumerate(("task", "language"))}
    places = [{"layers": "outside", "roles": ["head"], "take": "language"}]
    message = refusal(recipe_plan, experts=sources, swap={"outside": "task"}, places=places)
    assert message == (
        "the head cannot take language and the embedding task: they are one tensor here (tied); "
        "give both the same"
    )


def test_shards_are_as_full_as_allowed_and_indexed(experts, tmp_path):
    pair = {"task": experts["task"], "language": experts["language"]}
    whole = tensors_of(ls.swap(**pair).save(tmp_path / "whole"))
    out = ls.swap(**pair, max_shard_size="10KB").save(tmp_path / "sharded")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(files) > 3
    assert files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert index["metadata"]["total_size"] == sum(len(raw(t)) for t in whole.values())
    sizes = []
    for file in files:
        tensors = load_file(out / file)
        assert tensors, "an empty shard"
        assert all(index["weight_map"][name] == file for name in tensors)
        assert metadata_of(out / file) == {"format": "pt"}
        sizes.append([len(raw(t)) for t in tensors.values()])
        assert sum(sizes[-1]) <= 10_000 or len(sizes[-1]) == 1
    assert set(index["weight_map"]) == set(whole)
    assert all(sum(a) + b[0] > 10_000 for a, b in zip(map(sorted, sizes), sizes[1:], strict=False))
    check_tensors(tensors_of(out), whole)


def test_compositions_and_grids_that_do_not_fit(experts):
    plan = swap_of(experts)
    other = ls.parse_recipe("{experts: {a: x, swahili: y}, soup: {experts: [a, swahili]}}")
    with pytest.raises(RecipeError, match="the plan has no expert 'a'"):
        plan.with_recipe(other)
    with pytest.raises(LayerswapError, match="no combination of these zone sizes fits 4 layers"):
        plan.grid(bottom=[9], top=[0])
    soup = ls.soup([experts["task"], experts["language"]])
    with pytest.raises(LayerswapError, match="only a swap or a partition has zones for a grid"):
        soup.grid(bottom=[1], top=[1])
