"""Measures the changes of fine-tuning: maps of changed rows."""

from typing import TYPE_CHECKING

from layerswap.ground.types import lazy_names

if TYPE_CHECKING:
    from layerswap.deltas.atlas import Atlas, measure_delta

__all__ = ["Atlas", "measure_delta"]

if not TYPE_CHECKING:  # A merge needs a few of the measures alone.
    __getattr__ = lazy_names(__name__, {"Atlas": "atlas", "measure_delta": "atlas"})
