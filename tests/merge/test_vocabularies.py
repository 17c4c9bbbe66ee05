"""Experts whose vocabularies or tokenizers differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from merging import (
    change_config,
    change_tensors,
    copied,
    raw,
    recipe_plan,
    refusal,
    save_expert,
    save_tokenizer,
    swap_of,
    tensors_of,
    tiny_llama,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import layerswap as ls
from layerswap.ground.errors import LayerswapError
from layerswap.merge import metadata

EMBEDDING, HEAD, BIAS = "model.embed_tokens.weight", "lm_head.weight", "final_logits_bias"
WORDS = {"task": "a b c d e", "language": "c a habari e f g"}


def expert(root: Path, name: str, rows: int, words: str, seed: int, **config) -> Path:
    folder = save_expert(root / name, tiny_llama(vocab_size=rows, **config), seed)
    return save_tokenizer(folder, words)


@pytest.fixture
def unlike(tmp_path) -> dict[str, Path]:
    """A task expert of 6 tokens in 8 rows, and a language expert of 7 tokens in 7 rows."""
    return both(tmp_path, 8, 7)


def both(root: Path, task: int, language: int, words=WORDS, **config) -> dict[str, Path]:
    """Experts with these numbers of rows, and tokenizers of these words."""
    rows = {"task": task, "language": language}
    return {n: expert(root, n, rows[n], words[n], seed, **config) for seed, n in enumerate(rows)}


def ids(name: str) -> dict[str, int]:
    return {word: i for i, word in enumerate(["<unk>", *WORDS[name].split()])}


def merged(experts: dict[str, Path], out: Path, tokenizer: str | None, **more) -> Path:
    recipe = {"experts": experts, "swap": {"bottom": 1, "top": 1}, "tokenizer": tokenizer, **more}
    return recipe_plan(recipe).save(out)


def check_rows(experts: dict[str, Path], out: Path, order: list[str], size: int) -> None:
    """Every row of the output, from the definition: the blend of those that have its token."""
    stored = {name: tensors_of(path) for name, path in experts.items()}
    result = tensors_of(out)
    for each in (result, *stored.values()):  # as in Marian
        each[BIAS] = each[BIAS][0] if BIAS in each else each[HEAD]
    for tensor in (EMBEDDING, HEAD, BIAS):
        assert result[tensor].shape[:1] == (size,)
        for row, token in enumerate(order):
            rows = [stored[n][tensor][ids(n)[token]] for n in stored if token in ids(n)]
            want = rows[0] * 0.5 + rows[-1] * 0.5
            assert torch.equal(result[tensor][row], want), (tensor, token)


@pytest.mark.parametrize("choice", ["task", "language"])
def test_rows_are_aligned_to_the_chosen_tokenizer(unlike, tmp_path, choice):
    for name, end in (("task", 3), ("language", 5)):
        change_config(unlike[name], eos_token_id=end, decoder_start_token_id=end)
        change_tensors(unlike[name], {BIAS: torch.randn(1, len(tensors_of(unlike[name])[HEAD]))})
    out = merged(unlike, tmp_path / "out", choice)
    size = {"task": 8, "language": 7}[choice]
    result, own = tensors_of(out), tensors_of(unlike[choice])
    for tensor in (EMBEDDING, HEAD):  # padding, which only the task expert has
        assert torch.equal(result[tensor][len(ids(choice)) :], own[tensor][len(ids(choice)) :])
    config = json.loads((out / "config.json").read_text())
    for key in ("eos_token_id", "decoder_start_token_id"):
        assert config[key] == {"task": 3, "language": 5}[choice]
    check_rows(unlike, out, list(ids(choice)), size)
    assert config["vocab_size"] == size
    parts = ({"text_config": {"image_token_index": row}} for row in (1, 2))
    assert metadata._with_token_ids(*parts) == {"text_config": {"image_token_index": 2}}
    assert (out / "tokenizer.json").read_bytes() == (unlike[choice] / "tokenizer.json").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.get_input_embeddings().num_embeddings == size


def test_a_union_has_every_token_and_reads_both_texts(unlike, tmp_path):
    out = merged(unlike, tmp_path / "out", "union")
    order = [*ids("task"), *(word for word in ids("language") if word not in ids("task"))]
    check_rows(unlike, out, order, 9)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("a habari g")["input_ids"] == [order.index(w) for w in ("a", "habari", "g")]
    assert len(tokenizer) == 9
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 9
    recipe = json.loads((out / "layerswap.json").read_text())["recipe"]
    weights = recipe_plan(recipe).load().state_dict()
    for name, tensor in tensors_of(out).items():
        assert raw(weights[name]) == raw(tensor), name


def test_verbatim_rows_keep_their_bits(unlike, tmp_path):
    swap = {"bottom": 1, "top": 1, "outside": "language"}
    out = merged(unlike, tmp_path / "out", "task", swap=swap)
    result, own = tensors_of(out), {name: tensors_of(path) for name, path in unlike.items()}
    for tensor in (EMBEDDING, HEAD):
        for token, row in ids("task").items():
            source = "language" if token in ids("language") else "task"
            assert raw(result[tensor][row]) == raw(own[source][tensor][ids(source)[token]])


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_deltas_are_taken_row_by_row(unlike, tmp_path, method):
    base = expert(tmp_path, "base", 8, WORDS["task"], 5)
    merge = {"method": method, "experts": {"task": 1.0, "language": 1.0}}
    merge |= {"density": 1.0} if method == "ties" else {}
    out = merged(unlike, tmp_path / "out", "union", base=base, swap=None, merge=merge)
    result = tensors_of(out)
    own = {name: tensors_of(path) for name, path in unlike.items()}
    for tensor in (EMBEDDING, HEAD):
        # "b" is the task expert's alone: the language expert has no delta there to add.
        row = ids("task")["b"]
        b_task = own["task"][tensor][row]
        assert torch.allclose(result[tensor][row], b_task, atol=1e-6)
        habari = own["language"][tensor][ids("language")["habari"]]
        assert torch.allclose(result[tensor][6], habari, atol=1e-6)


@pytest.mark.parametrize("back", [{"layers": "outside"}, {"keep": 0.0, "axis": "output"}])
def test_a_revert_leaves_tokens_that_the_base_lacks(unlike, tmp_path, back):
    base = expert(tmp_path, "base", 8, WORDS["task"], 5)
    out = ls.revert(base, unlike["language"], tokenizer="expert", **back).save(tmp_path / "out")
    result, own, before = map(tensors_of, (out, unlike["language"], base))
    for tensor in (EMBEDDING, HEAD):
        for token, row in ids("language").items():
            known = token in ids("task")
            want = before[tensor][ids("task")[token]] if known else own[tensor][row]
            assert torch.equal(result[tensor][row], want), (tensor, token)


def test_a_chat_vector_leaves_new_tokens_as_the_language_model_has_them(tmp_path):
    """L + w (I - B) at every row that the base has; the language model's row at every other."""
    words = {"base": "a b c d e", "instruct": "a b c d e", "language": "a b c d e habari f"}
    result = {
        name: expert(tmp_path, name, len(text.split()) + 1, text, seed)
        for seed, (name, text) in enumerate(words.items())
    }
    given = {"base": result.pop("base"), "experts": result, "tokenizer": "language"}
    plan = recipe_plan(given, instruct={"weight": 0.5, "bottom": 1})
    out = tensors_of(plan.save(tmp_path / "out"))
    base, instruct, language = (tensors_of(tmp_path / name) for name in words)
    for tensor in (EMBEDDING, HEAD):
        assert len(out[tensor]) == 8
        expected = language[tensor][:6] + 0.5 * (instruct[tensor] - base[tensor])
        torch.testing.assert_close(out[tensor][:6], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(out[tensor][6:], language[tensor][6:], rtol=1e-6, atol=1e-7)


def test_a_chat_vector_brings_the_template_and_the_stop_tokens_of_its_chat_model(tmp_path):
    models = {
        name: expert(tmp_path, name, 6, "a b c d e", seed)
        for seed, name in enumerate(("base", "instruct", "language"))
    }
    chat = models["instruct"]
    tool = "additional_chat_templates/tool_use.jinja"
    (chat / tool).parent.mkdir()
    (chat / tool).write_text("tool")
    (chat / "chat_template.jinja").write_text("chat")
    (chat / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    config = json.loads((chat / "config.json").read_text())
    (chat / "config.json").write_text(json.dumps({**config, "eos_token_id": 3}))
    out = ls.instruct(**models).save(tmp_path / "out")
    for name in ("chat_template.jinja", tool, "generation_config.json"):
        assert (out / name).read_bytes() == (chat / name).read_bytes()
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 3
    plan = ls.instruct(**models, tokenizer="language")
    assert any("the output has none" in note for note in plan.notes)


def test_tied_embeddings(tmp_path):
    experts = both(tmp_path, 8, 7, tie_word_embeddings=True)
    out = merged(experts, tmp_path / "out", "union")
    assert HEAD not in tensors_of(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight


# --- one tokenizer, padded to different sizes ---


@pytest.mark.parametrize(("task", "language"), [(10, 16), (16, 10), (10, 10)])
def test_one_tokenizer_with_more_or_less_padding(tmp_path, task, language):
    experts = both(tmp_path, task, language, dict.fromkeys(WORDS, "a b c d"))
    out = merged(experts, tmp_path / "out", None)
    result = tensors_of(out)
    own = [tensors_of(path) for path in experts.values()]
    for tensor in (EMBEDDING, HEAD):
        assert result[tensor].shape == (max(task, language), 24)
        want = own[0][tensor][:10] * 0.5 + own[1][tensor][:10] * 0.5
        assert torch.equal(result[tensor][:10], want)
        longer = own[0] if task > language else own[1]
        if task != language:
            assert torch.equal(result[tensor][10:], longer[tensor][10:])
    AutoModelForCausalLM.from_pretrained(out)


def test_a_tokenizer_longer_than_its_embedding(tmp_path):
    experts = both(tmp_path, 10, 7, dict.fromkeys(WORDS, "a b c d e f g"))
    message = refusal(merged, experts, tmp_path / "out", None)
    assert message.startswith("language has 7 rows in its embedding, but its tokenizer has token 7")


# --- what the user is logged ---


def test_a_choice_that_names_no_expert(unlike):
    message = refusal(recipe_plan, experts=unlike, swap={}, tokenizer="tsak")
    assert message == "tokenizer: no expert 'tsak'; write the name of an expert, or union"


def test_differences_beside_the_tokens_are_only_noted(unlike, tmp_path):
    same = {"task": unlike["task"], "language": copied(unlike["task"], tmp_path / "same")}

    def notes():
        copy, *rest = ls.swap(**same).notes
        assert "have the same weights" in copy
        return rest

    assert notes() == []
    (same["language"] / "chat_template.jinja").write_text("language")
    assert notes() == [
        f"language has a chat template; the output has none, as {same['task']} has none"
    ]
    (same["task"] / "chat_template.jinja").write_text("task")
    assert notes() == [
        f"the chat templates of task and language differ; the output uses {same['task']}'s"
    ]
    settings = same["language"] / "tokenizer_config.json"
    content = json.loads(settings.read_text()) if settings.is_file() else {}
    settings.write_text(json.dumps({**content, "eos_token": "<end>"}))
    token = notes()[-1]
    assert token.startswith("eos_token is ")
    assert "'<end>' in language" in token
    (same["task"] / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (same["task"] / "chat_template.jinja").unlink()
    assert not any("template" in note for note in notes())  # the language expert's is copied
    (tmp_path / "tokenizer.json").rename(same["task"] / "tokenizer.json")
    (same["language"] / "tokenizer.json").unlink()
    assert notes() == ["language has no tokenizer; its rows are assumed to have the others' tokens"]


def test_tokenizers_in_unlike_files_cannot_be_compared(unlike, tmp_path):
    other = copied(unlike["task"], tmp_path / "other")
    (other / "tokenizer.json").rename(other / "vocab.txt")
    assert refusal(ls.swap, task=unlike["task"], language=other, tokenizer="task") == (
        "tokenizers of task and language differ: tokenizer.json and vocab.txt cannot be compared; "
        "language has no tokenizer.json to align rows by: save its tokenizer again with "
        "transformers"
    )


ODD = {
    "a number of added tokens": {"added_tokens": 3},
    "an added token without a text": {"added_tokens": [{"id": 1}]},
    "pairs of numbers": {"model": {"type": "Unigram", "vocab": [[1, 2], [3, 4]]}},
    "ids that are fractions": {"model": {"type": "WordLevel", "vocab": {"a": 0.5}}},
    "ids below zero": {"model": {"type": "WordLevel", "vocab": {"a": -1}}},
    "an id far beyond any vocabulary": {"model": {"type": "WordLevel", "vocab": {"a": 10**9}}},
    "an id below zero that an added token replaces": {
        "model": {"type": "WordLevel", "vocab": {"a": -1}},
        "added_tokens": [{"id": 0, "content": "a"}],
    },
    "a vocabulary of one number": {"model": {"type": "WordLevel", "vocab": 7}},
}


@pytest.mark.parametrize("case", ODD)
def test_a_tokenizer_of_odd_types_is_one_line(experts, pair, case):
    path = pair[1] / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **ODD[case]}))
    with pytest.raises(LayerswapError, match="its tokens are not texts with ids") as caught:
        swap_of(pair, bottom=1, top=1)
    assert str(caught.value).startswith(f"{path}: ")
