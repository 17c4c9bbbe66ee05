"""What fine-tuning changed: maps, conflicts, and what they suggest.

The room can be called: `layerswap.delta(base, *experts)` is `measure_delta`.
"""

import sys
from types import ModuleType
from typing import Any

from layerswap.delta.atlas import Atlas, measure_delta
from layerswap.delta.conflict import Conflict
from layerswap.delta.proposal import Evidence, Suggestion, suggest, suggest_from

__all__ = [
    "Atlas",
    "Conflict",
    "Evidence",
    "Suggestion",
    "measure_delta",
    "suggest",
    "suggest_from",
]


class _Room(ModuleType):
    """A module that can be called: `layerswap.delta` is a room and, to its users, a function."""

    def __call__(self, *arguments: Any, **options: Any) -> Atlas:
        """The atlas of experts against their base; see `measure_delta`."""
        return measure_delta(*arguments, **options)


sys.modules[__name__].__class__ = _Room
