"""Accuracy after batch calibration, for tasks with the same labels for every document.

A model that prefers one label chooses it too often. Batch calibration (Zhou et al., 2024, section
3.3) divides the probability of each label by its mean over the documents. It needs no right answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

CALIBRATED = "acc_calibrated"
"""Name of the metric."""


def calibrate(
    logprobs: npt.NDArray[np.float64], others: npt.NDArray[np.float64] | None = None
) -> npt.NDArray[np.float64]:
    """Divide the probability of each label by its mean over documents.

    Args:
        logprobs: natural logarithms `(documents, labels)`, of any scale in a row.
        others: those of the documents to average over; the same documents when None.

    Returns:
        The same shape, up to a constant in each row; the largest is the calibrated answer.
    """
    logs = _normalised(logprobs)
    batch = logs if others is None else _normalised(others)
    prior = np.logaddexp.reduce(batch, axis=0) - np.log(len(batch))
    # A label that is impossible everywhere stays impossible.
    calibrated = np.full_like(logs, -np.inf)
    possible = np.isfinite(prior)
    calibrated[:, possible] = logs[:, possible] - prior[possible]
    return calibrated


def _normalised(logprobs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    normalised: npt.NDArray[np.float64] = logprobs - np.logaddexp.reduce(
        logprobs, axis=1, keepdims=True
    )
    return normalised


def add_calibrated(result: Mapping[str, Any]) -> None:
    """Add the metric `acc_calibrated` to the tasks that have the same labels for every document.

    These are multiple-choice tasks with the metric `acc` and one filter.

    Args:
        result: results of lm-eval for one model, with `samples`; changed in place.
    """
    for task, every in result["samples"].items():
        samples = [one for one in every if CALIBRATED not in one["metrics"]]
        read = [_read(sample) for sample in samples]
        labels = {one[0] for one in read if one is not None}
        filters = {sample["filter"] for sample in samples}
        if None in read or len(labels) != 1 or len(samples) < 2 or len(filters) != 1:
            continue
        logprobs = np.array([one[1] for one in read if one is not None])
        right = [one[2] for one in read if one is not None]
        answers = calibrate(logprobs).argmax(axis=1).tolist()
        for sample, answer, gold in zip(samples, answers, right, strict=True):
            sample[CALIBRATED] = float(answer == gold)
            sample["metrics"] = [*sample["metrics"], CALIBRATED]
        key = f"{CALIBRATED},{samples[0]['filter']}"
        result["results"][task][key] = float(np.mean([sample[CALIBRATED] for sample in samples]))


def _read(sample: Mapping[str, Any]) -> tuple[tuple[str, ...], list[float], int] | None:
    """Read the labels of a document, their log-probabilities and the position of the right one.

    None if the document is not a choice among labels after one prompt.
    """
    asked: Sequence[Any] = sample["arguments"]
    answers: Sequence[Any] = sample["filtered_resps"]
    if "acc" not in sample["metrics"] or not all(
        isinstance(one, tuple | list) and len(one) == 2 for one in (*asked, *answers)
    ):
        return None
    if len(asked) < 2 or len({prompt for prompt, _ in asked}) != 1:
        return None
    labels = tuple(label.strip() for _, label in asked)
    logprobs = [float(logprob) for logprob, _ in answers]
    target = sample["target"]
    if isinstance(target, str) and target.strip() in labels:
        target = labels.index(target.strip())
    if not isinstance(target, Integral) or len(labels) != len(logprobs):
        return None
    if np.isnan(logprobs).any() or not np.isfinite(logprobs).any():
        return None
    # A task that counts otherwise is not a plain choice.
    counted = float(int(np.argmax(logprobs)) == target)
    return (labels, logprobs, int(target)) if counted == float(sample["acc"]) else None
