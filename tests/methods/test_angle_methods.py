"""Methods by angles between tensors, against plain float64 formulas."""

import math

import numpy as np
import pytest
from merged_vectors import SHAPE, SIZE, close, deltas, merged, wide


def cosine(x, y):
    return x @ y / np.linalg.norm(x) / np.linalg.norm(y)


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 1.0])
def test_slerp(t):
    a, b = deltas(2)
    b = b + np.float32(0.3) * a
    x, y = wide([a, b])
    angle = math.acos(cosine(x, y))
    reference = (math.sin((1 - t) * angle) * x + math.sin(t * angle) * y) / math.sin(angle)
    close(merged("slerp", [a, b], [1 - t, t]), reference)


def test_slerp_of_nearly_parallel_tensors_is_linear():
    (a,) = deltas(1)
    b = np.float32(1.5) * a + deltas(1, seed=3)[0] * np.float32(1e-3)
    x, y = wide([a, b])
    close(merged("slerp", [a, b], [0.75, 0.25]), 0.75 * x + 0.25 * y)


@pytest.mark.parametrize("t", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("angle", ["tensor", "row", "column"])
def test_nuslerp(angle, t):
    a, b = deltas(2)
    b = b + np.float32(0.3) * a
    x, y = (array.reshape(SHAPE) for array in wide([a, b]))
    axis = {"tensor": None, "row": 1, "column": 0}[angle]
    dot = (x * y).sum(axis=axis, keepdims=True)
    norms = np.sqrt((x**2).sum(axis=axis, keepdims=True) * (y**2).sum(axis=axis, keepdims=True))
    theta = np.arccos(dot / norms)
    reference = (np.sin((1 - t) * theta) * x + np.sin(t * theta) * y) / np.sin(theta)
    close(merged("nuslerp", [a, b], [1 - t, t], angle=angle), reference.ravel())


def test_multislerp():
    """The publication's steps, the tangent step too."""
    parts, weights = deltas(3), np.array([0.2, 0.5, 0.3])
    x = np.stack(wide(parts))
    norms = np.linalg.norm(x, axis=1)
    units = x / (norms + 1e-8)[:, None]
    mean = weights @ units
    mean = mean / np.linalg.norm(mean)
    tangent = weights @ (units - (units @ mean)[:, None] * mean)
    length = np.linalg.norm(tangent) + 1e-8
    reference = (mean * math.cos(length) + tangent * math.sin(length) / length) * (weights @ norms)
    close(merged("multislerp", parts, weights.tolist()), reference)
    close(merged("multislerp", parts, (2 * weights).tolist(), scale=2.0), 2 * reference)


def test_multislerp_of_opposites_is_linear():
    (part,) = deltas(1)
    close(merged("multislerp", [part, -part], [0.5, 0.5]), np.zeros(SIZE))


def similar(count):
    shared = deltas(1, seed=9)[0]
    return [part + shared for part in deltas(count)]


@pytest.mark.parametrize("steps", [1, 10])
def test_karcher(steps):
    parts = similar(3)
    x = np.stack(wide(parts))
    norms = np.linalg.norm(x, axis=1)
    units = x / norms[:, None]
    mean = units.mean(axis=0)
    mean = mean / np.linalg.norm(mean)
    for _ in range(steps):
        angles = [math.acos(np.clip(unit @ mean, -1, 1)) for unit in units]
        logs = [
            angle / math.sin(angle) * (unit - (unit @ mean) * mean)
            for unit, angle in zip(units, angles, strict=True)
        ]
        tangent = np.mean(logs, axis=0)
        step = np.linalg.norm(tangent)
        if step < 1e-5:
            break
        mean = math.cos(step) * mean + math.sin(step) / step * tangent
    close(merged("karcher", parts, max_iter=steps), norms.mean() * mean)


@pytest.mark.parametrize("angle", ["tensor", "row"])
def test_model_stock(angle):
    parts = similar(3)
    vectors = np.stack(wide(parts)).reshape(3, 1 if angle == "tensor" else SHAPE[0], -1)
    expected = []
    for row in vectors.transpose(1, 0, 2):
        pairs = [(0, 1), (0, 2), (1, 2)]
        mean = max(np.mean([cosine(row[i], row[j]) for i, j in pairs]), 0)
        expected.append(3 * mean / (1 + 2 * mean) * row.mean(axis=0))
    close(merged("model_stock", parts, angle=angle), np.concatenate(expected))
