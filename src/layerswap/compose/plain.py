"""Blends and operations as plain data for JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layerswap.compose.blend import Blend
from layerswap.compose.operation import Operation


def blend_to_dict(blend: Blend) -> dict[str, Any]:
    """`{"weights": {expert: weight}}`, and under `"operations"` what methods make, if anything."""
    data: dict[str, Any] = {"weights": {m: w for m, w in blend.weights if isinstance(m, str)}}
    operations = [
        {**_operation_to_dict(member), "weight": weight}
        for member, weight in blend.weights
        if isinstance(member, Operation)
    ]
    return {**data, "operations": operations} if operations else data


def blend_from_dict(data: Mapping[str, Any]) -> Blend:
    """The blend that `blend_to_dict` wrote.

    Raises:
        RecipeError: a weight, method or parameter that is not allowed.
        KeyError, TypeError, AttributeError: data of another shape.
    """
    weights: dict[Any, float] = dict(data["weights"])
    for entry in data.get("operations", ()):
        weights[_operation_from_dict(entry)] = entry["weight"]
    return Blend.of(weights)


def _operation_to_dict(operation: Operation) -> dict[str, Any]:
    inputs = [{**blend_to_dict(b), "weight": weight} for b, weight in operation.inputs]
    if operation.fishers:
        pairs = zip(inputs, operation.fishers, strict=True)
        inputs = [{**entry, "fisher": name} for entry, name in pairs]
    return {
        "method": operation.method,
        "inputs": inputs,
        "base": blend_to_dict(operation.base) if operation.base else None,
        "parameters": dict(operation.parameters),
    }


def _operation_from_dict(data: Mapping[str, Any]) -> Operation:
    fishers = {blend_from_dict(e): e["fisher"] for e in data["inputs"] if "fisher" in e}
    return Operation.of(
        data["method"],
        {blend_from_dict(entry): entry["weight"] for entry in data["inputs"]},
        base=blend_from_dict(data["base"]) if data["base"] else None,
        parameters=data["parameters"],
        fishers=fishers,
    )
