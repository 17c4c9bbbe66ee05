"""What every composition answers to lm-eval's requests, asked once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerswap.evaluate.answers import Answer, AnswerStore, composition_key, grouped, request_key
from layerswap.evaluate.sweep_engine import ROWS, Sweep

USUAL_BATCH = 16
"""Rows that are scored together, where memory lets them."""


class Book:
    """What every composition answers, asked once for all of them.

    Args:
        sweep: the compositions.
        members: positions of those that are judged.
        store: keeps the answers; in memory when None.
        batch_size: rows that are scored together; when None, 16 or as many as fit.
        say: told what will be in memory, before it is.
    """

    def __init__(
        self,
        sweep: Sweep,
        members: Sequence[int],
        store: AnswerStore | None,
        batch_size: int | None,
        say: Callable[[str], None],
    ) -> None:
        self.members = list(members)
        self._sweep, self._store = sweep, store or AnswerStore()
        self._batch_size, self._say = batch_size, say
        self._said: dict[str, int] = {}
        self._keys = [composition_key(sweep.plans[member]) for member in members]

    def scores(self, number: int, asked: Sequence[Any], *, bound: int, dtype: str) -> list[Answer]:
        """Log-probability and greediness of continuations under the `number`-th composition."""
        keys = [request_key("score", c, r, bound, dtype) for c, r in asked]
        for lacking, numbers in self._lacking(keys).items():
            members = [self.members[n] for n in numbers]
            longest = max(min(bound, len(asked[i][0]) + len(asked[i][1])) for i in lacking)
            batch = self._batch(members, longest)
            for part in self._sweep.iter_loglikelihood(
                [asked[i] for i in lacking],
                members=members,
                batch_size=batch,
                max_length=bound,
                softmax_dtype=dtype,
            ):
                self._store.keep(
                    (
                        self._keys[n],
                        keys[lacking[request]],
                        [float(part.logprob[row, column]), bool(part.greedy[row, column])],
                    )
                    for row, n in enumerate(numbers)
                    for column, request in enumerate(part.requests)
                )
        return self._answers(number, keys)

    def texts(
        self,
        number: int,
        prompts: Sequence[tuple[int, ...]],
        settings: Mapping[str, Any],
        tokenizer: Any,
    ) -> list[Answer]:
        """Tokens that the `number`-th composition writes after prompts."""
        keys = [request_key("text", prompt, repr(sorted(settings.items()))) for prompt in prompts]
        for lacking, numbers in self._lacking(keys).items():
            members = [self.members[n] for n in numbers]
            position = dict(zip(members, numbers, strict=True))
            longest, new = max(len(prompts[i]) for i in lacking), settings["max_new_tokens"]
            batch = self._batch(members, longest, new) if self._batch_size is None else None
            for part in self._sweep.iter_generate(
                [prompts[i] for i in lacking],
                members=members,
                tokenizer=tokenizer,
                batch_size=batch,
                **settings,
            ):
                self._store.keep(
                    (self._keys[position[member]], keys[lacking[prompt]], list(text.tokens))
                    for (member, prompt), text in part
                )
        return self._answers(number, keys)

    def _batch(self, members: Sequence[int], tokens: int, new_tokens: int = 0) -> int:
        """Rows of a batch, or prompts of one; and a word on the memory that it takes."""
        sweep, size = self._sweep, self._batch_size
        if size is None:
            usual = max(1, ROWS // len(members)) if new_tokens else USUAL_BATCH
            size = min(usual, sweep.fit_batch_size(tokens, new_tokens=new_tokens, members=members))
        doing = "generating" if new_tokens else "scoring"
        estimate = sweep.memory(size, tokens, new_tokens, members)
        if estimate.total > self._said.get(doing, 0):
            self._said[doing] = estimate.total
            self._say(f"{doing} {size} at a time with {len(members)} compositions: {estimate}")
        return size

    def _lacking(self, keys: Sequence[str]) -> dict[tuple[int, ...], list[int]]:
        distinct = {key: i for i, key in reversed(list(enumerate(keys)))}
        missing = []
        for composition in self._keys:
            known = self._store.known(composition, distinct)
            missing.append(tuple(sorted(i for key, i in distinct.items() if key not in known)))
        return grouped(missing)

    def _answers(self, number: int, keys: Sequence[str]) -> list[Answer]:
        known = self._store.known(self._keys[number], keys)
        return [known[key] for key in keys]
