"""The result of a sweep, and its files: scores, summary, the best recipe and the page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.compose.presets import Zones, default_zones
from layerswap.engine.trie import LayerCounts
from layerswap.evaluation.statistics import paired_difference
from layerswap.experiment.answers import ANSWERS_TABLE, Answer, Measure, under, write_answers
from layerswap.experiment.compare import Compared, InEnglish, plain
from layerswap.experiment.conditions import (
    CHOSEN,
    DEFAULT,
    LANGUAGE_EXPERT,
    TASK_EXPERT,
    Condition,
    in_a_sentence,
)
from layerswap.experiment.evaluator import TEST
from layerswap.experiment.sections import (
    english_in_words,
    grid_sections,
    score_sections,
    scored,
    side_by_side,
)
from layerswap.experiment.tables import scores_table
from layerswap.experiment.verdict import opening, verdict_facts
from layerswap.ground.types import PathLike
from layerswap.ground.yaml_file import dump_yaml
from layerswap.merge.plan import Plan
from layerswap.report.page import Report, Section, write_report
from layerswap.report.stack import draw_stack
from layerswap.report.tables import Table
from layerswap.versions import __version__

if TYPE_CHECKING:
    import pandas as pd

SUMMARY, RECIPE, PAGE = "board.json", "best.yaml", "report.html"
ABOVE = "above.yaml"
"""Recipe of the best model that clearly beats the selected model on the test documents."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SweepResult(Compared):
    """The result of a sweep: models on the test documents, with their plans and answers.

    Attributes:
        measure: the task, metric and filter that chose.
        models: the plan of every model that can be saved.
        rows: every score of every document, of both splits.
        layers_run: layers run per batch, together and one by one.
        english: the task expert on the task in English; None if it was not asked.
    """

    measure: Measure
    models: Mapping[Condition, Plan] = field(default_factory=dict)
    rows: Sequence[Answer]
    layers_run: LayerCounts
    english: InEnglish | None = None

    @property
    def best(self) -> Plan:
        """The plan of the selected model, ready to be saved or loaded."""
        return self.models[self.selected]

    @property
    def chosen(self) -> Condition:
        """The best composition on the development documents, reported as `CHOSEN`."""
        return self.choice.chosen[""]

    @property
    def development(self) -> dict[Condition, float]:
        """By composition, its mean on the development documents that it was scored on."""
        return {model: float(v.mean()) for model, v in self.choice.candidates.items()}

    @property
    def default(self) -> Zones:
        """The paper's zones, scaled by depth."""
        return default_zones(self.best.composition.layers)

    def tested(self, measure: Measure) -> Compared:
        """The test documents under a measure."""
        if measure == self.measure:
            return self
        rows = (row for row in self.rows if row.split == TEST)
        return Compared.of(under(rows, measure), selected=self.selected)

    def to_pandas(self) -> pd.DataFrame:
        """Every score of every document, a row each; see `Answer`."""
        import pandas as pd

        return pd.DataFrame([row.to_dict() for row in self.rows])

    def report(self, path: PathLike) -> Path:
        """Write the report as one HTML page; returns its path."""
        return write_report(Path(path).expanduser(), sweep_report(self))

    def __repr__(self) -> str:
        return f"{lead(self)}\n{scores_table(self)}"


def write_result(board: SweepResult, folder: Path) -> dict[str, Any]:
    """Write the files of a sweep into a folder; return the content of `board.json`."""
    facts = summary(board)
    write_answers(folder / ANSWERS_TABLE, board.rows)
    (folder / SUMMARY).write_bytes((json.dumps(facts, indent=2) + "\n").encode())
    write_recipe(board.best, folder / RECIPE)
    write_above(board, folder)
    write_report(folder / PAGE, sweep_report(board, folder / RECIPE))
    return facts


def summary(board: SweepResult) -> dict[str, Any]:
    """The content of `board.json`."""
    names, choice = ("task", "metric", "filter"), board.choice
    competed, apart = choice.competed[""], None
    if DEFAULT in competed and not choice.same(CHOSEN, DEFAULT):
        apart = paired_difference(competed[CHOSEN], competed[DEFAULT])
    return {
        "layerswap_version": __version__,
        "chosen_by": " ".join(board.measure),
        "compared_by": dict(zip(names, board.measure, strict=True)),
        "compositions_tried": len(choice.candidates),
        "development": [{**c.to_dict(), "mean": score} for c, score in board.development.items()],
        "development_lead": plain(apart),
        "competed": [{**c.to_dict(), "mean": float(scores.mean())}
                     for c, scores in competed.items()],
        "verdict": verdict_facts(board),
        "english": board.english and {**asdict(board.english.score),
                                      "parallel": board.english.parallel},
        "above": [str(model) for model in board.above],
        "default": asdict(board.default),
        "chosen": board.chosen.to_dict(),
        "selected": str(board.selected),
        "test": board.records(),
    }  # fmt: skip


