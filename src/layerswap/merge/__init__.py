"""Materialising a composition: checks, arithmetic, streaming writer, model card."""

from layerswap.merge.api import revert, soup, swap
from layerswap.merge.metadata import RECORD
from layerswap.merge.plan import Plan
from layerswap.merge.planner import make_plan
from layerswap.merge.verification.report import Verification
from layerswap.merge.verification.verify import verify

__all__ = ["RECORD", "Plan", "Verification", "make_plan", "revert", "soup", "swap", "verify"]
