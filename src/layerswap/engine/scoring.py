"""Log-likelihoods of continuations, for all compositions in one batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.engine.memory import LOGIT_BYTES
from layerswap.engine.rows import Question, TokenRow, pad
from layerswap.engine.split import reason_of
from layerswap.engine.trie import (
    CHECKED_ROWS,
    CHECKED_TOKENS,
    Leaf,
    Runner,
    gap_beyond_rounding,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


@dataclass(frozen=True)
class Scores:
    """Answers to loglikelihood requests: a row per composition, a column per request.

    Logarithms are natural and in float64. An answer is greedy if every token of the continuation is
    the most likely one.
    """

    members: Sequence[int]  # numbers of the compositions, one per row
    requests: Sequence[int]  # numbers of the requests, one per column
    logprob: npt.NDArray[np.float64]  # summed over the tokens of a continuation
    greedy: npt.NDArray[np.bool_]


def score_batch(
    runner: Runner,
    rows: Sequence[TokenRow],
    requests: Sequence[Question],
    members: Sequence[int],
    *,
    prefix: int = 0,
    softmax_dtype: str = "float32",
) -> Scores:
    """Answer the requests of some rows, which are read as one batch, padded on the right.

    No mask is needed, because no token reads the tokens on its right. Only logits that predict a
    token of a continuation are computed. A common prefix of all rows is read once.
    """
    import numpy as np
    import torch

    ids = pad([row.tokens for row in rows]).to(runner.virtual.device)
    # Every token of every continuation, with its position in the flattened batch.
    positions: list[int] = []
    tokens: list[int] = []
    order, lengths = [], []
    for number, row in enumerate(rows):
        for request, end in zip(row.requests, row.ends, strict=True):
            continuation = requests[request][1]
            stop = number * (ids.shape[1] - prefix) + end - prefix
            positions += range(stop - len(continuation), stop)
            tokens += continuation
            order.append(request)
            lengths.append(len(continuation))
    dtype: torch.dtype = getattr(torch, softmax_dtype)
    wanted = torch.tensor(tokens)
    distinct, predictor = torch.unique(torch.tensor(positions), return_inverse=True)
    answers: dict[int, tuple[list[float], list[bool]]] = {}
    with torch.inference_mode():
        inputs = {"input_ids": ids, "use_cache": False}
        for leaf in runner.run(inputs, members, prefix=prefix):
            values, best = _score_tokens(runner, leaf, distinct, predictor, wanted, dtype=dtype)
            sums = [float(part.sum()) for part in torch.split(values, lengths)]
            greedy = [bool(part.all()) for part in torch.split(best, lengths)]
            answers.update(dict.fromkeys(leaf.members, (sums, greedy)))
    found = zip(*(answers[member] for member in members), strict=True)
    return Scores(list(members), order, *map(np.array, found))


def _score_tokens(
    runner: Runner,
    leaf: Leaf,
    positions: torch.Tensor,
    predictor: torch.Tensor,
    tokens: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each token, and True if it is the most likely one.

    `predictor` has, per token, the index of its position in `positions`.
    """
    import torch

    device = runner.virtual.device
    vocabulary = runner.virtual.model.config.get_text_config().vocab_size
    step = max(1, LOGIT_BYTES // (4 * vocabulary))
    values = torch.empty(len(tokens), dtype=dtype)
    best = torch.empty(len(tokens), dtype=torch.bool)
    for start in range(0, len(positions), step):
        stop = min(start + step, len(positions))
        logits = leaf.logits(positions[start:stop].to(device))
        logprobs = torch.log_softmax(logits, dim=-1, dtype=dtype)
        here = (predictor >= start) & (predictor < stop)
        rows, wanted = (predictor[here] - start).to(device), tokens[here].to(device)
        values[here] = logprobs[rows, wanted].cpu()
        best[here] = (logprobs.argmax(dim=-1)[rows] == wanted).cpu()
    return values, best


def merge_batches(parts: Iterable[Scores], members: Sequence[int], requests: int) -> Scores:
    """Join the answers of several batches, with all requests in their order."""
    import numpy as np

    logprob = np.zeros((len(members), requests))
    greedy = np.zeros((len(members), requests), dtype=bool)
    for part in parts:
        logprob[:, part.requests] = part.logprob
        greedy[:, part.requests] = part.greedy
    return Scores(list(members), list(range(requests)), logprob, greedy)


def why_not_together(
    runner: Runner, members: Sequence[int], texts: Sequence[Sequence[int]]
) -> str | None:
    """Return how later tokens, padding or neighbours change a row's logits; None if they do not.

    Compares the beginnings of two rows, read alone, with the same rows in a padded batch.
    """
    import torch

    first, last = texts[0][:CHECKED_TOKENS], texts[-1][: CHECKED_TOKENS // 2]
    device = runner.virtual.device
    with torch.inference_mode():
        batch = {"input_ids": pad([first, last]).to(device), "use_cache": False}
        together = runner.logits_alone(batch, members[0])
        for row, text in zip(together, (first, last), strict=True):
            half = (len(text) + 1) // 2
            alone = {"input_ids": pad([text[:half]]).to(device), "use_cache": False}
            gap = gap_beyond_rounding(row[:half], runner.logits_alone(alone, members[0])[0])
            if gap is not None:
                return f"later tokens, padding or other rows change a row's logits by {gap:.2g}"
    return None


def shares_prefix(
    runner: Runner, members: Sequence[int], rows: Sequence[TokenRow], prefix: int
) -> bool:
    """Return True if a model can share a prefix between rows.

    Compares two short rows, read with a shared prefix, with the same rows read whole.
    """
    import torch

    virtual = runner.virtual
    if not virtual.layers or runner.stack.why_no_kv_cache is not None:
        return False
    length = min(prefix, CHECKED_TOKENS)
    short = [
        [*row.tokens[:length], *row.tokens[prefix:][:CHECKED_TOKENS]] for row in rows[:CHECKED_ROWS]
    ]
    inputs: dict[str, Any] = {"input_ids": pad(short).to(virtual.device), "use_cache": False}
    chosen = sorted({members[0], members[-1]})

    def differs() -> str | None:
        if not runner.check(inputs, members):
            return "its layers cannot be run one by one exactly"
        whole = {leaf.members[0]: leaf.logits(None) for leaf in runner.run(inputs, chosen)}
        every = torch.arange(inputs["input_ids"][:, length:].numel(), device=virtual.device)
        for leaf in runner.run(inputs, chosen, prefix=length):
            logits = leaf.logits(every)
            expected = whole[leaf.members[0]][:, length:].reshape(logits.shape)
            if (gap := gap_beyond_rounding(logits, expected)) is not None:
                return f"logits differ by up to {gap:.2g}"
        return None

    return reason_of(differs) is None
