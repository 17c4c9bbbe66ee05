"""Scores continuations: log-likelihood requests in rows, batches and windows.

Token requests, those for generation too, are checked against the limits of a model and padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from layerswap.engine.rows import Question, TokenRow, make_rows
from layerswap.engine.split import other_state
from layerswap.engine.trie import (
    CHECKED_ROWS,
    CHECKED_TOKENS,
    CLOSE,
    NOT_SO_BUILT,
    Leaf,
    Runner,
)
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
        self,
        rows: Sequence[TokenRow],
        requests: Sequence[Question],
        members: Sequence[int],
        prefix: int = 0,
    ) -> Scores:
        """The answers to every request of some rows, read as one batch, padded on the right.

        Only logits that a request needs are computed. Without a mask, since no token reads what
        is on its right.

        Args:
            rows: what is read.
            requests: what is asked, of which the rows answer some.
            members: positions of the compositions.
            prefix: first tokens, the same in all rows, that are read once.
        """
        import numpy as np
        import torch

        device = self._runner.virtual.device
        ids = pad([row.tokens for row in rows]).to(device)
        questions = _questions(rows, requests, ids.shape[1], prefix)
        answers: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}
        with torch.inference_mode():
            inputs = {"input_ids": ids, "use_cache": False}
            for leaf in self._runner.run(inputs, members, prefix=prefix):
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


def why_not_shared(
    runner: Runner, members: Sequence[int], rows: Sequence[TokenRow], prefix: int
) -> str | None:
    """Read two short rows with their prefix shared, and see that logits are as those of whole rows.

    Returns:
        Why this model cannot read a prefix once for several rows; None if it can.
    """
    import torch

    model = runner.virtual.model
    obstacle = "its layers are not in one list" if not runner.virtual.layers else other_state(model)
    if obstacle is None and rotary_bound(model) is not None:
        obstacle = "its rotary tables depend on the length of a batch"
    if obstacle is not None:
        return obstacle
    chosen = sorted({members[0], members[-1]})
    some = [row.tokens for row in rows[:CHECKED_ROWS]]
    rest = [tokens[prefix:][:CHECKED_TOKENS] for tokens in some]
    prefix = min(prefix, CHECKED_TOKENS)
    short = [[*tokens[:prefix], *own] for tokens, own in zip(some, rest, strict=True)]
    inputs = {"input_ids": pad(short).to(runner.virtual.device), "use_cache": False}
    with torch.inference_mode():
        if not runner.check(inputs, members):
            return "its layers cannot be run one by one exactly"
        whole = {leaf.members[0]: leaf.logits(None) for leaf in runner.run(inputs, chosen)}
        every = torch.arange(whole[chosen[0]][:, prefix:, 0].numel(), device=runner.virtual.device)
        try:
            for leaf in runner.run(inputs, chosen, prefix=prefix):
                found = leaf.logits(every)
                expected = whole[leaf.members[0]][:, prefix:].reshape(found.shape)
                gap = float((found.float() - expected.float()).abs().max())
                if not gap <= CLOSE[str(found.dtype)] * float(expected.abs().max()):
                    return f"logits differ by up to {gap:.2g}"
        except torch.OutOfMemoryError:
            raise
        except NOT_SO_BUILT as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


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


def _questions(
    rows: Sequence[TokenRow], requests: Sequence[Question], width: int, prefix: int
) -> _Questions:
    import torch

    asked: list[int] = []
    tokens: list[int] = []
    order, lengths = [], []
    for number, row in enumerate(rows):
        for request, own in zip(row.requests, row.ends, strict=True):
            continuation = requests[request][1]
            end = number * (width - prefix) + own - prefix
            asked += range(end - len(continuation), end)
            tokens += continuation
            order.append(request)
            lengths.append(len(continuation))
    positions, inverse = torch.unique(torch.tensor(asked), return_inverse=True)
    return _Questions(positions, inverse, torch.tensor(tokens), order, lengths)
