"""What fine-tuning changed: maps, conflicts, and what they suggest."""

from typing import TYPE_CHECKING

from layerswap._types import lazy_names

if TYPE_CHECKING:
    from layerswap.deltas.atlas import Atlas, Conflict, measure_delta
    from layerswap.deltas.suggestion import Evidence, Suggestion, suggest, suggest_from

__all__ = [
    "Atlas",
    "Conflict",
    "Evidence",
    "Suggestion",
    "measure_delta",
    "suggest",
    "suggest_from",
]

if not TYPE_CHECKING:  # a merge needs a few of the measures alone
    __getattr__ = lazy_names(
        __name__,
        {
            **dict.fromkeys(("Atlas", "Conflict", "measure_delta"), "atlas"),
            **dict.fromkeys(("Evidence", "Suggestion", "suggest", "suggest_from"), "suggestion"),
        },
    )
