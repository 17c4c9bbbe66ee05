"""YAML: lines of key paths, and hostile files."""

from __future__ import annotations

import time

import pytest

from layerswap.compose.yaml_file import parse_yaml, refuse_text, write_text
from layerswap.errors import RecipeError

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
)


def refusal(text):
    with pytest.raises(RecipeError) as caught:
        parse_yaml(text, "r.yaml")
    return str(caught.value)


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
        ("a: &a [*a]", "r.yaml: line 1: a value contains itself by an alias"),
        (BOMB, "r.yaml: line 6: aliases make more than 100,000 values of this"),
        ("a: &x {b: 1, b: 2}\nc: *x", "r.yaml: line 1: key 'b' is given twice"),
        ("a: *x", "r.yaml: line 1: not valid YAML (found undefined alias 'x')"),
        ("[" * 5000, "r.yaml: lists and mappings are nested too deeply"),
        ("[" * 3000 + "]" * 3000, "r.yaml: lists and mappings are nested too deeply"),
        ("a: 1\n---\nb: 2", "r.yaml: line 2: not valid YAML (but found another document)"),
        ("? [1]\n: 2", "r.yaml: line 1: not valid YAML (found unhashable key)"),
        ("a: 2020-13-45", "r.yaml: not valid YAML (month must be in 1..12)"),
        ("a: [1\nb: 2", "r.yaml: line 2: not valid YAML (expected ',' or ']', but got ':')"),
        ("!!python/object/apply:os.getcwd []", "r.yaml: line 1: not valid YAML (could not determine"
         " a constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.getcwd')"),
    ],
)  # fmt: skip
def test_refusals_are_quick(text, message):
    start = time.perf_counter()
    assert refusal(text) == message
    assert time.perf_counter() - start < 60  # it would otherwise take years


def test_a_written_file_gets_its_folder(tmp_path):
    path = tmp_path / "new" / "folder" / "x.yaml"
    refuse_text(path)
    assert not (tmp_path / "new").exists()
    write_text(path, "a: 1")
    assert path.read_text() == "a: 1"
    for refuse in (refuse_text, lambda path: write_text(path, "a: 2")):
        with pytest.raises(RecipeError, match=r"x\.yaml: is there already; give --overwrite"):
            refuse(path)
        with pytest.raises(RecipeError, match=r"x\.yaml: is not a folder$"):
            refuse(path / "below" / "y.yaml")
