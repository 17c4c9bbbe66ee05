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

from layerswap.reading.letters import folded

NORMALISED = "exact_match_normalised"
"""Name of the metric of exact match after normalisation."""
OPTION = re.compile(r"\W*[A-Za-z]\W*")
"""A letter that stands for an option of a question, which is no label to balance."""


# --- labels of a classification ---


def add_labels(result: Mapping[str, Any]) -> None:
    """Add the right label and the answer to the samples of classifications, in place.

    These are multiple-choice tasks with the metric `acc`, one filter, and the same labels for every
    document, except letters of options. `answered` of a sample holds the two, by metric.
    """
    for samples in result["samples"].values():
        choices = [choice for sample in samples if (choice := _choice(sample)) is not None]
        filters = {sample["filter"] for sample in samples}
        if len(choices) < 2 or len(choices) != len(samples) or len(filters) != 1:
            continue
        names = choices[0][0]
        if any(labels != names for labels, _, _ in choices) or all(map(OPTION.fullmatch, names)):
            continue
        for sample, (_, logprobs, gold) in zip(samples, choices, strict=True):
            sample["answered"] = {"acc": (names[gold], names[int(np.argmax(logprobs))])}


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
    """A text without case, punctuation, variants of letters and runs of white space.

    A sign and a separator before a digit stay: -3 is not 3, and 1.5 is not 15.
    """
    letters = folded(text.replace("\N{MINUS SIGN}", "-"))
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


ADDED = {NORMALISED: Added("exact_match", add_normalised)}
"""The metrics by name."""
