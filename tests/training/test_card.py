"""A built mix on disk: files, data card, warnings, and training on its rows."""

import hashlib
import json
import os
import shutil

import pytest
from datasets import Dataset, load_dataset
from excerpts import DATA, read_jsonl
from lab_files import write_jsonl
from processes import layerswap
from test_mixes import TEMPLATE, TOKENIZER
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from layerswap.checkpoint.loading import load_tokenizer
from layerswap.ground.errors import DataError, MergeError
from layerswap.training.expert.job import load_rows
from layerswap.training.expert.save import read_training
from layerswap.training.expert.trainer import train
from layerswap.training.mix.build import build_mix
from layerswap.training.mix.card import (
    boundary_warning,
    data_card,
    ending_warning,
    length_warning,
    load_saved,
    save_mix,
    template_warning,
    unknown_warning,
)
from layerswap.training.mix.schema import parse_mix

RECIPE = """\
name: excerpts
description: A little of everything
languages: [sw]
kind: chat
validation: 4
sources:
  afriqa:
    path: DATA/afriqa.jsonl
    prompt: "{question}"
    completion: "{answer}"
    language: sw
    licence: CC-BY-4.0
  tico19:
    path: DATA/tico19.jsonl
    prompt: "Tafsiri:\\n{eng}"
    completion: "{swa}"
    language: sw
    licence: CC0-1.0
    unverified: [nothing at all]
  problems:
    path: DATA/mgsm_sw.tsv
    header: [question, answer]
    quotes: false
    prompt: "{question}"
    completion: "{answer}"
  flores:
    path: DATA/flores.swh_Latn
    format: text
    template: jinja
    prompt: "Endelea: {{ text[:12] }}"
    completion: "{{ text }}"
    language: sw
  english:
    path: DATA/flores.eng_Latn
    format: text
    prompt: "Habari?"
    completion: "{text}"
    language: sw
filters:
  length: true
  math: true
  language: true
  near_duplicates: true
  evaluation:
    against:
      flores: {path: "DATA/flores.swh_Latn", format: text, columns: [text]}
""".replace("DATA", str(DATA))


@pytest.fixture
def excerpts():
    return build_mix(parse_mix(RECIPE))


