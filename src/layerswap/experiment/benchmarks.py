"""Results of a study: the choice on development documents, the scores on test documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from layerswap.evaluation.classifier import LabelledTexts
from layerswap.evaluation.languages import ANSWER, REASONING
from layerswap.evaluation.statistics import (
    Classified,
    Friedman,
    Interval,
    friedman,
    mean_interval,
    mean_over_groups,
    paired_over_groups,
    student_interval,
)
from layerswap.evaluation.suites.suites import development_tasks, has_variants
from layerswap.experiment.answers import Answer, fraction, read_answers
from layerswap.experiment.baselines import baselines
from layerswap.experiment.compare import (
    DocumentSplit,
    TestResult,
    Values,
    best_of_all,
    choose,
    split_documents,
)
from layerswap.experiment.conditions import CHOSEN, DEFAULT, FLATTERED, TUNED, Condition
from layerswap.experiment.sections import BY_LABEL
from layerswap.experiment.tables import by_label, models_table
from layerswap.experiment.verdict import verdict_facts
from layerswap.report.tables import STAR, Number, Spread, Table

RESULTS, OTHER_LANGUAGES = "results", "other_languages"
"""Folders of an evaluation: in the language's own documents, and in other languages."""
RANKED = 5
"""Minimum number of results for ranks, and of languages for intervals over languages."""
Scores = Mapping[Condition, Values]
"""By condition, one score per document of a benchmark."""


T = TypeVar("T")
Labels = npt.NDArray[np.str_]
"""One label per document of a classification."""


class BenchmarkScores(NamedTuple):
    """Scores of all documents of a benchmark in one language.

    The first `published` documents are the published development split.
    """

    scores: Scores
    published: int = 0
    labels: Labels | None = None  # right labels of a classification
    answers: Mapping[Condition, Labels] = {}  # by condition, its answers
    texts: Sequence[str] = ()  # what each document asks
    choices: npt.NDArray[np.int64] | None = None  # number of answers to choose from, by document

    def split(self, development: float | None) -> DocumentSplit:
        """The documents to choose on and to report on: the published splits, or a drawn share.

        Without a share, all documents are reported on.
        """
        count = len(next(iter(self.scores.values())))
        if development is None:
            return DocumentSplit(np.arange(0), np.arange(count))
        if self.published:
            return DocumentSplit(np.arange(self.published), np.arange(self.published, count))
        return split_documents(count, development)


class InEnglish(NamedTuple):
    """The task experts in English, mean over them: the score with a perfect translator."""

    score: Interval
    parallel: bool  # true if the documents are those of the language, by their labels


