"""Placeholders such as `${name}` in the texts of parsed YAML."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def fill(node: Any, pattern: re.Pattern[str], value_of: Callable[[re.Match[str]], Any]) -> Any:
    """Replace what matches `pattern` in the keys and texts of plain data.

    Text that is one placeholder becomes its value, such as a number or a list. An unchanged part
    stays the same object, so that YAML's anchors are written as they were read.
    """
    if isinstance(node, str):
        whole = pattern.fullmatch(node)
        if whole:
            return value_of(whole)
        return pattern.sub(lambda match: str(value_of(match)), node)
    filled: Any = node
    if isinstance(node, dict):
        filled = {
            fill(key, pattern, value_of): fill(value, pattern, value_of)
            for key, value in node.items()
        }
    elif isinstance(node, list | tuple):
        filled = type(node)(fill(item, pattern, value_of) for item in node)
    return node if filled == node else filled
