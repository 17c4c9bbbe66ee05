"""Writes the report of a study: a page, its tables and its figures."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from layerswap.compose.presets import swap
from layerswap.compose.recipe import Recipe, check_recipe, read_recipe
from layerswap.deltas.atlas import Atlas
from layerswap.evaluation.classifier import Worth
from layerswap.experiment.answers import grouped, read_answers
from layerswap.experiment.benchmarks import RESULTS, Part, study_results, test_documents
from layerswap.experiment.compare import Compared, InEnglish
from layerswap.experiment.conditions import (
    BASE,
    CHOSEN,
    DEFAULT,
    JOINT,
    LANGUAGE_EXPERT,
    SOUP,
    TASK_EXPERT,
    Condition,
    in_a_sentence,
)
from layerswap.experiment.sections import (
    change_section,
    english_in_words,
    grid_sections,
    score_sections,
    scored,
    side_by_side,
)
from layerswap.experiment.tables import chosen_on
from layerswap.experiment.verdict import opening, verdict_in_words
from layerswap.ground.errors import StudyError
from layerswap.ground.types import Log, counted
from layerswap.ground.yaml_file import dump_yaml
from layerswap.merge.api import make_plan
from layerswap.merge.metadata import command_lines, study_uses
from layerswap.report.charts import draw_intervals, draw_ranks
from layerswap.report.drawing import Drawing
from layerswap.report.page import Report, Section, write_report
from layerswap.report.stack import draw_stack
from layerswap.report.tables import Number, Table, slug, write_tables
from layerswap.study.conditions import RecipeData
from layerswap.study.evaluating import MAP_FOLDER, NUMBERS, EvaluateStep, TablesStep, further
from layerswap.study.finishing import FINISH, FinishedStep
from layerswap.study.inputs import layers_of
from layerswap.study.journal import PAGE, StudyJournal, read_journal
from layerswap.study.steps import Graph
from layerswap.study.trainings import EXPERT, SelectStep, TrainStep, selection
from layerswap.training.expert.save import read_training
from layerswap.versions import __version__

FIGURES, TABLES, BEST, MERGED = "figures", "tables", "best", "merged"
BROWSED = (CHOSEN, DEFAULT, TASK_EXPERT, LANGUAGE_EXPERT, SOUP, JOINT, BASE)
"""Treatments whose answers are shown, with those of the selected model and of TIES."""
COMPARED = (TASK_EXPERT, JOINT, SOUP, LANGUAGE_EXPERT, BASE)
"""Models that the selected model is compared with at the head of the report."""
ROWS = 24
"""Most rows of the chart at the head, unless there are more results."""


def write_study_report(root: Path) -> Path:
    """Write `report.html`, `tables/`, `figures/` and `best/` into the folder of a study.

    Raises:
        StudyError: the folder holds no study, cannot be written, or nothing was evaluated yet.
    """
    return FinishedSteps(read_journal(root)).write()


class FinishedSteps:
    """The results of the finished steps of a study."""

    def __init__(self, journal: StudyJournal) -> None:
        self.journal = journal
        if "tables" not in journal.graph:
            raise StudyError(f"{journal.root}: holds no study with tables; nothing to report")
        self.settings = TablesStep.of(journal.graph["tables"])
        self.records = journal.finished()
        self.evaluations = self._of_kind("evaluate")
        self.results = study_results(
            self.evaluations,
            self.settings.development,
            further({name: journal.folder(name) for name in self.records}),
            next(iter(self._of_kind("english").values()), None),
        )
        if not self.results.benchmarks:
            raise StudyError(f"{journal.root}: nothing was evaluated yet; nothing to report")
        self.atlases = {
            language: Atlas.load(folder / MAP_FOLDER)
            for language, folder in self._of_kind("change").items()
        }
        self.trainings = {
            name: read_training(journal.folder(name) / EXPERT)
            for name, record in self.records.items()
            if record.kind == "train"
        }

    def write(self) -> Path:
        """Write the report; returns the page."""
        folder = self.journal.root
        try:
            page = self._write_all(folder)
            write_best(self.journal, self.results.benchmarks)
        except OSError as error:
            raise StudyError(f"{folder}: the report cannot be written ({error})") from None
        return page

    def _write_all(self, folder: Path) -> Path:
        tables, figures = folder / TABLES, folder / FIGURES
        tables.mkdir(exist_ok=True)
        figures.mkdir(exist_ok=True)
        for old in (path for kind in ("svg", "pdf", "png") for path in figures.glob(f"*.{kind}")):
            old.unlink()  # the study may have had other languages and benchmarks
        write_tables(tables / tables.name, self.results.tables)
        report = self.report()
        drawings = {slug(section.heading.lower()): section.figure for section in report.sections}
        drawings |= {"differences": report.figure, "stack": report.sections[0].figure}
        drawings.pop(slug(report.sections[0].heading.lower()))
        for name, drawing in drawings.items():
            if drawing is not None:
                drawing.save(figures / name)
        return write_report(folder / PAGE, report)

    def _of_kind(self, kind: str) -> dict[str, Path]:
        """The folders of the finished steps of a kind, by language; or by kind of expert."""
        return {
            name.partition("/")[2]: self.journal.folder(name)
            for name, record in self.records.items()
            if record.kind == kind
        }

    def report(self) -> Report:
        """The content of the page."""
        left = [step.name for step in self.journal.graph if step.name not in self.records]
        results = self.results.benchmarks
        lead = study_opening(
            results, self.journal.root, self.settings.description, *self._cautions(),
            "Higher, lower and *: the 95% interval of the paired difference excludes zero. "
            "Intervals are over documents, not over trainings.",
        )  # fmt: skip
        if left:
            lead.append(f"{counted(len(left), 'step')} left, such as {left[0]}: parts are missing.")
        return Report(
            title=self.settings.name,
            lead="\n\n".join(lead),
            figure=_differences(results),
            sections=list(self._sections()),
            colophon=f"layerswap {__version__}.",
        )

    def _cautions(self) -> Iterator[str]:
        """Cautions on the data and the answers, such as contaminated data."""
        yield from self.settings.cautions
        for name, training in self.trainings.items():
            for data in training["data"]:
                for items, count in data.get("contaminated", {}).items():
                    yield (
                        f"{name} trained on {counted(count, 'row')} of {data['name']} with an item "
                        f"of {items}: scores on it are flattered."
                    )
        selections = SelectStep.all_of(self.journal.graph).values()
        tasks = dict.fromkeys(task for step in selections for task in step.tasks)
        choices = [result.choice for result in self.results.benchmarks]
        yield from dict.fromkeys(
            chosen_on(choice) for choice in choices if not (choice.published and choice.count)
        )
        if tasks:
            yield (
                f"Checkpoints were selected on all documents of {', '.join(tasks)}: scores on "
                "these are flattered."
            )

    def _sections(self) -> Iterator[Section]:
        """The parts of the page, in order."""
        first = self.results.benchmarks[0]
        merge = shlex.join(["layerswap", "study", "merge", str(self.journal.root)])
        saved = [f"in {code}: {by.choice.saved}"
                 for code, by in _first(self.results.benchmarks).items()]  # fmt: skip
        yield Section(
            "The selected model",
            f"Selected {'; '.join(saved)}. This command writes the selected model of each "
            "language:",
            merge,
            figure=self._stack(first),
        )
        commands = command_lines(study_uses(self.journal.root, first.language))
        yield Section(
            "Use it",
            "Ask it beside other compositions, write a GGUF file that provably answers as it does, "
            "upload it, and let speakers compare answers. Replace the words in capitals.",
            commands,
        )
        for part in self.results.parts:
            yield from self._about(part)
        for language, atlas in self.atlases.items():
            yield change_section(atlas, f"What fine-tuning changed, {language}")
        answered = (self.evaluations, self._of_kind("finished"))
        for evaluated in self.results.benchmarks:
            code = evaluated.language
            yield from examples_of(
                evaluated, *[by[code] / RESULTS for by in answered if code in by]
            )
        yield self._asked()
        yield self._provenance()

    def _about(self, part: Part) -> Iterator[Section]:
        """The sections of a table: scores with a chart and the maps of the grid."""
        match part.kind, part.result:
            case "scores", Compared() as by:
                text = _sentence(by, self.results.english.get(by))
                yield from score_sections(by, heading=part.heading, measure=by.benchmark, text=text)
                if by.choice.candidates:
                    yield from _maps(by)
            case "balanced", _:
                pass  # beside the scores
            case _:
                ranked = self.results.ranked if part.kind == "ranks" else None
                figure = draw_ranks(ranked) if ranked else None
                yield Section(part.heading, figure=figure, table=part.table)

    def _asked(self) -> Section:
        """The models of the study, and the settings of their evaluation."""
        steps = evaluations_of(self.journal.graph)
        settings = next(iter(steps.values()))
        spec = settings.evaluate
        limit, shots = spec.limit, spec.num_fewshot
        documents = f"at most {limit:,} of a task, drawn by label" if limit else "all"
        rows = [
            ["base", settings.base],
            *(
                [f"{kind} experts", ", ".join(selection(folder, Path()))]
                for kind, folder in self._of_kind("select").items()
            ),
            ["benchmarks", spec.suite or ", ".join(spec.tasks)],
            ["documents", documents],
            ["examples in a prompt", "each benchmark's own" if shots is None else str(shots)],
            ["chat template", "applied" if spec.apply_chat_template else "not applied"],
            ["device", settings.device],
            ["dtype", settings.dtype or "as stored"],
        ]
        return Section("Models and evaluation", table=Table(["setting", "value"], rows))

    def _provenance(self) -> Section:
        """A row for each finished step, and the versions of the packages."""
        seeds = {name: step.seed for name, step in TrainStep.all_of(self.journal.graph).items()}
        rows: list[list[Any]] = [
            [record.name, record.key[:16], seeds.get(record.name, ""),
             Number(record.seconds or 0.0, ".1f"), record.where]
            for record in self.records.values()
        ]  # fmt: skip
        known = {item for record in self.records.values() for item in record.versions.items()}
        versions = grouped(sorted(known), lambda item: item[0])
        packages = [f"{name} {' and '.join(number for _, number in numbers)}"
                    for name, numbers in versions.items()]  # fmt: skip
        return Section(
            "Where the numbers come from",
            "The step evaluate/<language> computed the scores of a language. Its models are "
            "composed of the experts that the steps select/... kept. "
            f"Packages: {', '.join(packages)}.",
            table=Table(["step", "key", "seed", "seconds", "machine"], rows,
                        caption="A step's output is in steps/<kind>-<key>."),
        )  # fmt: skip

    def _stack(self, first: Compared) -> Drawing | None:
        """The selected composition of the first language; None for a model that is no swap."""
        saved = first.choice.saved
        if saved.method != "swap":
            return None
        base = evaluations_of(self.journal.graph)[first.language].base
        names = {"task": "task expert", "language": f"{first.language} expert"}
        outside: Any = saved.outside or "blend"
        return draw_stack(swap(layers_of(base), zones=saved.zones, outside=outside), names)


def write_best(journal: StudyJournal, results: Sequence[Compared]) -> None:
    """Write `best/<language>.yaml` for each language: the recipe of its selected model.

    This is the choice on the language's first benchmark.
    """
    folder = journal.root / BEST
    folder.mkdir(exist_ok=True)
    for language, result in _first(results).items():
        saved = result.choice.saved
        recipe = dict(_recipes(journal, language))[saved]
        head = f"# {result.benchmark} in {language}, {saved}: {scored(result.saved_score)}\n"
        text = dump_yaml({**recipe, "bake": True})
        (folder / f"{language}.yaml").write_bytes((head + text).encode())


def _first(results: Sequence[Compared]) -> dict[str, Compared]:
    """Return the first result of each language, whose model is saved."""
    first: dict[str, Compared] = {}
    for result in results:
        first.setdefault(result.language, result)
    return first


def evaluations_of(graph: Graph) -> dict[str, EvaluateStep]:
    """The evaluations of a study, by language."""
    return {step.language: step for step in EvaluateStep.all_of(graph).values()}


def _recipes(journal: StudyJournal, language: str) -> Iterator[tuple[Condition, RecipeData]]:
    """List a language's conditions and recipes, with those of existing finished models."""
    for kind in (EvaluateStep, FinishedStep):
        name = f"{kind.kind}/{language}"
        if name in journal.graph and (kind is EvaluateStep or name in journal.finished()):
            step = journal.graph[name]
            yield from kind.of(step).recipes({need: journal.folder(need) for need in step.needs})