@dataclass(frozen=True)
class BenchmarkResult:
    """One language on one benchmark, on the documents that nothing was chosen on."""

    language: str
    benchmark: str
    pairs: Mapping[str, Scores]  # by pair and treatment, on test documents
    grid: Mapping[Condition, Interval]  # compositions, mean over pairs on development documents
    test: tuple[int, ...]  # positions of the test documents, in the order of task and document
    shared: frozenset[Condition]  # treatments that all pairs share
    # By pair, its treatments on development documents; empty without such documents.
    development: Mapping[str, Scores]
    chosen_on: str = ""  # the development documents, in words
    labels: Labels | None = None  # right labels of a classification, on test documents
    answers: Mapping[str, Mapping[Condition, Labels]] = field(default_factory=dict)  # as `pairs`
    # By pair and treatment, the model that it reports: a setting or zones that were chosen.
    reported: Mapping[str, Mapping[Condition, Condition]] = field(default_factory=dict)
    labelled: LabelledTexts | None = None  # that a linear classifier is trained on and asked
    english: InEnglish | None = None

    @property
    def heading(self) -> str:
        """The heading of its table."""
        return f"{self.benchmark}, {self.language}"

    @property
    def chosen(self) -> dict[str, Condition]:
        """By pair, the best composition on development documents."""
        return {pair: by[CHOSEN] for pair, by in self.reported.items() if CHOSEN in by}

    def documents(self, known: Collection[tuple[str, int]]) -> list[tuple[str, int]]:
        """The test documents among all of the benchmark, as task and position."""
        published = development_tasks(task for task, _ in known)
        ordered = sorted(known, key=lambda document: (document[0] not in published, *document))
        return [ordered[i] for i in self.test if i < len(ordered)]

    @cached_property
    def over_pairs(self) -> TestResult:
        """Every treatment, the mean over pairs."""
        means = {name: np.mean(rows, axis=0) for name, rows in self._by_treatment.items()}
        classified = {} if self.labels is None else {
            name: Classified(
                self.labels, np.array([by[name] for by in self.answers.values() if name in by])
            )
            for name in means if any(name in by for by in self.answers.values())
        }  # fmt: skip
        return TestResult(
            means, selected=self.selected, classified=classified, labelled=self.labelled
        )

    @cached_property
    def selected(self) -> Condition:
        """The treatment to report and save, by `best_of_all` over pairs.

        The default swap without development documents.
        """
        if not self.development:
            return DEFAULT
        scores = list(self.development.values())
        common = [name for name in scores[0] if all(name in by for by in scores)]
        return best_of_all({name: np.mean([by[name] for by in scores], axis=0) for name in common})

    @cached_property
    def extremes(self) -> dict[Condition, tuple[float, float]]:
        """The mean score of the lowest and of the highest pair, by treatment."""
        means = {name: [float(v.mean()) for v in rows] for name, rows in self._by_treatment.items()}
        return {name: (min(pair_means), max(pair_means)) for name, pair_means in means.items()}

    def names_of(self, condition: Condition) -> list[Condition]:
        """The treatments that report a condition: of the grid, `CHOSEN`, `FLATTERED` or none."""
        if condition.zones is None:
            return [condition.treatment]
        picked = self.reported.get(condition.pair, {})
        return [name for name in (CHOSEN, FLATTERED) if picked.get(name) == condition.treatment]

    @property
    def best(self) -> Condition:
        """The model to save: `selected` of the pair that is best on development.

        Without development documents, the first pair's.
        """
        if not self.development:
            return replace(DEFAULT, pair=next(iter(self.pairs)))
        means = {pair: scores[self.selected] for pair, scores in self.development.items()}
        pair = max(means, key=lambda candidate: float(means[candidate].mean()))
        model = self.reported[pair][self.selected]
        return model if model in self.shared else replace(model, pair=pair)

    @property
    def best_score(self) -> Interval:
        """The score of `best` on the test documents."""
        pair = self.best.pair or next(iter(self.pairs))
        return mean_interval(self.pairs[pair][self.selected])

    @cached_property
    def _by_treatment(self) -> dict[Condition, list[Values]]:
        found: dict[Condition, list[Values]] = defaultdict(list)
        for scores in self.pairs.values():
            for treatment, values in scores.items():
                found[treatment].append(values)
        return dict(found)


def benchmark_result(
    language: str, benchmark: str, found: BenchmarkScores, development: float | None
) -> BenchmarkResult:
    """One language on one benchmark.

    The composition of each pair is chosen on the development documents, and all treatments are
    reported on the test documents. The best on those is reported too, as in the papers: it is
    flattered, since the same documents chose it. A baseline with a weight, scale or density is
    also reported with the setting that is best on the development documents. Without these
    (`development` is None) nothing is chosen, and every setting is reported.
    """
    split = found.split(development)
    choosing = len(split.development) > 0
    by_pair, answers = _by_pair(found.scores), _by_pair(found.answers)
    shared, shared_answers = by_pair.pop("", {}), answers.pop("", {})
    reported = {pair: _reported(shared, own, split) for pair, own in by_pair.items()}

    def on(
        documents: npt.NDArray[np.int64], own: Mapping[str, Any], common: Mapping[Condition, Any]
    ) -> dict[str, dict[Condition, Any]]:
        models = {pair: {**common, **own[pair]} for pair in reported}
        return {
            pair: {name: models[pair][model][documents] for name, model in names.items()}
            for pair, names in reported.items()
        }

    grids: dict[Condition, list[Values]] = defaultdict(list)
    for condition, values in (item for own in by_pair.values() for item in own.items()):
        if choosing and condition.zones is not None:
            grids[condition].append(values[split.development])
    free = baselines(found.labels, found.texts, found.choices, split)
    tested = on(split.test, by_pair, shared)
    answered = {} if found.labels is None else on(split.test, answers, shared_answers)
    return BenchmarkResult(
        language, benchmark, {pair: {**own, **free.scores} for pair, own in tested.items()},
        {zoned: mean_interval(np.mean(values, axis=0)) for zoned, values in grids.items()},
        tuple(split.test.tolist()), frozenset([*shared, *free.scores]),
        on(split.development, by_pair, shared) if choosing else {}, _chosen_on(found, split),
        None if found.labels is None else found.labels[split.test],
        {pair: {**own, **free.answers} for pair, own in answered.items()}, reported, free.labelled,
    )  # fmt: skip


