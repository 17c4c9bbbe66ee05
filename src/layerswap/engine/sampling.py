"""Draws tokens with random numbers that depend on seed, prompt and position alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from transformers import LogitsProcessorList


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    A draw depends on seed, prompt and position alone: every composition answers a prompt with
    the same random numbers, whatever is generated beside it.

    Attributes:
        temperature: above 0; logits are divided by it.
        top_k: draw among this many most likely tokens; 0 for all.
        top_p: draw among the most likely tokens that together have this probability.
        seed: of the random numbers.

    Raises:
        EvaluationError: a setting out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise EvaluationError(f"temperature is {self.temperature}; it must be above 0")
        if self.top_k < 0:
            raise EvaluationError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise EvaluationError(f"top_p is {self.top_p}; it must be above 0 and at most 1")

    def processors(self) -> LogitsProcessorList:
        """Transformers' own processors, in the order in which it applies them."""
        from transformers import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        found = LogitsProcessorList()
        if self.temperature != 1:
            found.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            found.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            found.append(TopPLogitsWarper(self.top_p))
        return found

    def draws(self, streams: Sequence[int], count: int) -> npt.NDArray[np.float64]:
        """Uniform numbers in [0, 1), `(streams, count)`; a stream's are its own for ever."""
        import numpy as np

        found = np.empty((len(streams), count))
        for row, stream in enumerate(streams):
            digest = hashlib.sha256(f"{self.seed}/{stream}".encode()).digest()
            key = np.frombuffer(digest[:16], dtype=np.uint64)
            found[row] = np.random.Generator(np.random.Philox(key=key)).random(count)
        return found


def draw_tokens(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """One token per row, where the distribution function passes the row's draw.

    Args:
        logits: float32 `[rows, vocabulary]`, minus infinity for what must not be drawn.
        draws: float64 `[rows]`, uniform in [0, 1).

    Returns:
        int64 `[rows]`.
    """
    import torch

    total = logits.double().softmax(dim=-1).cumsum(dim=-1)
    # Scaled by what it really sums to, so that a draw close to 1 still finds a token.
    wanted = (draws * total[:, -1])[:, None]
    return torch.searchsorted(total, wanted, right=True)[:, 0].clamp_max(logits.shape[1] - 1)
