"""Metrics that lm-eval lacks, added to its results document by document.

A metric is a row of `ADDED`. Its function adds the name to `metrics` of every sample it scores,
the score under this name, and the mean to `results`. Tables, comparisons, a sweep's `choose_by` and
a study's `metric` take it from there.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from layerswap.evaluation.languages import answer_of
from layerswap.ground.errors import EvaluationError
from layerswap.reading.letters import folded, is_unspaced

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


@lru_cache(maxsize=1 << 12)
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
    for samples in result["samples"].values():
        for sample in samples:
            if "exact_match" in sample["metrics"] and isinstance(sample["filtered_resps"][0], str):
                _add(sample, NORMALISED, float(
                    normalised(sample["filtered_resps"][0]) in map(normalised, references(sample))
                ))  # fmt: skip
    _average(result, NORMALISED)


def references(sample: Mapping[str, Any]) -> list[str]:
    """Return the right answers to a document."""
    targets = sample["target"]
    return [str(target) for target in (targets if isinstance(targets, list) else [targets])]


def _add(sample: dict[str, Any], name: str, value: float) -> None:
    sample[name], sample["metrics"] = value, [*sample["metrics"], name]


def _average(result: Mapping[str, Any], name: str) -> None:
    """Add the mean of a metric to the results of each task, by filter."""
    for task, samples in result["samples"].items():
        scores: dict[str, list[float]] = {}
        for sample in samples:
            if name in sample:
                scores.setdefault(sample["filter"], []).append(sample[name])
        for filter_name, values in scores.items():
            result["results"][task][f"{name},{filter_name}"] = float(np.mean(values))


# --- written answers ---


def chrf(answer: str, target: str) -> float:
    """Compute sacrebleu's chrF++ of one answer, 0 to 100."""
    from sacrebleu import sentence_chrf

    return float(sentence_chrf(answer, [target], word_order=2).score)


def rouge_l(answer: str, target: str) -> float:
    """Compute the F1 of the longest common subsequence of tokens, 0 to 1 (Lin, 2004)."""
    return _f1(answer, target, _common_subsequence)


def token_f1(answer: str, target: str) -> float:
    """Compute the F1 of the tokens in any order, 0 to 1, as for SQuAD."""
    return _f1(answer, target, lambda a, b: (Counter(a) & Counter(b)).total())


def _f1(answer: str, target: str, common: Callable[[list[str], list[str]], int]) -> float:
    by_letter = is_unspaced(target)
    given, right = _tokens(answer, by_letter), _tokens(target, by_letter)
    return 2 * common(given, right) / (len(given) + len(right)) if given and right else 0.0


def _tokens(text: str, by_letter: bool) -> list[str]:
    """Split a text into normalised words, or into their characters."""
    words = normalised(text).split()
    return [*"".join(words)] if by_letter else words


def _common_subsequence(first: list[str], second: list[str]) -> int:
    lengths = [0] * (len(second) + 1)
    for token in first:
        above, lengths = lengths, [0]
        for i, other in enumerate(second):
            lengths.append(above[i] + 1 if token == other else max(above[i + 1], lengths[i]))
    return lengths[-1]


WRITTEN = {"chrf++": chrf, "rouge_l": rouge_l, "token_f1": token_f1}
"""Metrics of a written answer against one right answer; of several, the best counts."""
EMPTY, CUT, COPIED = "answer_empty", "answer_cut", "answer_copied"
"""Metrics that are 1 if an answer is empty, reaches the most tokens, or is part of the prompt."""
BESIDE = (*WRITTEN, EMPTY, CUT, COPIED)
"""All metrics of written answers."""
COPY = {True: 10, False: 5}
"""Fewest characters or words of a copy; a shorter right answer may well be in the prompt."""


def written_metrics(name: str, task: Any) -> list[str] | None:
    """Return the metrics in `metadata: {written: [...]}` of one of lm-eval's tasks."""
    named = (task.get_config("metadata") or {}).get("written")
    if named is not None and not {*named} <= {*WRITTEN}:
        raise EvaluationError(f"{name}: metadata.written: there are {', '.join(WRITTEN)}")
    return named


def add_written(result: Mapping[str, Any], tasks: Mapping[str, Any], model: Any) -> None:
    """Add the metrics that lm-eval's tasks name, with `EMPTY`, `CUT` and `COPIED`, in place.

    `model` is one of lm-eval's; its tokens are counted.
    """
    for name, samples in result["samples"].items():
        if (metrics := written_metrics(name, tasks[name])) is None:
            continue
        for sample in samples:
            (prompt, settings), answer = sample["arguments"][0], sample["filtered_resps"][0]
            for metric in metrics:
                sample[metric] = max(WRITTEN[metric](answer, t) for t in references(sample))
            sample["metrics"] = [*metrics, *sample["metrics"]]  # the first is a sweep's own choice
            whole = answer_of(sample["resps"][0][0])
            most, by_letter = settings.get("max_gen_toks", model.max_gen_toks), is_unspaced(whole)
            size = len(_tokens(whole, by_letter))
            _add(sample, EMPTY, float(size == 0))
            # The model may have written the text with a few more tokens than it is encoded with.
            _add(sample, CUT, float(len(model.tok_encode(whole)) >= 0.95 * most))
            copied = size >= COPY[by_letter] and normalised(whole) in normalised(prompt)
            _add(sample, COPIED, float(copied))
    for metric in BESIDE:
        _average(result, metric)


class Added(NamedTuple):
    """A metric that is added to the tasks that have another."""

    needs: str  # the metric of lm-eval
    add: Callable[[Mapping[str, Any]], None]  # to a result of lm-eval, in place


ADDED = {NORMALISED: Added("exact_match", add_normalised)}
"""The metrics by name."""
