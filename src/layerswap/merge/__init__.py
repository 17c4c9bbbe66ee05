"""Merges: plans over opened checkpoints, arithmetic, a streaming writer and verification."""

from typing import TYPE_CHECKING

from layerswap._types import lazy_names

if TYPE_CHECKING:
    from layerswap.merge.api import instruct, partition, revert, soup, swap
    from layerswap.merge.metadata import RECORD
    from layerswap.merge.planner import AdapterPlan, Plan, make_plan
    from layerswap.merge.verification.files import Verification
    from layerswap.merge.verification.verify import verify

__all__ = [
    "RECORD",
    "AdapterPlan",
    "Plan",
    "Verification",
    "instruct",
    "make_plan",
    "partition",
    "revert",
    "soup",
    "swap",
    "verify",
]

if not TYPE_CHECKING:  # a merge from the command line needs neither the API nor verification
    __getattr__ = lazy_names(
        __name__,
        {
            "RECORD": "metadata",
            "Verification": "verification.files",
            "verify": "verification.verify",
            **dict.fromkeys(("AdapterPlan", "Plan", "make_plan"), "planner"),
            **dict.fromkeys(("instruct", "partition", "revert", "soup", "swap"), "api"),
        },
    )
