"""Compositions of the same experts in memory: which they are, what they hold, what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from layerswap.errors import EvaluationError
from layerswap.evaluate.memory import (
    MemoryEstimate,
    estimate_generating,
    estimate_scoring,
    largest_fitting,
)
from layerswap.evaluate.trie import LayerCounts, build_trie, count_layers
from layerswap.evaluate.virtual import VirtualModel
from layerswap.evaluate.weights import free_bytes
from layerswap.merge.plan import Plan

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Compositions:
    """Compositions that share one model; `Sweep` evaluates them.

    Args:
        plans: the compositions.
        device: where the models run and their tensors live.
        dtype: `float32`, `bfloat16` or `float16`; the plans' own when None.
        max_made_bytes: bound on blended and merged tensors in memory.
        experts_on: `device` or `cpu`, where the experts' tensors stay.

    Raises:
        LayerswapError: the compositions do not make models of one kind.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        *,
        device: str | torch.device,
        dtype: str | None,
        max_made_bytes: int | None,
        experts_on: str,
    ) -> None:
        self.virtual = VirtualModel(
            plans,
            device=device,
            dtype=dtype,
            max_made_bytes=max_made_bytes,
            experts_on=experts_on,
        )

    def __len__(self) -> int:
        return len(self.virtual)

    @property
    def plans(self) -> Sequence[Plan]:
        """The compositions, in the order of every result's rows."""
        return self.virtual.plans

    def add(self, plans: Sequence[Plan]) -> list[int]:
        """More compositions, without loading anything again; returns their positions."""
        return self.virtual.add(plans)

    def model(self, index: int) -> PreTrainedModel:
        """One composition as a transformers model: the same object every time, re-pointed."""
        return self.virtual.switch(index)

    def counts(self, members: Sequence[int] | None = None) -> LayerCounts:
        """How many layers run per batch, one by one and here."""
        return count_layers(build_trie(self.virtual.paths, self.choose(members)))

    def memory(
        self, rows: int, tokens: int, new_tokens: int = 0, members: Sequence[int] | None = None
    ) -> MemoryEstimate:
        """What scoring takes in memory, or generating where there are new tokens.

        Args:
            rows: rows of a batch, or prompts of a batch.
            tokens: tokens of a row or prompt.
            new_tokens: tokens to write after a prompt; 0 for scoring.
            members: positions of the compositions; all when None.
        """
        counts, chosen = self.counts(members), self.choose(members)
        if not new_tokens:
            return estimate_scoring(self.virtual, counts, rows, tokens)
        return estimate_generating(
            self.virtual,
            counts,
            members=len(chosen),
            prompts=rows,
            tokens=tokens,
            new_tokens=new_tokens,
        )

    def fit_batch_size(
        self,
        tokens: int,
        *,
        new_tokens: int = 0,
        budget: int | None = None,
        members: Sequence[int] | None = None,
    ) -> int:
        """The largest batch, a power of two, that fits into memory; as `memory`.

        Args:
            tokens: tokens of the longest row or prompt.
            new_tokens: tokens to write after a prompt; 0 for scoring.
            budget: bytes for everything, experts included; when None, what they take now and
                four fifths of what is free.
            members: positions of the compositions; all when None.

        Raises:
            EvaluationError: not even one row fits.
        """
        if budget is None:
            held = self.virtual.pool.kept_bytes + self.virtual.pool.made_bytes
            budget = held + int(0.8 * free_bytes(self.virtual.device))
        return largest_fitting(
            budget,
            lambda rows: self.memory(rows, tokens, new_tokens, members),
            "prompt" if new_tokens else "row",
        )

    def choose(self, members: Sequence[int] | None) -> list[int]:
        """Positions of compositions, checked; all when None.

        Raises:
            EvaluationError: there is no such composition, or none is chosen.
        """
        if members is None:
            return list(range(len(self)))
        wrong = [member for member in members if not 0 <= member < len(self)]
        if wrong or not members:
            raise EvaluationError(
                f"there is no composition {wrong[0]}; they are 0 to {len(self) - 1}"
                if wrong
                else "no composition is chosen"
            )
        return list(members)
