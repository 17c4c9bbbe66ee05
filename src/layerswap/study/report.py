"""Where the numbers of a report come from: steps, their keys and what did them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from layerswap.compose.presets import swap
from layerswap.deltas.atlas import Atlas
from layerswap.errors import StudyError
from layerswap.evaluation.statistics import Friedman
from layerswap.report.charts import draw_intervals, draw_ranks
from layerswap.report.delta_map import draw_maps, map_of, map_panel
from layerswap.report.drawing import Drawing
from layerswap.report.page import Report, Section, write_report
from layerswap.report.panels import ShownAnswer, examples_panel, grid_panel
from layerswap.report.stack import draw_stack
from layerswap.report.tables import Table, interval_words, slug, write_tables
from layerswap.study.conditions import DEFAULT, RESULTS, grid_name
from layerswap.study.journal import PAGE, StepRecord, StudyJournal, read_journal
from layerswap.study.results import (
    BEST,
    CHOSEN,
    Condition,
    elsewhere,
    findings,
    fraction,
    heading_elsewhere,
    in_detail,
    over_languages,
    rank_table,
    tables_of,
)
from layerswap.study.step_functions import MAP_FOLDER
from layerswap.study.storage import Storage
from layerswap.versions import __version__


def provenance(
    entries: Sequence[StepRecord], told: str, seeds: Mapping[str, int] | None = None
) -> Section:
    """A section with a row for each step that is done.

    Args:
        entries: what the journal says of the steps, in order.
        told: which numbers are of which step, in a sentence or two.
        seeds: of the steps that have one, by name.
    """
    seeds = seeds or {}
    rows: list[Sequence[str | float | None]] = [
        [entry.name, entry.key[:16], str(seeds.get(entry.name, "")), f"{entry.seconds:.1f}",
         entry.where]
        for entry in entries
    ]  # fmt: skip
    versions: dict[str, set[str]] = {}
    for entry in entries:
        for package, number in entry.versions.items():
            versions.setdefault(package, set()).add(number)
    made = ", ".join(f"{name} {' and '.join(sorted(v))}" for name, v in sorted(versions.items()))
    return Section(
        "Where the numbers come from",
        f"{told} Made with {made}.",
        table=Table(["step", "key", "seed", "seconds", "machine"], rows,
                    caption="A step's output is in steps/<kind>-<key>."),
    )  # fmt: skip


SHOWN = 300
"""Most documents of a language."""
RIGHT = 0.5
"""A document whose score is above this counts as right."""


def examples_of(one: Condition, results: Path) -> Iterator[Section]:
    """Answers of the first pair, on documents that nothing was chosen on."""
    from layerswap.evaluation.results import read_samples, read_scores

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
            examples.append(ShownAnswer(
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


FIGURES, TABLES = "figures", "tables"


def write_study_report(root: Path, storage: Storage | None = None) -> Path:
    """Write `report.html`, `tables/` and `figures/` into the folder of a study.

    Args:
        root: the study's folder; the local one, where there is a storage.
        storage: what is behind it; the report is copied there.

    Raises:
        StudyError: the folder is no study's, cannot be written, or nothing was judged yet.
    """
    told = StudyResults(read_journal(root, storage))
    folder = told.journal.root
    try:
        page = _write_all(told, folder)
    except OSError as error:
        raise StudyError(f"{folder}: the report cannot be written ({error})") from None
    if storage is not None:
        for path in (
            page,
            *sorted((folder / TABLES).iterdir()),
            *sorted((folder / FIGURES).iterdir()),
        ):
            storage.write(path.relative_to(folder).as_posix(), path.read_bytes())
    return page


def _write_all(told: StudyResults, folder: Path) -> Path:
    tables, figures = folder / TABLES, folder / FIGURES
    tables.mkdir(exist_ok=True)
    figures.mkdir(exist_ok=True)
    for old in (path for kind in ("svg", "pdf", "png") for path in figures.glob(f"*.{kind}")):
        old.unlink()  # of languages and benchmarks that the study may have had before
    write_tables(tables / tables.name, tables_of(told.found))
    for language, atlas in told.atlases.items():
        drawn = draw_maps([map_of(atlas, name, atlas.threshold()) for name in atlas.experts])
        drawn.save(figures / f"change-{language}")
    report = told.report()
    drawings = {slug(one.heading.lower()): one.figure for one in report.sections}
    for name, drawing in {"stack": report.figure, **drawings}.items():
        if drawing is not None:
            drawing.save(figures / name)
    return write_report(folder / PAGE, report)


class StudyResults:
    """What a study found, as far as it is done.

    Args:
        journal: of the study.

    Raises:
        StudyError: nothing was judged yet, or the steps are not a study's.
    """

    def __init__(self, journal: StudyJournal) -> None:
        self.journal = journal
        if "tables" not in journal.graph.by_name:
            own = journal.root / PAGE
            there = f"its report is {own}" if own.is_file() else "there is nothing to report"
            raise StudyError(f"{journal.root}: holds no study with tables; {there}")
        self.settings = journal.graph["tables"].settings
        told = {"judge", "change"}  # the kinds of step that are read
        self.folders = {
            name: journal.bring(name) if journal.graph[name].kind in told else journal.folder(name)
            for name in journal.finished()
        }
        self.found = findings(self.folders, self.settings["development"])
        if not self.found.conditions:
            raise StudyError(f"{journal.root}: nothing was judged yet; there is nothing to report")
        self.atlases = {
            name.partition("/")[2]: Atlas.load(folder / MAP_FOLDER)
            for name, folder in self.folders.items()
            if name.startswith("change/")
        }

    def report(self) -> Report:
        """The page."""
        left = [step.name for step in self.journal.graph if step.name not in self.folders]
        lead = [self.settings["description"], *(_sentence(one) for one in self.found.conditions)]
        stack = self._stack()
        if stack is not None:
            first = self.found.conditions[0]
            pair = next(iter(first.chosen))
            lead.append(f"Drawn: the composition chosen for the pair {pair} in {first.language}.")
        lead += self._cautions()
        lead.append(
            "Above and below: the 95% interval of the paired difference is clear of zero. "
            "Intervals are over documents, not over trainings."
        )
        if left:
            lead.append(f"{len(left)} steps are not done, such as {left[0]}: parts are missing.")
        return Report(
            title=self.settings["name"],
            lead="\n\n".join(line for line in lead if line),
            figure=stack,
            sections=list(self.sections()),
            colophon=f"layerswap {__version__}.",
        )

    def _cautions(self) -> Iterator[str]:
        """What the numbers do not say by themselves."""
        selects = [step.settings for step in self.journal.graph if step.kind == "select"]
        tasks = dict.fromkeys(task for one in selects for task in one["tasks"])
        if tasks:
            yield (
                f"Checkpoints were selected on all documents of {', '.join(tasks)}: scores on "
                "these are flattered."
            )

    def sections(self) -> Iterator[Section]:
        """The parts of the page, in order."""
        for benchmark in dict.fromkeys(one.benchmark for one in self.found.conditions):
            same = [one for one in self.found.conditions if one.benchmark == benchmark]
            if len(same) > 1:
                yield Section(f"{benchmark}, all languages", table=over_languages(benchmark, same))
            for one in same:
                yield from _about(one)
        for other in self.found.other_languages:
            table = elsewhere(other, self.found.own(other))
            yield Section(heading_elsewhere(other), table=table)
        if self.found.ranked is not None:
            yield _ranks(self.found.ranked)
        for language, atlas in self.atlases.items():
            yield Section(
                f"What fine-tuning changed, {language}",
                "The share of rows of each matrix whose mean absolute change is above the "
                "threshold (paper 1, figure 2).",
                panel=map_panel(atlas, atlas.threshold()),
            )
        for one in self.found.conditions:
            yield from examples_of(one, self.folders[f"judge/{one.language}"] / RESULTS)
        yield self._provenance()

    def _provenance(self) -> Section:
        steps = [step for step in self.journal.graph if step.name in self.folders]
        return provenance(
            [entry for step in steps if (entry := self.journal.entry(step.name))],
            "Scores of a language are of the step judge/<language>, whose models are the experts "
            "that the steps select/... kept.",
            {step.name: step.settings["seed"] for step in steps if "seed" in step.settings},
        )

    def _stack(self) -> Drawing | None:
        """The chosen composition of the first pair of the first language."""
        atlas = next(iter(self.atlases.values()), None)
        zones = next(iter(self.found.conditions[0].chosen.values()), None)
        if atlas is None or zones is None:
            return None
        names = {"task": "task expert", "language": f"{self.found.conditions[0].language} expert"}
        return draw_stack(swap(atlas.layers, zones=zones), names)


def _sentence(one: Condition) -> str:
    """The result of one language in plain words, with its uncertainty."""
    rows = one.rows
    name = CHOSEN if CHOSEN in rows else DEFAULT
    placed: dict[str, list[str]] = {"above": [], "level with": [], "below": []}
    for other, row in rows.items():
        apart = row.against.get(name)
        if apart is None or other == BEST:
            continue
        if apart.high < 0:
            placed["above"].append(f"{other} (by {-100 * apart.mean:.1f})")
        elif apart.low > 0:
            placed["below"].append(f"{other} (by {100 * apart.mean:.1f})")
        else:
            placed["level with"].append(other)
    score = interval_words(rows[name].score)
    said = f"{one.benchmark} in {one.language}: the {name}, reaches {score}%"
    told = "; ".join(f"{where} {', '.join(names)}" for where, names in placed.items() if names)
    return f"{said}. It is {told}." if told else f"{said}."


def _about(one: Condition) -> Iterator[Section]:
    rows = one.rows
    yield Section(
        f"{one.benchmark}, {one.language}",
        figure=draw_intervals(
            [(name, row.score) for name, row in rows.items()],
            measure=one.benchmark,
            highlight=CHOSEN if CHOSEN in rows else DEFAULT,
        ),
        table=in_detail(one),
    )
    if one.grid:
        counts = {zones: list(one.chosen.values()).count(zones) for zones in one.grid}
        pairs = len(one.chosen)
        marks = {zones: f"chosen for {n} of {pairs} pairs" for zones, n in counts.items() if n}
        yield Section(
            f"The compositions, {one.benchmark}, {one.language}",
            "Mean over pairs on the development documents, by the number of layers from the "
            "language expert at the bottom and at the top. An asterisk: chosen for some pair.",
            panel=grid_panel(
                {zones: interval.mean for zones, interval in one.grid.items()},
                title=f"{one.benchmark}, {one.language}, %",
                intervals=one.grid,
                marks=marks,
            ),
        )


def _ranks(ranked: Friedman) -> Section:
    table = rank_table(ranked)
    return Section(
        "Ranks",
        figure=draw_ranks(ranked),
        table=table,
    )