@pytest.mark.slow
def test_the_files_depend_on_the_mix_alone(tmp_path):
    (tmp_path / "mix.yaml").write_text(RECIPE)
    here = save_mix(build_mix(parse_mix(RECIPE)), tmp_path / "here", recipe=RECIPE)
    there = tmp_path / "there"
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    other = {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "3", "HF_HOME": str(tmp_path / "home")}
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **other}
    assert not layerswap("data", tmp_path / "mix.yaml", "--out", there, env=env).returncode
    hashes = [
        {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
        for folder in (here, there)
    ]
    assert hashes[0] == hashes[1]
    assert set(hashes[0]) == {
        "train.parquet", "validation.parquet", "README.md", "data_card.json", "mix.yaml",
    }  # fmt: skip


def test_the_filters_drop_mathematics_other_languages_and_test_items(excerpts):
    dropped = {
        name: {filter_: n[name] for filter_, n in excerpts.filters.counts.items() if n[name]}
        for name in excerpts.tallies
    }
    assert dropped["tico19"] == {}
    assert dropped["afriqa"] == {}
    assert dropped["problems"]["math"] >= 15
    assert dropped["english"] == {"language": 16}
    assert dropped["flores"]["evaluation"] >= 14
    kept = {name: tally.kept for name, tally in excerpts.tallies.items()}
    assert kept["tico19"] == len(read_jsonl("tico19.jsonl"))
    assert kept["english"] == 0
    assert sum(kept.values()) == len(excerpts.train) + len(excerpts.validation)


def test_the_card_counts_rows_and_drops(excerpts):
    card = data_card(excerpts)
    for name, facts in card["sources"].items():
        assert facts["looked_at"] == (
            facts["kept"] + facts["empty"] + facts["not_wanted"]
            + sum(facts["dropped"].values())
        ), name  # fmt: skip
    assert card["rows"] == {"train": len(excerpts.train), "validation": 4}
    assert card["filters"]["math"]["examples"][0]["source"] == "problems"
    assert card["evaluation_sets"]["flores"]["items"] == 16
    # The filter drops items of 8 words and more; the shortest item is not among them.
    assert card["evaluation_sets"]["flores"]["shared_runs"] == 0


def test_a_saved_mix_is_a_data_set_that_loads(excerpts, tmp_path):
    out = save_mix(excerpts, tmp_path / "out", recipe=RECIPE)
    mix, train, validation = load_saved(out)
    assert mix == excerpts.mix
    assert train.to_dict() == excerpts.train.to_dict()
    assert validation.to_dict() == excerpts.validation.to_dict()
    sizes = {split: len(rows) for split, rows in load_dataset(str(out)).items()}
    assert sizes == {"train": len(train), "validation": len(validation)}
    text = (out / "README.md").read_text("utf-8")
    for expected in ("# excerpts", "language:\n- sw\n", "| tico19 |", "CC0-1.0",
                     "- not verified: tico19: nothing",
                     "- flores: 16 evaluation items are left out; 0 share 5 words"):  # fmt: skip
        assert expected in text
    with pytest.raises(MergeError, match="exists already; choose another output or pass --ov"):
        save_mix(excerpts, out, recipe=RECIPE)
    assert save_mix(excerpts, out, recipe=RECIPE, overwrite=True) == out
    with pytest.raises(DataError, match=r"no data_card\.json; give a folder that `layerswap data"):
        load_saved(tmp_path)


@pytest.mark.slow
def test_a_mix_of_messages_trains(excerpts, tmp_path):
    base = shutil.copytree(TOKENIZER, tmp_path / "base")
    (base / "chat_template.jinja").write_text(TEMPLATE)
    data = save_mix(excerpts, tmp_path / "mix", recipe=RECIPE)
    steps = {"max_steps": 1, "max_length": 128, "per_device_train_batch_size": 2}
    spec = {"base": str(base), "data": str(data), "hyperparameters": steps}
    record = read_training(train(spec, tmp_path / "out"))
    assert record["data"][0]["train"] == len(excerpts.train)
    assert record["losses"]["training"] > 0


def test_a_source_that_skips_the_evaluation_filter_is_counted(tmp_path):
    items = [f"this is a long question number {i} about the same old thing again" for i in range(9)]
    write_jsonl(tmp_path / "items.jsonl", [{"q": q} for q in items])
    write_jsonl(tmp_path / "r.jsonl", [{"q": q, "a": "yes"} for q in [*items[:3], "short"]])
    source = {"path": "r.jsonl", "prompt": "{q}", "completion": "{a}", "skip": ["evaluation"]}
    against = {"items": {"path": "items.jsonl", "columns": ["q"]}}
    recipe = json.dumps({"name": "m", "sources": {"rows": source}, "kind": "prompt-completion",
                         "filters": {"evaluation": {"against": against}}})  # fmt: skip
    built = build_mix(parse_mix(recipe), folder=tmp_path)
    assert built.tallies["rows"].contaminated == {"items": 3}
    out = save_mix(built, tmp_path / "out", recipe=recipe)
    warning = "3 examples with an item of the evaluation set items"
    assert warning in (out / "README.md").read_text()
    assert load_rows(str(out), folder=tmp_path).contaminated == {"items": 3}


def test_items_that_share_five_words_with_training_are_counted_not_dropped(tmp_path):
    items = [f"item {i} has these words: the red house on hill number {i}" for i in range(4)]
    texts = [f"We saw THE RED HOUSE, on hill {i} again" for i in range(30)]
    texts += ["nothing of that kind is here", "item 2 has these"]
    write_jsonl(tmp_path / "items.jsonl", [{"q": q} for q in [*items, "five other words in here"]])
    write_jsonl(tmp_path / "r.jsonl", [{"q": q} for q in texts])
    against = {"items": {"path": "items.jsonl", "columns": ["q"]}}
    recipe = json.dumps({
        "name": "m", "kind": "text", "sources": {"rows": {"path": "r.jsonl", "text": "{q}"}},
        "filters": {"evaluation": {"against": against}},
    })  # fmt: skip
    built = build_mix(parse_mix(recipe), folder=tmp_path)
    assert len(built.train) == len(texts)
    card = data_card(built)
    assert card["evaluation_sets"]["items"]["shared_runs"] == 4


def test_a_template_that_opens_answers_otherwise_in_evaluation_is_named():
    tokenizer = load_tokenizer(TOKENIZER)
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    row = {"prompt": [{"role": "user", "content": "Q"}],
           "completion": [{"role": "assistant", "content": "A"}]}  # fmt: skip
    opened = "{% if add_generation_prompt %}[assistant]{% endif %}"
    tokenizer.chat_template = turns + opened
    assert template_warning(Dataset.from_list([row]), tokenizer) is None
    assert template_warning(Dataset.from_list([{"prompt": "a", "completion": "b"}]), None) is None
    tokenizer.chat_template = turns + opened.replace("[assistant]", "[assistant]<think></think>")
    warning = template_warning(Dataset.from_list([row]), tokenizer)
    assert warning.startswith("in evaluation the chat template writes '<think></think>' before")
    spaced = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    tokenizer.chat_template = spaced + "{% if add_generation_prompt %}assistant: {% endif %}"
    row = {**row, "completion": [{"role": "assistant", "content": "12"}]}
    warning = template_warning(Dataset.from_list([row]), tokenizer)
    assert warning.startswith("the end of 'Qassistant: ', which the chat template writes before")


def test_a_template_that_ends_no_answer_is_named():
    tokenizer = load_tokenizer(TOKENIZER)
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "s"}]
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}|end|{% endfor %}\n"
    )
    for row in ({"messages": turns}, {"prompt": turns[:1], "completion": turns[1:]}):
        rows = Dataset.from_list([row])
        assert ending_warning(rows, tokenizer, ["</s>", "|end|"]) is None
        warning = ending_warning(rows, tokenizer, ["</s>", "<|end|>"])
        assert warning.startswith(
            "after an answer the chat template writes '|end|' and no token that ends a text "
            "(</s>, <|end|>), so the expert does not learn to stop"
        )
        assert warning.endswith("to eos_token_id in the base's generation_config.json")
    plain = Dataset.from_list([{"prompt": "a", "completion": "b"}])  # TRL ends it
    assert ending_warning(plain, tokenizer, ["</s>"]) is None


