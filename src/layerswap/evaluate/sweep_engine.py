"""All compositions of the same experts, evaluated together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from layerswap.errors import EvaluationError
from layerswap.evaluate.requests import Request, make_batches, make_rows, rolling_requests
from layerswap.evaluate.runner import Runner, check_tokens
from layerswap.evaluate.scoring import Scorer, Scores, joined
from layerswap.evaluate.trie import LayerCounts, build_trie, count_layers
from layerswap.evaluate.virtual import VirtualModel
from layerswap.merge.plan import Plan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from transformers import PreTrainedModel


class Sweep:
    """Compositions of the same experts, evaluated for the price of a few.

    Compositions that begin alike share the work of their common layers: logits are bit for bit
    those of every composition loaded and run alone on the same batch, on the same device. Where a
    model's layers cannot be called one by one exactly, a warning says so and every composition
    runs alone.

    Args:
        plans: the compositions; see `Plan.grid` and `Plan.with_composition`.
        device: where the models run and their tensors live.
        dtype: `float32`, `bfloat16` or `float16`; the plans' own when None.
        max_made_bytes: bound on blended and merged tensors in memory; None for half of the
            memory that is free once the experts are there.

    Raises:
        LayerswapError: the compositions do not make models of one kind.

    Example:
        sweep = Sweep(plan.grid(bottom=range(9), top=range(9)))
        print(sweep.counts())
        scores = sweep.loglikelihood([([1, 5, 9], [12]), ([1, 5, 9], [13])])
        scores.logprob.shape  # (81, 2)
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        *,
        device: str | torch.device = "cpu",
        dtype: str | None = None,
        max_made_bytes: int | None = None,
    ) -> None:
        self.virtual = VirtualModel(
            plans, device=device, dtype=dtype, max_made_bytes=max_made_bytes
        )
        self.runner = Runner(self.virtual)

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
        return count_layers(build_trie(self.virtual.paths, self._members(members)))

    def logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        members: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Every composition's logits for one batch, in the order of the trie.

        Args:
            input_ids: int64 `(rows, tokens)`.
            attention_mask: of the same shape, 0 at padding; none when None.
            members: positions of the compositions; all when None.

        Yields:
            A composition's position, and `(rows, tokens, vocabulary)` in the model's dtype.
        """
        import torch

        device = self.virtual.device
        inputs = {"input_ids": input_ids.to(device), "use_cache": False}
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask.to(device)
        endings = self.runner.run(inputs, self._members(members))
        while True:
            # Not around the loop: what runs between two results is the caller's.
            with torch.inference_mode():
                ending = next(endings, None)
                if ending is None:
                    return
                logits = ending.logits(None)
            for member in ending.members:
                yield member, logits

    def loglikelihood(
        self, requests: Sequence[Request], *, members: Sequence[int] | None = None, **settings: Any
    ) -> Scores:
        """Log-probabilities of continuations after contexts, under every composition.

        Args:
            requests: token ids of context and continuation.
            members: positions of the compositions; all when None.
            settings: as `iter_loglikelihood`.
        """
        batches = self.iter_loglikelihood(requests, members=members, **settings)
        return joined(batches, self._members(members), len(requests))

    def iter_loglikelihood(
        self,
        requests: Sequence[Request],
        *,
        members: Sequence[int] | None = None,
        batch_size: int = 16,
        max_batch_tokens: int | None = None,
        max_length: int | None = None,
        softmax_dtype: str = "float32",
    ) -> Iterator[Scores]:
        """`loglikelihood` batch by batch, longest rows first, to be stored as they come.

        Args:
            requests: token ids of context and continuation, neither empty.
            members: positions of the compositions; all when None.
            batch_size: most rows that are read together.
            max_batch_tokens: most tokens that are read together, padding included.
            max_length: most tokens that the model reads; longer contexts lose tokens on the
                left. The model's own bound when None.
            softmax_dtype: dtype of the log-softmax and of the sums over continuations; lm-eval
                takes the model's.

        Raises:
            EvaluationError: a request that cannot be answered.
        """
        chosen = self._members(members)
        bound = self._max_length() if max_length is None else max_length
        for part, what in ((0, "the context of request"), (1, "the continuation of request")):
            check_tokens([request[part] for request in requests], self._vocabulary(), what)
        rows = make_rows(requests, bound)
        scorer = Scorer(self.runner, softmax_dtype)
        for batch in make_batches(rows, batch_size, max_batch_tokens):
            yield scorer.score(batch, requests, chosen)

    def perplexity(
        self,
        texts: Sequence[Sequence[int]],
        *,
        prefix: int,
        members: Sequence[int] | None = None,
        max_length: int | None = None,
        **settings: Any,
    ) -> npt.NDArray[np.float64]:
        """Perplexity per token of every text under every composition, in lm-eval's windows.

        Args:
            texts: token ids, each at least one.
            prefix: the token before the first, usually the one that begins every text.
            members: positions of the compositions; all when None.
            max_length: most tokens that the model reads; its own bound when None.
            settings: as `iter_loglikelihood`.

        Returns:
            float64 `(compositions, texts)`: exp of minus the mean log-probability of a token.
        """
        import numpy as np

        bound = max_length or self._max_length() or max(map(len, texts), default=1)
        requests, owners = [], []
        for index, text in enumerate(texts):
            if not text:
                raise EvaluationError(f"text {index} is empty")
            windows = rolling_requests(text, bound, prefix)
            requests += windows
            owners += [index] * len(windows)
        scores = self.loglikelihood(requests, members=members, max_length=bound, **settings)
        total = np.zeros((len(scores.members), len(texts)))
        np.add.at(total.T, owners, scores.logprob.T)
        perplexity: npt.NDArray[np.float64] = np.exp(-total / np.array([len(t) for t in texts]))
        return perplexity

    def _members(self, members: Sequence[int] | None) -> list[int]:
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

    def _max_length(self) -> int | None:
        config = self.virtual.model.config.get_text_config()
        for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            if isinstance(getattr(config, name, None), int):
                return int(getattr(config, name))
        return None

    def _vocabulary(self) -> int:
        embedding: Any = self.virtual.model.get_input_embeddings()
        return int(embedding.weight.shape[0])
