"""From rows to examples: plain and Jinja templates, conversations, and their mistakes."""

import re

import pytest
from datasets import Dataset

from layerswap.ground.errors import DataError
from layerswap.training.mix.examples import ExampleMaker, MixExample
from layerswap.training.mix.schema import MixSource
from layerswap.training.mix.templates import template_mistake


def make(row, **source):
    source = {"path": "x.jsonl", **source}
    if "prompt" in source:
        source.setdefault("completion", "{a}")
    maker = ExampleMaker(MixSource.model_validate(source), "name")
    maker.check(Dataset.from_list([row]))
    return maker.make(row)


def prompt_of(row, prompt):
    return make({"a": "answer", **row}, prompt=prompt).prompt


def test_a_plain_template_fills_in_columns():
    row = {"q": " What? ", "n": 3, "x": {"en": "hello", "list": ["first", "second"]}}
    assert prompt_of(row, "Q{n}: {q}\n\n{x[en]} {x[list][1]}") == "Q3: What?\n\nhello second"
    assert prompt_of(row, "{{{q}}}") == "{What?}"
    example = make({"q": "What?", "a": "That."}, prompt="{q}", completion=" {a}", language="sw")
    assert example == MixExample((("user", "What?"), ("assistant", " That.")), "", "sw", "name")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{i}\n\n{x}", "Do it."),
        ("{x}\n\n{i}", "Do it."),
        ("{i}\n\n{x}\n\nAnswer:\n", "Do it.\n\nAnswer:\n"),
        ("{i}\n\n{y}", "Do it.\n\nWith this."),
    ],
)
def test_an_empty_field_leaves_no_blank_lines(template, text):
    assert prompt_of({"i": "Do it.", "x": None, "y": "With this."}, template) == text


def test_a_row_without_prompt_or_completion_gives_no_example():
    assert make({"q": "", "a": "x"}, prompt="{q}") is None
    assert make({"q": "x", "a": None}, prompt="{q}") is None
    assert make({"t": " \n"}, text="{t}") is None
    assert make({"t": "page"}, text="{t}") == MixExample((), "page", None, "name")


@pytest.mark.parametrize(
    ("template", "syntax", "message"),
    [
        ("{q!r}", "plain", r"\{q!r\} is not \{column\} or \{column\[key\]\}; for more write temp"),
        ("{q:>10}", "plain", r"\{q:>10\} is not \{column\}"),
        ("{}", "plain", r"\{\} is not \{column\}"),
        ("{q.__class__[x]} }", "plain", "Single '}' encountered"),
        ("no column", "plain", "names no column, so every row would be the same"),
        ("{{ q ", "jinja", r"^not a jinja template \("),
    ],
)
def test_a_text_that_is_no_template_is_refused(template, syntax, message):
    assert re.search(message, template_mistake(template, syntax))


@pytest.mark.parametrize(
    ("row", "source", "message"),
    [
        ({"q": "x", "a": "y"}, {"prompt": "{q.__class__}"}, "no column 'q.__class__'; there are a"),
        ({"inputs": "x", "a": "y"}, {"prompt": "{inptus}"}, "no column 'inptus'; did you mean 'in"),
        ({"q": "x", "a": "y"}, {"prompt": "{q}", "completion": "{b}"}, "completion: no column 'b'"),
        ({"x": {"en": "hello"}, "a": "y"}, {"prompt": "{x[sw]}"}, r"prompt: a row has no x\[sw\]"),
        ({"q": "x", "a": "y"}, {"template": "jinja", "prompt": "{{ z }}", "completion": "{{ a }}"},
         "prompt: no column 'z'; there are a, q"),
        ({"q": "x", "a": "y"}, {"template": "jinja", "prompt": "{{ q.__class__.__mro__ }}"},
         "prompt: the template fails on a row"),
        ({"q": "x", "a": "y"}, {"template": "jinja", "prompt": "{{ q.nothing }}"},
         "prompt: the template fails on a row"),
        ({"c": [{"role": "bot", "content": "x"}]}, {"messages": {"column": "c"}},
         "messages.roles: unknown role 'bot'; map it to system, user or assistant"),
        ({"c": [{"from": "bot", "value": "x"}]}, {"messages": {"column": "c"}},
         "messages.roles: unknown role 'bot'; map it to system, user or assistant"),
        ({"c": [{"from": "bot", "says": "x"}]}, {"messages": {"column": "c"}},
         "has no 'role' and 'content'; it has from, says"),
        ({"d": []}, {"messages": {"column": "c"}}, "messages.column: no column 'c'"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_is_refused(row, source, message):
    with pytest.raises(DataError, match=message):
        make(row, **source)


def test_a_jinja_template_can_choose():
    row = {"q": "cause", "premise": "Rain.", "choices": ["a", "b"], "label": 1}
    example = make(
        row,
        template="jinja",
        prompt="{{ premise }} {{ 'Why?' if q == 'cause' else 'So?' }}\n",
        completion="{{ choices[label] }}",
    )
    assert example.turns == (("user", "Rain. Why?\n"), ("assistant", "b"))
    source = {"path": "x", "template": "jinja", "prompt": "{{ a }}{% if b %}{{ b }}{% endif %}",
              "completion": "{{ c[0] }}"}  # fmt: skip
    assert ExampleMaker(MixSource.model_validate(source), "name").columns == {"a", "b", "c"}


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


@pytest.mark.parametrize("value", [["Hi"], None, ["Hi", "", "So?", "Well."]])
def test_a_conversation_without_an_answer_or_with_a_gap_gives_no_example(value):
    mapping = {"column": "c", "layout": "alternating"}
    assert make({"c": value}, messages=mapping) is None
    kept = make({"c": ["Hi", "Hello", "And then?"]}, messages=mapping)
    assert kept.turns == (("user", "Hi"), ("assistant", "Hello"))


def test_a_system_column_beside_a_conversation_is_said():
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with pytest.warns(UserWarning, match="source 'name': its column 'system' is not read; write"):
        make({"chat": turns, "system": "In Swahili."}, messages={"column": "chat"})
