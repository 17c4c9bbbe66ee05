"""The diagonal Fisher against per-example gradients taken one by one."""

import json
import random
from functools import partial

import numpy as np
import pytest
import torch
from merging import (
    change_tensors,
    copied,
    refusal,
    save_expert,
    save_tokenizer,
    tensors_of,
    tiny_llama,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, MixtralConfig

from layerswap.evaluation.examples import Example, Tokens, read_examples, tokenize
from layerswap.evaluation.fisher import estimate_fisher

TEXTS = ["a b c d", "f e d c b a", "c c c", "b a d f", "e f a"]


@pytest.fixture(scope="module")
def expert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fisher") / "expert"
    return save_tokenizer(save_expert(folder, tiny_llama(num_hidden_layers=2), 0))


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n\n")
    return path


def loaded(folder):
    # The fast way through a mixture of experts knows no float64.
    mixture = "mixtral" in (folder / "config.json").read_text()
    kind = {"experts_implementation": "eager"} if mixture else {}
    return AutoModelForCausalLM.from_pretrained(folder, **kind).double().eval()


def tokens_of(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenize(Example("", text), tokenizer, 99) for text in TEXTS]


def gradients(model, log_p):
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(log_p, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g
            for n, p, g in zip(names, parameters, found, strict=True)}  # fmt: skip


def fisher_by_hand(model, rows, seed=0):
    """mean_x (d log p(y | x) / d theta)^2, in float64, one example after the other."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    for row in random.Random(seed).sample(rows, len(rows)):
        log_p = model(input_ids=torch.tensor([row.ids])).logits[0].log_softmax(-1)
        draws = torch.rand(len(row.predicted), dtype=torch.float64, generator=generator)
        value = 0
        for at, draw in zip(row.predicted, draws, strict=True):
            passed = log_p[at - 1].exp().cumsum(-1) > draw
            value = value + log_p[at - 1, int(passed.int().argmax())]
        for name, gradient in gradients(model, value).items():
            total[name] += gradient**2
    return {name: values / len(rows) for name, values in total.items()}


def fisher_of(folder):
    return load_file(folder / "fisher.safetensors")


def test_the_fisher_is_the_mean_of_squared_gradients(expert, data, tmp_path):
    out = estimate_fisher(expert, data, tmp_path / "out")
    found, expected = fisher_of(out), fisher_by_hand(loaded(expert), tokens_of(expert))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == torch.float32
        room = 1e-5 * float(values.abs().max())
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=room, err_msg=name)


def test_another_seed_draws_other_labels(expert, data, tmp_path):
    made = [estimate_fisher(expert, data, tmp_path / str(seed), seed=seed) for seed in (5, 6)]
    one, other = ((out / "fisher.safetensors").read_bytes() for out in made)
    assert one != other


def test_the_record_names_checkpoint_data_and_settings(expert, data, tmp_path):
    out = estimate_fisher(expert, data, tmp_path / "out", examples=4, seed=2, max_length=5)
    record = json.loads((out / "fisher.json").read_text())
    flat = torch.cat([f.flatten().double() for f in fisher_of(out).values()])
    assert record["norm"] == pytest.approx(float(flat.norm()), rel=1e-6)
    assert record["checkpoint"]["source"] == str(expert)
    assert list(record["checkpoint"]["fingerprints"]) == ["model.safetensors"]
    assert record["data"]["file"] == "texts.txt"
    known = {key: record[key] for key in ("examples", "seed", "max_length")}
    assert known == {"examples": 4, "seed": 2, "max_length": 5}
    assert 4 * 2 <= record["tokens"] <= 4 * 4
    assert sorted(file.name for file in out.iterdir()) == ["fisher.json", "fisher.safetensors"]


def gpt2():
    return GPT2Config(n_embd=24, n_layer=2, n_head=4, vocab_size=50, n_positions=32,
                      bos_token_id=0, eos_token_id=0)  # fmt: skip


def mixtral():
    return MixtralConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, vocab_size=50,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip


@pytest.mark.parametrize("config", [gpt2, mixtral])
def test_tensors_are_named_as_the_checkpoint_stores_them(data, tmp_path, config):
    folder = save_tokenizer(save_expert(tmp_path / "expert", config(), 0))
    out = estimate_fisher(folder, data, tmp_path / "out")
    found, stored = fisher_of(out), tensors_of(folder)
    assert {n: f.shape for n, f in found.items()} == {n: t.shape for n, t in stored.items()}
    # The mass of the whole is that of the gradients, whatever way they are cut and named.
    expected = fisher_by_hand(loaded(folder), tokens_of(folder))
    assert sum(float(f.sum()) for f in found.values()) == pytest.approx(
        sum(float(f.sum()) for f in expected.values()), rel=1e-4
    )


def test_a_stored_copy_of_tied_embeddings_gets_no_fisher(data, tmp_path):
    config = tiny_llama(tie_word_embeddings=True, num_hidden_layers=2)
    folder = save_tokenizer(save_expert(tmp_path / "expert", config, 0))
    embedding = tensors_of(folder)["model.embed_tokens.weight"]
    change_tensors(folder, {"lm_head.weight": embedding.clone()})
    out = estimate_fisher(folder, data, tmp_path / "out")
    found = fisher_of(out)
    assert not found["lm_head.weight"].any()
    expected = fisher_by_hand(loaded(folder), tokens_of(folder))["model.embed_tokens.weight"]
    np.testing.assert_allclose(found["model.embed_tokens.weight"], expected, rtol=1e-4, atol=1e-6)


# --- examples ---


def test_examples_are_read_from_text_and_json_lines(tmp_path):
    lines = tmp_path / "a.txt"
    lines.write_text("one\n\n  two \r\n")
    assert read_examples(lines) == [Example("", "one"), Example("", "two")]
    rows = tmp_path / "b.jsonl"
    rows.write_text('{"text": "one"}\n{"prompt": "p", "completion": "c", "id": 3}\n')
    assert read_examples(rows) == [Example("", "one"), Example("p", "c")]


NEEDS = "needs a `text`, or a `prompt` and a `completion`"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n\n", "{}: holds no example"),
        ("a.jsonl", b'\n{"prompt": "p"}', "{}, row 1: " + NEEDS),
        ("a.jsonl", b'{"text": 1}', "{}, row 1: " + NEEDS),
    ],
)  # fmt: skip
def test_data_without_examples_are_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    assert refusal(read_examples, path) == message.format(path)


class Words:
    """A tokenizer of words, with a beginning and an end, as many have."""

    eos_token_id = 9

    def __call__(self, text, add_special_tokens=True):
        ids = [int(word) for word in text.split()]
        return type("Encoding", (), {"input_ids": [8, *ids] if add_special_tokens else ids})


def test_tokens_are_those_of_fine_tuning():
    tokenizer = Words()
    assert tokenize(Example("", "1 2"), tokenizer, 99) == Tokens((8, 1, 2, 9), range(1, 4))
    assert tokenize(Example("", "1 9"), tokenizer, 99) == Tokens((8, 1, 9), range(1, 3))
    asked = tokenize(Example("1 2", "3 4"), tokenizer, 99)
    assert asked == Tokens((8, 1, 2, 3, 4, 9), range(3, 6))
    assert tokenize(Example("1 2", "3 4"), tokenizer, 4) == Tokens((8, 1, 2, 3), range(3, 4))
    assert not tokenize(Example("1 2", "3 4"), tokenizer, 3).predicted


# --- refusals ---


refused = partial(refusal, estimate_fisher)


def test_wrong_settings_and_inputs_are_refused(expert, data, tmp_path):
    out = tmp_path / "out"
    expected = "a Fisher needs at least 1 example, of at least 2 tokens"
    assert refused(expert, data, out, examples=0) == expected
    assert refused(expert, data, out, max_length=1) == expected
    data.write_text("a\nb\n")
    expected = f"{data}: no example has two tokens, so there is nothing to predict"
    assert refused(expert, data, out) == expected
    bare = copied(expert, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    expected = f"{bare}: its tokenizer cannot be loaded ("
    assert refused(bare, data, out).startswith(expected)
    data.write_text("\n".join(TEXTS))
    spoilt = copied(expert, tmp_path / "spoilt")
    change_tensors(spoilt, {"model.norm.weight": torch.full((24,), float("nan"))})
    assert refused(spoilt, data, out).startswith("the norm of the Fisher is nan; all gradients")


def test_an_output_is_overwritten_only_with_the_option(expert, data, tmp_path):
    out = estimate_fisher(expert, data, tmp_path / "out")
    assert refused(expert, data, out).startswith(f"{out}: exists already")
    before = (out / "fisher.safetensors").read_bytes()
    estimate_fisher(expert, data, out, overwrite=True, seed=1)
    assert (out / "fisher.safetensors").read_bytes() != before
