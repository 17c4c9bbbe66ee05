"""Recognises a task by the columns of its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from layerswap.errors import DataError
from layerswap.new.tables import Table

Kind = Literal["messages", "pairs", "choices", "prompts", "answers", "labels"]
NAMES: dict[str, tuple[str, ...]] = {
    "text": ("text", "sentence", "headline", "title", "tweet", "review", "content", "utterance"),
    "label": ("label", "category", "topic", "sentiment", "class", "intent"),
    "prompt": ("prompt", "instruction"),
    "question": ("question", "problem", "query", "inputs"),
    "answer": ("answer", "completion", "response", "output", "solution", "targets"),
    "messages": ("messages", "conversation", "conversations"),
    "premise": ("premise", "sentence1"),
    "hypothesis": ("hypothesis", "sentence2"),
    "choices": ("choices", "options", "endings"),
}
"""Names of a column, by its role."""
KINDS: dict[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "pairs": ("premise", "hypothesis", "label"),
    "choices": ("question", "choices", "answer"),
    "prompts": ("prompt", "answer"),
    "answers": ("question", "answer"),
    "labels": ("text", "label"),
}
"""Roles of the columns of each kind of task; the first kind that a table has is its own."""
SHOWN = 70
"""Characters of a column that an example shows."""


@dataclass(frozen=True)
class Shape:
    """A kind of task, and its columns in a table by role."""

    kind: Kind
    columns: Mapping[str, str]


def recognise(table: Table, given: Mapping[str, str], kind: Kind | None = None) -> Shape:
    """Recognise the kind of a table, or find the columns of a known kind.

    `given` names columns by role, as `--columns` does. An error lists the table's columns.
    """
    listed = f"its columns are {', '.join(table.columns)}"
    for role, column in given.items():
        if role not in NAMES:
            raise DataError(f"--columns: no role {role!r}; there are {', '.join(NAMES)}")
        if column not in table.columns and kind is None:
            raise DataError(f"{table.name}: has no column {column!r}; {listed}")
    unclear: dict[str, list[str]] = {}
    for one in [kind] if kind else KINDS:
        roles = KINDS[one]
        if kind is None and not set(given) <= set(roles):
            continue
        found = {role: _candidates(table, role, given) for role in roles}
        if all(len(names) == 1 for names in found.values()):
            return Shape(one, {role: names[0] for role, names in found.items()})
        if all(found.values()):
            unclear |= {role: names for role, names in found.items() if len(names) > 1}
    if unclear:
        role, names = next(iter(unclear.items()))
        raise DataError(
            f"{table.name}: {' and '.join(names)} may both be the {role}; choose one, such as "
            f"--columns {role}={names[0]}"
        )
    if kind:
        wanted = " and ".join(KINDS[kind])
        raise DataError(f"{table.name}: has no columns for {wanted} as the task has; {listed}")
    raise DataError(
        f"{table.name}: no rule recognises its columns; {listed}. Name them, such as "
        "--columns text=COLUMN,label=COLUMN or --columns question=COLUMN,answer=COLUMN"
    )


def _candidates(table: Table, role: str, given: Mapping[str, str]) -> list[str]:
    if given.get(role) in table.columns:
        return [given[role]]
    names = [name for name in table.columns if name.casefold() in NAMES[role]]
    return [name for name in names if name not in given.values()]


def examples(table: Table, shape: Shape, count: int = 2) -> list[str]:
    """The first rows of a table by role, a line each."""
    return [
        ", ".join(f"{role} {_short(row[column])!r}" for role, column in shape.columns.items())
        for row in table.rows[:count]
    ]


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
