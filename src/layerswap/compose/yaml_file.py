"""YAML with duplicate keys refused, and the line of every key path kept for messages."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml

from layerswap.errors import RecipeError

KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, except that a key given twice and an alias are errors.

    Aliases can make a value that is exponentially large, or that contains itself.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            line = event.start_mark.line + 1
            raise RecipeError(f"line {line}: alias *{event.anchor}; write the value out instead")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    line = key_node.start_mark.line + 1
                    raise RecipeError(f"line {line}: key {key!r} is given twice")
                seen.add(key)
        return super().construct_mapping(node, deep)


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        RecipeError: it cannot be read.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RecipeError(f"{path}: cannot be read ({reason})") from None


def parse_yaml(text: str, where: str) -> tuple[Any, dict[KeyPath, int]]:
    """The value of a YAML document, and the line (from 1) of every key path in it.

    Raises:
        RecipeError: naming `where` and the line: not YAML, a key given twice, or an alias.
    """
    try:
        loader = _Loader(text)
        tree = loader.get_single_node()
        lines = dict(_lines(tree, ()))
        return (None if tree is None else loader.construct_document(tree)), lines
    except RecipeError as error:
        raise error.within(where) from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise RecipeError(f"{where}: {line}not valid YAML ({error.problem})") from None
    except RecursionError:
        raise RecipeError(f"{where}: lists and mappings are nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from None


def write_text(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Write a file of text that is not to replace another one by accident.

    Raises:
        RecipeError: it is there already, or cannot be written.
    """
    try:
        with path.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RecipeError(f"{path}: is there already; give --overwrite to replace it") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be written ({error.strerror})") from None


def _lines(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # no key of ours; the constructor refuses it
            child = (*path, key.value)
            yield child, key.start_mark.line + 1
            yield from _lines(value, child)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield (*path, i), value.start_mark.line + 1
            yield from _lines(value, (*path, i))