def merge_models(
    root: Path, languages: Sequence[str] = (), model: str | None = None, *, log: Log
) -> Iterator[Path]:
    """Write one model and its card for each language into `merged/<language>`.

    Args:
        root: folder of the study.
        languages: all when empty.
        model: its name in the tables, with the first pair of experts; the selected model when None.
        log: called with one line at a time.

    Raises:
        StudyError: nothing is selected yet, or there is no such language or model; nothing was
            written.
    """
    known = {path.stem: path for path in sorted((root / BEST).glob("*.yaml"))}
    if not known:
        read_journal(root)  # raises if this is not a study folder
        raise StudyError(f"{root}: has no {BEST}/<language>.yaml yet; finish the study first")
    if strange := [name for name in languages if name not in known]:
        raise StudyError(f"{root}: has no {strange[0]!r}; its languages are {', '.join(known)}")
    recipes = {
        name: read_recipe(known[name]) if model is None else _recipe_of(root, name, model)
        for name in languages or known
    }
    for language, recipe in recipes.items():
        log(f"merging the model of {language}")
        (root / MERGED).mkdir(exist_ok=True)
        remark = " ".join([*_finished(recipe), *([] if model else _worth(root, language))])
        plan = replace(make_plan(recipe), remark=remark)
        yield plan.save(root / MERGED / language, overwrite=True)


