"""The scoring engine: log-probabilities of continuations, for all compositions together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerswap.evaluate.requests import Question, Row
from layerswap.evaluate.runner import Ending, Runner

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

LOGIT_BYTES = 1 << 28
"""Bytes of float32 logits that are held at a time."""


@dataclass(frozen=True)
class Scores:
    """Answers to loglikelihood requests: a row per composition, a column per request.

    Attributes:
        members: positions of the compositions, one per row.
        requests: positions of the requests, one per column.
        logprob: float64 `(compositions, requests)`, natural logarithms: the sum over the tokens
            of a continuation.
        greedy: bool `(compositions, requests)`, whether every token of the continuation is the
            most likely one.
        tokens: per request float64 `(compositions, tokens)`, the logarithm of every token.
    """

    members: Sequence[int]
    requests: Sequence[int]
    logprob: npt.NDArray[np.float64]
    greedy: npt.NDArray[np.bool_]
    tokens: Sequence[npt.NDArray[np.float64]]


@dataclass(frozen=True)
class _Questions:
    """What is asked of one batch, flattened.

    Attributes:
        positions: int64 `(n,)`, distinct positions of the flattened batch whose logits are needed.
        asked: int64 `(m,)`, per token of a continuation the index of its position.
        tokens: int64 `(m,)`, the token.
        requests: the requests in their order, and how many tokens each asks for.
        lengths: see `requests`.
    """

    positions: torch.Tensor
    asked: torch.Tensor
    tokens: torch.Tensor
    requests: list[int]
    lengths: list[int]


class Scorer:
    """Answers batches of loglikelihood requests.

    Args:
        runner: of the compositions.
        softmax_dtype: dtype of the log-softmax and of the sum over a continuation.
    """

    def __init__(self, runner: Runner, softmax_dtype: str = "float32") -> None:
        import torch

        self._runner = runner
        self._dtype: torch.dtype = getattr(torch, softmax_dtype)

    def score(
        self, rows: Sequence[Row], requests: Sequence[Question], members: Sequence[int]
    ) -> Scores:
        """The answers to every request of some rows, read as one batch, padded on the right.

        Only logits that a request needs are computed. Without a mask, since no token reads what
        is on its right.
        """
        import numpy as np
        import torch

        device = self._runner.virtual.device
        ids = _right_padded(rows).to(device)
        questions = _questions(rows, requests, ids.shape[1])
        answers: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}
        with torch.inference_mode():
            for ending in self._runner.run({"input_ids": ids, "use_cache": False}, members):
                answer = self._answer(ending, questions)
                answers.update(dict.fromkeys(ending.members, answer))
        parts = [answers[member][0] for member in members]
        return Scores(
            list(members),
            questions.requests,
            np.array([[float(values.sum()) for values in part] for part in parts]),
            np.stack([answers[member][1].numpy() for member in members]),
            [
                np.stack([part[i].double().numpy() for part in parts])
                for i in range(len(questions.requests))
            ],
        )

    def _answer(
        self, ending: Ending, questions: _Questions
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Per request the log-probabilities of its tokens, and whether all are most likely."""
        import torch

        count = len(questions.positions)
        vocabulary = self._runner.virtual.model.config.get_text_config().vocab_size
        step = max(1, LOGIT_BYTES // (4 * vocabulary))
        values = torch.empty(len(questions.asked), dtype=self._dtype)
        best = torch.empty(len(questions.asked), dtype=torch.bool)
        for start in range(0, count, step):
            stop = min(start + step, count)
            here = (questions.asked >= start) & (questions.asked < stop)
            device = self._runner.virtual.device
            logits = ending.logits(questions.positions[start:stop].to(device))
            asked = (questions.asked[here] - start).to(device)
            tokens = questions.tokens[here].to(device)
            logprobs = torch.log_softmax(logits, dim=-1, dtype=self._dtype)
            values[here] = logprobs[asked, tokens].cpu()
            best[here] = (logprobs.argmax(dim=-1)[asked] == tokens).cpu()
        greedy = torch.stack([part.all() for part in torch.split(best, questions.lengths)])
        return list(torch.split(values, questions.lengths)), greedy


def joined(parts: Iterable[Scores], members: Sequence[int], requests: int) -> Scores:
    """The answers of several batches as one, requests in their first order."""
    import numpy as np

    logprob = np.zeros((len(members), requests))
    greedy = np.zeros((len(members), requests), dtype=bool)
    tokens: list[npt.NDArray[np.float64]] = [np.zeros((len(members), 0))] * requests
    for part in parts:
        logprob[:, part.requests] = part.logprob
        greedy[:, part.requests] = part.greedy
        for index, values in zip(part.requests, part.tokens, strict=True):
            tokens[index] = values
    return Scores(list(members), list(range(requests)), logprob, greedy, tokens)


def _right_padded(rows: Sequence[Row]) -> torch.Tensor:
    import torch

    ids = torch.zeros(len(rows), max(len(row.tokens) for row in rows), dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row.tokens)] = torch.tensor(row.tokens)
    return ids


def _questions(rows: Sequence[Row], requests: Sequence[Question], width: int) -> _Questions:
    import torch

    asked: list[int] = []
    tokens: list[int] = []
    order, lengths = [], []
    for number, row in enumerate(rows):
        for request in row.requests:
            continuation = requests[request][1]
            end = number * width + len(row.tokens)
            asked += range(end - len(continuation), end)
            tokens += continuation
            order.append(request)
            lengths.append(len(continuation))
    positions, inverse = torch.unique(torch.tensor(asked), return_inverse=True)
    return _Questions(positions, inverse, torch.tensor(tokens), order, lengths)
