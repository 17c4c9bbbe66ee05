"""YAML: lines of key paths, and hostile files."""

from __future__ import annotations

import math
import time

import pytest
import yaml
from refusals import refused

from layerswap.compose.recipe import read_recipe
from layerswap.ground import yaml_file
from layerswap.ground.errors import RecipeError
from layerswap.ground.yaml_file import dump_yaml, parse_yaml

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
)


def refusal(text):
    return refused(RecipeError, parse_yaml, text, "r.yaml")


def test_lines_of_key_paths():
    value, lines = parse_yaml("a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n", "r.yaml")
    assert value == {"a": {"b": 1, "c": ["x", {"d": 2}]}}
    assert lines == {
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "c"): 3,
        ("a", "c", 0): 4,
        ("a", "c", 1): 5,
        ("a", "c", 1, "d"): 5,
    }
    assert parse_yaml("", "r.yaml") == (None, {})


def test_aliases_stand_for_their_value():
    value, lines = parse_yaml("a: &x {b: 1, c: 2}\nd: *x\ne: {<<: *x, c: 3}\n", "r.yaml")
    assert value == {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 2}, "e": {"b": 1, "c": 3}}
    assert lines["d", "b"] == 1
    assert lines["e", "c"] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "r.yaml: line 2: key 'a' is given twice"),
        ('a:\n- "b\\0c"', r"r.yaml: line 2: 'b\x00c' holds NUL or half of a surrogate pair"),
        ('"\\ud800": 1', r"r.yaml: line 1: '\ud800' holds NUL or half of a surrogate pair"),
        ("x:\n  a: 1\n  b: 2\n  a: 3", "r.yaml: line 4: key 'a' is given twice"),
        ("a: &a [*a]", "r.yaml: line 1: an alias makes a value contain itself"),
        (BOMB, "r.yaml: line 6: aliases expand this to more than 100,000 values"),
        ("a: &x {b: 1, b: 2}\nc: *x", "r.yaml: line 1: key 'b' is given twice"),
        ("a: *x", "r.yaml: line 1: not valid YAML (found undefined alias 'x')"),
        ("[" * 5000, "r.yaml: lists and mappings are nested too deeply"),
        ("[" * 3000 + "]" * 3000, "r.yaml: lists and mappings are nested too deeply"),
        ("a: 1\n---\nb: 2", "r.yaml: line 2: a second YAML document begins here; write each into a "
         "file of its own"),
        ("? [1]\n: 2", "r.yaml: line 1: not valid YAML (found unhashable key)"),
        ("a: [1\nb: 2", "r.yaml: line 2: not valid YAML (expected ',' or ']', but got ':')"),
    ],
)  # fmt: skip
def test_refusals_are_quick(text, message):
    start = time.process_time()
    assert refusal(text) == message
    assert time.process_time() - start < 60  # it would otherwise take years


@pytest.mark.parametrize("text", ["- a\n", "- {a: b}\n", "- [[[]]]\n", "- *x\n"])
def test_a_long_file_is_refused_before_its_end(monkeypatch, text):
    monkeypatch.setattr(yaml_file, "LARGEST", 1000)
    assert " more than 1,000 values" in refusal(f"- &x a\n{text * 1000}]")


TAGS = [
    "!!python/object/apply:os.getcwd []", "!!set {a, b}", "!!bool x", "!!int ''", "!!float x",
    "!!timestamp x", "!!binary x", "!!null x", "!!str 1", "!own x", "! x", "!<tag:x> y",
    "!!omap [a: 1]",
]  # fmt: skip


@pytest.mark.parametrize("place", ["{}", "a: {}", "a:\n  - {}", "[{}]", "{}: 1"])
@pytest.mark.parametrize("tag", TAGS)
def test_tags_are_refused(tag, place):
    message = refusal(place.format(tag))
    line = place[: place.index("{")].count("\n") + 1
    assert message == f"r.yaml: line {line}: a tag ('!…') is not allowed; write a text in quotes"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30", "1:30"), ("190:20:30.15", "190:20:30.15"), ("010", 10), ("0o10", 8), ("0x1F", 31),
        ("-07", -7), ("+3", 3), ("1_000", "1_000"), ("0b11", "0b11"), ("1e-5", 1e-5), ("1e3", 1e3),
        (".5", 0.5), ("5.", 5.0), ("+.5e1", 5.0), ("1.5", 1.5), ("08.5", 8.5), (".inf", math.inf),
        ("-.INF", -math.inf), ("2001-01-01", "2001-01-01"), ("2020-13-45", "2020-13-45"),
        ("=", "="), ("'!x'", "!x"), ("a!b", "a!b"), ("~", None), ("null", None), ("", None),
        ("true", True), ("off", False), ("nan", "nan"), ("-", [None]), ("1e", "1e"), ("0x", "0x"),
    ],
)  # fmt: skip
def test_numbers_are_those_of_yaml_1_2(text, value):
    (found, *_), _ = parse_yaml(f"- {text}", "r.yaml")
    assert found == value
    assert type(found) is type(value)


def test_a_written_text_is_a_text_to_every_reader():
    texts = ["1e3", "0o17", "1_000", ".5", "1.", "yes", "no", "null", "~", "2024-01-01", "1:30",
             "<<", "=", "0b11", ".nan", "1e400", "a: b", "# c", "- d", "!x", "a\nb"]  # fmt: skip
    for layout in ({}, {"default_flow_style": True}):
        written = dump_yaml({text: [text] for text in texts}, **layout)
        assert parse_yaml(written, "x")[0] == {text: [text] for text in texts}
        assert yaml.safe_load(written) == {text: [text] for text in texts}


@pytest.mark.slow
def test_a_recipe_cannot_make_a_long_message(tmp_path):
    name, path = "x" * 400_000, tmp_path / "r.yaml"
    for text in (f"a: *{name}", f"{name}: 1\n{name}: 2", f"experts: {{}}\n{name}: 1", f"- {name}"):
        path.write_text(text)
        with pytest.raises(RecipeError) as caught:
            read_recipe(path)
        assert len(str(caught.value)) < 10_000
    path.write_text("".join(f"wrong{i}: 1\n" for i in range(20_000)))
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    assert len(str(caught.value).splitlines()) <= 51
    assert str(caught.value).endswith("and more mistakes")
