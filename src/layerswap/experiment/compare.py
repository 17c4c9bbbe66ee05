"""The experiment protocol: choose on development documents, report on test documents.

Sweeps, studies, the quickstart and the lab's experiments compare models in the same way. Every
candidate is scored on development documents, and these decide which composition is selected. The
test documents give the scores of the report, with intervals and paired differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from layerswap.evaluation.classifier import LabelledTexts, Worth, worth
from layerswap.evaluation.statistics import (
    Balanced,
    Classified,
    Interval,
    mean_interval,
    paired_difference,
)
from layerswap.experiment.conditions import BASELINES, CHOSEN, DEFAULT, FLATTERED, Condition

NOT_SAVED = ("base", "joint", "simultaneous", *BASELINES)
"""Methods that are compared with merges but are not saved: they are no merges of the experts."""
Values = npt.NDArray[np.float64]
"""One score per document."""


class DocumentSplit(NamedTuple):
    """Positions of the development documents and of the test documents."""

    development: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]


def split_documents(
    count: int,
    development: float,
    *,
    seed: int = 0,
    limit: int | None = None,
    order: Sequence[int] | None = None,
) -> DocumentSplit:
    """Splits at least two documents at random, with at least one on each side.

    Equal arguments give an equal split, so tasks with parallel documents are split in parallel.
    `development` is a share in 0..1. `limit` counts both splits. Positions are in the order drawn,
    or in a given order of them.
    """
    drawn = np.random.default_rng(seed).permutation(count) if order is None else np.array(order)
    drawn = drawn[:limit]
    cut = min(len(drawn) - 1, max(1, round(development * len(drawn))))
    return DocumentSplit(drawn[:cut], drawn[cut:])


def ranked(scores: Mapping[Condition, Values | float]) -> list[Condition]:
    """Sorts candidates from the best mean score to the worst.

    Of equal candidates the one that departs least from the task expert comes first, with the
    fewest layers in its zones.
    """

    def rank(condition: Condition) -> tuple[float, int]:
        size = sum(vars(condition.zones).values()) if condition.zones else 0
        return -float(np.mean(scores[condition])), size

    return sorted(scores, key=rank)


def choose(
    scores: Mapping[Condition, Values | float],
    *,
    of_equals: Literal["smallest", "first"] = "smallest",
) -> Condition:
    """Returns the candidate with the highest mean score on the development documents.

    Ties: `smallest` uses the order of `ranked`, `first` the order of the mapping.
    """
    if of_equals == "smallest":
        return ranked(scores)[0]
    return max(scores, key=lambda condition: float(np.mean(scores[condition])))


def best_of_all(scores: Mapping[Condition, Values]) -> Condition:
    """Returns the model to save: the highest mean score on development documents.

    All merges and experts of a study compete, not only swaps; `NOT_SAVED` do not. Ties go to
    the default swap, then to the chosen one. Test scores play no part. The regret of this rule
    and of others is in docs/evaluation.md.
    """
    competing = [model for model in scores if model.method not in NOT_SAVED and model != FLATTERED]
    ordered = sorted(competing, key=lambda model: (model != DEFAULT, model != CHOSEN))
    return choose({model: scores[model] for model in ordered}, of_equals="first")


@dataclass(frozen=True)
class TestResult:
    """Scores of conditions on the test documents, on which nothing was chosen."""

    scores: Mapping[Condition, Values]  # on the same documents for all
    chosen: Condition | None = None  # the best on the development documents, reported as CHOSEN
    # The condition to save and to report first; see `select` and `best_of_all`.
    selected: Condition = field(default=CHOSEN, kw_only=True)
    # The answers to a classification, on the same documents; empty for other tasks.
    classified: Mapping[Condition, Classified] = field(default_factory=dict, kw_only=True)
    # The texts of a classification that a linear classifier is trained on and asked.
    labelled: LabelledTexts | None = field(default=None, kw_only=True)

    __test__ = False  # Pytest collects classes whose name begins with Test.

    @cached_property
    def intervals(self) -> dict[Condition, Interval]:
        """Mean and 95% bootstrap interval of every condition."""
        return {condition: mean_interval(values) for condition, values in self.scores.items()}

    @cached_property
    def differences(self) -> dict[Condition, Interval]:
        """The selected model minus every other condition, paired over documents.

        Empty if the selected model is not among the conditions.
        """
        if self.selected not in self.scores:
            return {}
        first, others = self.scores[self.selected], {**self.scores}
        del others[self.selected]
        return {condition: paired_difference(first, values) for condition, values in others.items()}

    @cached_property
    def by_sign(self) -> dict[int, list[Condition]]:
        """Other models, best first: 1 clearly below the selected one, -1 above, 0 neither."""
        others = sorted(self.differences, key=lambda model: -self.intervals[model].mean)
        return {sign: [model for model in others
                       if model != FLATTERED and self.differences[model].sign == sign]
                for sign in (1, -1, 0)}  # fmt: skip

    @property
    def above(self) -> list[Condition]:
        """Models that the test documents show clearly above the selected one, best first."""
        return self.by_sign[-1]

    @cached_property
    def balanced_differences(self) -> dict[Condition, Balanced]:
        """`differences` of a classification's balanced measures; empty for other tasks."""
        if self.selected not in self.classified:
            return {}
        first = self.classified[self.selected]
        others = {
            model: answers for model, answers in self.classified.items() if model != self.selected
        }
        return {model: first.minus(answers) for model, answers in others.items()}

    @cached_property
    def worth_in_labels(self) -> dict[str, Worth]:
        """The labels that the selected model is worth, by measure; empty without a classifier."""
        if self.labelled is None or self.selected not in self.classified:
            return {}
        model, curve = self.classified[self.selected], self.labelled.curve
        return {
            "accuracy": worth(model, curve),
            "balanced accuracy": worth(model, curve, balanced=True),
        }

    def against(self, reference: Condition) -> dict[Condition, Interval]:
        """Every other condition minus a reference, paired over documents; computed once."""
        if reference not in self._against:
            first, others = self.scores[reference], {**self.scores}
            del others[reference]
            self._against[reference] = {
                condition: paired_difference(values, first) for condition, values in others.items()
            }
        return self._against[reference]

    @cached_property
    def _against(self) -> dict[Condition, dict[Condition, Interval]]:
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Returns every condition with its fields, its interval and its difference."""
        differences = {condition: asdict(apart) for condition, apart in self.differences.items()}
        rows = [
            {"condition": str(condition), **condition.to_dict(), **asdict(interval),
             "selected_minus": differences.get(condition), **self._balanced(condition)}
            for condition, interval in self.intervals.items()
        ]  # fmt: skip
        chosen = None if self.chosen is None else self.chosen.to_dict()
        return {"chosen": chosen, "selected": str(self.selected), "test": rows}

    def _balanced(self, condition: Condition) -> dict[str, Any]:
        if condition not in self.classified:
            return {}
        gap = self.balanced_differences.get(condition)
        return {
            **asdict(self.classified[condition].balanced),
            "selected_minus_balanced": gap and asdict(gap),
        }
