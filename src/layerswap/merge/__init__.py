"""Merges: plans over opened checkpoints, a streaming writer, and verification."""

from typing import TYPE_CHECKING

from layerswap.ground.types import lazy_names

if TYPE_CHECKING:
    from layerswap.merge.api import instruct, make_plan, partition, revert, soup, swap
    from layerswap.merge.compare import verify_against
    from layerswap.merge.plan import Plan
    from layerswap.merge.verification import verify

__all__ = [
    "Plan",
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
            "verify": "verification",
            "verify_against": "compare",
            **dict.fromkeys(
                ("instruct", "make_plan", "partition", "revert", "soup", "swap"), "api"
            ),
        },
    )
