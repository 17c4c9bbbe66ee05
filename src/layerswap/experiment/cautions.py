"""Cautions on a result: reasons to doubt its scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from layerswap.experiment.compare import Compared
from layerswap.experiment.conditions import CHANCE, COMMONEST
from layerswap.ground.types import counted

FEW = 50
"""Fewest development documents of a choice without a caution."""
NEARLY_ALL = 0.95
"""Smallest share of equal answers for which a model has a caution."""


@dataclass(frozen=True)
class Caution:
    """A caution.

    Attributes:
        kind: the reason.
        names: the baseline above all models, the models with one answer, the missing labels, or the
            number of documents.
        heading: the benchmark and the language.
    """

    kind: Literal["no model", "one answer", "some labels", "all labels", "few documents"]
    names: tuple[str, ...]
    heading: str

    def __str__(self) -> str:
        where = f" of {self.heading}" if self.heading else ""
        names = "; ".join(self.names)
        match self.kind:
            case "no model":
                return f"On the test documents{where}, no language model is above the {names}."
            case "one answer":
                return (f"One answer to at least {NEARLY_ALL:.0%} of the test documents{where}, "
                        f"whatever they ask: {names}.")  # fmt: skip
            case "some labels":
                return (f"The development documents{where} lack labels of the test ({names}): "
                        "choices and training on them ignore these labels.")  # fmt: skip
            case "all labels":
                return (f"The development documents{where} have no label of the test: choices and "
                        "training on them say nothing about it.")  # fmt: skip
            case "few documents":
                return (f"Only {counted(int(names), 'development document')}{where} chose: others "
                        "may choose another model.")  # fmt: skip


def cautions_on(result: Compared) -> list[Caution]:
    """List the cautions: poor models, missing development labels, few documents."""
    found = []
    means = {model: values.mean() for model, values in result.scores.items()
             if model not in result.flattered}  # fmt: skip
    fixed = [model for model in result.baselines & means.keys()
             if str(model).rpartition("/")[2] in (str(COMMONEST), str(CHANCE))]  # fmt: skip
    models = [mean for model, mean in means.items() if model not in result.baselines]
    best = max(fixed, key=lambda model: (means[model], str(model)), default=None)
    if best and models and max(models) <= means[best]:
        found.append(Caution("no model", (str(best),), result.heading))
    constant = [
        str(model) for model, answers in result.classified.items()
        if model not in result.baselines
        and _most(answers.predicted) >= NEARLY_ALL > _most(answers.labels)
    ]  # fmt: skip
    if constant:
        found.append(Caution("one answer", tuple(constant), result.heading))
    if result.classified and result.choice.labels:
        labels = {*next(iter(result.classified.values())).labels.tolist()}
        if missing := tuple(sorted(labels - result.choice.labels)):
            found.append(Caution(
                "all labels" if len(missing) == len(labels) else "some labels", missing,
                result.heading,
            ))  # fmt: skip
    if 0 < result.choice.count < FEW:
        found.append(Caution("few documents", (str(result.choice.count),), result.heading))
    return found


def _most(answers: np.ndarray) -> float:
    """The share of the commonest answer; of several models the smallest of their shares."""
    rows = np.atleast_2d(answers)
    return min(float(np.unique(row, return_counts=True)[1].max()) / len(row) for row in rows)