def _reported(shared: Scores, own: Scores, split: DocumentSplit) -> dict[Condition, Condition]:
    """By name, the models that a pair reports: not a whole grid, but the best of it."""
    choosing = len(split.development) > 0
    grid = [condition for condition in own if condition.zones is not None]
    others = [
        condition for condition in own if condition not in grid
        and (not choosing or condition.method == "ties" or condition.method not in TUNED)
    ]  # fmt: skip
    reported = {condition: condition for condition in (*shared, *others)}
    if choosing:
        reported |= _chosen_of_methods(own, split)
    if choosing and grid:
        for name, documents in ((CHOSEN, split.development), (FLATTERED, split.test)):
            tried = {condition: own[condition][documents] for condition in grid}
            reported[name] = choose(tried, of_equals="first")
    return reported


def _chosen_on(found: BenchmarkScores, split: DocumentSplit) -> str:
    """Describe the documents of the selection in words."""
    count = len(split.development)
    if not count:
        return "Nothing is chosen on documents: the swap has its default zones."
    if found.published:
        return f"Choices are made on the {count:,} documents of the development split."
    return (
        f"Choices are made on {count:,} drawn documents, which are left out here: there is no "
        "development split."
    )


def _chosen_of_methods(own: Scores, split: DocumentSplit) -> dict[Condition, Condition]:
    """Choose each method's weight, scale or density on development documents."""
    found: dict[Condition, dict[Condition, Values]] = defaultdict(dict)
    for condition, values in own.items():
        if condition.method in TUNED:
            found[replace(condition, variant=CHOSEN.variant)][condition] = values
    return {
        chosen: choose({setting: v[split.development] for setting, v in tried.items()})
        for chosen, tried in found.items()
        if len(tried) > 1
    }


@dataclass(frozen=True)
class OtherLanguagesResult:
    """The models of a language on a benchmark in other languages.

    `rows` has the mean over pairs by treatment and other language, on the documents at the places
    of the test documents. `own` is the benchmark in the models' own language, if evaluated.
    """

    language: str
    benchmark: str
    rows: Mapping[Condition, Mapping[str, Interval]]
    own: BenchmarkResult | None

    @property
    def heading(self) -> str:
        """The heading of its table."""
        return f"{self.benchmark}, the models of {self.language} in other languages"


def in_other_languages(
    own: Sequence[BenchmarkResult],
    scores: Mapping[tuple[str, str], BenchmarkScores],
    development: float | None,
) -> list[OtherLanguagesResult]:
    """The models of a language in other languages; nothing is chosen there.

    A benchmark that is not among the language's own takes the composition that was chosen on the
    first of them.
    """
    by_benchmark = {result.benchmark: result for result in own}
    rows: dict[str, dict[Condition, dict[str, Interval]]] = {}
    for (benchmark, language), found in scores.items():
        chosen = by_benchmark.get(benchmark, own[0])
        values: dict[Condition, list[Values]] = defaultdict(list)
        test = found.split(development).test
        for condition, by_document in found.scores.items():
            for name in chosen.names_of(condition):
                values[name].append(by_document[test])
        for name, several in values.items():
            mean = mean_interval(np.mean(several, axis=0))
            rows.setdefault(benchmark, {}).setdefault(name, {})[language] = mean
    return [
        OtherLanguagesResult(own[0].language, benchmark, by, by_benchmark.get(benchmark))
        for benchmark, by in rows.items()
    ]


