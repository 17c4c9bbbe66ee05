"""From rows to examples: plain and jinja templates, conversations, and their mistakes."""

from __future__ import annotations

import re

import pytest

from layerswap.errors import DataError
from layerswap.training.mix.mapping import MixExample, example_maker, used_columns
from layerswap.training.mix.schema import MixSource, template_mistake


def make(row, **source):
    given = {"path": "x.jsonl", **source}
    if "prompt" in given:
        given.setdefault("completion", "{a}")
    return example_maker(MixSource.model_validate(given), "name", list(row))(row)


def prompt_of(row, prompt, **more):
    return make({"a": "answer", **row}, prompt=prompt, **more).prompt


def test_a_plain_template_fills_in_columns():
    row = {"q": " What? ", "n": 3, "x": {"en": "hello", "list": ["first", "second"]}}
    assert prompt_of(row, "Q{n}: {q}\n\n{x[en]} {x[list][1]}") == "Q3: What?\n\nhello second"
    assert prompt_of(row, "{{{q}}}") == "{What?}"
    example = make({"q": "What?", "a": "That."}, prompt="{q}", completion=" {a}", language="sw")
    assert example == MixExample((("user", "What?"), ("assistant", " That.")), "", "sw", "name")


def test_an_empty_input_leaves_no_hole_and_no_loose_end():
    row = {"i": "Do it.", "x": None}
    assert prompt_of(row, "{i}\n\n{x}") == "Do it."
    assert prompt_of(row, "{x}\n\n{i}") == "Do it."
    assert prompt_of(row, "{i}\n\n{x}\n\nAnswer:\n") == "Do it.\n\nAnswer:\n"
    assert prompt_of({"i": "Do it.", "x": "With this."}, "{i}\n\n{x}") == "Do it.\n\nWith this."


def test_a_row_without_prompt_or_completion_gives_no_example():
    assert make({"q": "", "a": "x"}, prompt="{q}") is None
    assert make({"q": "x", "a": None}, prompt="{q}") is None
    assert make({"t": " \n"}, text="{t}") is None
    assert make({"t": "page"}, text="{t}") == MixExample((), "page", None, "name")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{q!r}", r"\{q!r\} is not \{column\} or \{column\[key\]\}; for more write template"),
        ("{q:>10}", r"\{q:>10\} is not \{column\}"),
        ("{}", r"\{\} is not \{column\}"),
        ("{q.__class__[x]} }", "Single '}' encountered"),
        ("no column", "names no column, so every row would be the same"),
    ],
)
def test_what_is_not_a_plain_template_is_refused(template, message):
    assert re.search(message, template_mistake(template, "plain"))


def test_a_plain_template_never_reads_attributes():
    with pytest.raises(DataError, match=r"prompt: no column 'q.__class__'; there are a, q"):
        make({"q": "x", "a": "y"}, prompt="{q.__class__}")


def test_a_wrong_column_is_named_with_the_nearest_one():
    with pytest.raises(DataError, match=r"prompt: no column 'inptus'; did you mean 'inputs'\?"):
        make({"inputs": "x", "a": "y"}, prompt="{inptus}")
    with pytest.raises(DataError, match="completion: no column 'b'; there are a, q"):
        make({"q": "x", "a": "y"}, prompt="{q}", completion="{b}")
    with pytest.raises(DataError, match=r"prompt: a row has no x\[sw\]"):
        make({"x": {"en": "hello"}, "a": "y"}, prompt="{x[sw]}")


def test_a_jinja_template_can_choose():
    row = {"q": "cause", "premise": "Rain.", "choices": ["a", "b"], "label": 1}
    example = make(
        row,
        template="jinja",
        prompt="{{ premise }} {{ 'Why?' if q == 'cause' else 'So?' }}\n",
        completion="{{ choices[label] }}",
    )
    assert example.turns == (("user", "Rain. Why?\n"), ("assistant", "b"))


def test_jinja_is_sandboxed_and_strict():
    row = {"q": "x", "a": "y"}
    for attack in ("{{ q.__class__.__mro__ }}", "{{ q.nothing }}"):
        with pytest.raises(DataError, match="prompt: the template fails on a row"):
            make(row, template="jinja", prompt=attack, completion="{{ a }}")
    with pytest.raises(DataError, match="prompt: no column 'z'; there are a, q"):
        make(row, template="jinja", prompt="{{ z }}", completion="{{ a }}")
    assert template_mistake("{{ q ", "jinja").startswith("not a jinja template (")


def test_conversations_in_three_layouts_are_the_same():
    turns = (("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "Goodbye"))
    named = [{"who": "human" if role == "user" else "bot", "says": text} for role, text in turns]
    roles = {"human": "user", "bot": "assistant"}
    layouts = [
        (named, {"role": "who", "content": "says", "roles": roles}),
        ([["Hi", "Hello"], ["Bye", "Goodbye"]], {"layout": "pairs"}),
        (["Hi", "Hello", "Bye", "Goodbye"], {"layout": "alternating"}),
    ]
    for value, mapping in layouts:
        assert make({"c": value}, messages={"column": "c", **mapping}).turns == turns


def test_a_conversation_ends_with_an_answer():
    value = ["Hi", "Hello", "And then?"]
    mapping = {"column": "c", "layout": "alternating"}
    assert make({"c": value}, messages=mapping).turns == (("user", "Hi"), ("assistant", "Hello"))
    assert make({"c": ["Hi"]}, messages=mapping) is None
    assert make({"c": None}, messages=mapping) is None
    assert make({"c": ["Hi", "", "So?", "Well."]}, messages=mapping) is None


def test_roles_and_keys_that_are_not_there_are_named():
    with pytest.raises(DataError, match=r"messages.roles: says nothing about the role 'bot'"):
        make({"c": [{"role": "bot", "content": "x"}]}, messages={"column": "c"})
    with pytest.raises(DataError, match="has no 'role' and 'content'; it has from, value"):
        make({"c": [{"from": "bot", "value": "x"}]}, messages={"column": "c"})


def test_only_the_columns_that_are_used_are_asked_for():
    source = MixSource.model_validate(
        {"path": "x", "template": "jinja", "prompt": "{{ a }}{% if b %}{{ b }}{% endif %}",
         "completion": "{{ c[0] }}"}
    )  # fmt: skip
    assert used_columns(source) == {"a", "b", "c"}
