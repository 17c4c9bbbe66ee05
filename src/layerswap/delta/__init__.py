"""What fine-tuning changed: maps, conflicts, and what they suggest."""

from layerswap.delta.atlas import Atlas, measure_delta
from layerswap.delta.proposal import Evidence, Suggestion, suggest, suggest_from

__all__ = ["Atlas", "Evidence", "Suggestion", "measure_delta", "suggest", "suggest_from"]