@dataclass(frozen=True)
class StudyResults:
    """All results of a study; `written` has tables of the languages that the models wrote in."""

    benchmarks: Sequence[BenchmarkResult]
    other_languages: Sequence[OtherLanguagesResult]
    written: Mapping[str, Table] = field(default_factory=dict)

    @cached_property
    def ranked(self) -> Friedman | None:
        """Friedman's test over languages and benchmarks; None for too few of them.

        A block is the mean over its pairs, which share experts and documents.
        """
        values = [result.over_pairs.intervals for result in self.benchmarks]
        names = [
            name for name in (values[0] if values else ())
            if name != FLATTERED and all(name in by for by in values)
        ]  # fmt: skip
        if len(values) < 3 or len(names) < 3:
            return None
        return friedman({str(name): [by[name].mean for by in values] for name in names})

    @property
    def by_benchmark(self) -> dict[str, list[BenchmarkResult]]:
        """Every language on each benchmark."""
        found: dict[str, list[BenchmarkResult]] = defaultdict(list)
        for result in self.benchmarks:
            found[result.benchmark].append(result)
        return dict(found)

    @cached_property
    def tables(self) -> dict[str, Table]:
        """Every table, by its heading."""
        return dict(self._tables())

    @cached_property
    def summary(self) -> Table:
        """Treatments down, every language and benchmark across, with intervals."""
        columns = {
            result.heading: {name: score for name, score in result.over_pairs.intervals.items()
                             if name != FLATTERED}
            for result in self.benchmarks
        }  # fmt: skip
        caption = "Per cent on test documents, mean over pairs, with 95% bootstrap intervals."
        return models_table(columns, first="treatment", caption=caption)

    def _tables(self) -> Iterator[tuple[str, Table]]:
        for benchmark, same in self.by_benchmark.items():
            if len(same) > 1:
                yield f"{benchmark}, all languages", _over_languages(benchmark, same)
            for result in same:
                yield result.heading, _in_detail(result)
                if result.over_pairs.classified:
                    yield f"{result.heading}: {BY_LABEL}", _balanced_table(result)
                if result.grid:
                    yield f"{result.heading}: the compositions", _grid_table(result)
        yield from self.written.items()
        for other in self.other_languages:
            yield other.heading, _in_other_languages(other)
        if self.ranked is not None and self.ranked.conditions >= RANKED:
            yield "Ranks", _rank_table(self.ranked)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; every row has the fields of its condition."""
        facts: dict[str, Any] = {
            "languages": {}, "verdicts": {}, "grids": {}, "all_languages": {},
            "other_languages": {},
        }  # fmt: skip
        for result in self.benchmarks:
            rows = {}
            for model, interval in result.over_pairs.intervals.items():
                low, high = result.extremes[model]
                rows[str(model)] = {**model.to_dict(), **asdict(interval),
                                  "low_pair": low, "high_pair": high}  # fmt: skip
                if model in result.over_pairs.classified:
                    rows[str(model)] |= asdict(result.over_pairs.classified[model].balanced)
            facts["languages"].setdefault(result.language, {})[result.benchmark] = rows
            if result.english is not None:
                english = {**asdict(result.english.score), "parallel": result.english.parallel}
                facts.setdefault("english", {})[result.benchmark] = english
            facts["verdicts"].setdefault(result.language, {})[result.benchmark] = verdict_facts(
                result.over_pairs
            )
            facts["grids"].setdefault(result.language, {})[result.benchmark] = {
                "development": [{**c.to_dict(), **asdict(i)} for c, i in result.grid.items()],
                "chosen": {pair: condition.to_dict() for pair, condition in result.chosen.items()},
            }
        for benchmark, same in self.by_benchmark.items():
            means = {str(name): over_languages(same, name) for name in same[0].over_pairs.scores}
            facts["all_languages"][benchmark] = {
                name: asdict(mean) for name, mean in means.items() if mean is not None
            }
        for other in self.other_languages:
            facts["other_languages"].setdefault(other.language, {})[other.benchmark] = {
                str(name): {language: asdict(interval) for language, interval in row.items()}
                for name, row in other.rows.items()
            }
        return facts | ({"friedman": asdict(self.ranked)} if self.ranked else {})


def study_results(
    folders: Mapping[str, Path],
    development: float | None,
    further: Mapping[str, Sequence[Path]] | None = None,
    english: Path | None = None,
) -> StudyResults:
    """The results of the evaluations of a study, from the folders of their steps by language.

    `further` has folders with answers of baselines by language, in all documents or in those of the
    test alone. In the folder `english` are the results of the task experts in English.
    """
    there = {} if english is None else read_condition_scores(english / RESULTS)
    in_english = {benchmark: scores for (benchmark, _), scores in there.items()}
    found: list[BenchmarkResult] = []
    others: list[OtherLanguagesResult] = []
    written: dict[str, Table] = {}
    for language, folder in folders.items():
        answers = read_answers(folder / RESULTS)
        for other in (further or {}).get(language, ()):
            answers += read_answers(other)
        own = [
            replace(benchmark_result(language, benchmark, scores, development),
                    english=_in_english(in_english.get(benchmark), scores))
            for (benchmark, _), scores in condition_scores(answers).items()
        ]  # fmt: skip
        found += own
        written |= {f"{result.benchmark}, {language}: written in the language": table
                    for result in own if (table := _written(result, folder / RESULTS))}  # fmt: skip
        if (folder / OTHER_LANGUAGES).is_dir():
            there = read_condition_scores(folder / OTHER_LANGUAGES)
            others += in_other_languages(own, there, development)
    return StudyResults(found, others, written)


def _in_english(found: BenchmarkScores | None, own: BenchmarkScores) -> InEnglish | None:
    if found is None:
        return None
    score = mean_interval(np.mean([*found.scores.values()], axis=0))
    if found.labels is None or own.labels is None:
        return InEnglish(score, parallel=False)
    return InEnglish(score, np.array_equal(found.labels, own.labels[own.published :]))


def _written(result: BenchmarkResult, folder: Path) -> Table | None:
    """The share of the answers' letters in the language, by treatment; None without any."""
    shares: dict[tuple[Condition, str], list[float]] = defaultdict(list)
    for score in read_answers(folder):
        if score.metric in (ANSWER, REASONING) and score.benchmark == result.benchmark:
            for name in result.names_of(score.condition):
                if name != FLATTERED:
                    shares[name, score.metric].append(score.score)
    metrics = [metric for metric in (ANSWER, REASONING) if any(key[1] == metric for key in shares)]
    if not metrics:
        return None
    columns = {
        metric.partition("_")[0]: {
            model: float(np.mean(shares[model, metric])) if (model, metric) in shares else None
            for model in dict.fromkeys(model for model, _ in shares)
        }
        for metric in metrics
    }
    caption = "Per cent of the letters, mean over pairs and all documents with enough of them."
    return models_table(columns, first="treatment", bold=False, caption=caption)


