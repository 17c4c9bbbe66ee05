"""Answers that compositions gave, kept on disk as they come, so that none is computed twice."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from layerswap.errors import EvaluationError
from layerswap.merge.documents import record
from layerswap.merge.plan import Plan

Answer = list[Any]
"""A log-probability and whether it was the greedy answer; or the tokens that were written."""


class AnswerStore:
    """Answers by composition and request, in one SQLite file that survives a crash.

    Args:
        path: the file; in memory when None.

    Raises:
        EvaluationError: the file cannot be opened, or is not an answer store.
    """

    def __init__(self, path: Path | None = None) -> None:
        try:
            self._database = sqlite3.connect(path or ":memory:", isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS answers (composition TEXT, request TEXT, answer TEXT, "
                "PRIMARY KEY (composition, request)) WITHOUT ROWID"
            )
        except sqlite3.Error as error:
            raise EvaluationError(f"{path}: cannot be used to keep answers ({error})") from None

    def known(self, composition: str, requests: Iterable[str]) -> dict[str, Answer]:
        """The answers that a composition has given to some requests."""
        wanted = set(requests)
        rows = self._database.execute(
            "SELECT request, answer FROM answers WHERE composition = ?", (composition,)
        )
        return {request: json.loads(answer) for request, answer in rows if request in wanted}

    def keep(self, answers: Iterable[tuple[str, str, Answer]]) -> None:
        """Keep answers by composition and request; on the disk when this returns."""
        self._database.execute("BEGIN")
        self._database.executemany(
            "INSERT OR REPLACE INTO answers VALUES (?, ?, ?)",
            [(one, request, json.dumps(answer)) for one, request, answer in answers],
        )
        self._database.execute("COMMIT")

    def close(self) -> None:
        """Close the file."""
        self._database.close()


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


def grouped(missing: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
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
