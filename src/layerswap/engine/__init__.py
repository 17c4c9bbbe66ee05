"""Joint scoring and generation for many compositions of the same experts."""

from layerswap.engine.decoding import Sampling
from layerswap.engine.sweep import Sweep

__all__ = ["Sampling", "Sweep"]
