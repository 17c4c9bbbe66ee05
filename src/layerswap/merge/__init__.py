"""Merges: plans over opened checkpoints, arithmetic, a streaming writer and verification."""

from layerswap.merge.api import partition, revert, soup, swap
from layerswap.merge.metadata import RECORD
from layerswap.merge.planner import AdapterPlan, Plan, make_plan
from layerswap.merge.verification.report import Verification
from layerswap.merge.verification.verify import verify

__all__ = [
    "RECORD",
    "AdapterPlan",
    "Plan",
    "Verification",
    "make_plan",
    "partition",
    "revert",
    "soup",
    "swap",
    "verify",
]
