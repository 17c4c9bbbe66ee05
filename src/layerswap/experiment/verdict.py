"""The road that a result recommends (`Compared.verdict`), in words; docs/when.md has the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from layerswap.evaluation.statistics import mean_interval
from layerswap.experiment.cautions import cautions_on
from layerswap.experiment.compare import Compared
from layerswap.experiment.conditions import (
    BASE,
    CROSS_VALIDATED,
    FINISHED,
    ON_LABELS,
    TASK_EXPERT,
    VECTORS,
    Condition,
    in_a_sentence,
)
from layerswap.experiment.sections import Writes, scored, surpassing, worth_in_words


def verdict_in_words(result: Compared) -> str:
    """Recommends a road in one sentence, with the worth of the selected model in labels."""
    if result.selected not in result.scores:
        return ""
    name, found = in_a_sentence(result.selected), result.verdict
    score, apart = scored(result.intervals[found.road], result.unit), _apart(result)
    finished = result.selected.method == FINISHED
    match found.kind:
        case "too few documents":
            said = (
                f"The test is too small to choose a road: {result.intervals[result.selected].n:,} "
                f"documents cannot distinguish between the {name} and the {found.road}, {score}; "
                f"{apart}."
            )
        case "no model":
            where = "below" if found.lead and found.lead.sign < 0 else "not clearly above"
            said = f"Do not use the {name}: it is {where} the {found.road}, {score}; {apart}."
        case "merge" | "finished" if found.lead is None:
            said = f"Use the {name}, {score}{_lead(result)}."
        case _ if found.lead is None:
            said = f"Do not merge: the {name} is selected, {score}."
        case _:
            worse, level = (
                (f"Do not use the {name}", f"The {name} is not needed")
                if finished else ("Do not merge", "No merge is needed")
            )  # fmt: skip
            first = worse if found.lead.sign < 0 else level
            said = f"{first}: {_subject(result, found.road)} {score}; {apart}."
    return " ".join(filter(None, [said, worth_in_words(result)]))


def _apart(result: Compared) -> str:
    """Compare the selected model with the recommended road; empty if they are the same."""
    if (lead := result.verdict.lead) is None:
        return ""
    score = scored(result.intervals[result.selected], result.unit)
    but = ", but lower in balanced accuracy" if lead.sign > 0 else ""
    return f"the {in_a_sentence(result.selected)} reaches {score}, {lead.in_words()}{but}"


def _subject(result: Compared, road: Condition) -> str:
    """The recommended road with its verb."""
    if road.method == VECTORS:
        return f"{in_a_sentence(road)} reach"
    if road.method != ON_LABELS.method or result.labelled is None:
        return f"the {in_a_sentence(road)} reaches"
    how = ", cross-validated," if road == CROSS_VALIDATED else ""
    return f"a linear classifier on {result.labelled.most:,} labels{how} reaches"


def verdict_facts(result: Compared) -> dict[str, Any]:
    """Returns the road, the labels that the selected model is worth, and the curve, as data."""
    found = result.verdict
    curve = {} if result.labelled is None else result.labelled.curve
    return {
        "kind": found.kind, "road": str(found.road), "selected": str(result.selected),
        "selected_minus": found.lead and asdict(found.lead),
        "cautions": [asdict(caution) for caution in cautions_on(result)],
        "worth_in_labels": {name: asdict(w) for name, w in result.worth_in_labels.items()},
        "linear_classifier": [
            {"labels": size, "accuracy": asdict(mean_interval(answers.right)),
             **asdict(answers.balanced)}
            for size, answers in curve.items()
        ],
    }  # fmt: skip


def _lead(result: Compared) -> str:
    """The selected model against the task expert, else against the base, in words."""
    rival = next((model for model in (TASK_EXPERT, BASE) if model in result.differences), None)
    return f"; against the {rival}, {result.differences[rival].in_words()}" if rival else ""


def verdicts_in_words(results: Sequence[Compared]) -> str:
    """Recommends a road for every result of a study, in one sentence."""
    if len(results) == 1:
        return verdict_in_words(results[0])
    roads: dict[str, list[str]] = {}
    for result in results:
        found = result.verdict
        none = found.kind in ("too few documents", "no model")
        roads.setdefault(found.kind if none else in_a_sentence(found.road), []).append(
            result.heading
        )
    often = sorted(roads.items(), key=lambda road: -len(road[1]))
    said = [f"{road} in {len(headings)} ({'; '.join(headings)})" for road, headings in often]
    return f"The road to take, of {len(results)} results: {'; '.join(said)}."


def opening(
    results: Sequence[Compared],
    *said: str,
    writes: Writes = lambda model: (),
) -> list[str]:
    """The paragraphs that every report begins with.

    The road, the models above the selected ones, sentences of the report's own, and cautions.
    """
    above = surpassing(results, writes)
    cautions = [str(caution) for result in results for caution in cautions_on(result)]
    return [*filter(None, [verdicts_in_words(results), above, *said]), *cautions]
