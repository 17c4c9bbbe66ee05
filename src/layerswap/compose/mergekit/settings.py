"""mergekit's settings: numbers, gradients over layers, and values by a tensor's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Scalar = float | bool
Setting = Any
"""A scalar, a list of scalars (a gradient), or a list of `{"filter": text, "value": ...}`, where
the filter may be left out."""
EVERYTHING = (None, "*")
"""Filters that match every tensor."""


def read_setting(value: object) -> Setting:
    """A setting in its plain form, whatever form mergekit would take it in.

    Raises:
        ValueError: saying what can be written.
    """
    if isinstance(value, Mapping):
        return [_condition(value)]
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return [_condition(item) for item in value]
    return _gradient(value)


def value_at(setting: Setting, tensor: str, t: float, *, discrete: bool = False) -> Scalar | None:
    """The value for one tensor; None where no filter matches its name.

    Args:
        setting: what `read_setting` gave.
        tensor: the tensor's name.
        t: position in the slice, 0 at its first layer and 1 at its last.
        discrete: whether a gradient jumps between its values, as that of a truth value does.

    Example: the gradient `[0, 1]` is 0.25 at t = 0.25; `[0, 0.5, 1]` is 0.25 there too.
    """
    if not isinstance(setting, list):
        return setting  # type: ignore[no-any-return]
    if isinstance(setting[0], Mapping):
        for condition in setting:
            wanted = condition.get("filter")
            if wanted in EVERYTHING or wanted in tensor:
                return value_at(condition["value"], tensor, t, discrete=discrete)
        return None
    if discrete:
        return setting[int(t * (len(setting) - 1))]  # type: ignore[no-any-return]
    scaled = t * (len(setting) - 1)
    low = int(scaled)
    high = min(len(setting) - 1, low + 1)
    share = scaled - low
    return (1 - share) * setting[low] + share * setting[high]  # type: ignore[no-any-return]


def scalars(setting: Setting) -> Iterator[Scalar]:
    """Every number and truth value that a setting is written with."""
    for item in setting if isinstance(setting, list) else [setting]:
        yield from scalars(item["value"]) if isinstance(item, Mapping) else [item]


def _condition(value: Mapping[Any, Any]) -> dict[str, Any]:
    unknown = set(value) - {"filter", "value"}
    if unknown or "value" not in value:
        forms = "a number, a list of numbers, or {filter: ..., value: ...}"
        raise ValueError(f"write {forms}; found {value!r:.60}")
    wanted = value.get("filter")
    if wanted is not None and not isinstance(wanted, str):
        raise ValueError(f"filter is {wanted!r:.40}; it is a part of a tensor's name")
    named = {} if wanted is None else {"filter": wanted}
    return {**named, "value": _gradient(value["value"])}


def _gradient(value: object) -> Scalar | list[Scalar]:
    if isinstance(value, list):
        if not value:
            raise ValueError("an empty list; write at least one number")
        return [_scalar(item) for item in value]
    return _scalar(value)


def _scalar(value: object) -> Scalar:
    if isinstance(value, bool):
        return value
    # YAML 1.1 takes 1e-3 for a text; mergekit reads it as the number that is meant.
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{value!r:.40} is not a number") from None
    if not isinstance(value, int | float) or not abs(value) <= 1e100:
        raise ValueError(f"{value!r:.40} is not a number")
    return value
