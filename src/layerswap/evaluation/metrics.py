"""Metrics that lm-eval lacks, added to its results document by document.

A metric is a row of `ADDED`. Its function adds the name to `metrics` of every sample it scores,
the score under this name, and the mean to `results`. Tables, comparisons, a sweep's `choose_by` and
a study's `metric` take it from there.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

CALIBRATED = "acc_calibrated"
"""Name of the metric of accuracy after batch calibration."""
NORMALISED = "exact_match_normalised"
"""Name of the metric of exact match after normalisation."""
OPTION = re.compile(r"\W*[A-Za-z]\W*")
"""A letter that stands for an option of a question, which is no label to balance."""


# --- batch calibration ---


def calibrate(
    logprobs: npt.NDArray[np.float64], others: npt.NDArray[np.float64] | None = None
) -> npt.NDArray[np.float64]:
    """Divide the probability of each label by its mean over documents.

    Batch calibration (Zhou et al., 2024, section 3.3) corrects a model that prefers a label, and
    needs no right answer.

    Args:
        logprobs: natural logarithms `(documents, labels)`, of any scale in a row.
        others: logarithms of the documents to average over; the same documents when None.

    Returns:
        The same shape, up to a constant in each row; the largest is the calibrated answer.
    """
    logs, batch = (
        rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
        for rows in (logprobs, logprobs if others is None else others)
    )
    prior = np.logaddexp.reduce(batch, axis=0) - np.log(len(batch))
    # A label that is impossible everywhere stays impossible.
    calibrated = np.full_like(logs, -np.inf)
    possible = np.isfinite(prior)
    calibrated[:, possible] = logs[:, possible] - prior[possible]
    return calibrated


def add_calibrated(result: Mapping[str, Any]) -> None:
    """Add the metric `acc_calibrated` to tasks with the same labels for every document, in place.

    These are multiple-choice tasks with the metric `acc` and one filter. Except where the labels
    are letters of options, `answered` holds the right label and the answer, by metric.
    """
    for task, every in result["samples"].items():
        samples = [sample for sample in every if CALIBRATED not in sample["metrics"]]
        choices = [choice for sample in samples if (choice := _choice(sample)) is not None]
        filters = {sample["filter"] for sample in samples}
        if len(choices) != len(samples) or len(samples) < 2 or len(filters) != 1:
            continue
        labels, logprobs, right = zip(*choices, strict=True)
        if len(set(labels)) != 1:
            continue
        plain = np.argmax(logprobs, axis=1)
        calibrated = calibrate(np.array(logprobs)).argmax(axis=1)
        names, classes = labels[0], not all(OPTION.fullmatch(label) for label in labels[0])
        for sample, answer, other, gold in zip(samples, plain, calibrated, right, strict=True):
            sample[CALIBRATED] = float(other == gold)
            sample["metrics"] = [*sample["metrics"], CALIBRATED]
            if classes:
                sample["answered"] = {
                    "acc": (names[gold], names[answer]), CALIBRATED: (names[gold], names[other])
                }  # fmt: skip
        key = f"{CALIBRATED},{samples[0]['filter']}"
        result["results"][task][key] = float(np.mean([sample[CALIBRATED] for sample in samples]))


def _choice(sample: Mapping[str, Any]) -> tuple[tuple[str, ...], list[float], int] | None:
    """Read the labels of a document, their log-probabilities and the position of the right one.

    None if the document is not a choice among labels after one prompt.
    """
    asked: Sequence[Any] = sample["arguments"]
    answers: Sequence[Any] = sample["filtered_resps"]
    if "acc" not in sample["metrics"] or not all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in (*asked, *answers)
    ):
        return None
    if len(asked) < 2 or len({prompt for prompt, _ in asked}) != 1:
        return None
    labels = tuple(label.strip() for _, label in asked)
    logprobs = [float(logprob) for logprob, _ in answers]
    target = sample["target"]
    if isinstance(target, str) and target.strip() in labels:
        target = labels.index(target.strip())
    if not isinstance(target, Integral) or np.isnan(logprobs).any():
        return None
    if not np.isfinite(logprobs).any():
        return None
    # A task that counts otherwise is not a plain choice.
    counted = float(int(np.argmax(logprobs)) == target)
    return (labels, logprobs, int(target)) if counted == float(sample["acc"]) else None


# --- exact match after normalisation ---


def normalised(text: str) -> str:
    """A text without case, punctuation, Unicode variants and runs of white space.

    A sign and a separator before a digit stay: -3 is not 3, and 1.5 is not 15.
    """
    plain = unicodedata.normalize("NFKC", text).casefold().replace("\N{MINUS SIGN}", "-")
    letters = unicodedata.normalize("NFKC", plain)
    return " ".join("".join(
        " " if unicodedata.category(letter).startswith("P") and not after.isdigit() else letter
        for letter, after in zip(letters, [*letters[1:], " "], strict=False)
    ).split())  # fmt: skip


def add_normalised(result: Mapping[str, Any]) -> None:
    """Add `exact_match_normalised` to the tasks that generate and have `exact_match`, in place.

    The answer counts if it equals the target, or one of several, after `normalised`.
    """
    for task, samples in result["samples"].items():
        scores: dict[str, list[float]] = {}
        for sample in samples:
            answers = sample["filtered_resps"]
            if "exact_match" not in sample["metrics"] or not isinstance(answers[0], str):
                continue
            targets = sample["target"] if isinstance(sample["target"], list) else [sample["target"]]
            right = normalised(answers[0]) in [normalised(str(target)) for target in targets]
            sample[NORMALISED] = float(right)
            sample["metrics"] = [*sample["metrics"], NORMALISED]
            scores.setdefault(sample["filter"], []).append(float(right))
        for name, values in scores.items():
            result["results"][task][f"{NORMALISED},{name}"] = float(np.mean(values))


class Added(NamedTuple):
    """A metric that is added to the tasks that have another."""

    needs: str  # the metric of lm-eval
    add: Callable[[Mapping[str, Any]], None]  # to a result of lm-eval, in place


ADDED = {
    CALIBRATED: Added("acc", add_calibrated),
    NORMALISED: Added("exact_match", add_normalised),
}
"""The metrics by name."""
