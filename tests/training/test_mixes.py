"""Whole mixes: shares, caps, seeds, forms, cards, the folder on disk, and every ready recipe."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from excerpts import DATA, read_jsonl, read_lines, read_mgsm
from hypothesis import given
from hypothesis import strategies as st

from layerswap.errors import DataError, MergeError
from layerswap.training.mix.build import build_mix, share
from layerswap.training.mix.card import data_card, load_saved, save_mix
from layerswap.training.mix.schema import mix_text, parse_mix, read_mix, ready_recipes

TOKENIZER = Path(__file__).parents[2] / "src/layerswap/lab/assets/base"


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def numbered(tmp_path, **sizes):
    """A mix of sources whose rows are numbered texts, each unlike the others."""
    for name, size in sizes.items():
        rows = [{"q": f"{name} question {i}", "a": f"{name} answer {i}"} for i in range(size)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    sources = {
        name: {"path": f"{name}.jsonl", "prompt": "{q}", "completion": "{a}"} for name in sizes
    }
    return {"name": "numbers", "kind": "prompt-completion", "sources": sources}


def build(mix, folder, **more):
    return build_mix(parse_mix(json.dumps(mix)), folder=folder, **more)


def counts(built):
    return Counter(example.source for example in built.examples)


@given(
    st.integers(0, 10_000),
    st.dictionaries(st.text("abc", min_size=1), st.floats(0.01, 100), min_size=1),
)
def test_shares_are_whole_and_as_near_to_the_weights_as_can_be(total, weights):
    shares = share(total, weights)
    assert sum(shares.values()) == total
    for name, weight in weights.items():
        assert abs(shares[name] - total * weight / sum(weights.values())) < 1 + 1e-9


def test_without_a_total_every_row_is_there_once(tmp_path):
    built = build(numbered(tmp_path, a=30, b=10), tmp_path)
    assert counts(built) == {"a": 30, "b": 10}
    assert len(set(built.train["prompt"])) == 40
    # Shuffled: the sources alternate far more often than if one followed the other.
    order = [example.source for example in built.examples]
    assert sum(x != y for x, y in pairwise(order)) > 8


def test_a_total_is_shared_out_by_weight(tmp_path):
    mix = numbered(tmp_path, a=100, b=100) | {"total": 40}
    mix["sources"]["b"]["weight"] = 3
    assert counts(build(mix, tmp_path)) == {"a": 10, "b": 30}


def test_what_a_source_cannot_give_the_others_make_up_for(tmp_path):
    mix = numbered(tmp_path, a=5, b=100, c=100) | {"total": 65}
    mix["sources"]["c"]["weight"] = 2
    assert counts(build(mix, tmp_path)) == {"a": 5, "b": 20, "c": 40}
    mix["sources"]["c"]["cap"] = 30
    assert counts(build(mix, tmp_path)) == {"a": 5, "b": 30, "c": 30}
    mix["total"] = 1000
    built = build(mix, tmp_path)
    assert counts(built) == {"a": 5, "b": 100, "c": 30}
    assert built.tallies["c"].looked_at == 30  # and no row more than it had to


def test_a_cap_is_a_sample_of_the_whole_source_and_not_its_start(tmp_path):
    mix = numbered(tmp_path, a=1000)
    mix["sources"]["a"]["cap"] = 100
    built = build(mix, tmp_path)
    picked = sorted(int(text.split()[-1]) for text in built.train["completion"])
    assert len(picked) == 100
    # The mean of 100 of 0..999 has a standard deviation of about 27.
    assert abs(sum(picked) / 100 - 499.5) < 120


def test_validation_rows_are_apart(tmp_path):
    built = build(numbered(tmp_path, a=50) | {"validation": 8}, tmp_path)
    assert (len(built.train), len(built.validation)) == (42, 8)
    assert not set(built.train["prompt"]) & set(built.validation["prompt"])


def test_the_seed_decides_and_each_source_can_have_its_own(tmp_path):
    mix = numbered(tmp_path, a=60, b=60) | {"total": 20}
    first, again = build(mix, tmp_path), build(mix, tmp_path)
    assert first.train.to_dict() == again.train.to_dict()
    other = build(mix | {"seed": 1}, tmp_path)
    assert other.train.to_dict() != first.train.to_dict()
    mix["sources"]["a"]["seed"] = 5
    reseeded = build(mix, tmp_path)
    picked = [{e.prompt for e in built.examples if e.source == "b"} for built in (first, reseeded)]
    assert picked[0] == picked[1]
    picked = [{e.prompt for e in built.examples if e.source == "a"} for built in (first, reseeded)]
    assert picked[0] != picked[1]


@pytest.mark.slow
def test_the_files_on_disk_depend_on_nothing_but_the_mix(tmp_path):
    recipe = MIX_OF_EXCERPTS.format(data=DATA)
    (tmp_path / "mix.yaml").write_text(recipe)
    here = save_mix(build_mix(parse_mix(recipe)), tmp_path / "here", recipe=recipe)
    there = tmp_path / "there"
    code = "import sys; from layerswap.cli import main; sys.argv[0] = 'layerswap'; main()"
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    subprocess.run(
        [sys.executable, "-c", code, "data", str(tmp_path / "mix.yaml"), "--out", str(there)],
        check=True, capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "HF_HUB_OFFLINE": "1",
             "OMP_NUM_THREADS": "3", "HF_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    found = [
        {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
        for folder in (here, there)
    ]
    assert found[0] == found[1]
    assert set(found[0]) == {
        "train.parquet", "validation.parquet", "README.md", "data_card.json", "mix.yaml",
    }  # fmt: skip


MIX_OF_EXCERPTS = """\
name: excerpts
description: A little of everything
languages: [sw]
kind: chat
validation: 4
sources:
  afriqa:
    path: {data}/afriqa.jsonl
    prompt: "{{question}}"
    completion: "{{answer}}"
    language: sw
    licence: CC-BY-4.0
  tico19:
    path: {data}/tico19.jsonl
    prompt: "Tafsiri:\\n{{eng}}"
    completion: "{{swa}}"
    language: sw
    licence: CC0-1.0
    unverified: [nothing at all]
  problems:
    path: {data}/mgsm_sw.tsv
    header: [question, answer]
    quotes: false
    prompt: "{{question}}"
    completion: "{{answer}}"
  flores:
    path: {data}/flores.swh_Latn
    format: text
    template: jinja
    prompt: "Endelea: {{{{ text[:12] }}}}"
    completion: "{{{{ text }}}}"
    language: sw
  english:
    path: {data}/flores.eng_Latn
    format: text
    prompt: "Habari?"
    completion: "{{text}}"
    language: sw
