"""Reads YAML files into Pydantic models, and explains every mistake by line and key path."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from layerswap.ground.errors import RecipeError

KeyPath = tuple[str | int, ...]
Mistake = tuple[KeyPath, str]
"""A key path and the mistake there."""
Model = TypeVar("Model", bound=BaseModel)
Checked = TypeVar("Checked")
UNWRITABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that no path, no terminal and no UTF-8 file takes."""
LARGEST = 100_000
"""Most values of a file once every alias (`*name`) is written out."""
LONGEST = 10_000_000
"""Most characters of a file."""
MOST_DIGITS = 1000
"""Most digits of a text that is read as a number."""
MOST_MISTAKES = 50
"""Most mistakes of a file that are listed."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 numbers, stricter than YAML itself.

    Refuses a key given twice, tags, aliases that make a value very large or contain themselves,
    and text that no file and no terminal can hold. Dates, `1:30` and `1_000` are text, and `010` is
    10.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.values, self.sizes = 0, dict[int, int]()  # so far, and of each node, aliases expanded

    def fetch_tag(self) -> None:
        line = self.get_mark().line + 1
        raise RecipeError(f"line {line}: a tag ('!…') is not allowed; write a text in quotes")

    def construct_number(self, node: yaml.ScalarNode) -> int:
        value = self.construct_scalar(node)
        return int(value, {"0o": 8, "0x": 16}.get(value[:2], 10))

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        before, is_alias = self.values, self.check_event(yaml.AliasEvent)
        node: Any = super().compose_node(parent, index)
        line = (parent or node).start_mark.line + 1
        if not is_alias:
            self.values += 1
            self.sizes[id(node)] = self.values - before
        elif id(node) not in self.sizes:
            raise RecipeError(f"line {line}: an alias makes a value contain itself")
        else:
            self.values += self.sizes[id(node)]
        if self.values > LARGEST:
            what = "aliases expand this to" if is_alias else "the file has"
            raise RecipeError(f"line {line}: {what} more than {LARGEST:,} values")
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and UNWRITABLE.search(value):
            line = node.start_mark.line + 1
            raise RecipeError(f"line {line}: {value[:80]!r} holds NUL or half of a surrogate pair")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    line = key_node.start_mark.line + 1
                    raise RecipeError(f"line {line}: key {key!r} is given twice")
                seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
for _kind, _first, _pattern in (
    ("bool", "yYnNtTfFoO",
     "yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF"),
    ("int", "-+0123456789", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    ("float", "-+.0123456789",
     r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
    ("merge", "<", "<<"),
    ("null", ["~", "n", "N", ""], "~|null|Null|NULL|"),
):  # fmt: skip
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), list(_first)
    )
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)


class _Dumper(yaml.SafeDumper):
    """Quotes what this loader or PyYAML's would cast, and writes long texts on one line."""


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()),
            *_Loader.yaml_implicit_resolvers.get(first, ())]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}  # fmt: skip
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if "\n" in text else None
    ),
)


def dump_yaml(value: Any, **layout: Any) -> str:
    """Write YAML whose texts every parser reads as texts; `layout` holds options of PyYAML."""
    layout = {"sort_keys": False, "allow_unicode": True, **layout}
    return str(yaml.dump(value, Dumper=_Dumper, **layout))


@lru_cache(maxsize=1 << 12)
def scalar(text: str) -> Any:
    """Parse an unquoted YAML scalar as a boolean or an integer; return other texts."""
    loader: Any = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    known = tag.endswith((":bool", ":int")) and len(text) <= MOST_DIGITS
    return loader.construct_object(yaml.ScalarNode(tag, text)) if known else text


