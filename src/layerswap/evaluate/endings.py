"""When a generation is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from layerswap.errors import EvaluationError

Reason = Literal["eos", "stop", "length"]
"""The model ended the text; it wrote a stop string; it wrote as much as it may."""


class Generation(NamedTuple):
    """What a composition wrote.

    Attributes:
        tokens: every token, the one that ended it included.
        reason: a `Reason`.
    """

    tokens: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Endings:
    """What ends a row.

    Attributes:
        max_new_tokens: most tokens that are written.
        eos: tokens that end a text.
        stop: strings that end it, wherever they are in what was written.
        tokenizer: decodes for `stop`.

    Raises:
        EvaluationError: no token may be written, or stop strings without a tokenizer.
    """

    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    tokenizer: Any = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise EvaluationError(f"max_new_tokens is {self.max_new_tokens}; at least 1 is needed")
        if self.stop and self.tokenizer is None:
            raise EvaluationError("stop strings need the tokenizer that decodes them")
        if "" in self.stop:
            raise EvaluationError("a stop string is empty, and would stop everything at once")

    def reasons(self, written: Sequence[Sequence[int]]) -> list[Reason | None]:
        """Why each row is done after its last token; None for those that go on."""
        stopped = self._stopped(written)
        found: list[Reason | None] = []
        for tokens, stop in zip(written, stopped, strict=True):
            if tokens[-1] in self.eos:
                found.append("eos")
            elif stop:
                found.append("stop")
            else:
                found.append("length" if len(tokens) >= self.max_new_tokens else None)
        return found

    def _stopped(self, written: Sequence[Sequence[int]]) -> list[bool]:
        if not self.stop:
            return [False] * len(written)
        # A token is at least a byte, but some are decoded differently at the beginning.
        tail = max(len(stop.encode()) for stop in self.stop) + 2
        tails = [tuple(tokens[-tail:]) for tokens in written]
        distinct = list(dict.fromkeys(tails))
        texts = dict(zip(distinct, self.tokenizer.batch_decode(distinct), strict=True))
        return [any(stop in texts[t] for stop in self.stop) for t in tails]
