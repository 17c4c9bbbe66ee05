"""Building a mix: shares, caps, seeds, kinds of rows, and errors."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_files import write_jsonl

from layerswap.ground.errors import DataError
from layerswap.training.mix.build import build_mix, share
from layerswap.training.mix.schema import parse_mix

TOKENIZER = Path(__file__).parents[2] / "src/layerswap/lab/assets/base"


def numbered(tmp_path, **sizes):
    """A mix of sources whose rows are numbered texts, each unlike the others."""
    for name, size in sizes.items():
        rows = [{"q": f"{name} question {i}", "a": f"{name} answer {i}"} for i in range(size)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    sources = {
        name: {"path": f"{name}.jsonl", "prompt": "{q}", "completion": "{a}"} for name in sizes
    }
    return {"name": "numbers", "kind": "prompt-completion", "sources": sources}


def build(mix, folder, **options):
    return build_mix(parse_mix(json.dumps(mix)), folder=folder, **options)


def counts(built):
    return Counter(example.source for example in built.examples)


@given(
    st.integers(0, 10_000),
    st.dictionaries(st.text("abc", min_size=1), st.floats(0.01, 100), min_size=1),
)
def test_shares_are_whole_numbers_within_one_of_the_exact_share(total, weights):
    shares = share(total, weights)
    assert sum(shares.values()) == total
    for name, weight in weights.items():
        assert abs(shares[name] - total * weight / sum(weights.values())) < 1 + 1e-9


def test_without_a_total_every_row_appears_once_in_shuffled_order(tmp_path):
    built = build(numbered(tmp_path, a=30, b=10), tmp_path)
    assert counts(built) == {"a": 30, "b": 10}
    assert len(set(built.train["prompt"])) == 40
    order = [example.source for example in built.examples]
    assert sum(x != y for x, y in pairwise(order)) > 8


@pytest.mark.parametrize(
    ("sizes", "total", "changes", "expected"),
    [
        ({"a": 100, "b": 100}, 40, {"b": {"weight": 3}}, {"a": 10, "b": 30}),
        ({"a": 5, "b": 100, "c": 100}, 65, {"c": {"weight": 2}}, {"a": 5, "b": 20, "c": 40}),
        ({"a": 5, "b": 100, "c": 30}, 1000, {"c": {"weight": 2}}, {"a": 5, "b": 100, "c": 30}),
    ],
)  # fmt: skip
def test_a_total_is_shared_by_weight_and_others_replace_what_a_source_lacks(
    tmp_path, sizes, total, changes, expected
):
    mix = numbered(tmp_path, **sizes) | {"total": total}
    for name, change in changes.items():
        mix["sources"][name] |= change
    built = build(mix, tmp_path)
    assert counts(built) == expected
    # No row is read beyond the share.
    assert {name: tally.looked_at for name, tally in built.tallies.items()} == expected


@pytest.mark.parametrize(
    ("total", "validation", "held_out"),
    [(None, 0.1, 5), ("all", 0.01, 1), ("all", 0, 0), ("all", 0.999, 49), (20, 0.25, 5),
     ("20", 0.25, 5)],
)  # fmt: skip
def test_validation_may_be_a_share_of_all_rows_or_of_a_total(tmp_path, total, validation, held_out):
    mix = numbered(tmp_path, a=50) | {"total": total, "validation": validation}
    built = build(mix, tmp_path)
    size = 20 if total in (20, "20") else 50
    assert (len(built.train), len(built.validation)) == (size - held_out, held_out)
    assert not set(built.train["prompt"]) & set(built.validation["prompt"])


def test_validation_of_more_rows_than_the_sources_hold(tmp_path):
    built = build(numbered(tmp_path, a=21) | {"total": "all", "validation": 50}, tmp_path)
    assert (len(built.train), len(built.validation)) == (11, 10)


def test_the_seed_decides_and_each_source_can_have_its_own(tmp_path):
    mix = numbered(tmp_path, a=60, b=60) | {"total": 20}
    first, again = build(mix, tmp_path), build(mix, tmp_path)
    assert first.train.to_dict() == again.train.to_dict()
    assert build(mix | {"seed": 1}, tmp_path).train.to_dict() != first.train.to_dict()
    mix["sources"]["a"]["seed"] = 5
    reseeded = build(mix, tmp_path)

    def prompts(built, name):
        return {e.prompt for e in built.examples if e.source == name}

    assert prompts(first, "b") == prompts(reseeded, "b")
    assert prompts(first, "a") != prompts(reseeded, "a")


MESSAGES = [
    {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Goodbye"},
]  # fmt: skip


def conversation(tmp_path, **options):
    write_jsonl(tmp_path / "c.jsonl", [{"turns": [["Hi", "Hello"], ["Bye", "Goodbye"]]}])
    source = {"path": "c.jsonl", "messages": {"column": "turns", "layout": "pairs"}}
    return build({"name": "c", "sources": {"c": source}, **options}, tmp_path).train[0]


def test_each_kind_has_its_rows(tmp_path):
    assert conversation(tmp_path) == {"prompt": MESSAGES[:3], "completion": MESSAGES[3:]}
    assert conversation(tmp_path, kind="messages") == {"messages": MESSAGES}
    assert conversation(tmp_path, kind="prompt-completion", separator="\n--\n") == {
        "prompt": "Hi\n--\nHello\n--\nBye\n--\n", "completion": "Goodbye",
    }  # fmt: skip
    assert conversation(tmp_path, kind="text") == {"text": "Hi\nHello\nBye\nGoodbye"}


def test_raw_text_is_stripped_and_otherwise_unchanged(tmp_path):
    write_jsonl(tmp_path / "t.jsonl", [{"text": "  A page.\n\n\n\nAnother.\n"}])
    mix = {"name": "t", "kind": "text", "sources": {"t": {"path": "t.jsonl", "text": "{text}"}}}
    assert build(mix, tmp_path).train[0] == {"text": "A page.\n\n\n\nAnother."}


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def changed(mix, **changes):
    """The mix with other keys of its source `a`, or other keys of its own."""
    mix["sources"]["a"] |= changes.pop("a", {})
    return mix | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": {"prompt": "{question}"}},
         r"^source 'a' \(a\.jsonl\): prompt: no column 'question'"),
        ({"filters": {"evaluation": {"against": {"e": {"path": "a.jsonl", "columns": ["x"]}}}}},
         r"^evaluation set 'e' \(a\.jsonl\): columns: no column 'x'"),
        ({"a": {"language": "swa"}, "filters": {"language": True}},
         r"^source 'a': the language filter \(py3langid, \d+ languages\) does not know 'swa'; "
         "write sw$"),
        ({"a": {"language": "lua"}, "filters": {"language": True}},
         r"does not know 'lua'; learn it by texts: \{CODE: FILE, \.\.\.\}, or write "
         r"skip: \[language\] in the source, or language: false$"),
        ({"filters": {"length": {"min_text": 1000}}},
         r"^mix 'numbers': no example is left; dropped: length 2$"),
    ],
)  # fmt: skip
def test_an_error_names_the_source_or_the_key(tmp_path, changes, message):
    mix = changed(numbered(tmp_path, a=2), **changes)
    with pytest.raises(DataError, match=message):
        build(mix, tmp_path)


def test_a_missing_source_fails_before_anything_is_read(tmp_path):
    mix = numbered(tmp_path, a=200)
    mix["sources"]["b"] = {**mix["sources"]["a"], "path": "b.jsonl"}
    calls = []
    with pytest.raises(DataError, match=r"^source 'b' \(b\.jsonl\): .*/b\.jsonl: no such file"):
        build(mix, tmp_path, progress=lambda *step: calls.append(step))
    assert not calls
    with pytest.raises(DataError, match=f"^--local {tmp_path}/no: no such folder$"):
        build(numbered(tmp_path, a=2), tmp_path, local=tmp_path / "no")


def test_progress_counts_the_rows_of_a_source(tmp_path):
    calls = []
    build(numbered(tmp_path, a=250), tmp_path, progress=lambda *step: calls.append(step))
    assert calls == [("a", 100, 250), ("a", 200, 250), ("a", 250, 250)]
