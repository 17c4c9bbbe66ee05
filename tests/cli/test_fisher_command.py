from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def expert(experts, tmp_path):
    """A copy of the task expert, with a tokenizer of a few words."""
    folder = tmp_path / "expert"
    shutil.copytree(experts.task, folder)
    vocab = {word: i for i, word in enumerate(["<unk>", *"abcdef"])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("a b c\nd e f\nc b a\n")
    return path


def test_from_data_to_a_merge(layerswap, experts, expert, texts, tmp_path):
    out = tmp_path / "fisher"
    result = layerswap("fisher", expert, "--data", texts, "--out", out, "--examples", 2)
    assert result.code == 0, result.err
    assert result.out == f"wrote {out}\n"
    assert json.loads((out / "fisher.json").read_text())["examples"] == 2
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"experts:\n  math: {{source: {expert}, fisher: {out}}}\n"
        "merge: {method: fisher, experts: [math]}\n"
    )
    merged = tmp_path / "merged"
    assert layerswap("merge", recipe, "--out", merged).code == 0
    assert layerswap("verify", merged, "--full").code == 0


def test_refusals_are_one_line(layerswap, expert, texts, tmp_path):
    common = ("fisher", expert, "--out", tmp_path / "out")
    wrong = layerswap(*common, "--data", texts, "--labels", "truth")
    assert (wrong.code, wrong.out) == (2, "")
    assert wrong.err == "error: labels: 'truth' is not one of model, data\n"
    missing = layerswap(*common, "--data", tmp_path / "none.txt")
    assert missing.code == 2
    assert missing.err == (
        f"error: {tmp_path}/none.txt: cannot be read (No such file or directory)\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": ' + "[" * 5000 + "]" * 5000 + "}", "not valid JSON (maximum recursion depth"),
        ('{"text": "\\ud800"}', "holds half of a surrogate pair"),
        ('{"prompt": "a", "completion": "b \\udfff"}', "holds half of a surrogate pair"),
        ('{"text": "a', "not valid JSON (Unterminated string"),
        ('{"text": ["a"]}', "needs a `text`, or a `prompt` and a `completion`"),
        ("1" * 5000, "not valid JSON (Exceeds the limit"),
    ],
    ids=lambda text: text[:24],
)
def test_odd_examples_are_one_line(layerswap, expert, tmp_path, line, said):
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "a b"}\n' + line + "\n")
    result = layerswap("fisher", expert, "--data", data, "--out", tmp_path / "out")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {data}, line 2: {said}")
    assert result.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
