"""JSON that two readers could read differently is refused in one line."""

from __future__ import annotations

import json

import pytest
from refusals import one_line

from layerswap.ground import strict_json
from layerswap.ground.errors import CheckpointError
from layerswap.ground.strict_json import parse_json, read_json_object


def refusal(data: bytes) -> str:
    return one_line(CheckpointError, parse_json, data, "x.json")


@pytest.mark.parametrize(
    "text",
    ['{"a": 1}', "[]", "0", "-1.5e3", '"\\ud83d\\ude00"', '"\\\\ud800"', "null", '{"": {"a": []}}'],
)
def test_ordinary_json_is_read_as_the_standard_library_reads_it(text):
    assert parse_json(text.encode(), "x") == json.loads(text)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"NaN", "x.json: NaN is not a JSON number"),
        (b'{"a": [Infinity]}', "x.json: Infinity is not a JSON number"),
        (b"[1e999]", "x.json: 1e999 is too large for a number"),
        (b'{"a": 1, "a": 1}', "x.json: key 'a' is given twice"),
        (b'{"a": 1, "\\u0061": 1}', "x.json: key 'a' is given twice"),
        (b'{"b": 0, "a": [{"c": {"d": 1, "e": 2, "d": 3}}]}', "x.json: key 'd' is given twice"),
        (b'{"\\n": 1, "\\n": 1}', "x.json: key '\\n' is given twice"),
        (b'"\xff"', "x.json: not UTF-8 text"),
        (b'"\xed\xa0\x80"', "x.json: not UTF-8 text"),
        (b'"\\ud800"', "x.json: holds half of a surrogate pair"),
        (b'{"\\uDFFF": 0}', "x.json: holds half of a surrogate pair"),
        (b'[["\\ude00\\ud83d"]]', "x.json: holds half of a surrogate pair"),
        (b"[" * 200_000, "x.json: nested too deeply"),
        (b'{"a":' * 200_000, "x.json: nested too deeply"),
        (b"", "x.json: empty, as an interrupted download leaves it; download it again"),
        (b"{} {}", "x.json: not valid JSON (Extra data: line 1 column 4 (char 3))"),
    ],
)
def test_bad_json_is_refused_in_one_line(data, message):
    assert refusal(data) == message


def test_an_integer_too_long_to_read_is_refused():
    assert parse_json(b"1" * 4300, "x") > 0
    assert refusal(b"1" * 4301).startswith("x.json: not valid JSON (Exceeds the limit (4300")


def test_a_huge_duplicate_key_is_clipped():
    key = b'"' + b"k" * 1_000_000 + b'"'
    assert refusal(b"{" + key + b":1," + key + b":2}").endswith("k… is given twice")


@pytest.mark.parametrize("text", ["[]", '"a"', "1", "1.5", "true", "null"])
def test_a_file_must_hold_an_object(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert one_line(CheckpointError, read_json_object, path) == f"{path}: not a JSON object"


def test_a_file_larger_than_the_limit_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    monkeypatch.setattr(strict_json, "MAX_JSON_BYTES", 8)
    assert read_json_object(path) == {"a": 1}
    monkeypatch.setattr(strict_json, "MAX_JSON_BYTES", 7)
    assert one_line(CheckpointError, read_json_object, path) == f"{path}: larger than 7 bytes"


def test_a_missing_file_is_one_line(tmp_path):
    path = tmp_path / "no.json"
    message = one_line(CheckpointError, read_json_object, path)
    assert message == f"{path}: cannot be read (No such file or directory)"