def _finished(recipe: Recipe) -> Iterator[str]:
    """Yield the sentence of a finished model's card on its start and its labelled rows."""
    for expert in recipe.experts.values():
        facts = Path(expert.source or "").parent / FINISH
        if facts.is_file():
            found = json.loads(facts.read_text("utf-8"))
            yield (f"It is the {found.get('start', 'start')} after a training on "
                   f"{counted(found['rows'], 'labelled row')}.")  # fmt: skip


def _worth(root: Path, language: str) -> Iterator[str]:
    """Yield the sentence of a card on the worth in labels, by the first benchmark."""
    numbers = read_journal(root).folder("tables") / NUMBERS
    facts = json.loads(numbers.read_text("utf-8")) if numbers.is_file() else {}
    for benchmark, verdict in [*facts.get("verdicts", {}).get(language, {}).items()][:1]:
        if labels := verdict["worth_in_labels"].get("accuracy"):
            worth = Worth(**labels)
            yield f"On {benchmark} in {language} it is worth {worth} to a linear classifier."


def _recipe_of(root: Path, language: str, model: str) -> Recipe:
    """Return the recipe of a model by its name in the tables, of the first pair of experts."""
    journal = read_journal(root)
    recipes = dict(_recipes(journal, language))
    named = {str(one.treatment): one for one in reversed(recipes)}
    if model not in named:  # a setting or zones that were chosen
        results = FinishedSteps(journal).results.benchmarks
        reported = next(iter(_first(results)[language].choice.reported.values()))
        named |= {str(name): one for name, one in reported.items()}
    if model not in named:
        names = [*dict.fromkeys(str(one.treatment) for one in recipes)]
        hint = "".join(f"; did you mean {name!r}?" for name in get_close_matches(model, names, n=1))
        hint = hint or f"; there are {'; '.join(names)}"
        raise StudyError(f"{root}: no model is called {model!r} in {language}{hint}")
    return check_recipe({**recipes[named[model]], "bake": True}, where=f"{root}")


