"""Proving a composition: how well it does, and whether a difference is more than noise."""

from layerswap.evaluate.endings import Generation
from layerswap.evaluate.sampling import Sampling
from layerswap.evaluate.scoring import Scores
from layerswap.evaluate.sweep_engine import Sweep
from layerswap.evaluate.virtual import VirtualModel

__all__ = ["Generation", "Sampling", "Scores", "Sweep", "VirtualModel"]