def read_condition_scores(folder: Path) -> dict[tuple[str, str], BenchmarkScores]:
    """The scores of a folder of results by benchmark and language, in the order of documents.

    Documents of a published development split come first.
    """
    return condition_scores(read_answers(folder))


def condition_scores(answers: Iterable[Answer]) -> dict[tuple[str, str], BenchmarkScores]:
    """`read_condition_scores` of answers that are read."""
    rows: dict[tuple[str, str], dict[Condition, list[Answer]]] = {}
    for score in answers:
        if score.main:
            name = score.task if has_variants(score.benchmark) else score.benchmark
            by = rows.setdefault((name, score.language), defaultdict(list))
            by[score.condition].append(score)
    return {key: _scores_of(by) for key, by in rows.items()}


def in_order(answers: Iterable[Answer]) -> list[Answer]:
    """Sort a model's answers to a benchmark by document, a published development split first."""
    rows = list(answers)
    published = development_tasks(row.task for row in rows)
    return sorted(rows, key=lambda row: (row.task not in published, row.task, row.document))


def _scores_of(by: Mapping[Condition, Sequence[Answer]]) -> BenchmarkScores:
    """Scores of one benchmark by condition; published development documents come first."""
    asked = in_order(next(iter(by.values())))
    published = development_tasks(score.task for score in asked)
    count = sum(score.task in published for score in asked)

    def column(value: Callable[[Answer], Any], missing: Any) -> dict[Condition, Any]:
        """Values of every condition; translations have no published development documents."""
        return {
            condition: np.array([missing] * (count if len(scores) < len(asked) else 0)
                                + [value(score) for score in in_order(scores)])
            for condition, scores in by.items()
        }  # fmt: skip

    ordered = column(fraction, np.nan)
    texts, choices = [row.text for row in asked], np.array([row.choices for row in asked])
    if not all(score.label for scores in by.values() for score in scores):
        return BenchmarkScores(ordered, count, texts=texts, choices=choices)
    labels, answers = np.array([row.label for row in asked]), column(lambda row: row.predicted, "")
    return BenchmarkScores(ordered, count, labels, answers, texts, choices)


