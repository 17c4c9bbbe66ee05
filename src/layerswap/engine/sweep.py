"""Sweeps: joint scoring and generation with many compositions of the same experts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from layerswap.engine.decoding import Decoding, Generation, Sampling, acting_settings
from layerswap.engine.generation import JointBatch, generate_alone, why_not_joint
from layerswap.engine.memory import MemoryEstimate, estimate_memory, free_bytes
from layerswap.engine.prefix import PrefixGroup, group_by_prefix
from layerswap.engine.rows import (
    Question,
    TokenRow,
    check_batch_size,
    check_prompts,
    eos_tokens,
    first_scored,
    longest_first,
    make_batches,
    one_table_length,
    rows_for,
)
from layerswap.engine.scoring import (
    Scores,
    merge_batches,
    score_batch,
    shares_prefix,
    why_not_together,
)
from layerswap.engine.trie import LayerCounts, Runner, build_trie, count_layers
from layerswap.engine.virtual import VirtualModel
from layerswap.ground.errors import EvaluationError
from layerswap.merge.metadata import generation_file

if TYPE_CHECKING:
    import torch


ROWS = 256
"""Default number of rows of generation: compositions times prompts."""


class Sweep(VirtualModel):
    """Compositions of the same experts, evaluated at the cost of a few models.

    Compositions that begin alike share the work of their common layers. Logits are bit for bit
    those of each composition loaded and run alone, on the same batch and device. If a model's
    layers cannot be called one by one exactly, a warning says so and every composition runs alone.

    Args:
        plans: the compositions; see `Plan.grid` and `Plan.with_recipe`.
        device: where the models run and their tensors live.
        dtype: `float32`, `bfloat16` or `float16`; the plans' own when None.
        max_made_bytes: bound on blended and merged tensors in memory; None for half of the
            memory that is free once the experts are loaded.

    Raises:
        LayerswapError: the compositions do not make models of one kind.

    Example:
        sweep = Sweep(plan.grid(bottom=range(9), top=range(9)))
        print(sweep.counts())
        scores = sweep.loglikelihood([([1, 5, 9], [12]), ([1, 5, 9], [13])])
        scores.logprob.shape  # (81, 2)
    """

    _decodes_jointly: bool | None = None  # None until checked
    _shares_prefixes: bool | None = None
    _batches: bool | None = None

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
        """Yield every composition's logits for one batch, in the order of the trie.

        Args:
            input_ids: int64 `(rows, tokens)`.
            attention_mask: of the same shape, 0 at padding; none when None.
            members: numbers of the compositions; all when None.

        Yields:
            A composition's number, and `(rows, tokens, vocabulary)` in the model's dtype.
        """
        import torch

        self._check_tables(input_ids.shape[1])
        inputs = {"input_ids": input_ids.to(self.device), "use_cache": False}
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask.to(self.device)
        leaves = self.runner.run(inputs, self.choose(members))
        while True:
            # Not around the loop: between two results the caller's code runs.
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
        """Score continuations after contexts, under every composition.

        `requests` are token ids of context and continuation; `settings` are those of
        `iter_loglikelihood`.
        """
        batches = self.iter_loglikelihood(requests, members=members, **settings)
        return merge_batches(batches, self.choose(members), len(requests))

    def iter_loglikelihood(
        self,
        requests: Sequence[Question],
        *,
        members: Sequence[int] | None = None,
        batch_size: int = 16,
        max_length: int | None = None,
        softmax_dtype: str = "float32",
        share_prefixes: bool = True,
    ) -> Iterator[Scores]:
        """Yield the scores of `loglikelihood` batch by batch, the longest row first.

        Args:
            requests: token ids of context and continuation, neither empty.
            members: numbers of the compositions; all when None.
            batch_size: most rows that are read together.
            max_length: most tokens that the model reads; longer contexts lose tokens on the
                left. The model's own limit when None.
            softmax_dtype: dtype of the log-softmax and of the sums over continuations; lm-eval
                uses the model's.
            share_prefixes: read a common beginning of many rows once in a batch, such as few-shot
                examples, where the model allows it and tokens are saved. Scores are then equal
                except for rounding.

        Raises:
            EvaluationError: a request that cannot be answered.
        """
        chosen = self.choose(members)
        check_batch_size(batch_size)
        rows = rows_for(self.model, requests, max_length)
        self._check_tables(len(rows[0].tokens))
        if not self._reads_batches(chosen, rows):
            rows = rows_for(self.model, requests, max_length, share=False)
            batch_size, share_prefixes = 1, False
        groups = [PrefixGroup(rows, 0)]
        if share_prefixes:
            bounds = [first_scored(row, requests) for row in rows]
            groups = self._prefix_groups(rows, bounds, batch_size, chosen) or groups
        for group, prefix in groups:
            for batch in make_batches(group, batch_size):
                yield score_batch(
                    self.runner, batch, requests, chosen,
                    prefix=prefix, softmax_dtype=softmax_dtype,
                )  # fmt: skip

    def _reads_batches(self, members: Sequence[int], rows: Sequence[TokenRow]) -> bool:
        """Check once that a row's logits do not depend on later tokens, padding and other rows."""
        if self._batches is None:
            reason = why_not_together(self.runner, members, [row.tokens for row in rows])
            self._batches = self._can(
                "read several requests together", reason, "every request is scored alone"
            )
        return self._batches

    def _check_tables(self, tokens: int) -> None:
        """Refuse texts at whose length rotary tables depend on the other texts of a batch."""
        limit = one_table_length(self.model)
        if limit is not None and tokens > limit:
            raise EvaluationError(
                f"a text of {tokens:,} tokens is beyond the {limit:,} up to which "
                f"{type(self.model).__name__} has one rotary table; shorten it (--num-fewshot), or "
                "use --engine hf"
            )

    def _can(self, what: str, reason: str | None, otherwise: str) -> bool:
        """Return False, with a warning, if there is a reason against a feature."""
        if reason is not None:
            warnings.warn(
                f"{type(self.model).__name__} cannot {what} ({reason}); {otherwise}, at full cost",
                stacklevel=5,
            )
        return reason is None

    def _prefix_groups(
        self, rows: Sequence[TokenRow], bounds: Sequence[int], size: int, members: Sequence[int]
    ) -> list[PrefixGroup]:
        """Group rows by prefixes; no groups if that saves nothing or the model cannot share any."""
        groups = group_by_prefix(rows, bounds, size, device=self.device.type)
        example = next((group for group in groups if group.prefix), None)
        if example is None:
            return []
        if self._shares_prefixes is None:
            self._shares_prefixes = shares_prefix(self.runner, members, *example)
        return groups if self._shares_prefixes else []

    def generate(self, prompts: Sequence[Sequence[int]], **settings: Any) -> list[list[Generation]]:
        """Generate with every composition after every prompt, given as token ids.

        The result is `[composition][prompt]`; `settings` are `iter_generate`'s.
        """
        members = self.choose(settings.get("members"))
        texts = dict(pair for part in self.iter_generate(prompts, **settings) for pair in part)
        return [[texts[member, prompt] for prompt in range(len(prompts))] for member in members]

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
        batch_size: int | None = None,
        share_prefixes: bool = True,
    ) -> Iterator[list[tuple[tuple[int, int], Generation]]]:
        """Yield the texts of `generate` batch by batch, the longest prompt first.

        The first call checks a part of the first batch: each composition alone must find the
        written tokens likely, and no token may read later ones. If that fails, or the model keeps
        another state than keys and values, a warning says so and every composition generates alone.

        Greedy by default, with the settings of the generation configuration, such as
        `repetition_penalty`. In float32 the tokens are those of transformers' `generate` for each
        composition, unless two tokens are equally likely except for rounding. Settings that do not
        act row by row, such as `num_beams`, are refused.

        Args:
            prompts: token ids, none empty.
            max_new_tokens: most tokens to write after a prompt.
            members: numbers of the compositions; all when None.
            stop: strings that end a text; needs `tokenizer`.
            tokenizer: with transformers' `batch_decode`.
            eos: tokens that end a text; from the generation configuration when None.
            sampling: how to draw tokens; greedy when None.
            batch_size: prompts per batch; when None, `ROWS` divided by the number of
                compositions.
            share_prefixes: as `iter_loglikelihood`.

        Yields:
            Per batch `((composition, prompt), generation)`, in both their orders.

        Raises:
            EvaluationError: a setting or prompt that is not possible.
        """
        chosen = self.choose(members)
        self._check_generation_files(chosen)
        ends = eos_tokens(self.model) if eos is None else frozenset(eos)
        own = acting_settings(self.model)
        decoding = Decoding(max_new_tokens, ends, tuple(stop), tokenizer, sampling, own)
        self._check_tables(max(map(len, prompts), default=0) + max_new_tokens)
        check_prompts(self.model, prompts, max_new_tokens)
        check_batch_size(batch_size)
        size = batch_size or max(1, ROWS // len(chosen))
        rows = longest_first(
            TokenRow(tuple(prompt), (number,), (len(prompt),))
            for number, prompt in enumerate(prompts)
        )
        groups = [PrefixGroup(rows, 0)]
        first = [row.tokens for row in rows[:size]]
        if share_prefixes and self._decodes(chosen, first):
            bounds = [len(row.tokens) - 1 for row in rows]
            groups = self._prefix_groups(rows, bounds, size, chosen) or groups
        for group, prefix in groups:
            for batch in make_batches(group, size):
                numbers, some = [row.requests[0] for row in batch], [row.tokens for row in batch]
                if self._decodes(chosen, some):
                    joint = JointBatch(self.runner, chosen, some, numbers, decoding, prefix=prefix)
                    texts = joint.generate()
                else:
                    texts = generate_alone(self.runner, chosen, some, numbers, decoding)
                yield [
                    ((member, number), texts[member, index])
                    for member in chosen
                    for index, number in enumerate(numbers)
                ]

    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        members: Sequence[int] | None = None,
        sampling: Sampling | None = None,
    ) -> Iterator[list[tuple[int, int]]]:
        """Yield `(composition, token)` of every composition, token by token, after one prompt.

        The tokens equal `generate`'s. If compositions cannot be decoded together, each
        gives its whole text at once.
        """
        chosen = self.choose(members)
        ends, own = eos_tokens(self.model), acting_settings(self.model)
        decoding = Decoding(max_new_tokens, ends, sampling=sampling, own=own)
        self._check_tables(len(prompt) + max_new_tokens)
        check_prompts(self.model, [prompt], max_new_tokens)
        if self._decodes(chosen, [prompt]):
            batch = JointBatch(self.runner, chosen, [prompt], [0], decoding)
            for newest in batch.steps({}):
                yield [(member, token) for member, _, token in newest]
            return
        for member in chosen:
            texts = generate_alone(self.runner, [member], [prompt], [0], decoding)
            yield [(member, token) for token in texts[member, 0].tokens]

    def _check_generation_files(self, members: Sequence[int]) -> None:
        """Warn if compositions have other generation configurations than the model in memory."""
        files = {member: generation_file(self.plans[member]) for member in (0, *members)}
        texts = {member: file and file.read_bytes() for member, file in files.items()}
        differing = next((member for member in members if texts[member] != texts[0]), None)
        if differing is not None:
            warnings.warn(
                f"composition {differing} differs in generation_config.json from composition 0, "
                "whose settings are used for all; evaluate it separately to use its own",
                stacklevel=4,
            )

    def _decodes(self, members: Sequence[int], prompts: Sequence[Sequence[int]]) -> bool:
        """Check once that texts can be decoded together."""
        if self._decodes_jointly is None:
            self._decodes_jointly = self._can(
                "be decoded for several compositions together",
                why_not_joint(self.runner, members, prompts),
                "every composition generates alone",
            )
        return self._decodes_jointly

    def counts(self, members: Sequence[int] | None = None) -> LayerCounts:
        """Count the layers that run per batch, one by one and in the sweep."""
        chosen = self.choose(members)
        if not self.layers or self.runner.exact is False:
            runs = len(chosen) * self.plans[0].composition.layers
            return LayerCounts(runs, runs, 1)
        return count_layers(build_trie(self.paths, chosen))

    def memory(
        self, rows: int, tokens: int, new_tokens: int = 0, members: Sequence[int] | None = None
    ) -> MemoryEstimate:
        """Estimate the memory of scoring a batch, or of generating if there are new tokens."""
        experts, blends = self.weight_bytes()
        return estimate_memory(
            self.model,
            experts=experts,
            blends=min(blends, self.pool.max_made_bytes),
            open_states=self.counts(members).open_states,
            members=len(self.choose(members)),
            rows=rows,
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
        """Return the largest batch size, a power of two, that fits into memory.

        `tokens` is the length of the longest row or prompt. `budget` is in bytes for everything,
        experts included; when None, it is what they take now and 80% of the free memory. Other
        sizes are left out because the shape of a batch decides the last bits of its results, and a
        little more or less free memory must not.

        Raises:
            EvaluationError: not even one row fits.
        """
        from rich.filesize import decimal

        if budget is None:
            held = self.pool.kept_bytes + self.pool.made_bytes
            budget = held + int(0.8 * free_bytes(self.device))
        single = self.memory(1, tokens, new_tokens, members)
        if single.total > budget:
            raise EvaluationError(
                f"one {'prompt' if new_tokens else 'row'} at a time needs {single}, but there are "
                f"{decimal(budget)}; evaluate fewer compositions at a time, set max_made_bytes, or "
                "use a smaller dtype"
            )
        size = 1
        while size < 1 << 16 and self.memory(2 * size, tokens, new_tokens, members).total <= budget:
            size *= 2
        return size

    def choose(self, members: Sequence[int] | None) -> list[int]:
        """Check numbers of compositions; return all numbers for None."""
        if members is None:
            return list(range(len(self)))
        if not members:
            raise EvaluationError("no composition is chosen")
        for member in members:
            if not 0 <= member < len(self):
                raise EvaluationError(
                    f"no composition {member}; the compositions are 0 to {len(self) - 1}"
                )
        return list(members)