filters:
  length: true
  math: true
  language: true
  near_duplicates: true
  evaluation:
    against:
      flores: {{path: "{data}/flores.swh_Latn", format: text, columns: [text]}}
"""


@pytest.fixture
def excerpts():
    return build_mix(parse_mix(MIX_OF_EXCERPTS.format(data=DATA)))


def test_the_filters_drop_what_must_not_be_there(excerpts):
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


def test_the_card_says_what_is_there_and_what_was_dropped(excerpts):
    card = data_card(excerpts, tokenizer=str(TOKENIZER))
    for name, facts in card["sources"].items():
        assert facts["looked_at"] == (
            facts["kept"] + facts["empty"] + facts["left_out_by_where"]
            + sum(facts["dropped"].values())
        ), name  # fmt: skip
    assert card["rows"] == {"train": len(excerpts.train), "validation": 4}
    assert card["filters"]["math"]["examples"][0]["source"] == "problems"
    assert card["evaluation_sets"]["flores"]["items"] == 16
    assert card["unverified"] == ["tico19: nothing at all"]
    assert card["sources"]["afriqa"]["licence"] == "CC-BY-4.0"
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(TOKENIZER)
    texts = [e.whole for e in excerpts.examples if e.source == "tico19"]
    expected = sum(
        len(encode(part, add_special_tokens=False)["input_ids"])
        for e in excerpts.examples if e.source == "tico19"
        for part in (e.prompt, e.completion)
    )  # fmt: skip
    assert texts
    assert card["sources"]["tico19"]["tokens"] == expected
    assert card["tokens"] == sum(facts["tokens"] for facts in card["sources"].values())


def test_a_saved_mix_is_a_data_set_that_loads(excerpts, tmp_path):
    from datasets import load_dataset

    recipe = MIX_OF_EXCERPTS.format(data=DATA)
    out = save_mix(excerpts, tmp_path / "out", recipe=recipe)
    mix, train, validation = load_saved(out)
    assert mix == excerpts.mix
    assert train.to_dict() == excerpts.train.to_dict()
    assert validation.to_dict() == excerpts.validation.to_dict()
    loaded = load_dataset(str(out))
    assert {split: len(rows) for split, rows in loaded.items()} == {
        "train": len(train), "validation": len(validation),
    }  # fmt: skip
    text = (out / "README.md").read_text("utf-8")
    for expected in ("# excerpts", "| tico19 |", "CC0-1.0", "- tico19: nothing at all",
                     "| flores | 16 |", "- math, problems: mathematics ("):  # fmt: skip
        assert expected in text
    with pytest.raises(MergeError, match="exists already; choose another output or pass --ov"):
        save_mix(excerpts, out, recipe=recipe)
    assert save_mix(excerpts, out, recipe=recipe, overwrite=True) == out
    with pytest.raises(DataError, match=r"no data_card\.json; give a folder that `layerswap data"):
        load_saved(tmp_path)


ROW = {"turns": [["Hi", "Hello"], ["Bye", "Goodbye"]]}
MESSAGES = [
    {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Goodbye"},
]  # fmt: skip


def conversation(tmp_path, **more):
    write_jsonl(tmp_path / "c.jsonl", [ROW])
    source = {"path": "c.jsonl", "messages": {"column": "turns", "layout": "pairs"}}
    return build({"name": "c", "sources": {"c": source}, **more}, tmp_path).train[0]


def test_each_kind_has_its_rows(tmp_path):
    assert conversation(tmp_path) == {"prompt": MESSAGES[:3], "completion": MESSAGES[3:]}
    assert conversation(tmp_path, kind="messages") == {"messages": MESSAGES}
    assert conversation(tmp_path, kind="prompt-completion", separator="\n--\n") == {
        "prompt": "Hi\n--\nHello\n--\nBye\n--\n", "completion": "Goodbye",
    }  # fmt: skip
    assert conversation(tmp_path, kind="text") == {"text": "Hi\nHello\nBye\nGoodbye"}


def test_raw_text_stays_as_it_is(tmp_path):
    write_jsonl(tmp_path / "t.jsonl", [{"text": "  A page.\n\n\n\nAnother.\n"}])
    mix = {"name": "t", "kind": "text", "sources": {"t": {"path": "t.jsonl", "text": "{text}"}}}
    assert build(mix, tmp_path).train[0] == {"text": "A page.\n\n\n\nAnother."}


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_chat_template_writes_what_the_tokenizer_would(tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    row = conversation(tmp_path, kind="prompt-completion", chat_template="chat.jinja")
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = TEMPLATE
    whole = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert row["prompt"] + row["completion"] == whole
    assert row["completion"] == "Goodbye<|end|>"
    text = conversation(tmp_path, kind="text", chat_template="chat.jinja")
    assert text == {"text": whole}


def test_a_chat_template_that_is_wrong_is_named(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages | length }}")
    with pytest.raises(DataError, match=r"chat\.jinja: the prompt is not the beginning of"):
        conversation(tmp_path, kind="prompt-completion", chat_template="chat.jinja")
    with pytest.raises(DataError, match=r"chat_template: .*no\.jinja: cannot be read \(No such"):
        conversation(tmp_path, kind="text", chat_template="no.jinja")


def test_errors_name_the_source(tmp_path):
    mix = numbered(tmp_path, a=2)
    mix["sources"]["a"]["prompt"] = "{question}"
    with pytest.raises(DataError, match=r"^source 'a' \(a\.jsonl\): prompt: no column 'question'"):
        build(mix, tmp_path)
    mix = numbered(tmp_path, a=2)
    mix["filters"] = {"evaluation": {"against": {"e": {"path": "a.jsonl", "columns": ["x"]}}}}
    with pytest.raises(DataError, match=r"^evaluation set 'e' \(a\.jsonl\): columns: no column"):
        build(mix, tmp_path)
    mix["sources"]["a"]["language"] = "swa"
    mix["filters"] = {"language": True}
    with pytest.raises(DataError, match=r"^filters\.language: py3langid knows no language 'swa'"):
        build(mix, tmp_path)


def test_what_is_missing_is_known_before_anything_is_read(tmp_path):
    mix = numbered(tmp_path, a=200)
    mix["sources"]["b"] = {**mix["sources"]["a"], "path": "b.jsonl"}
    seen = []
    with pytest.raises(DataError, match=r"^source 'b' \(b\.jsonl\): .*/b\.jsonl: no such file"):
        build(mix, tmp_path, progress=lambda *step: seen.append(step))
    assert not seen


def test_filters_that_leave_nothing_are_told(tmp_path):
    mix = numbered(tmp_path, a=3) | {"filters": {"length": {"min_text": 1000}}}
    with pytest.raises(DataError, match=r"^mix 'numbers': no example is left; dropped: length 3$"):
        build(mix, tmp_path)


def test_the_local_folder_must_exist(tmp_path):
    with pytest.raises(DataError, match=f"^--local {tmp_path}/no: no such folder$"):
        build(numbered(tmp_path, a=2), tmp_path, local=tmp_path / "no")


def test_progress_is_told_of_every_row(tmp_path):
    seen = []
    build(numbered(tmp_path, a=250), tmp_path, progress=lambda *step: seen.append(step))
    assert seen == [("a", 100, 250), ("a", 200, 250), ("a", 250, 250)]


def published(mix, local):
    """Little copies of a recipe's data sets, with its columns, where `hf download` puts them."""
    language = mix.languages[0]
    flores = {"en": "eng_Latn", "sw": "swh_Latn", "bn": "ben_Beng", "te": "tel_Telu",
              "ja": "jpn_Jpan"}[language]  # fmt: skip
    target = read_lines(f"flores.{flores}")
    english = read_lines("flores.eng_Latn")
    for name, source in mix.sources.items():
        folder = local / source.id
        rows = []
        for i, (ask, line) in enumerate(zip(english, target, strict=True)):
            row = dict.fromkeys(_columns(source), ask)
            answer = f"{i} {name} {line}"
            row |= {column: values[0] for column, values in source.where.items()}
            if source.messages:
                row = {source.messages.column: [[ask, answer]]}
            elif source.text:
                row = {"text": f"{answer}\n" * 4}
            else:
                row[source.completion.strip("{}")] = answer
            rows.append(row)
        _publish(folder, source, rows)
    for origin in mix.filters.evaluation.against.values():
        row = dict.fromkeys(origin.columns, read_mgsm(language)[0][0])
        _publish(local / origin.id, origin, [row])


