"""Types that several rooms share, and the loading of a room's names on first use."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

PathLike = str | os.PathLike[str]
"""A checkpoint or file as users name it: a path, or a Hub id where one is meant."""
Log = Callable[[str], None]
"""Called with one line of progress for a person."""
Advance = Callable[[int], None]
"""Called with the number of units (bytes, requests, steps) just done."""
Bars = Callable[[str, int], AbstractContextManager[Advance]]
"""Opens a progress bar: a label and the units in all; yields what to call with units done."""
EngineName = Literal["sweep", "vllm"]
"""Answers for compositions: layerswap's own engine, or vLLM, re-pointed from one to the next."""


def no_bars(label: str, total: int) -> AbstractContextManager[Advance]:
    """Bars that are not shown."""
    return nullcontext(lambda count: None)


def lazy_names(package: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that imports public names from their modules when first used.

    Args:
        package: the module's `__name__`.
        home: the module of every name within the package, and its name there after a colon where
            that is another one.
    """

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, there = home[name].partition(":")
        return getattr(importlib.import_module(f"{package}.{module}"), there or name)

    return load
