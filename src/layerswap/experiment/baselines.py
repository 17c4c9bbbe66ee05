"""Baselines that need no language model: the commonest label, chance, and labels alone.

They are conditions like the models, so tables, intervals and paired differences hold them too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from layerswap.evaluation.classifier import LabelledTexts, Labels, cross_validation, in_text_order
from layerswap.experiment.answers import Answer, Values
from layerswap.experiment.compare import DocumentSplit
from layerswap.experiment.conditions import CHANCE, COMMONEST, CROSS_VALIDATED, ON_LABELS, Condition

FEWEST = 20
"""Fewest labels that a linear classifier is trained on."""


@dataclass(frozen=True)
class Baselines:
    """Baselines on the test documents.

    Attributes:
        scores: one score per test document, by baseline.
        answers: one label per test document, by baseline; chance has none.
        labelled: the texts with labels that a linear classifier is trained on and asked.
    """

    scores: Mapping[Condition, Values] = field(default_factory=dict)
    answers: Mapping[Condition, Labels] = field(default_factory=dict)
    labelled: LabelledTexts | None = None


def baselines(
    labels: Labels | None,
    texts: Sequence[str],
    choices: npt.NDArray[np.int64] | None,
    split: DocumentSplit,
) -> Baselines:
    """Returns the baselines of a task with labels or choices; empty for other tasks.

    The commonest label is that of the test documents, the best constant answer. The linear
    classifier learns from the development documents. Without any it is cross-validated on the test
    documents.

    Args:
        labels: the right labels, `(documents,)`; None for a task without labels.
        texts: what each document asks, without exemplars; a classifier needs all of them.
        choices: the number of answers to choose from, `(documents,)`; 0 or None for free answers.
        split: positions of the development and test documents.
    """
    scores: dict[Condition, Values] = {}
    answers: dict[Condition, Labels] = {}
    if choices is not None and choices[split.test].all():
        scores[CHANCE] = 1 / choices[split.test]
    if labels is None:
        return Baselines(scores)
    right = labels[split.test]
    answers[COMMONEST] = np.full(len(right), Counter(right.tolist()).most_common(1)[0][0])
    labelled = _labelled(labels, texts, split)
    if labelled is not None:
        name = ON_LABELS if len(split.development) else CROSS_VALIDATED
        answers[name] = labelled.answers
    scores |= {name: (given == right).astype(float) for name, given in answers.items()}
    return Baselines(scores, answers, labelled)


def _labelled(labels: Labels, texts: Sequence[str], split: DocumentSplit) -> LabelledTexts | None:
    """The documents of a linear classifier; None if there are too few, or one label alone."""
    known = len(split.development)
    taught = split.development if known else split.test
    written = len(texts) == len(labels) and all(texts)
    if not written or len(taught) < FEWEST or len(set(labels[taught].tolist())) < 2:
        return None
    order = np.concatenate(split)
    of, right = [texts[i] for i in order], labels[order]
    if known:
        asked = np.arange(known, len(order))
        return LabelledTexts(of, right, [(in_text_order(of[:known], right[:known]), asked)])
    if len({*of}) < 2:
        return None
    return LabelledTexts(of, right, cross_validation(of, right))


def baselines_of(development: Sequence[Answer], test: Sequence[Answer]) -> Baselines:
    """Returns the baselines of the documents that one model answered, under one measure."""
    rows, known = [*development, *test], len(development)
    labels = np.array([row.label for row in rows]) if all(row.label for row in rows) else None
    split = DocumentSplit(np.arange(known), np.arange(known, len(rows)))
    texts, choices = [row.text for row in rows], np.array([row.choices for row in rows])
    return baselines(labels, texts, choices, split)


def answers_of_baselines(test: Sequence[Answer], found: Baselines) -> Iterator[Answer]:
    """Yields one answer for each baseline and test document; `test` is as in `baselines_of`."""
    for condition, scores in found.scores.items():
        answered = found.answers.get(condition, [""] * len(test))
        for row, score, answer in zip(test, scores, answered, strict=True):
            yield replace(
                row, model=str(condition), condition=condition, score=float(score),
                label=row.label if answer else "", predicted=str(answer), answer=str(answer),
                weights=str(condition), prompts="",
            )  # fmt: skip