def read_text(path: Path) -> str:
    """Read a text file; raise a RecipeError if it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RecipeError(f"{path}: cannot be read ({reason})") from None
    if len(text) > LONGEST:
        raise RecipeError(f"{path}: longer than {LONGEST:,} characters")
    return text


def parse_yaml(text: str, where: str) -> tuple[Any, dict[KeyPath, int]]:
    """Parse a YAML document; return its value and the line (from 1) of every key path."""
    try:
        loader = _Loader(text)
        tree = loader.get_single_node()
        lines = dict(_lines(tree, ()))
        return (None if tree is None else loader.construct_document(tree)), lines
    except RecipeError as error:
        raise error.within(where) from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        if error.problem == "but found another document":
            text = "a second YAML document begins here; write each into a file of its own"
            raise RecipeError(f"{where}: {line}{text}") from None
        raise RecipeError(f"{where}: {line}not valid YAML ({error.problem})") from None
    except RecursionError:
        raise RecipeError(f"{where}: lists and mappings are nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from None


def _lines(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):  # the constructor refuses other keys
                child = (*path, key.value)
                yield child, key.start_mark.line + 1
                yield from _lines(value, child)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield (*path, i), value.start_mark.line + 1
            yield from _lines(value, (*path, i))


def read_yaml(path: Path, model: type[Model], expected: str) -> Model:
    """Read a YAML file into a model; see `validate`."""
    data, lines = parse_yaml(read_text(path), str(path))
    return validate(model, data, where=str(path), expected=expected, lines=lines)


def validate(
    model: type[Model],
    data: Any,
    *,
    where: str,
    expected: str,
    lines: Mapping[KeyPath, int] | None = None,
) -> Model:
    """Validate plain data as a model; the RecipeError has one line for every mistake.

    A line names the file, the line of the key path (from `parse_yaml`), the key path, the value and
    the right form. `expected` is the message if the data is no mapping.
    """
    if not isinstance(data, dict):
        raise RecipeError(f"{where}: {expected}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise RecipeError(*_explain(error, where, lines or {}, model)) from None


def refuse_mistakes(checked: Checked, mistakes: Iterable[Mistake]) -> Checked:
    """Return the validated model, or raise the mistakes that rules across its fields found."""
    details = [
        InitErrorDetails(type=PydanticCustomError("layerswap", text), loc=path, input=None)
        for path, text in mistakes
    ]
    if details:
        raise ValidationError.from_exception_data(type(checked).__name__, details)
    return checked


DIGITS = re.compile(r"\d+")
ALIKE, LISTED = 8, 200
"""Most words that a message lists: of words that differ in numbers alone, and of others."""


def nearest(word: str, known: list[str]) -> str:
    """Suggest the closest known word (`"; did you mean 'x'?"`), or list the known words.

    Words that differ from it in numbers alone are listed, because none is closer.
    """
    alike = [other for other in known if DIGITS.sub("", other) == DIGITS.sub("", word)]
    if len(alike) > 1 and word not in known:
        return f"; there are {', '.join(alike[:ALIKE] if len(known) > ALIKE else known)}"
    close = get_close_matches(word, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    if len(known) > LISTED:
        return f"; none of {len(known):,} is alike"
    return f"; there are {', '.join(sorted(known))}" if known else ""


def keys_at(model: type[BaseModel], path: KeyPath) -> list[str]:
    """The valid keys at a key path of a model.

    Example: at `("sources", "math")` of a model with `sources: dict[str, Source]` these are the
    fields of `Source`.
    """
    models = [model]
    for part in path:  # an index, or a key that a user chose, names no field
        fields = [kind.model_fields[str(part)] for kind in models if part in kind.model_fields]
        models = [inner for field in fields for inner in _models_in(field.annotation)] or models
    return list(dict.fromkeys(name for kind in models for name in kind.model_fields))


def _models_in(kind: Any) -> list[type[BaseModel]]:
    """The models in a type, such as `Source` in `dict[str, Source] | None`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [inner for member in get_args(kind) for inner in _models_in(member)]


_TAG = re.compile(r"\[key\]|constrained-\w+|(?:list|dict|literal)\[.*\]", re.DOTALL)
"""Parts of Pydantic's key paths that are in no file."""
_WANTED = {
    "dict_type": "write a mapping",
    "model_type": "write a mapping",
    "list_type": "write a list",
    "string_type": "write a text",
    "int_type": "write a whole number",
    "greater_than_equal": "write a number from {ge}",
    "too_short": "write at least one",
    "string_too_short": "write a text that is not empty",
}
"""The right form, by the type of Pydantic's error."""


def _explain(
    error: ValidationError, where: str, lines: Mapping[KeyPath, int], model: type[BaseModel]
) -> list[str]:
    messages = []
    for item in error.errors(include_url=False):
        path = tuple(part for part in item["loc"] if not _TAG.fullmatch(str(part)))
        path = path[:-1] if path[-1:] in (("int",), ("str",), ("bool",)) else path  # of a union
        key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
        at = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)
        place = f"{where}, line {at}" if at else where
        for text in _phrase(item, path, model).split("\n"):
            messages.append(f"{place}: {key + ': ' if key else ''}{text}")
        if len(messages) >= MOST_MISTAKES:
            return [*dict.fromkeys(messages), f"{where}: and more mistakes"]
    return list(dict.fromkeys(messages))


def _phrase(item: Any, path: KeyPath, model: type[BaseModel]) -> str:
    kind, value = item["type"], item["input"]
    if kind == "extra_forbidden":
        return f"unknown key{nearest(str(path[-1]), keys_at(model, path[:-1]))}"
    if kind == "missing":
        return "is missing"
    if kind in {"value_error", "layerswap"}:
        return str(item["ctx"]["error"] if kind == "value_error" else item["msg"])
    if kind == "invalid_key" or "[key]" in item["loc"]:
        key = {False: "no", True: "yes"}[value] if isinstance(value, bool) else path[-1]
        return f"a key is a text; write it in quotes: '{key}'"
    if kind == "literal_error":
        known = [word.strip("'") for word in re.split(", | or ", item["ctx"]["expected"])]
        return f"{value!r:.60} is not allowed{nearest(str(value), known)}"
    wanted = f"{item['msg'][0].lower()}{item['msg'][1:]}"
    if kind in _WANTED:
        wanted = _WANTED[kind].format(**item.get("ctx", {}))
    if kind == "string_type" and isinstance(value, int | float):  # `no` is false in YAML
        wanted = "write a text in quotes"
    return f"{wanted}; found {value!r:.60}"
