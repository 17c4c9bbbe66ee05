"""The proof that a file answers as a folder: files with one fault each, which is named."""

from __future__ import annotations

import json
import re

import gguf
import pytest
from deployed import LINES, TEMPLATE, save_chat_model, write_like

pytest.importorskip("xllamacpp")

from layerswap.deploy import proof
from layerswap.deploy.api import deploy
from layerswap.deploy.modelfile import modelfile, sides_of
from layerswap.deploy.proof import Agreement, Proof, prove
from layerswap.evaluation.statistics import Interval
from layerswap.ground.errors import LayerswapError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("proof") / "merged", 1)


def problems(folder, file, positions=0):
    return prove(str(folder), file, LINES, positions=positions).problems


def test_an_equal_file_is_equal(folder, tmp_path):
    like = write_like(folder, tmp_path / "base.gguf")
    done = deploy(str(folder), tmp_path / "out", like=str(like), kinds=["F32", "Q8_0"],
                  lines=LINES, positions=6)  # fmt: skip
    assert done.problems == []
    whole, coarse = done.proofs
    tried = [check.tried for check in whole.checks if check.name in ("tokens", "template")]
    assert tried == [4 + 4 + 3, 5]  # the lines, fixed texts, added tokens
    assert {a.language for a in whole.agreements} == {"sw", "en"}
    for exact, rounded in zip(whole.agreements, coarse.agreements, strict=True):
        assert exact.same.mean == 1
        assert exact.divergence_nats < 1e-5 < rounded.divergence_nats < 0.1
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model-F32.gguf", "model-Q8_0.gguf", "Modelfile", "deploy.json"}
    assert json.loads((tmp_path / "out" / "deploy.json").read_text())["equal"] is True
    with pytest.raises(LayerswapError, match="overwrite"):
        deploy(str(folder), tmp_path / "out", like=str(like))


def rows(tensors):
    embedding = tensors["token_embd.weight"].copy()
    embedding[[250, 300]] = embedding[[300, 250]]
    return {**tensors, "token_embd.weight": embedding}


def swapped(tensors):
    first, second = "blk.0.ffn_gate.weight", "blk.2.ffn_gate.weight"
    return {**tensors, first: tensors[second], second: tensors[first]}


def unshifted(tensors):
    return {name: v - 1 if "attn_norm" in name else v for name, v in tensors.items()}


def one_element(tensors):
    norm = tensors["blk.1.ffn_norm.weight"].copy()
    norm[5] *= 1.5
    return {**tensors, "blk.1.ffn_norm.weight": norm}


def one_row(tensors):
    down = tensors["blk.2.ffn_down.weight"].copy()
    down[7] = 0
    return {**tensors, "blk.2.ffn_down.weight": down}


def entry(key, change):
    """Change the value of an entry."""

    def changed(writer):
        value = writer.kv_data[0][key]
        value.value = change(value.value)

    return {"metadata": changed}


def twisted(merges):
    return [*merges[:-2], merges[-1], merges[-2]]


def stops_elsewhere(writer):
    """The end of a turn still ends an answer, but so does another token."""
    writer.kv_data[0]["tokenizer.ggml.eos_token_id"].value = 5
    writer.add_eot_token_id(1)


def ending(condition):
    return {"template": TEMPLATE.replace("if add", f"if {condition} and add")}


