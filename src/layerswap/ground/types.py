"""Types and words that several rooms share, and the lazy import of a package's public names."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

PathLike = str | os.PathLike[str]
"""A checkpoint or file as users name it: a path, or a Hub id where that is possible."""
Log = Callable[[str], None]
"""Receives one line of progress for the user."""


Scoring = Literal["number", "exact_match", "token_f1", "chrf++", "rouge_l"]
"""How a written answer is scored against the right one."""


Advance = Callable[[int], None]
"""Receives the number of units (bytes, requests, steps) just done."""
Bars = Callable[[str, int, str], AbstractContextManager[Advance]]
"""Opens a progress bar from a label, a total and a unit, and yields its `Advance`."""


def no_bars(label: str, total: int, unit: str) -> AbstractContextManager[Advance]:
    """Return a progress bar that shows nothing."""
    return nullcontext(lambda count: None)


def listed(given: Any) -> list[Any]:
    """Wrap a single value in a list; a text counts as one value."""
    many = isinstance(given, Sequence) and not isinstance(given, str)
    return list(given) if many else [given]


def duration(seconds: float) -> str:
    """Write a duration as text, such as `40 s`, `12 min` or `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def counted(count: int, noun: str) -> str:
    """Write a number with its noun, such as `1 row` or `1,200 rows`."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def lazy_names(package: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package that imports public names on first use.

    `home` maps each public name to its module, or to `module:name` if it differs there.
    """

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, name_there = home[name].partition(":")
        return getattr(importlib.import_module(f"{package}.{module}"), name_there or name)

    return load
