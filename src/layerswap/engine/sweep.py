"""Sweeps: many compositions of the same experts, scored and generated with together.

Their memory is estimated first, to find the largest batch that fits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from layerswap.engine.generation import (
    Batch,
    Generation,
    Request,
    Sampling,
    StoppingCriteria,
    generate_alone,
    why_not_together,
)
from layerswap.engine.rows import (
    PrefixGroup,
    Question,
    TokenRow,
    first_asked,
    group_by_prefix,
    longest_first,
    make_batches,
    rolling_requests,
)
from layerswap.engine.scoring import (
    LOGIT_BYTES,
    Scorer,
    Scores,
    check_prompts,
    eos_tokens,
    merge_batches,
    model_max_length,
    rotary_bound,
    rows_for,
    why_not_shared,
)
from layerswap.engine.trie import LayerCounts, Runner, build_trie, count_layers
from layerswap.engine.virtual import VirtualModel, free_bytes
from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from transformers import PreTrainedConfig


LOGIT_COPIES = 3
"""Logits, their log-softmax and what it works in."""
STREAMS = 8
"""Tensors as wide as the hidden state that a layer holds at a time: residual, norms, q, k, v."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a sweep holds at its peak.

    Attributes:
        experts: the experts' tensors that some composition takes verbatim, each once.
        made: blended and merged tensors, as far as their bound lets them stay.
        states: hidden states of open branches.
        layer: what one layer works in.
        logits: logits at the positions asked for.
        cache: keys and values, when generating.
    """

    experts: int
    made: int
    states: int = 0
    layer: int = 0
    logits: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.experts + self.made + self.states + self.layer + self.logits + self.cache

    def __str__(self) -> str:
        parts = {name.replace("_", " "): value for name, value in vars(self).items() if value}
        listed = ", ".join(f"{name} {_human(value)}" for name, value in parts.items())
        return f"about {_human(self.total)} of memory ({listed})"


def estimate_scoring(
    virtual: VirtualModel, counts: LayerCounts, rows: int, tokens: int
) -> MemoryEstimate:
    """Memory for scoring batches of `rows` rows of `tokens` tokens."""
    experts, made = _weights(virtual)
    per_row = _state_bytes(virtual, tokens)
    return MemoryEstimate(
        experts,
        made,
        states=rows * per_row * (counts.open + 1),
        layer=rows * _layer_bytes(virtual, tokens, tokens),
        logits=_logit_bytes(virtual, rows * tokens),
    )


def estimate_generating(
    virtual: VirtualModel,
    counts: LayerCounts,
    *,
    members: int,
    prompts: int,
    tokens: int,
    new_tokens: int,
) -> MemoryEstimate:
    """Memory for `members` compositions answering `prompts` prompts of `tokens` tokens.

    As if no two compositions wrote the same, so that no lane was shared.
    """
    experts, made = _weights(virtual)
    rows = members * prompts
    config = virtual.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * heads * width * config.num_hidden_layers * _itemsize(virtual)
    prefill = _layer_bytes(virtual, tokens, tokens)
    decode = _layer_bytes(virtual, 1, tokens + new_tokens)
    return MemoryEstimate(
        experts,
        made,
        states=prompts * _state_bytes(virtual, tokens) * (counts.open + 1),
        layer=max(prompts * prefill, rows * decode),
        logits=_logit_bytes(virtual, rows),
        # Room for a quarter more, and for the copies while one layer's room grows.
        cache=int(1.25 * rows * cached * (tokens + new_tokens)),
    )


def largest_fitting(budget: int, estimate: Any, what: str) -> int:
    """The largest power of two for which an estimate stays within a budget.

    Powers of two, because the shape of a batch decides the last bits of its results: a little
    more or less memory must not.

    Args:
        budget: bytes.
        estimate: from a size to a `MemoryEstimate`.
        what: the unit of the size, for the message.

    Raises:
        EvaluationError: not even one fits.
    """
    if estimate(1).total > budget:
        raise EvaluationError(
            f"one {what} at a time needs {estimate(1)}, but there are {_human(budget)}; evaluate "
            "fewer compositions at a time, bound max_made_bytes, or take a smaller dtype"
        )
    size = 1
    while size < 1 << 16 and estimate(2 * size).total <= budget:
        size *= 2
    return size


def _weights(virtual: VirtualModel) -> tuple[int, int]:
    stays, made = virtual.weight_bytes()
    return stays, min(made, virtual.pool.max_made_bytes)


def _state_bytes(virtual: VirtualModel, tokens: int) -> int:
    config = virtual.model.config.get_text_config()
    return int(tokens * config.hidden_size * _itemsize(virtual))


def _layer_bytes(virtual: VirtualModel, queries: int, keys: int) -> int:
    """What one layer works in for one row."""
    config = virtual.model.config.get_text_config()
    size = _itemsize(virtual)
    wide = 3 * _inner_width(config) + STREAMS * config.hidden_size
    # A mask, at most; and the scores of all heads where attention is spelt out.
    scores = size * queries * keys
    if config._attn_implementation == "eager":
        scores += 3 * 4 * config.num_attention_heads * queries * keys
    return int(queries * wide * size + scores)


def _inner_width(config: PreTrainedConfig) -> int:
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    found: list[int] = [w for name in names if isinstance(w := getattr(config, name, None), int)]
    return found[0] if found else 4 * int(config.hidden_size)


def _logit_bytes(virtual: VirtualModel, positions: int) -> int:
    vocabulary = virtual.model.config.get_text_config().vocab_size
    return LOGIT_COPIES * min(LOGIT_BYTES, 4 * int(vocabulary) * positions)


def _itemsize(virtual: VirtualModel) -> int:
    return int(virtual.model.dtype.itemsize)


def _human(count: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


ROWS = 256
"""Compositions times prompts that are generated together by default."""


class Sweep(VirtualModel):
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
        experts_on: `device` or `cpu`: where the experts' tensors stay. From the CPU they are copied
            to the device when they are needed, within `max_made_bytes`.

    Raises:
        LayerswapError: the compositions do not make models of one kind.

    Example:
        sweep = Sweep(plan.grid(bottom=range(9), top=range(9)))
        print(sweep.counts())
        scores = sweep.loglikelihood([([1, 5, 9], [12]), ([1, 5, 9], [13])])
        scores.logprob.shape  # (81, 2)
    """

    _together: bool | None = None
    _shares: bool | None = None

    @cached_property
    def runner(self) -> Runner:
        """Runs the compositions' forward passes."""
        return Runner(self)

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

        inputs = {"input_ids": input_ids.to(self.device), "use_cache": False}
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask.to(self.device)
        leaves = self.runner.run(inputs, self.choose(members))
        while True:
            # Not around the loop: what runs between two results is the caller's.
            with torch.inference_mode():
                leaf = next(leaves, None)
                if leaf is None:
                    return
                logits = leaf.logits(None)
            for member in leaf.members:
                yield member, logits

    def loglikelihood(
        self, requests: Sequence[Question], *, members: Sequence[int] | None = None, **settings: Any
    ) -> Scores:
        """Log-probabilities of continuations after contexts, under every composition.

        Args:
            requests: token ids of context and continuation.
            members: positions of the compositions; all when None.
            settings: as `iter_loglikelihood`.
        """
        batches = self.iter_loglikelihood(requests, members=members, **settings)
        return merge_batches(batches, self.choose(members), len(requests))

    def iter_loglikelihood(
        self,
        requests: Sequence[Question],
        *,
        members: Sequence[int] | None = None,
        batch_size: int = 16,
        max_batch_tokens: int | None = None,
        max_length: int | None = None,
        softmax_dtype: str = "float32",
        share_prefixes: bool = True,
    ) -> Iterator[Scores]:
        """`loglikelihood` batch by batch, to be stored as they come; the longest row in the first.

        Args:
            requests: token ids of context and continuation, neither empty.
            members: positions of the compositions; all when None.
            batch_size: most rows that are read together.
            max_batch_tokens: most tokens that are read together, padding included.
            max_length: most tokens that the model reads; longer contexts lose tokens on the
                left. The model's own bound when None.
            softmax_dtype: dtype of the log-softmax and of the sums over continuations; lm-eval
                takes the model's.
            share_prefixes: read what many rows begin with, such as the examples of few-shot
                prompts, once in a batch, where the model allows it and tokens are saved. Scores
                are then equal to rounding, and not to the bit.

        Raises:
            EvaluationError: a request that cannot be answered.
        """
        chosen = self.choose(members)
        rows = rows_for(self.model, requests, max_length)
        scorer = Scorer(self.runner, softmax_dtype)
        rotary = rotary_bound(self.model)
        groups = [PrefixGroup(rows, 0)]
        if share_prefixes:
            asked = [first_asked(row, requests) for row in rows]
            alike = group_by_prefix(rows, asked, batch_size, device=self.device.type)
            groups = self._shared(alike, chosen) or groups
        for group, prefix in groups:
            for batch in make_batches(
                group, batch_size, max_batch_tokens, rotary=rotary, prefix=prefix
            ):
                yield scorer.score(batch, requests, chosen, prefix)

    def _shared(self, groups: list[PrefixGroup], members: Sequence[int]) -> list[PrefixGroup]:
        """The groups, if any has a prefix and the model can read one once; else none."""
        example = next((group for group in groups if group.prefix), None)
        if example is None:
            return []
        if self._shares is None:
            self._shares = why_not_shared(self.runner, members, *example) is None
        return groups if self._shares else []

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

        bound = max_length or model_max_length(self.model) or max(map(len, texts), default=1)
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

    def generate(self, prompts: Sequence[Sequence[int]], **settings: Any) -> list[list[Generation]]:
        """What every composition writes after every prompt: `[composition][prompt]`.

        Args:
            prompts: token ids.
            settings: as `iter_generate`.
        """
        members = self.choose(settings.get("members"))
        found = dict(pair for part in self.iter_generate(prompts, **settings) for pair in part)
        return [[found[member, prompt] for prompt in range(len(prompts))] for member in members]

    def iter_generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        members: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        tokenizer: Any = None,
        eos: Iterable[int] | None = None,
        sampling: Sampling | None = None,
        streams: Sequence[int] | None = None,
        processors: Any = None,
        batch_size: int | None = None,
        share_prefixes: bool = True,
    ) -> Iterator[list[tuple[tuple[int, int], Generation]]]:
        """`generate` batch by batch, to be stored as they come; the longest prompt in the first.

        The first call checks, on a part of the first batch, that what is written is what the
        compositions alone find likely; where it is not, or the model keeps another state than
        keys and values, a warning says so and every composition generates alone.

        Greedy by default. In float32 the tokens are those that transformers' `generate` gives each
        composition, unless two tokens are equally likely but for rounding.

        Args:
            prompts: token ids, none empty.
            max_new_tokens: most tokens that are written after a prompt.
            members: positions of the compositions; all when None.
            stop: strings that end a text; needs `tokenizer`.
            tokenizer: with transformers' `batch_decode`.
            eos: tokens that end a text; those of the generation configuration when None.
            sampling: how to draw tokens; greedy when None.
            streams: per prompt, the number of its random numbers; its position when None. Give
                them where only some of the prompts are generated again.
            processors: transformers' logits processors to apply before all else.
            batch_size: prompts of a batch; as many as make `ROWS` rows with all compositions
                when None.
            share_prefixes: as `iter_loglikelihood`.

        Yields:
            Per batch `((composition, prompt), generation)`, in both their orders.

        Raises:
            EvaluationError: a setting or prompt that is not possible.
        """
        chosen = self.choose(members)
        ends = eos_tokens(self.model) if eos is None else frozenset(eos)
        stopping = StoppingCriteria(max_new_tokens, ends, tuple(stop), tokenizer)
        request = Request(stopping, sampling, processors)
        check_prompts(self.model, prompts, max_new_tokens)
        numbers = range(len(prompts)) if streams is None else streams
        size = batch_size or max(1, ROWS // len(chosen))
        rows = [TokenRow(tuple(one), (i,), (len(one),)) for i, one in enumerate(prompts)]
        groups = [PrefixGroup(longest_first(rows), 0)]
        if share_prefixes and self._decodes_together(
            chosen, [row.tokens for row in groups[0].rows[:size]]
        ):
            asked = [len(row.tokens) - 1 for row in rows]
            alike = group_by_prefix(rows, asked, size, device=self.device.type)
            groups = self._shared(alike, chosen) or groups
        for group, prefix in groups:
            for batch in make_batches(group, size, None):
                part = [row.requests[0] for row in batch]
                found = self._generate_batch(
                    chosen, [prompts[i] for i in part], [numbers[i] for i in part], request, prefix
                )
                yield [
                    ((member, part[i]), found[member, i])
                    for member in chosen
                    for i in range(len(part))
                ]

    def _generate_batch(
        self,
        members: Sequence[int],
        prompts: Sequence[Sequence[int]],
        streams: Sequence[int],
        request: Request,
        prefix: int,
    ) -> dict[tuple[int, int], Generation]:
        together = self._decodes_together(members, prompts)
        bound = rotary_bound(self.model)
        needed = max(map(len, prompts)) + request.stopping.max_new_tokens
        if not together or (bound is not None and needed > bound):
            return generate_alone(self.runner, members, prompts, streams, request)
        return Batch(self.runner, members, prompts, streams, request, prefix=prefix).generate()

    def _decodes_together(self, members: Sequence[int], prompts: Sequence[Sequence[int]]) -> bool:
        """Whether compositions can be decoded together; found out once, on some prompts."""
        if self._together is None:
            why = why_not_together(self.runner, members, prompts)
            self._together = why is None
            if why is not None:
                warnings.warn(
                    f"{type(self.model).__name__} cannot be decoded for several "
                    f"compositions together ({why}); every composition generates alone, at full "
                    "price",
                    stacklevel=4,
                )
        return bool(self._together)

    def counts(self, members: Sequence[int] | None = None) -> LayerCounts:
        """How many layers run per batch, one by one and here."""
        chosen = self.choose(members)
        if not self.layers:
            runs = len(chosen) * self.plans[0].composition.layers
            return LayerCounts(runs, runs, 1)
        return count_layers(build_trie(self.paths, chosen))

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
            return estimate_scoring(self, counts, rows, tokens)
        return estimate_generating(
            self,
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
            held = self.pool.kept_bytes + self.pool.made_bytes
            budget = held + int(0.8 * free_bytes(self.device))
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