def sweep_report(board: SweepResult, recipe: Path | None = None) -> Report:
    """The report of a sweep, with the command that merges the recipe in a file."""
    swap = board.best.recipe.swap
    names = {swap.task: TASK_EXPERT, swap.language: LANGUAGE_EXPERT} if swap else {}
    choice, counts = board.choice, board.layers_run
    return Report(
        title=f"{len(choice.candidates)} compositions, chosen by {' '.join(board.measure)}",
        lead=lead(board, recipe and recipe.parent),
        figure=draw_stack(board.best.composition, {name: str(c) for name, c in names.items()}),
        sections=[
            *result_sections(board),
            _models(recipe_of(board.best), recipe),
        ],
        colophon=f"layerswap {__version__}; {counts.distinct} layers run per batch instead of "
        f"{counts.naive}.",
    )


def result_sections(board: SweepResult) -> list[Section]:
    """The test documents, the compositions on the development documents, and the answers."""
    chosen = board.chosen
    default = Condition("swap", zones=board.default, outside=chosen.outside)
    tests = score_sections(
        board, heading="On the test split", measure=board.metric,
        note="The selected model was selected on other documents than these.",
    )  # fmt: skip
    maps = grid_sections(
        "The grid",
        "Layers from the language expert at the bottom and at the top, against the mean score on "
        "the development split.",
        board.choice.candidates, best=chosen, default=default, unit="",
    )  # fmt: skip
    return [*tests, *maps, *_answers(board)]


def lead(board: SweepResult, folder: Path | None = None) -> str:
    """The result in words: models above the selected one, then its name and its test score."""
    names = {CHOSEN: _zones_in_words(board.chosen), DEFAULT: "the default swap"}
    score = board.intervals[board.selected]
    selected = (
        f"The selected model is {names.get(board.selected, f'the {board.selected}')}, the best of "
        f"{len(board.choice.candidates) + len(board.choice.competed['']) - 1} on the development "
        f"documents. On {score.n} other documents, {' '.join(board.measure[:2])} is "
        f"{scored(score, board.unit)}."
    )
    return " ".join(sweep_opening(board, folder, selected, english_in_words(board.english)))


def sweep_opening(board: SweepResult, folder: Path | None, *said: str) -> list[str]:
    """`opening` of a sweep; with the folder of `write_above`, its command."""
    command = ["layerswap", "merge", str(folder / ABOVE), "--out", "merged"] if folder else []
    return opening([board], *said, writes=lambda model: command if model in board.models else ())


def write_above(board: SweepResult, folder: Path) -> None:
    """Write `above.yaml`; remove that of an earlier sweep in the folder."""
    (folder / ABOVE).unlink(missing_ok=True)
    above = next((model for model in board.above if model in board.models), None)
    if above is not None:
        write_recipe(board.models[above], folder / ABOVE)


def recipe_of(plan: Plan) -> dict[str, Any]:
    """Return the recipe of a plan, ready for `layerswap merge`."""
    return plan.recipe.model_dump(mode="json", exclude_defaults=True)


def write_recipe(plan: Plan, path: Path) -> None:
    """Write the recipe of a plan."""
    path.write_bytes(dump_yaml(recipe_of(plan)).encode())


def _models(recipe: Mapping[str, Any], file: Path | None) -> Section:
    """The checkpoints of a recipe, and the command that merges it."""
    sources = {**recipe["experts"], **({"base": recipe["base"]} if "base" in recipe else {})}
    plain = [given["source"] if isinstance(given, Mapping) and set(given) == {"source"} else given
             for given in sources.values()]  # fmt: skip
    rows = [[name, source if isinstance(source, str) else json.dumps(source)]
            for name, source in zip(sources, plain, strict=True)]  # fmt: skip
    text, command = 'In Python, `result.best.save("merged")` writes the best composition.', ""
    if file is not None:
        text = "This command writes the best composition:"
        command = shlex.join(["layerswap", "merge", str(file), "--out", "merged"])
    return Section("Models", text, command, table=Table(["name", "source"], rows))


def _answers(board: SweepResult) -> list[Section]:
    """The answers of the models to the test documents."""
    tested = [row for row in board.rows if row.split == TEST and row.measure == board.measure]
    others = [model for model in board.intervals if not board.choice.same(model, board.selected)]
    models = {in_a_sentence(model): model for model in [board.selected, *others]}
    documents = sorted({(row.task, row.document) for row in tested if row.question})
    answers = side_by_side(models, tested, documents)
    text = "Answers to test documents, grouped by the first two models: which of them is right."
    return [Section("Answers side by side", text, answers=answers)] if answers else []


def _zones_in_words(chosen: Condition) -> str:
    """A chosen composition in words, such as `bottom 5, top 2, outside task`."""
    if chosen.zones is None:
        return str(chosen)
    return f"{chosen.zones}, outside {chosen.outside}" if chosen.outside else str(chosen.zones)