def test_rows_that_a_trainer_cuts_are_counted():
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    texts = [("a b", " c"), ("a b", " c" * 30), ("a " * 30, "b")]
    rows = Dataset.from_list([{"prompt": p, "completion": c} for p, c in texts])
    assert length_warning(rows, tokenizer, None) is None
    sizes = [len(tokenizer(p + c)["input_ids"]) + 1 for p, c in texts]
    assert length_warning(rows, tokenizer, max(sizes)) is None
    assert length_warning(rows, tokenizer, 20) == (
        "2 of 3 rows are longer than max_length (20 tokens): 1 lose their end, and 1 are left out, "
        f"as their prompt alone fills it; hyperparameters.max_length: {max(sizes)} keeps all"
    )
    assert length_warning(rows, tokenizer, 20, 20) == length_warning(rows, tokenizer, 20)
    assert length_warning(rows, tokenizer, 40, 20) == (
        "2 of 3 rows are longer than the 20 tokens that the base reads; set "
        "hyperparameters.max_length: 20"
    )
    assert unknown_warning(rows, tokenizer) is None
    tokenizer.unk_token = "?"
    assert unknown_warning(rows, tokenizer) is None
    strange = Dataset.from_list([{"messages": [{"role": "user", "content": "a d e f"}]}])
    assert unknown_warning(strange, tokenizer).startswith("75% of the tokens are '?', because")


def test_prompts_whose_last_token_runs_into_the_answer_are_counted():
    core = Tokenizer(models.BPE({"a": 0, " ": 1, "b": 2, " b": 3}, [(" ", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    spaced, safe = (Dataset.from_list([{"prompt": prompt, "completion": completion}] * 2)
                    for prompt, completion in (("a ", "b"), ("a", " b")))  # fmt: skip
    assert boundary_warning(spaced, tokenizer).startswith("in 2 of 2 rows the tokens of the prompt")
    assert boundary_warning(safe, tokenizer) is None