FAULTS = {
    "role": ({"template": TEMPLATE.replace("<|turn|>", "<|halt|>")}, "template: user: from"),
    "space": ({"template": TEMPLATE.replace("'role'] }}\n", "'role'] }} ")}, "template: user"),
    "many messages": (ending("messages|length < 40"), "template: user, .*: from"),
    "more messages": (
        ending("messages|length < 500"),
        "metadata: chat template: the folder's, in place of the file's",
    ),
    "long message": (ending("messages[0]['content']|length < 999"), "template: user: from"),
    "longer message": (
        ending("messages[0]['content']|length < 9999"), "metadata: chat template: the folder's",
    ),
    "no template": ({"template": ""}, "metadata: chat template: the folder's, the file has none"),
    "named template": (
        {"metadata": lambda w: w.add_string("tokenizer.chat_template.tool_use", "{{ messages }}")},
        "metadata: chat template tool_use: none",
    ),
    "bos": ({"bos": True}, "tokens: 'Answer in one.*: token 0.*adds a BOS that.*more texts"),
    "eos added": ({"metadata": lambda w: w.add_add_eos_token(True)}, "tokens: "),
    "another bos": (entry("tokenizer.ggml.bos_token_id", lambda _: 5), "metadata: .*bos_token_id"),
    "stop": ({"eos": 0}, "stop: the answer goes on after '<|halt|>'"),
    "two stops": (
        {"metadata": stops_elsewhere}, "metadata: .*eos_token_id: 1 of the folder, in place of 5",
    ),
    "end of turn": ({"metadata": lambda w: w.add_eot_token_id(5)}, "metadata: .*eot_token_id: 5, "),
    "temperature": (
        {"metadata": lambda w: w.add_sampling_temp(0.1)}, "metadata: general.sampling.temp: None",
    ),
    "split": ({"pre": "llama-bpe"}, "tokens: .*another pre-tokenizer or other merges"),
    "order of merges": (entry("tokenizer.ggml.merges", twisted), "metadata: .*merges: 2 differ"),
    "lost merge": (
        entry("tokenizer.ggml.merges", lambda merges: merges[:-1]), "metadata: .*merges: 1 differ",
    ),
    "special": (
        entry("tokenizer.ggml.token_type", lambda kinds: [*kinds[:-1], 4]),
        "metadata: .*token_type: 1 differ",
    ),
    "plain": (
        entry("tokenizer.ggml.token_type", lambda kinds: [3, 3, 1, *kinds[3:]]),
        "metadata: .*token_type: 1 differ",
    ),
    "swapped": ({"tensors": swapped}, "tensors: .*0.mlp.gate_proj.*: differs by up to"),
    "norm": (
        {"tensors": unshifted}, "tensors: model.layers.0.input_layernorm.weight: differs by",
    ),
    "rows": ({"tensors": rows}, "tensors: model.embed_tokens.weight: differs by up to"),
    "one element": ({"tensors": one_element}, "tensors: model.layers.1.post_attention_layernorm"),
    "one row": ({"tensors": one_row}, "tensors: model.layers.2.mlp.down_proj.weight: differs"),
    "rope": (
        {"rope": 500_000.0}, "metadata: rope.freq_base: 10000 of the folder, in place of 500000",
    ),
    "epsilon": (entry("llama.attention.layer_norm_rms_epsilon", lambda _: 0.01), "metadata: "),
    "scaling": (
        {"metadata": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)},
        "metadata: .*has rotary scaling",
    ),
    "rotated width": (entry("llama.rope.dimension_count", lambda _: 8), "likelihoods: |load: "),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(folder, tmp_path, fault):
    change, named = FAULTS[fault]
    file = write_like(folder, tmp_path / "wrong.gguf", **change)
    found = problems(folder, file, positions=4)
    assert any(re.match(named, line) for line in found), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "text", "said"),
    [(2, "[PAD2]", r"tokens of the folder that .* lacks: '<\|turn\|>'"),
     (290, "<lost>", "not the same tokenizer")],
)  # fmt: skip
def test_a_lost_added_token_and_another_tokenizer_are_named(folder, tmp_path, number, text, said):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    tokens[number] = text
    file = write_like(folder, tmp_path / "other.gguf", tokens=tokens)
    found = prove(str(folder), file, {}, positions=0).problems
    assert any(re.search(said, line) for line in found)


def test_a_folder_is_no_file_to_check(folder):
    with pytest.raises(LayerswapError, match="not a GGUF file"):
        prove(str(folder), folder, {})


def test_a_divergence_that_no_type_explains_is_a_difference():
    def problems(nats):
        far = Agreement("bn", 40, Interval(0.3, 0.1, 0.5, 40), nats)
        return Proof("model.gguf", "Q4_0", (), (far,)).problems

    assert problems(1.44) == []  # the most that four bits cost in docs/deploy.md
    assert problems(3.5) == [
        "likelihoods: bn: 3.50 nats from the folder, more than rounding explains"
    ]


def test_ollama_gets_the_template_the_stop_and_the_sampling(folder):
    text = modelfile(folder, "model.gguf")
    assert text.startswith("FROM ./model.gguf\n")
    assert 'PARAMETER stop "<|halt|>"' in text
    assert 'if eq .Role "system" }}<|turn|>system\n{{ .Content }}<|halt|>\n' in text
    assert text.count("<|turn|>assistant\n") == 2


def test_a_template_that_is_no_list_of_turns(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages|length }}" + TEMPLATE
    assert sides_of(tokenizer) is None


def test_positions_are_spread_over_a_line():
    """With one position in a line, it is the middle: after one token all lines are alike."""
    assert proof._spread(10, 1).tolist() == [6]
    assert proof._spread(10, 3).tolist() == [2, 6, 9]
    assert proof._spread(4, 9).tolist() == [1, 2, 3, 4]
    assert proof._spread(4, 0).tolist() == []
    for tokens in range(2, 40):
        for count in range(1, tokens + 1):
            found = proof._spread(tokens, count)
            assert len({*found.tolist()}) == count
            assert 1 <= found.min() <= found.max() <= tokens
