"""Merges: plans over opened checkpoints, a streaming writer, and verification."""

from typing import TYPE_CHECKING

from layerswap.ground.types import lazy_names

if TYPE_CHECKING:
    from layerswap.merge.api import instruct, make_plan, partition, revert, soup, swap
    from layerswap.merge.compare import Origins, verify_against
    from layerswap.merge.plan import Plan
    from layerswap.merge.target import RECORD, MergeOptions
    from layerswap.merge.verification import Verification, verify

__all__ = [
    "RECORD",
    "MergeOptions",
    "Origins",
    "Plan",
    "Verification",
    "instruct",
    "make_plan",
    "partition",
    "revert",
    "soup",
    "swap",
    "verify",
    "verify_against",
]

if not TYPE_CHECKING:  # a merge from the command line needs no verification
    __getattr__ = lazy_names(
        __name__,
        {
            "Plan": "plan",
            **dict.fromkeys(("Verification", "verify"), "verification"),
            **dict.fromkeys(("Origins", "verify_against"), "compare"),
            **dict.fromkeys(("MergeOptions", "RECORD"), "target"),
            **dict.fromkeys(
                ("instruct", "make_plan", "partition", "revert", "soup", "swap"), "api"
            ),
        },
    )
