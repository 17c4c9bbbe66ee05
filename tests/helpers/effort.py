"""The number of cases of a test: a part by default, all with LAYERSWAP_THOROUGH."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from typing import Any

import pytest

THOROUGH = bool(os.environ.get("LAYERSWAP_THOROUGH"))
EVERY = 4
"""One case of a grid in so many is run where LAYERSWAP_SAMPLE is set."""


def examples(most: int) -> int:
    """Examples that a property is tried on: a fifth, or all with LAYERSWAP_THOROUGH."""
    return most if THOROUGH else most // 5


def sampled(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Cases of a grid, of which all but the quick ones are marked so: `.ci/run` draws from them."""
    return [
        case
        if case in quick
        else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.grid)
        for case in cases
    ]


def drawn(name: str) -> bool:
    """True for one case of a grid in `EVERY`, drawn by LAYERSWAP_SAMPLE; without it for all."""
    seed = os.environ.get("LAYERSWAP_SAMPLE")
    return not seed or zlib.crc32(f"{seed} {name}".encode()) % EVERY == 0