def _by_pair(scores: Mapping[Condition, T]) -> dict[str, dict[Condition, T]]:
    """Group scores by pair and treatment; the pair of shared treatments is an empty name."""
    found: dict[str, dict[Condition, T]] = defaultdict(dict)
    for condition, values in scores.items():
        found[condition.pair][condition.treatment] = values
    return dict(found)


def _grid_table(result: BenchmarkResult) -> Table:
    """Compositions down: their counts, the score on development, and the pairs that chose each."""
    columns = ["bottom", "top", "bottom transition", "top transition", "outside",
               "development, %", "chosen for"]  # fmt: skip
    cells: list[list[Any]] = [
        [*vars(composition.zones).values(), composition.outside or "blend", score,
         ", ".join(pair for pair, chosen in result.chosen.items() if chosen == composition)]
        for composition, score in result.grid.items()
    ]  # fmt: skip
    caption = (
        f"{result.heading}: layers from the language expert and blended ones; "
        f"mean over {_pairs(result)} on the documents that the compositions are chosen on."
    )
    return Table(columns, cells, caption=caption)


def _in_other_languages(other: OtherLanguagesResult) -> Table:
    """Treatments down, languages across, and their mean (paper 1, tables 2 and 5)."""
    languages = list(dict.fromkeys(name for row in other.rows.values() for name in row))
    own = {} if other.own is None else {other.language: other.own.over_pairs.intervals}
    columns: dict[str, dict[Condition, Any]] = {
        language: {model: by.get(model) for model in other.rows}
        for language, by in {
            **own, **{name: {model: row[name] for model, row in other.rows.items() if name in row}
                      for name in languages},
        }.items()
    }  # fmt: skip
    means = {
        model: [by[model].mean for by in columns.values() if by[model]] for model in other.rows
    }
    return models_table(
        {**columns, "mean": {model: sum(known) / len(known) for model, known in means.items()}},
        first="treatment", bold=False,
        caption=f"{other.benchmark}: mean over pairs, with its 95% bootstrap interval; per cent. "
        "The compositions are those that were chosen in the language's own documents.",
    )  # fmt: skip


def over_languages(
    results: Sequence[BenchmarkResult], treatment: Condition, reference: Condition | None = None
) -> Interval | None:
    """The mean of a treatment over languages, or its paired difference to another.

    From `RANKED` languages on, the interval is over languages, otherwise over documents. If all
    languages have the same documents, translations are resampled together; otherwise each language
    separately. None if a language lacks one of the treatments.
    """
    wanted = [treatment] if reference is None else [treatment, reference]
    if not all(name in by.over_pairs.scores for name in wanted for by in results):
        return None
    if len(results) >= RANKED:
        means = [np.array([by.over_pairs.scores[name].mean() for by in results]) for name in wanted]
        return student_interval(means[0] if reference is None else means[0] - means[1])
    together = len({by.test for by in results}) == 1

    def groups(name: Condition) -> list[Values]:
        values = [by.over_pairs.scores[name] for by in results]
        return [np.mean(values, axis=0)] if together else values

    if reference is None:
        return mean_over_groups(groups(treatment))
    return paired_over_groups(groups(treatment), groups(reference))


