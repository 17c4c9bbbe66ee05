"""Answers that compositions gave, kept on disk as they come, so that none is computed twice."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layerswap.engine.sweep import ROWS, Sweep
from layerswap.engine.vllm import VllmSweep
from layerswap.errors import EvaluationError
from layerswap.merge import Plan
from layerswap.merge.metadata import record

Answer = list[Any]
"""A log-probability and whether it was the greedy answer; or the tokens that were written."""


class AnswerStore:
    """Answers by composition and request, in one SQLite file that survives a crash.

    Args:
        path: the file; in memory when None.

    Raises:
        EvaluationError: the file cannot be opened, or is not an answer store; later, from any
            method, it is damaged or the disk is full.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        with self._damage_named():
            self._database = sqlite3.connect(path or ":memory:", isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS answers (composition TEXT, request TEXT, answer TEXT, "
                "PRIMARY KEY (composition, request)) WITHOUT ROWID"
            )

    def known(self, composition: str, requests: Iterable[str]) -> dict[str, Answer]:
        """The answers that a composition has given to some requests."""
        wanted = set(requests)
        with self._damage_named():
            rows = self._database.execute(
                "SELECT request, answer FROM answers WHERE composition = ?", (composition,)
            )
            return {request: json.loads(answer) for request, answer in rows if request in wanted}

    def keep(self, answers: Iterable[tuple[str, str, Answer]]) -> None:
        """Keep answers by composition and request; on the disk when this returns."""
        with self._damage_named():
            self._database.execute("BEGIN")
            self._database.executemany(
                "INSERT OR REPLACE INTO answers VALUES (?, ?, ?)",
                [(one, request, json.dumps(answer)) for one, request, answer in answers],
            )
            self._database.execute("COMMIT")

    def adopt(self, path: Path, compositions: Iterable[str]) -> int:
        """Take over what another store knows of some compositions.

        Args:
            path: the other store, which is not changed.
            compositions: their keys.

        Returns:
            The number of answers that are new here.
        """
        before = self._database.total_changes
        with self._damage_named():
            self._database.execute("ATTACH DATABASE ? AS other", (str(path),))
            try:
                self._database.executemany(
                    "INSERT OR IGNORE INTO answers SELECT * FROM other.answers "
                    "WHERE composition = ?",
                    [(one,) for one in compositions],
                )
            finally:
                self._database.execute("DETACH DATABASE other")
        return self._database.total_changes - before

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError) as error:
            raise EvaluationError(
                f"{self._path}: cannot be used to keep answers ({error}); "
                "delete it to compute them again"
            ) from None


def composition_key(plan: Plan) -> str:
    """A hash of what decides a composition's weights: its blends, its sources and the dtype."""
    known = record(plan)
    parts = [
        {name: known[name] for name in ("composition", "sources")},
        plan.recipe.dtype,
        plan.alignment is not None and plan.recipe.tokenizer,
    ]
    return _hash(parts)


def request_key(kind: str, *parts: Any) -> str:
    """A hash of what is asked: the kind of request, its tokens and its settings."""
    return _hash([kind, *parts])


def by_missing(missing: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    """Members by what each lacks, so that those that lack the same are asked together.

    Args:
        missing: per member, the positions of the requests that it has not answered.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for member, lacks in enumerate(missing):
        if lacks:
            groups.setdefault(lacks, []).append(member)
    return groups


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


USUAL_BATCH = 16
"""Rows that are scored together, where memory lets them."""


class ResponseCache:
    """The answers of all compositions, computed together and kept.

    Args:
        sweep: the compositions.
        members: positions of those that are evaluated.
        store: keeps the answers; in memory when None.
        batch_size: rows that are scored together; when None, 16 or as many as fit.
        log: called with the memory that will be needed, before it is.
    """

    def __init__(
        self,
        sweep: Sweep | VllmSweep,
        members: Sequence[int],
        store: AnswerStore | None,
        batch_size: int | None,
        log: Callable[[str], None],
    ) -> None:
        self.members = list(members)
        self._sweep, self._store = sweep, store or AnswerStore()
        self._batch_size, self._log = batch_size, log
        self._logged: dict[str, int] = {}
        self._keys = [composition_key(sweep.plans[member]) for member in members]

    def scores(self, number: int, asked: Sequence[Any], *, bound: int, dtype: str) -> list[Answer]:
        """Log-probability and greediness of continuations under the `number`-th composition."""
        keys = [request_key("score", c, r, bound, dtype) for c, r in asked]
        for missing, numbers in self._missing(keys).items():
            members = [self.members[n] for n in numbers]
            position = dict(zip(members, numbers, strict=True))
            longest = max(min(bound, len(asked[i][0]) + len(asked[i][1])) for i in missing)
            batch = self._batch(members, longest)
            for part in self._sweep.iter_loglikelihood(
                [asked[i] for i in missing],
                members=members,
                batch_size=batch,
                max_length=bound,
                softmax_dtype=dtype,
            ):
                self._store.keep(
                    (
                        self._keys[position[member]],
                        keys[missing[request]],
                        [float(part.logprob[row, column]), bool(part.greedy[row, column])],
                    )
                    for row, member in enumerate(part.members)
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
        for missing, numbers in self._missing(keys).items():
            members = [self.members[n] for n in numbers]
            position = dict(zip(members, numbers, strict=True))
            longest, new = max(len(prompts[i]) for i in missing), settings["max_new_tokens"]
            batch = self._batch(members, longest, new) if self._batch_size is None else None
            for part in self._sweep.iter_generate(
                [prompts[i] for i in missing],
                members=members,
                tokenizer=tokenizer,
                batch_size=batch,
                **settings,
            ):
                self._store.keep(
                    (self._keys[position[member]], keys[missing[prompt]], list(text.tokens))
                    for (member, prompt), text in part
                )
        return self._answers(number, keys)

    def _batch(self, members: Sequence[int], tokens: int, new_tokens: int = 0) -> int:
        """Rows or prompts of a batch; logs the memory that it takes."""
        sweep, size = self._sweep, self._batch_size
        if isinstance(sweep, VllmSweep):  # it schedules requests by itself
            return size or USUAL_BATCH
        if size is None:
            usual = max(1, ROWS // len(members)) if new_tokens else USUAL_BATCH
            size = min(usual, sweep.fit_batch_size(tokens, new_tokens=new_tokens, members=members))
        doing = "generating" if new_tokens else "scoring"
        estimate = sweep.memory(size, tokens, new_tokens, members)
        if estimate.total > self._logged.get(doing, 0):
            self._logged[doing] = estimate.total
            many = f"{len(members)} compositions" if len(members) > 1 else "one composition"
            self._log(f"{doing} {size} at a time with {many}: {estimate}")
        return size

    def _missing(self, keys: Sequence[str]) -> dict[tuple[int, ...], list[int]]:
        distinct = {key: i for i, key in reversed(list(enumerate(keys)))}
        absent = []
        for composition in self._keys:
            known = self._store.known(composition, distinct)
            absent.append(tuple(sorted(i for key, i in distinct.items() if key not in known)))
        return by_missing(absent)

    def _answers(self, number: int, keys: Sequence[str]) -> list[Answer]:
        known = self._store.known(self._keys[number], keys)
        return [known[key] for key in keys]
