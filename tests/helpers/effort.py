"""The number of cases of a test: a part by default, all with LAYERSWAP_THOROUGH."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

THOROUGH = bool(os.environ.get("LAYERSWAP_THOROUGH"))


def examples(most: int) -> int:
    """Examples that a property is tried on: a fifth, or all with LAYERSWAP_THOROUGH."""
    return most if THOROUGH else most // 5


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Cases of a parametrised test, of which all but the quick ones are marked slow."""
    return [
        case
        if case in quick
        else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)
        for case in cases
    ]
