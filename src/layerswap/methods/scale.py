"""Scaling: the weights of one expert times a number."""

from __future__ import annotations

from layerswap.methods import mergekit, steps
from layerswap.methods.method import ONE, Array, Chunk, Parameter, merge_method


@merge_method(
    "Goddard et al., 2024 (2403.13257)",
    parameters={"scale": Parameter(1.0, low=-1e6, high=1e6)},
    experts=ONE,
    deltas=False,
)
def scale(chunk: Chunk) -> Array:
    """`scale * theta`, as mergekit scales what passes through."""
    return steps.weighted_sum(chunk.parts, [chunk.number("scale")])


def _read(values: mergekit.TensorValues) -> mergekit.Reading:
    factor, only = float(values.shared["scale"]), values.models[0].name
    return only if factor == 1 else mergekit.Call("scale", ((only, 1.0),), {"scale": factor})


SPELLINGS = (
    mergekit.Spelling("passthrough", _read, shared={"scale": 1.0}, required=(), sources=(1, 1)),
)
