"""Scores and texts of many compositions of the same experts, computed together."""

from layerswap.engine.decoding import Generation, Sampling
from layerswap.engine.scoring import Scores
from layerswap.engine.sweep import Sweep
from layerswap.engine.virtual import VirtualModel

__all__ = ["Generation", "Sampling", "Scores", "Sweep", "VirtualModel"]
