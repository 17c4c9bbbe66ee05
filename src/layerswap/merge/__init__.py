"""Materialising a composition: checks, arithmetic, streaming writer, model card."""

from layerswap.merge.documents import RECORD
from layerswap.merge.make import make_plan
from layerswap.merge.plan import Plan
from layerswap.merge.shorthand import soup, swap

__all__ = ["RECORD", "Plan", "make_plan", "soup", "swap"]
