"""What fine-tuning changed: maps, conflicts, and what they suggest."""

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
