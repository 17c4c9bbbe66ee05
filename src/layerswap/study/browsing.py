"""Single answers of a study, to be browsed: what swap, experts and baselines wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from layerswap.report.page import Section
from layerswap.report.panels import Example, examples_panel
from layerswap.study.scores import CHOSEN, Condition, fraction
from layerswap.study.treatments import DEFAULT, grid_name

SHOWN = 300
"""Most documents of a language."""
RIGHT = 0.5
"""A document whose score is above this counts as right."""


def examples_of(one: Condition, results: Path) -> Iterator[Section]:
    """Answers of the first pair, on documents that nothing was chosen on."""
    from layerswap.evaluate.result_files import read_scores
    from layerswap.evaluate.samples import read_samples

    models = _shown(one)
    scores = {
        (s.model, s.task, s.document): fraction(s) for s in read_scores(results)
        if s.main and s.model in models.values()
        and one.benchmark in (s.benchmark, s.task)
    }  # fmt: skip
    samples = {
        (s.model, s.task, s.document): s for s in read_samples(results)
        if (s.model, s.task, s.document) in scores
    }  # fmt: skip
    places = sorted({(task, document) for _, task, document in samples})
    tested = [places[i] for i in one.test if i < len(places)][:SHOWN]
    examples = []
    for task, document in tested:
        keys = [(model, task, document) for model in models.values()]
        if all(key in samples for key in keys):
            first = samples[keys[0]]
            examples.append(Example(
                task, document, first.question, first.target,
                tuple(samples[key].answer for key in keys),
                tuple(scores[key] > RIGHT for key in keys),
            ))  # fmt: skip
    if examples:
        yield Section(
            f"Answers one by one, {one.benchmark}, {one.language}",
            "Of the first pair of experts, on documents that nothing was chosen on.",
            panel=examples_panel(list(models), examples),
        )


def _shown(one: Condition) -> dict[str, str]:
    """What to call each model that is browsed, and its name in the results."""
    pair = next(iter(one.pairs))
    found = {}
    if pair in one.chosen:
        found[CHOSEN] = f"{pair}: {grid_name(one.chosen[pair])}"
    found[DEFAULT] = f"{pair}: {DEFAULT}"
    for name in one.pairs[pair]:
        if name in ("task expert", "language expert", "soup") or name.startswith("ties"):
            found[name] = f"{pair}: {name}"
    for name in ("joint", "base"):
        if name in one.pairs[pair]:
            found[name] = name
    return found
