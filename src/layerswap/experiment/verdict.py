"""The road that a result recommends, in words; docs/when.md has the rule.

Roads are ordered by what they cost a user: a constant answer, a linear classifier on labels,
sentence vectors of an encoder, the base, one expert, a translator, a merge. The selected model was
selected on development documents. It competes with the cheaper roads and the translator's on the
test documents: the cheapest is recommended that no other is clearly above. Clearly above means that
the 95% interval of the paired difference lies above zero in accuracy, and not below zero in
balanced accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from layerswap.evaluation.statistics import Interval, mean_interval, paired_difference
from layerswap.experiment.compare import TestResult
from layerswap.experiment.conditions import (
    BASE,
    CHANCE,
    COMMONEST,
    CROSS_VALIDATED,
    LANGUAGE_EXPERT,
    ON_LABELS,
    TASK_EXPERT,
    TRANSLATIONS,
    VECTORS,
    Condition,
)
from layerswap.experiment.sections import scored, worth_in_words

Kind = Literal["too few documents", "no model", "labels", "encoder", "no merge", "translator",
               "merge"]  # fmt: skip
COSTS: tuple[tuple[Kind, set[str]], ...] = (
    ("no model", {CHANCE.method, COMMONEST.method}),
    ("labels", {ON_LABELS.method}),
    ("encoder", {VECTORS}),
    ("no merge", {BASE.method}),
    ("no merge", {TASK_EXPERT.method, LANGUAGE_EXPERT.method}),
    ("translator", {*TRANSLATIONS}),
)
"""Kinds of road that cost less than a merge, cheapest first, with their methods."""
COARSE = 0.10
"""Reach of an interval, as a fraction, from which a test has too few documents."""


@dataclass(frozen=True)
class Verdict:
    """The recommended road of one result.

    Attributes:
        kind: what the road is.
        road: the cheapest condition that no other one is clearly above.
        lead: the selected model minus the road, paired over documents; None if they are the same.
    """

    kind: Kind
    road: Condition
    lead: Interval | None


def verdict_of(result: TestResult) -> Verdict:
    """Returns the road of a result; nothing is chosen among merges on the test documents."""
    selected = result.selected
    roads = [
        model
        for model in result.intervals
        if model == selected or _cost(model) < _cost(selected) or _kind(model) == "translator"
    ]
    roads.sort(key=lambda model: (_cost(model), -result.intervals[model].mean))
    best = [model for model in roads
            if not any(_clearly_above(result, other, model) for other in roads)]  # fmt: skip
    road = best[0] if best else selected
    lead, kind = result.differences.get(road), _kind(road)
    if lead and kind == "no model" and max(lead.high - lead.mean, lead.mean - lead.low) > COARSE:
        kind = "too few documents"
    return Verdict(kind, road, lead)


def _cost(model: Condition) -> int:
    return next((i for i, (_, methods) in enumerate(COSTS) if model.method in methods), len(COSTS))


def _kind(model: Condition) -> Kind:
    return next((kind for kind, methods in COSTS if model.method in methods), "merge")


def _clearly_above(result: TestResult, model: Condition, other: Condition) -> bool:
    """True if a model is clearly above another; see the module."""
    if result.intervals[model].mean <= result.intervals[other].mean:
        return False  # as the difference would say, which costs a bootstrap
    if paired_difference(result.scores[model], result.scores[other]).sign < 1:
        return False
    known = [result.classified[one] for one in (model, other) if one in result.classified]
    return len(known) < 2 or known[0].minus(known[1]).balanced_accuracy.sign > -1


def verdict_in_words(result: TestResult, unit: str = "%") -> str:
    """Recommends a road in one sentence, and says what the selected model is worth in labels."""
    found, selected = verdict_of(result), result.selected
    if selected not in result.scores:
        return ""
    score = scored(result.intervals[found.road], unit)
    apart = "" if found.lead is None else f" against it, the {selected}: {found.lead.in_words()}"
    match found.kind:
        case "too few documents":
            said = (
                f"The test is too small to choose a road: {result.intervals[selected].n:,} "
                f"documents cannot distinguish the {selected} from the {found.road};{apart}."
            )
        case "no model":
            said = (
                f"Do not use the {selected}: it is not clearly above the {found.road}, {score};"
                f"{apart}."
            )
        case "merge":
            said = f"Use the {selected}, {score}{_lead(result)}."
        case _ if found.lead is None:
            said = f"Do not merge: the {selected} is selected, {score}."
        case _:
            first = "Do not merge" if found.lead.sign < 0 else "No merge is needed"
            said = f"{first}: {_subject(result, found.road)} {score};{apart}."
    return " ".join(filter(None, [said, worth_in_words(result)]))


def _subject(result: TestResult, road: Condition) -> str:
    """The recommended road with its verb."""
    if road.method == VECTORS:
        return f"{road} reach"
    if road.method != ON_LABELS.method or result.labelled is None:
        return f"the {road} reaches"
    how = ", cross-validated," if road == CROSS_VALIDATED else ""
    return f"a linear classifier on {result.labelled.most:,} labels{how} reaches"


def verdict_facts(result: TestResult) -> dict[str, Any]:
    """Returns the road, the labels that the selected model is worth, and the curve, as data."""
    found = verdict_of(result)
    curve = {} if result.labelled is None else result.labelled.curve
    return {
        "kind": found.kind, "road": str(found.road), "selected": str(result.selected),
        "selected_minus": found.lead and asdict(found.lead),
        "worth_in_labels": {name: asdict(w) for name, w in result.worth_in_labels.items()},
        "linear_classifier": [
            {"labels": size, "accuracy": asdict(mean_interval(answers.right)),
             **asdict(answers.balanced)}
            for size, answers in curve.items()
        ],
    }  # fmt: skip


def _lead(result: TestResult) -> str:
    """The selected model against the experts and the base, in words."""
    rivals = [model for model in (TASK_EXPERT, BASE) if model in result.differences]
    return "".join(f"; against the {model}, {result.differences[model].in_words()}"
                   for model in rivals[:1])  # fmt: skip


def verdicts_in_words(results: Mapping[str, TestResult]) -> str:
    """Recommends a road for every result of a study, by heading, in one sentence."""
    if len(results) == 1:
        return verdict_in_words(next(iter(results.values())))
    roads: dict[str, list[str]] = {}
    for heading, result in results.items():
        found = verdict_of(result)
        none = found.kind in ("too few documents", "no model")
        roads.setdefault(found.kind if none else str(found.road), []).append(heading)
    often = sorted(roads.items(), key=lambda road: -len(road[1]))
    said = [f"{road} in {len(headings)} ({', '.join(headings)})" for road, headings in often]
    return f"The road to take, of {len(results)} results: {'; '.join(said)}."
