"""Tables that compare models: a row for each model, with its scores and paired differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from layerswap.evaluation.languages import language_name
from layerswap.evaluation.statistics import Balanced, Interval, mean_interval
from layerswap.experiment.compare import Choice, Compared, over_languages
from layerswap.experiment.conditions import CHOSEN, DEFAULT, FLATTERED, Condition
from layerswap.experiment.results import Results
from layerswap.ground.errors import LayerswapError
from layerswap.ground.types import counted
from layerswap.report.tables import STAR, Difference, Table, Words, best_cells, unit_of, words_of

if TYPE_CHECKING:
    from layerswap.report.tables import Cell

BALANCED = {"balanced accuracy": "balanced_accuracy", "macro-F1": "macro_f1"}
"""Headings and fields of the measures in which every label has the same weight."""
BY_LABEL = "balanced by label"
"""Ends the heading of a table of these."""
HONEST = f"{FLATTERED}: chosen by the documents that it is evaluated on."
ModelT = TypeVar("ModelT")


def models_table(
    scores: Mapping[str, Mapping[ModelT, Cell]],
    minus: Mapping[str, Mapping[ModelT, Interval | None]] | None = None,
    *,
    caption: str,
    first: str = "model",
    selected: ModelT | None = None,
    unit: str = "%",
    bold: bool = True,
) -> Table:
    """Tabulate models.

    Args:
        scores: by heading and model, a cell; a model that a column lacks has a dash.
        minus: by heading and model, a paired difference; a model without one has an empty cell.
        caption: a sentence. Another one follows if the flattered swap is among the models.
        first: heading of the models.
        selected: the model to highlight.
        unit: of scores and differences.
        bold: emphasise the best score of each column, except the flattered one.
    """
    models: list[ModelT] = list(dict.fromkeys(model for by in scores.values() for model in by))
    rows: list[list[Any]] = [
        [str(model), *(by.get(model) for by in scores.values()),
         *(Difference(by.get(model), unit) for by in (minus or {}).values())]
        for model in models
    ]  # fmt: skip
    flattered = [i for i, model in enumerate(models) if model == FLATTERED]
    return Table(
        [first, *scores, *(minus or {})], rows, f"{caption} {HONEST}" if flattered else caption,
        unit=unit, bold=best_cells(rows, flattered) if bold else (),
        highlight=models.index(selected) if selected in models else None,
    )  # fmt: skip


def by_label(
    balanced: Mapping[ModelT, Balanced | None], heading: str
) -> dict[str, dict[ModelT, Interval]]:
    """Return the columns of the balanced measures; `heading` is such as `{}, %`."""
    return {
        heading.format(name): {
            model: getattr(both, field) for model, both in balanced.items() if both is not None
        }
        for name, field in BALANCED.items()
    }


def scores_table(result: Compared) -> Table:
    """Models down: score, spread over pairs, differences to the default and the chosen swap."""
    columns = dict[str, Any]()
    if len(result.pairs) > 1:
        for i, heading in enumerate(("lowest pair", "highest pair")):
            columns[heading] = {name: ends[i] for name, ends in result.extremes.items()}
    metric = result.metric_in_words or "score"
    count = len(next(iter(result.scores.values())))
    return models_table(
        {f"{metric}, {result.unit}" if result.unit else metric: result.intervals, **columns},
        {f"minus {swap}": result.against(swap) for swap in references(result)},
        first=column_of_models(result), selected=result.selected, unit=result.unit,
        caption=f"{result.heading or result.task}: {counted(count, 'document')}, "
        f"mean{over_pairs(result)} with its 95% bootstrap interval over documents, and paired "
        f"differences. {STAR} >: selected. {chosen_on(result.choice)}{_default_again(result)}",
    )  # fmt: skip


def balanced_table(result: Compared) -> Table | None:
    """Models down: balanced accuracy, macro-F1, and the former against both swaps.

    None if the task has no labels.
    """
    if not (classified := result.classified):
        return None
    return models_table(
        by_label({name: answers.balanced for name, answers in classified.items()}, "{}, %"),
        {f"balanced accuracy minus {reference}": {
            name: apart.balanced_accuracy
            for name, apart in result.balanced_against(reference).items()
        } for reference in references(result)},
        first=column_of_models(result),
        caption=f"{result.heading or result.task}: mean recall and mean F1 over labels, "
        f"mean{over_pairs(result)}, with 95% bootstrap intervals and paired differences. {STAR} "
        "Nothing is chosen by them.",
    )  # fmt: skip


def references(*results: Compared) -> list[Condition]:
    """The swaps that the others are compared with; one if the choice is the default."""
    known = [swap for swap in (DEFAULT, CHOSEN) if any(swap in by.scores for by in results)]
    if len(known) == 2 and all(by.choice.same(*known) for by in results):
        return known[:1]
    return known


def _default_again(result: Compared) -> str:
    """Return a sentence on the models that equal the default swap; empty if no model does."""
    again = [str(model) for model in result.scores
             if model != DEFAULT and result.choice.same(model, DEFAULT)]  # fmt: skip
    return f" The same model as {DEFAULT}: {'; '.join(again)}." if again else ""


def column_of_models(result: Compared) -> str:
    """The heading of the models; with pairs of experts a row is a treatment of each."""
    return "treatment" if result.pairs else "model"


def over_pairs(result: Compared) -> str:
    """The pairs that a mean is over, in words."""
    count = len(result.pairs)
    return f" over {'one pair' if count == 1 else f'{count} pairs'}" if count else ""


def chosen_on(choice: Choice) -> str:
    """Describe the documents of the selection in words."""
    if not choice.count:
        return "Nothing is chosen on documents: the swap has its default zones."
    if choice.published:
        return f"Choices are made on the {choice.count:,} documents of the development split."
    return (
        f"Choices are made on {choice.count:,} drawn documents, which are left out here: there is "
        "no development split."
    )


def labels_table(result: Compared) -> Table | None:
    """Tabulate a linear classifier by its number of labels; None if the task has no labels."""
    if result.labelled is None:
        return None
    rows: list[list[Any]] = [
        [f"{size:,}", mean_interval(answers.right), answers.balanced.balanced_accuracy]
        for size, answers in result.labelled.curve.items()
    ]
    return Table(
        ["labels", "accuracy, %", "balanced accuracy, %"], rows,
        "A linear classifier on character n-grams, by its number of labels; the mean over five "
        "draws of labels, with 95% bootstrap intervals over documents.",
    )  # fmt: skip


def evaluation_table(scores: Iterable[Mapping[str, Any]]) -> Table:
    """Tabulate the scores of models on tasks, with intervals if each document has a score."""
    rows: list[list[Any]] = []
    for row in scores:
        score = row["score"]
        whole = Interval(score, row["low"], row["high"], row["n"]) if "n" in row else score
        shown = words_of(whole, unit_of(row["metric"]))
        rows.append([row["model"], row["task"], row["metric"], row.get("n", ""), shown])
    columns = ["model", "task", "metric", "n", "score"]
    return Table(columns, rows, "with 95% bootstrap intervals over n documents; shares in %")


def comparison_tables(compared: Results) -> list[Table]:
    """Tabulate each benchmark: documents, scores, and differences to the first model.

    A benchmark of several languages has a second table with the differences in each of them.
    """
    tables: list[Table] = []
    for same in compared.by_benchmark:
        tables += _of_benchmark(compared, same)
    legend = f"{STAR[:-1]}; **: also p < .05 after Holm's correction for all comparisons."
    tables[-1] = replace(tables[-1], caption=f"{tables[-1].caption}. {legend}")
    for result in compared.results:
        if known := {name: by.balanced for name, by in result.classified.items()}:
            where = ", ".join(filter(None, [result.benchmark, _spoken(result.language)]))
            tables.append(models_table(
                by_label(known, "{}"),
                by_label(result.balanced_against(result.selected), f"{{}} minus {result.selected}"),
                caption=f"{where}: mean recall and mean F1 over labels, %, with 95% intervals",
                bold=False,
            ))  # fmt: skip
    return tables


def _of_benchmark(compared: Results, same: Sequence[Compared]) -> Iterator[Table]:
    """The scores and differences of one benchmark in its languages."""
    first, several, reference = same[0], len(same) > 1, compared.models[0]
    names, unit = [_spoken(by.language) for by in same], first.unit
    rows: list[list[Any]] = []
    differences: list[list[Any]] = []
    for model in compared.models:
        rows.append([model, _documents(model, same), *(by.intervals.get(model) for by in same)])
        gaps = [
            (by.against(by.selected).get(model), compared.p_values.get((by, model))) for by in same
        ]
        differences.append([model, *(Difference(gap, unit, corrected=p is not None and p < 0.05)
                                     for gap, p in gaps)])  # fmt: skip
        if several:
            gap = None if model == reference else over_languages(same, model, reference)
            rows[-1].append(over_languages(same, model))
            differences[-1].append(Difference(gap, unit))
    bold = {(compared.models.index(model), k + 2)
            for k, by in enumerate(same) for model in by.leaders}  # fmt: skip
    benchmark, metric = first.benchmark.replace("_", " "), first.metric.replace("_", " ")
    what, minus = f"{metric}, {unit}" if unit else metric, f"minus {reference}"
    words = "with 95% bootstrap intervals"
    if not several:
        rows = [[*row, gap] for row, (_, gap) in zip(rows, differences, strict=True)]
        where = ", ".join(filter(None, [benchmark, names[0]]))
        yield Table(["model", "n", names[0] or benchmark, minus], rows,
                    f"{where}: {what}, {words} over n documents", bold=bold, unit=unit)  # fmt: skip
        return
    scores = [*names, "mean"]
    caption = f"{benchmark}: {what}, {words} over n documents"
    yield Table(["model", "n", *scores], rows, caption, bold=bold, unit=unit)
    caption = f"{benchmark}: {what}, {minus}: paired differences {words}"
    yield Table(["model", *scores], differences, caption, unit=unit)


def _spoken(code: str) -> str:
    """Return the name of a language, or its code if it has no name, as the lab's languages."""
    try:
        return language_name(code) if code else ""
    except LayerswapError:
        return code


def _documents(model: str, same: Sequence[Compared]) -> Words:
    """Number of compared documents, and the model's total if larger."""
    known = [by for by in same if model in by.scores]
    compared = sum(len(by.scores[model]) for by in known)
    whole = sum(by.counts[model] for by in known)
    return Words(f"{compared:,}" + f" of {whole:,}" * (whole != compared))