def _over_languages(benchmark: str, results: Sequence[BenchmarkResult]) -> Table:
    """Treatments down, languages across: mean, lowest and highest pair (paper 1, table 1)."""
    treatments = list(dict.fromkeys(name for by in results for name in by.over_pairs.scores))
    several = any(len(by.pairs) > 1 for by in results)
    spread = ", with the lowest and the highest pair in brackets" if several else ""
    student = len(results) >= RANKED
    kind = "interval over languages (Student)" if student else "bootstrap interval over documents"
    caption = (
        f"{benchmark}: mean over pairs{spread}; per cent. The mean over languages has paired "
        f"differences and a 95% {kind}. {STAR}"
    )
    spreads = {
        by.language: {name: Spread(score.mean, *by.extremes[name])
                      for name, score in by.over_pairs.intervals.items()}
        for by in results
    }  # fmt: skip
    return models_table(
        {**spreads, "mean": {name: over_languages(results, name) for name in treatments}},
        {f"minus {reference}": {name: over_languages(results, name, reference)
                                for name in treatments if name != reference}
         for reference in _references(treatments)},
        first="treatment", caption=caption,
    )  # fmt: skip


def _references(treatments: Collection[Condition]) -> list[Condition]:
    """The treatments that the others are compared with."""
    return [reference for reference in (DEFAULT, CHOSEN) if reference in treatments]


def _in_detail(found: BenchmarkResult) -> Table:
    """Treatments down: score, spread over pairs, differences to the default and chosen swaps."""
    result, columns = found.over_pairs, dict[str, Any]()
    if len(found.pairs) > 1:
        for i, heading in enumerate(("lowest pair", "highest pair")):
            columns[heading] = {name: ends[i] for name, ends in found.extremes.items()}
    return models_table(
        {"score, %": result.intervals, **columns},
        {f"minus {swap}": result.against(swap) for swap in _references(result.scores)},
        first="treatment", selected=found.selected,
        caption=f"{found.heading}: {len(found.test)} documents, mean over {_pairs(found)} with its "
        f"95% bootstrap interval over documents, and paired differences. {STAR} >: selected. "
        f"{found.chosen_on}",
    )  # fmt: skip


def _balanced_table(result: BenchmarkResult) -> Table:
    """Treatments down: balanced accuracy, macro-F1, and the former against both swaps."""
    classified = result.over_pairs.classified
    return models_table(
        by_label({name: answers.balanced for name, answers in classified.items()}, "{}, %"),
        {f"balanced accuracy minus {reference}": {
            name: answers.minus(classified[reference]).balanced_accuracy
            for name, answers in classified.items() if name != reference
        } for reference in _references(classified)},
        first="treatment",
        caption=f"{result.heading}: mean recall and mean F1 over labels, mean over "
        f"{_pairs(result)}, with 95% bootstrap intervals and paired differences. {STAR} Nothing is "
        "chosen by them.",
    )  # fmt: skip


def _rank_table(ranked: Friedman) -> Table:
    """Treatments by their mean rank, the best first."""
    ranks = zip(ranked.treatments, ranked.mean_ranks, strict=True)
    caption = (
        f"Friedman over {ranked.conditions} conditions: p = {ranked.p:.3g}, Kendall's W = "
        f"{ranked.kendall_w:.2f}; mean ranks further apart than {ranked.critical_difference:.2f} "
        "differ (Nemenyi)."
    )
    cells = list[list[Any]]([name, Number(rank, ".2f")] for name, rank in ranks)
    return Table(["treatment", "mean rank"], cells, caption=caption)


def _pairs(result: BenchmarkResult) -> str:
    return "one pair" if len(result.pairs) == 1 else f"{len(result.pairs)} pairs"