def _columns(source):
    from layerswap.training.mix.mapping import used_columns

    return used_columns(source) - {"text"} if source.text else used_columns(source)


def _publish(folder, origin, rows):
    if origin.header:
        name = origin.files[0].rsplit("/", 1)[-1]
        text = "".join(
            "\t".join(str(row.get(c, "x")) for c in origin.header) + "\n" for row in rows
        )
        folder.mkdir(parents=True, exist_ok=True)
        data = text.encode()
        import gzip

        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    elif origin.files:
        import pyarrow as pa
        import pyarrow.parquet as pq

        name = origin.files[0].replace("*", "xp3_tasks")
        if name.endswith(".parquet"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows), folder / name)
        else:
            write_jsonl(folder / name, rows)
            if name == origin.files[0]:
                return
            leak = [{key: read_lines("flores.swh_Latn")[0] for key in rows[0]}]
            write_jsonl(folder / name.replace("tasks", "facebook_flores"), leak)
    else:
        inner = folder / (origin.config or "data")
        splits = origin.split.split("+")
        for split in splits:
            known = split in ("train", "test", "dev", "devtest")
            write_jsonl(inner / f"{split}{'' if known else '-00000-of-00001'}.jsonl", rows)
        if len(splits) > 1:  # names that `datasets` would not guess are laid out in the card
            files = [{"split": s, "path": f"{origin.config}/{s}.jsonl"} for s in splits]
            card = {"configs": [{"config_name": origin.config, "data_files": files}]}
            (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")


TRANSFER = {"sw": "swa", "ha": "hau", "yo": "yor"}


@pytest.mark.parametrize(("code", "column"), TRANSFER.items())
def test_news_recipes_build_from_a_downloaded_copy(code, column, tmp_path):
    (name,) = (n for n in ready_recipes() if n.endswith("-news") and code in read_mix(n).languages)
    folder = tmp_path / "masakhane" / "mafand" / f"en-{column}"
    folder.mkdir(parents=True)
    english = read_lines("flores.eng_Latn")
    rows = [{"translation": {"en": one, column: f"{one} ({column})"}} for one in english]
    write_jsonl(folder / "train.jsonl", rows)
    built = build_mix(read_mix(name), local=tmp_path)
    assert [tally.kept for tally in built.tallies.values()] == [len(rows)] * 3
    texts = [*built.train["text"], *(built.validation["text"] if built.validation else [])]
    assert any(text.startswith("English: ") for text in texts)


def test_topics_of_english_sentences_build_as_the_suite_asks_them(tmp_path):
    folder = tmp_path / "Davlan" / "sib200" / "eng_Latn"
    folder.mkdir(parents=True)
    rows = [{"index_id": i, "category": "travel", "text": f"Trip {i}."} for i in range(200)]
    write_jsonl(folder / "train.jsonl", rows)
    built = build_mix(read_mix("sib200-english"), local=tmp_path)
    assert (len(built.train), len(built.validation)) == (130, 70)
    assert built.train[0]["prompt"].startswith("Text: Trip ")
    assert built.train[0]["prompt"].endswith(".\nTopic:")
    assert built.train[0]["completion"] == " travel"


def test_topics_of_english_headlines_build_as_the_suite_asks_them(tmp_path):
    folder = tmp_path / "masakhane" / "masakhanews" / "data" / "eng"
    folder.mkdir(parents=True)
    rows = "".join(f'sports\tMatch {i}\t"A match,\nplayed."\thttps://\n' for i in range(200))
    (folder / "train.tsv").write_text("category\theadline\ttext\turl\n" + rows)
    built = build_mix(read_mix("masakhanews-english"), local=tmp_path)
    assert (len(built.train), len(built.validation)) == (100, 100)
    assert built.train[0]["prompt"].startswith("Text: Match ")
    assert built.train[0]["prompt"].endswith("\nTopic:")
    assert built.train[0]["completion"] == " sports"


def test_sentiments_of_english_tweets_build_as_the_suite_asks_them(tmp_path):
    folder = tmp_path / "cardiffnlp" / "tweet_eval" / "sentiment"
    folder.mkdir(parents=True)
    rows = {"text": [f"Tweet {i}" for i in range(300)], "label": [i % 3 for i in range(300)]}
    Dataset.from_dict(rows).to_parquet(folder / "train-00000-of-00001.parquet")
    built = build_mix(read_mix("tweeteval-english"), local=tmp_path)
    assert (len(built.train), len(built.validation)) == (200, 100)
    for row in built.train:
        number = int(re.fullmatch(r"Tweet: Tweet (\d+)\nSentiment:", row["prompt"])[1])
        assert row["completion"] == f" {('negative', 'neutral', 'positive')[number % 3]}"


PAPERS = [
    name for name in ready_recipes() if not name.endswith("-news") and not name.endswith("-english")
]


@pytest.mark.parametrize("name", PAPERS)
def test_every_ready_recipe_builds_from_downloaded_copies(name, tmp_path):
    mix = read_mix(name)
    published(mix, tmp_path / "downloads")
    built = build_mix(mix, local=tmp_path / "downloads")
    assert set(built.tallies) == set(mix.sources)
    for source, tally in built.tallies.items():
        assert tally.kept > 0, (source, built.filters.counts)
        assert tally.origin == f"{mix.sources[source].id} (local copy)"
    assert built.index.sets
    if name == "swahili":
        assert built.tallies["xp3mt"].rows == 16  # the FLORES file was left out
    column = "text" if mix.kind == "text" else "completion"
    assert column in built.train.column_names
    assert mix_text(name)


@pytest.mark.slow
def test_trl_trains_on_the_rows(excerpts, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = TEMPLATE
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(TOKENIZER),
        args=SFTConfig(
            output_dir=str(tmp_path), max_steps=1, use_cpu=True, bf16=False, report_to="none",
            max_length=128, per_device_train_batch_size=2, save_strategy="no",
            activation_checkpointing=False,
        ),
        train_dataset=excerpts.train,
        processing_class=tokenizer,
    )  # fmt: skip
    labels = trainer.train_dataset[0]
    assert "labels" in labels or "completion_mask" in labels
    assert trainer.train().training_loss > 0


def prompts_and_answers(tmp_path, **mix):
    lines = [json.dumps({"q": f"question {i}", "a": f"answer {i}"}) for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    source = {"path": "rows.jsonl", "prompt": "{q}", "completion": "{a}"}
    sources = {"rows": source | mix.pop("source", {})}
    return build({"name": "m", "sources": sources, **mix}, tmp_path)


def test_a_space_between_prompt_and_completion_is_warned_of(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bytes_of = Tokenizer(models.BPE())
    bytes_of.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_of.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    bytes_of.train_from_iterator(["question 1 answer 1", "question 2 answer 2"] * 9, trainer)
    tokenizer = str(tmp_path / "tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=bytes_of).save_pretrained(tokenizer)

    def warnings(given=None, **mix):
        made = prompts_and_answers(tmp_path, kind="prompt-completion", **mix)
        return data_card(made, given)["warnings"]

    for known in (None, tokenizer):
        (warning,) = warnings(known, separator=" ")
        assert warning.startswith("in 20 of 20 rows the tokens of the prompt do not begin")
        assert warnings(known) == []
        assert warnings(known, separator="", source={"completion": " {a}"}) == []
    made = prompts_and_answers(tmp_path, kind="prompt-completion", separator=" ")
    out = save_mix(made, tmp_path / "out", recipe="")
    assert "## Warnings" in (out / "README.md").read_text()


def test_evaluation_items_in_a_source_that_skips_the_filter_are_known(tmp_path):
    items = [f"this is a long question number {i} about the same old thing again" for i in range(9)]
    (tmp_path / "items.jsonl").write_text("\n".join(json.dumps({"q": q}) for q in items) + "\n")
    lines = [json.dumps({"q": q, "a": "yes"}) for q in [*items[:3], "short"]]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    source = {"path": "rows.jsonl", "prompt": "{q}", "completion": "{a}", "skip": ["evaluation"]}
    against = {"items": {"path": "items.jsonl", "columns": ["q"]}}
    mix = {"name": "m", "sources": {"rows": source}, "kind": "prompt-completion",
           "filters": {"evaluation": {"against": against}}}  # fmt: skip
    found = build_mix(parse_mix(json.dumps(mix)), folder=tmp_path)
    assert found.tallies["rows"].contaminated == {"items": 3}
    out = save_mix(found, tmp_path / "out", recipe=json.dumps(mix))
    assert (
        "3 examples contain an item of the evaluation set items" in (out / "README.md").read_text()
    )

    from layerswap.training.expert.rows import load_rows

    assert load_rows(str(out), folder=tmp_path).contaminated == {"items": 3}