def selected_recipe(root: Path, language: str | None = None) -> Recipe:
    """The selected swap of a language.

    The first language when None. The first swap of the first pair of experts until the study has
    selected a model, or if the selected model is no swap.
    """
    journal = read_journal(root)
    steps = evaluations_of(journal.graph)
    chosen = next(iter(steps), "") if language is None else language
    if chosen not in steps:
        raise StudyError(f"{root}: has no {chosen!r}; its languages are {', '.join(steps)}")
    best = root / BEST / f"{chosen}.yaml"
    recipe = read_recipe(best) if best.is_file() else None
    if recipe is not None and recipe.swap is not None:
        return recipe
    swaps = (data for _, data in _recipes(journal, chosen) if "swap" in data)
    return check_recipe(next(swaps), where=f"{root}")


def study_opening(results: Sequence[Compared], root: Path, *said: str) -> list[str]:
    """Write the opening of a report: verdict, cautions, and a command for the best better model."""
    command = ["layerswap", "study", "merge", str(root), "--model"]
    return opening(results, *said, writes=lambda model: [*command, str(model)])


def _differences(results: Sequence[Compared]) -> Drawing | None:
    """The selected model minus the main baselines, for each language and benchmark."""
    several = len({result.benchmark for result in results}) > 1
    rows = []
    for result in results:
        known = [model for model in COMPARED if model in result.differences]
        name = result.heading if several else result.language
        rows += [(f"{name}: {model}", result.differences[model])
                 for model in known[: max(1, ROWS // len(results))]]  # fmt: skip
    if not rows:
        return None
    return draw_intervals(rows, measure="the selected model minus the other", differences=True)


def _sentence(result: Compared, english: InEnglish | None = None) -> str:
    """Describe one language's result: the models that the swap is above, below and like."""
    score = scored(result.intervals[result.selected])
    score += f" in {result.metric_in_words}" if result.likeness else ""
    name = in_a_sentence(result.selected)
    parts = [f"{result.benchmark} in {result.language}: the {name} reaches {score}."]
    words = {1: "Higher than", -1: "Lower than", 0: "No difference detected from"}
    parts += [
        f"{words[sign]}: {'; '.join(map(str, others))}."
        for sign, others in result.by_sign.items() if others
    ]  # fmt: skip
    parts.append(verdict_in_words(result))
    return " ".join(filter(None, [*parts, english_in_words(english)]))


def _maps(result: Compared) -> list[Section]:
    """The compositions on the development documents."""
    choice = result.choice
    ((best, count),) = Counter(choice.chosen.values()).most_common(1)
    return grid_sections(
        f"The compositions, {result.heading}",
        "Mean over pairs on the development documents, by the number of layers from the language "
        f"expert at the bottom and at the top. Outlined: chosen for {count} of "
        f"{counted(len(result.pairs), 'pair')}.",
        choice.candidates, best=best,
    )  # fmt: skip


def examples_of(result: Compared, *folders: Path) -> Iterator[Section]:
    """Show the answers of the first pair's models to test documents, the selected model first."""
    reported = next(iter(result.choice.reported.values()))
    again = result.choice.same(CHOSEN, DEFAULT)
    shown = (result.selected, *BROWSED)
    names = [name for name in reported if (name in shown and not (again and name == CHOSEN))
             or (name.method == "ties" and name.variant != CHOSEN.variant)]  # fmt: skip
    names.sort(key=lambda name: (name != result.selected, name != CHOSEN, not reported[name].pair))
    models = {in_a_sentence(name): reported[name] for name in names}
    rows = [
        row for folder in folders for row in read_answers(folder)
        if row.main and row.condition in models.values()
        and result.benchmark in (row.benchmark, row.task)
    ]  # fmt: skip
    documents = test_documents(result, rows)
    if answers := side_by_side(models, rows, documents):
        yield Section(
            f"Answers one by one, {result.heading}",
            "Answers of the first pair of experts on test documents, grouped by the model that is "
            "right.",
            answers=answers,
        )
