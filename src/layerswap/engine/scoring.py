"""Scores continuations: log-likelihood requests in rows, batches and windows.

Token requests, those for generation too, are checked against the limits of a model and padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from layerswap.engine.trie import Leaf, Runner
from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from transformers import PreTrainedModel


LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Where configurations say how many tokens a model reads."""


def model_max_length(model: PreTrainedModel) -> int | None:
    """Most tokens that the model reads; None where its configuration sets no bound."""
    config = model.config.get_text_config()
    found = (getattr(config, name, None) for name in LENGTHS)
    return next((length for length in found if isinstance(length, int)), None)


def rotary_bound(model: PreTrainedModel) -> int | None:
    """Tokens beyond which rotary tables depend on the longest text of a batch; None if never.

    Those of dynamic NTK scaling, and of LongRoPE with its two sets of frequencies.
    """
    found = []
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        for layer, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if "dynamic" in str(kind):
                found.append(int(cast("Any", module).original_max_seq_len))
            elif kind == "longrope":
                parameters: Any = cast("Any", module).config.rope_parameters
                parameters = parameters if layer is None else parameters[layer]
                found.append(int(parameters["original_max_position_embeddings"]))
    return min(found, default=None)


def vocabulary(model: PreTrainedModel) -> int:
    """How many tokens the model has an embedding for."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def eos_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end a text, as the generation configuration has them."""
    # A model without a head has none; reading its logits says so.
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def check_prompts(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Refuse prompts that the model cannot continue.

    Raises:
        EvaluationError: one is empty, too long, or holds a token that the model does not have.
    """
    check_tokens(prompts, vocabulary(model), "prompt")
    bound = model_max_length(model)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise EvaluationError(f"prompt {index} is empty; give it at least one token")
        if bound is not None and len(prompt) + max_new_tokens > bound:
            raise EvaluationError(
                f"prompt {index} has {len(prompt)} tokens, which with {max_new_tokens} new ones "
                f"is more than the {bound} that the model reads"
            )


def check_tokens(rows: Sequence[Sequence[int]], vocabulary: int, what: str) -> None:
    """Refuse ids that the model has no embedding for.

    Raises:
        EvaluationError: naming the first.
    """
    for index, row in enumerate(rows):
        for token in row:
            if not 0 <= token < vocabulary:
                raise EvaluationError(
                    f"{what} {index} holds token {token}, but the model has {vocabulary}; "
                    "tokenise with the experts' tokenizer"
                )


def pad(
    rows: Sequence[Sequence[int]], *, fill: int = 0, left: bool = False, width: int | None = None
) -> torch.Tensor:
    """Rows as one tensor, int64 `(rows, width)`; `width` is the longest row's when None."""
    import torch

    width = max(map(len, rows)) if width is None else width
    padded = torch.full((len(rows), width), fill, dtype=torch.long)
    for index, row in enumerate(rows):
        start = width - len(row) if left else 0
        padded[index, start : start + len(row)] = torch.as_tensor(row, dtype=torch.long)
    return padded


def pad_with_mask(
    rows: Sequence[Sequence[int]], *, left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, int64 `(rows, longest)` each, 0 at padding."""
    return pad(rows, left=left), pad([[1] * len(row) for row in rows], left=left)


def batches(
    texts: Sequence[Sequence[int]], size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and mask of `size` texts at a time, padded on the right, longest texts first."""
    ordered = sorted(texts, key=lambda text: (-len(text), tuple(text)))
    for start in range(0, len(ordered), size):
        yield pad_with_mask(ordered[start : start + size])


Question = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of the continuation whose probability is asked for."""


@dataclass(frozen=True)
class TokenRow:
    """One sequence that the model reads.

    Attributes:
        tokens: what is read: a context and all of a continuation but its last token.
        requests: positions of the requests that it answers: those whose own tokens begin it.
        ends: per request, how many of `tokens` are its own.
    """

    tokens: tuple[int, ...]
    requests: tuple[int, ...]
    ends: tuple[int, ...]


def rows_for(
    model: PreTrainedModel, requests: Sequence[Question], max_length: int | None
) -> list[TokenRow]:
    """The rows of some requests for one model.

    Args:
        model: whose vocabulary and lengths count.
        requests: what is asked.
        max_length: most tokens that the model reads; its own bound when None.

    Raises:
        EvaluationError: a token that the model does not have, or as `make_rows`.
    """
    bound = model_max_length(model) if max_length is None else max_length
    for part, what in ((0, "the context of request"), (1, "the continuation of request")):
        check_tokens([request[part] for request in requests], vocabulary(model), what)
    return make_rows(requests, bound, rotary=rotary_bound(model))


def make_rows(
    requests: Sequence[Question], max_length: int | None, *, rotary: int | None = None
) -> list[TokenRow]:
    """The distinct rows of some requests, longest first, equal ones in the order of their tokens.

    Requests that differ in their last token alone, such as the letters of a multiple-choice
    question, share a row; so do those whose tokens begin another's, such as choices of one token
    beside a longer one, since no token reads what follows it.

    Args:
        requests: what is asked.
        max_length: most tokens that the model reads; longer rows lose tokens on the left.
        rotary: tokens beyond which what the model reads depends on the length of a row, which
            then answers for no shorter one.

    Raises:
        EvaluationError: a context or a continuation is empty, or a continuation alone is longer
            than `max_length`.
    """
    asked: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(requests):
        if not context or not continuation:
            empty = "continuation" if context else "context"
            raise EvaluationError(
                f"request {index} has an empty {empty}; a context has at least one token, "
                "such as the one that begins every text"
            )
        if max_length is not None and len(continuation) > max_length:
            raise EvaluationError(
                f"request {index} has a continuation of {len(continuation)} tokens, but the "
                f"model reads {max_length}"
            )
        tokens = (*context, *continuation)[:-1]
        asked.setdefault(tokens[-max_length:] if max_length else tokens, []).append(index)
    rows: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    longest: tuple[int, ...] = ()
    # In this order what begins other rows stands directly before one of them.
    for tokens in sorted(asked, reverse=True):
        too_long = rotary is not None and len(longest) > rotary
        if too_long or longest[: len(tokens)] != tokens:
            longest = tokens
        rows.setdefault(longest, []).extend((index, len(tokens)) for index in asked[tokens])
    ordered = sorted(rows.items(), key=lambda item: (-len(item[0]), item[0]))
    return [TokenRow(tokens, *zip(*sorted(found), strict=True)) for tokens, found in ordered]


def make_batches(
    rows: Sequence[TokenRow], max_rows: int, max_tokens: int | None, *, rotary: int | None = None
) -> Iterator[list[TokenRow]]:
    """Rows together that are read together.

    Args:
        rows: longest first.
        max_rows: most rows of a batch.
        max_tokens: most tokens of a batch, padding included; a row alone may have more.
        rotary: tokens beyond which what the model reads depends on the longest row of a batch;
            longer rows are read with those of their own length.
    """

    def reading(row: TokenRow) -> int:
        return len(row.tokens) if rotary is not None and len(row.tokens) > rotary else 0

    for _, alike in groupby(rows, key=reading):
        left = list(alike)
        while left:
            width = len(left[0].tokens)
            fit = max_rows if max_tokens is None else min(max_rows, max(1, max_tokens // width))
            yield left[:fit]
            left = left[fit:]


def rolling_requests(
    tokens: Sequence[int], max_length: int, prefix: int
) -> list[tuple[list[int], list[int]]]:
    """Requests whose log-probabilities sum to that of a whole text.

    The windows of lm-eval: each predicts up to `max_length` tokens, none twice, and reads as many
    tokens before them as fit, at least one.

    Args:
        tokens: the text.
        max_length: most tokens that the model reads.
        prefix: the token that the first window starts from.

    Example: `rolling_requests([5, 6, 7, 8, 9], 3, 0)` asks for `5 6 7` after `0`, and for `8 9`
    after `6 7`.
    """
    found = []
    for start in range(0, len(tokens), max_length):
        stop = min(start + max_length, len(tokens))
        # The window ends at `stop` and is full, so the last one reads further back.
        first = max(0, stop - max_length - 1) if start else 0
        context = [prefix] if not start else list(tokens[first:start])
        found.append((context, list(tokens[start:stop])))
    return found


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
        self, rows: Sequence[TokenRow], requests: Sequence[Question], members: Sequence[int]
    ) -> Scores:
        """The answers to every request of some rows, read as one batch, padded on the right.

        Only logits that a request needs are computed. Without a mask, since no token reads what
        is on its right.
        """
        import numpy as np
        import torch

        device = self._runner.virtual.device
        ids = pad([row.tokens for row in rows]).to(device)
        questions = _questions(rows, requests, ids.shape[1])
        answers: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}
        with torch.inference_mode():
            for leaf in self._runner.run({"input_ids": ids, "use_cache": False}, members):
                answer = self._answer(leaf, questions)
                answers.update(dict.fromkeys(leaf.members, answer))
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

    def _answer(self, leaf: Leaf, questions: _Questions) -> tuple[list[torch.Tensor], torch.Tensor]:
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
            logits = leaf.logits(questions.positions[start:stop].to(device))
            asked = (questions.asked[here] - start).to(device)
            tokens = questions.tokens[here].to(device)
            logprobs = torch.log_softmax(logits, dim=-1, dtype=self._dtype)
            values[here] = logprobs[asked, tokens].cpu()
            best[here] = (logprobs.argmax(dim=-1)[asked] == tokens).cpu()
        greedy = torch.stack([part.all() for part in torch.split(best, questions.lengths)])
        return list(torch.split(values, questions.lengths)), greedy


def merge_batches(parts: Iterable[Scores], members: Sequence[int], requests: int) -> Scores:
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


def _questions(rows: Sequence[TokenRow], requests: Sequence[Question], width: int) -> _Questions:
    import torch

    asked: list[int] = []
    tokens: list[int] = []
    order, lengths = [], []
    for number, row in enumerate(rows):
        for request, own in zip(row.requests, row.ends, strict=True):
            continuation = requests[request][1]
            end = number * width + own
            asked += range(end - len(continuation), end)
            tokens += continuation
            order.append(request)
            lengths.append(len(continuation))
    positions, inverse = torch.unique(torch.tensor(asked), return_inverse=True)
    return _Questions(positions, inverse, torch.tensor(tokens), order, lengths)
