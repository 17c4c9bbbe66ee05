"""Materialising a composition: checks, arithmetic, streaming writer, model card."""

from layerswap.merge.documents import RECORD
from layerswap.merge.findings import Verification
from layerswap.merge.make import make_plan
from layerswap.merge.plan import Plan
from layerswap.merge.reverting import revert
from layerswap.merge.shorthand import soup, swap
from layerswap.merge.verification import verify

__all__ = ["RECORD", "Plan", "Verification", "make_plan", "revert", "soup", "swap", "verify"]
