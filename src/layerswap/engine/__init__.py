"""Joint scoring and generation for many compositions of the same experts."""

from layerswap.engine.decoding import Generation, Sampling
from layerswap.engine.scoring import Scores
from layerswap.engine.sweep import Sweep
from layerswap.engine.virtual import VirtualModel

__all__ = ["Generation", "Sampling", "Scores", "Sweep", "VirtualModel"]
