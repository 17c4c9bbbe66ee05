"""Parts of reports that sweeps, studies and the quickstart share."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence

from layerswap.deltas.atlas import Atlas
from layerswap.evaluation.classifier import worths_in_words
from layerswap.evaluation.statistics import Interval, paired_difference
from layerswap.experiment.answers import Answer, Values, fraction
from layerswap.experiment.compare import Compared, InEnglish
from layerswap.experiment.conditions import Condition, in_a_sentence
from layerswap.experiment.tables import BY_LABEL, balanced_table, labels_table, scores_table
from layerswap.report.charts import GridCell, draw_heat_map, draw_intervals
from layerswap.report.delta_map import draw_changes
from layerswap.report.page import Answers, Section, ShownAnswer
from layerswap.report.stack import NOTHING_ON_TOP
from layerswap.report.tables import words_of

SHOWN = 300
"""Most documents whose answers are shown together."""
RIGHT = 0.5
"""Score above which an answer counts as right."""
Writes = Callable[[Condition], Sequence[str]]
"""Maps a model to the command that writes it; to an empty command without a recipe."""


def scored(score: Interval, unit: str = "%") -> str:
    """Write a score with its interval, such as `61.2 [58.1, 64.3]%`."""
    return f"{words_of(score, unit)}{unit}"


def worth_in_words(result: Compared) -> str:
    """Say how many labels the selected model is worth; empty without labels."""
    if not result.worth_in_labels:
        return ""
    measures = worths_in_words(result.worth_in_labels)
    return (
        f"The {in_a_sentence(result.selected)} is worth {measures}: that many labelled texts give "
        "a linear classifier the same score."
    )


def english_in_words(found: InEnglish | None) -> str:
    """Write the task expert's score in English; return an empty text without a score."""
    if found is None:
        return ""
    which = "the same" if found.parallel else "other"
    return f"In English, on {which} documents, the task expert reaches {scored(found.score)}."


def surpassing(results: Sequence[Compared], writes: Writes) -> str:
    """Name the models that score clearly above the selected model on the test documents.

    The text is empty if there is no such model. It ends with the first command that writes one.
    """
    sentences = []
    commands: dict[Condition, Sequence[str]] = {}
    for result in results:
        above = [model for model in result.above if model not in result.baselines]
        names = [f"{name} ({scored(result.intervals[name], result.unit)})" for name in above]
        commands |= {model: command for model in above if (command := writes(model))}
        if names:
            documents = "the test documents" + (f" of {result.heading}" if result.heading else "")
            sentences.append(
                f"On {documents}, models are clearly above the selected "
                f"{in_a_sentence(result.selected)}: {'; '.join(names)}."
            )
    if commands:
        model, command = next(iter(commands.items()))
        sentences.append(f"{shlex.join(command)} writes the {in_a_sentence(model)}.")
    return " ".join(sentences)


def change_section(atlas: Atlas, heading: str) -> Section:
    """Map the rows that fine-tuning changed, by expert."""
    return Section(
        heading,
        "Share of rows of each matrix among the 15% of rows that each expert changed most, by mean "
        "absolute change (paper 1, figure 2).",
        figure=draw_changes(atlas),
    )


def score_sections(
    result: Compared, *, heading: str, measure: str, text: str = "", note: str | None = None
) -> list[Section]:
    """Show models on the test documents: a chart, their tables, and what labels give."""
    figure = draw_intervals(
        [(str(model), interval) for model, interval in result.intervals.items()],
        measure=measure, unit=result.unit, highlight=str(result.selected),
    )  # fmt: skip
    sections = [Section(heading, text, figure=figure, table=scores_table(result), note=note)]
    if table := balanced_table(result):
        sections.append(Section(f"{heading}: {BY_LABEL}", table=table))
    if table := labels_table(result):
        worth = worth_in_words(result)
        sections.append(Section(f"{heading}: what labels give", worth, table=table))
    return sections


def grid_sections(
    heading: str,
    text: str,
    scores: Mapping[Condition, Values],
    *,
    best: Condition | None,
    default: Condition | None = None,
    unit: str = "%",
) -> list[Section]:
    """Draw heat maps over bottom and top layers, with one colour scale.

    `scores` are of the same documents. Conditions without zones are left out. There is a map for
    each of the other settings, which its heading names, such as `transitions 1 and 0, outside
    blend`.
    """
    maps: dict[tuple[int, int, str], dict[GridCell, float]] = {}
    means = {swap: float(values.mean()) for swap, values in scores.items()}
    for swap, value in means.items():
        if placed := _placed(swap):
            maps.setdefault(placed[0], {})[placed[1]] = value
    limits = (min(means.values()), max(means.values())) if maps else None
    several = len({key[:2] for key in maps}) > 1
    if best and best.zones and not best.zones.top:
        capped = [swap for swap in scores if swap.zones and swap.zones.top]
        rival = max(capped, key=means.__getitem__, default=None)
        if rival and paired_difference(scores[best], scores[rival]).sign > 0:
            text += f" {NOTHING_ON_TOP}"
    sections = []
    for key, values in maps.items():
        bottom, top, outside = key
        words = [heading, *([f"transitions {bottom} and {top}"] if several else []),
                 *([f"outside {outside}"] if outside else [])]  # fmt: skip
        cells = [
            placed[1] if (placed := _placed(swap)) and placed[0] == key else None
            for swap in (best, default)
        ]
        figure = draw_heat_map(
            values, row_label="bottom layers", column_label="top layers", best=cells[0],
            default=cells[1], unit=unit, limits=limits,
        )  # fmt: skip
        sections.append(Section(", ".join(words), text, figure=figure))
    return sections


def _placed(swap: Condition | None) -> tuple[tuple[int, int, str], GridCell] | None:
    """The map of a swap, and its cell in it; None without zones."""
    if swap is None or swap.zones is None:
        return None
    zones = swap.zones
    return (zones.bottom_transition, zones.top_transition, swap.outside), (zones.bottom, zones.top)


def side_by_side(
    models: Mapping[str, Condition],
    answers: Iterable[Answer],
    documents: Iterable[tuple[str, int]],
) -> Answers | None:
    """The answers of several models to the documents that all have answered, at most `SHOWN`.

    Args:
        models: by heading.
        answers: under one measure; with a score above `RIGHT` an answer counts as right.
        documents: task and position of each document.
    """
    answered = {(answer.condition, answer.task, answer.document): answer for answer in answers}
    shown = []
    for task, document in documents:
        keys = [(model, task, document) for model in models.values()]
        if answered.keys() >= set(keys):
            rows = [answered[key] for key in keys]
            shown.append(ShownAnswer(
                task, document, rows[0].question, rows[0].target,
                tuple(row.answer for row in rows), tuple(fraction(row) > RIGHT for row in rows),
            ))  # fmt: skip
    return Answers(list(models), shown[:SHOWN]) if shown and len(models) > 1 else None
