"""GGUF files with transformers' names: every tensor is the one that transformers loads."""

import json

import numpy as np
import pytest
import torch
from effort import sampled
from gguf_conversion import FAMILIES, convert, save_model
from merging import change_config, change_tensors, copied, recipe_plan

import layerswap as ls
from layerswap.checkpoint.header import RowOrder
from layerswap.checkpoint.read import row_order, same_bytes
from layerswap.ground.errors import LayerswapError

NOT_LOADED = ("cohere", "cohere2", "olmo2", "gpt_neox", "granite", "falcon-groups", "mixtral")
"""Those that transformers does not load from GGUF, or not as llama.cpp's converter writes them."""
QUICK = ("llama", "gemma3", "falcon-groups")


@pytest.mark.parametrize("family", sampled(FAMILIES, *QUICK))
def test_the_conversion_is_undone(tmp_path, family):
    folder = save_model(tmp_path / "model", family)
    like = ls.open_checkpoint(folder)
    opened = ls.open_checkpoint(convert(folder, tmp_path / "a.gguf", family)).as_transformers(like)
    assert list(opened.tensors) == list(like.tensors)
    assert opened.places == like.places
    # Adding 1 to a norm and subtracting it rounds twice.
    shifted = 2e-7 if family in ("gemma2", "gemma3", "nemotron") else 0.0
    for name, info in like.tensors.items():
        found, expected = opened.read(name), like.read(name)
        assert torch.allclose(found, expected, rtol=0, atol=shifted), name
        start, stop = info.elements // 3 + 1, info.elements // 2 + 5
        part = opened.elements(name, start, stop)
        assert np.array_equal(part, found.reshape(-1)[start:stop].numpy())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NOT_LOADED])
def test_tensors_are_those_that_transformers_loads(tmp_path, family, kind):
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "model", family)
    path = convert(folder, tmp_path / "a.gguf", family, kind)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", dtype=torch.float32, config=None
    )
    theirs.config.quantization_config = None
    del theirs.config.quantization_config
    plain = type(theirs)(theirs.config)  # a model from GGUF cannot be saved
    plain.load_state_dict(theirs.state_dict())
    plain.save_pretrained(tmp_path / "theirs")
    expected = ls.open_checkpoint(tmp_path / "theirs")
    opened = ls.open_checkpoint(path).as_transformers(ls.open_checkpoint(folder))
    compared = 0
    for name in opened.tensors.keys() & expected.tensors.keys():
        assert torch.equal(opened.read(name), expected.read(name)), name
        compared += 1
    assert compared >= len(opened.tensors) - 1  # a tied head is stored by one of the two


@pytest.mark.parametrize("kind", sampled(["F16", "BF16", "Q8_0", "Q4_0"], "Q8_0"))
def test_a_gguf_file_is_merged_beside_safetensors(tmp_path, kind):
    """The output equals a merge of safetensors with the dequantised numbers."""
    task, language = (save_model(tmp_path / n, "llama", i) for i, n in enumerate(("a", "b")))
    path = convert(language, tmp_path / "language.gguf", "llama", kind)
    made = ls.swap(task=task, language=path, bottom=1, top=1).save(tmp_path / "made")
    like = ls.open_checkpoint(task)
    plain = ls.open_checkpoint(path).as_transformers(like)
    tensors = {name: plain.read(name).contiguous() for name in plain.tensors}
    change_tensors(copied(task, tmp_path / "plain"), tensors)
    other = ls.swap(task=task, language=tmp_path / "plain", bottom=1, top=1).save(tmp_path / "o")
    assert (made / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    report = ls.verify(made, full=True)
    assert report.passed
    assert report.verbatim.tensors + report.computed.tensors == len(like.tensors)
    record = json.loads((made / "layerswap.json").read_text())
    assert record["sources"]["language"]["source"] == str(path)
    one, two = (ls.swap(task=given, language=task, bottom=1, top=1).load()
                for given in (path, tmp_path / "plain"))  # fmt: skip
    assert torch.equal(one.lm_head.weight, two.lm_head.weight)


def test_tied_heads_of_a_gguf_file_are_one_tensor(tmp_path):
    folder = save_model(tmp_path / "a", "llama-tied")
    path = convert(folder, tmp_path / "a.gguf", "llama-tied", "Q8_0")
    opened = ls.open_checkpoint(path).as_transformers(ls.open_checkpoint(folder))
    name = "model.embed_tokens.weight"
    assert same_bytes(opened.tensors[name], opened.tensors[name])
    assert not same_bytes(opened.tensors[name], ls.open_checkpoint(folder).tensors[name])


def test_rows_of_groups():
    """Two groups of two heads of two rows: queries, then keys, then values."""
    order = row_order(RowOrder("groups", 16, 4, 2))
    assert order.tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]
    assert row_order(RowOrder("rotary", 8, 2)).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert row_order(RowOrder("heads", 6, 2)).tolist() == [0, 2, 4, 1, 3, 5]


@pytest.fixture
def llama(tmp_path):
    """A model, and the GGUF file of it."""
    folder = save_model(tmp_path / "a", "llama")
    return folder, convert(folder, tmp_path / "a.gguf", "llama")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "GGUF architecture is 'llama'; the safetensors model is 'qwen2'"),
        ({"model_type": "gpt2"}, "GGUF beside safetensors is not supported for 'gpt2'"),
        (
            {"rope_theta": 5e5},
            "rope.freq_base is 10000; in the safetensors model rope_theta is 500000",
        ),
        (
            {"rms_norm_eps": 1e-3},
            "attention.layer_norm_rms_epsilon is 1e-06; in the safetensors model rms_norm_",
        ),
    ],
)
def test_models_of_another_kind(llama, change, message):
    folder, path = llama
    change_config(folder, **change)
    with pytest.raises(LayerswapError, match=f"^language: {path}: {message}"):
        ls.swap(task=folder, language=path)


def test_another_vocabulary(llama):
    folder, path = llama
    vocabulary = {f"w{i}": i for i in range(200)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(LayerswapError, match=r"of language and .* differ: token 0 is '<unk>' and"):
        ls.swap(task=folder, language=path)


def test_an_adapter_cannot_be_added_to_a_gguf_file(llama, tmp_path):
    path = llama[1]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    experts = {"a": {"source": path, "adapter": adapter}}
    with pytest.raises(LayerswapError, match=r"a: adapter: .*a\.gguf is a GGUF file, to which ad"):
        recipe_plan(experts=experts, soup={"experts": ["a"]})


def test_tensors_that_one_of_the_two_lacks(tmp_path):
    folder = save_model(tmp_path / "a", "qwen2")
    path = convert(folder, tmp_path / "a.gguf", "qwen2")
    other = save_model(tmp_path / "b", "llama")
    change_config(other, model_type="qwen2")
    with pytest.raises(LayerswapError, match=r"has 'blk\.0\.attn_k\.bias', which .* lacks"):
        ls.swap(task=other, language=path)
