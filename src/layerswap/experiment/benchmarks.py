"""Results of a study: the choice on development documents, the scores on test documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from layerswap.evaluation.classifier import Labels
from layerswap.evaluation.languages import ANSWER, REASONING
from layerswap.evaluation.metrics import COPIED, CUT, EMPTY, WRITTEN
from layerswap.evaluation.statistics import (
    Classified,
    Friedman,
    friedman,
    mean_interval,
)
from layerswap.evaluation.suites.suites import development_tasks, has_variants
from layerswap.experiment.answers import (
    ANSWERS_TABLE,
    Answer,
    Values,
    fraction,
    grouped,
    read_answers,
)
from layerswap.experiment.baselines import baselines
from layerswap.experiment.compare import (
    RANKED,
    Choice,
    Compared,
    DocumentSplit,
    InEnglish,
    choose,
    over_languages,
    split_documents,
)
from layerswap.experiment.conditions import BASELINES, CHOSEN, FLATTERED, TUNED, Condition
from layerswap.experiment.tables import (
    BY_LABEL,
    balanced_table,
    models_table,
    references,
    scores_table,
)
from layerswap.experiment.verdict import verdict_facts
from layerswap.report.tables import STAR, Number, Spread, Table

AS_WRITTEN = {
    ANSWER: "letters in the language", REASONING: "of the reasoning", EMPTY: "empty answers",
    CUT: "cut answers", COPIED: "copies of the prompt",
    **{metric: metric.replace("_", " ") for metric in WRITTEN},
}  # fmt: skip
"""Headings of the measures that stand beside the score of written answers."""
RESULTS, OTHER_LANGUAGES = "results", "other_languages"
"""Folders of an evaluation: in the language's own documents, and in other languages."""
Scores = Mapping[Condition, Values]
"""By condition, one score per document of a benchmark."""


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
    metric: str = ""
    weights: Mapping[Condition, str] = {}  # by condition, the key of its weights, if recorded

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


def benchmark_result(
    language: str, benchmark: str, found: BenchmarkScores, development: float | None
) -> Compared:
    """One language on one benchmark.

    The composition of each pair is chosen on the development documents, and all treatments are
    reported on the test documents. The best on those is reported too, as in the papers: it is
    flattered, since the same documents chose it. A baseline with a weight, scale or density is
    also reported with the setting that is best on the development documents. Without these
    (`development` is None) nothing is chosen, and every setting is reported.
    """
    split = found.split(development)
    choosing = len(split.development) > 0
    by_pair: dict[str, dict[Condition, Values]] = defaultdict(dict)
    for condition, values in found.scores.items():
        by_pair[condition.pair][condition] = values
    shared = {model: model for model in by_pair.pop("", {})}
    reported = {pair: {**shared, **_reported(own, split)} for pair, own in by_pair.items()}

    def on(
        documents: npt.NDArray[np.int64], values: Mapping[Condition, Any]
    ) -> dict[str, dict[Condition, Any]]:
        return {
            pair: {name: values[model][documents] for name, model in names.items()}
            for pair, names in reported.items()
        }

    grids: dict[Condition, list[Values]] = defaultdict(list)
    for condition, values in found.scores.items():
        if choosing and condition.zones is not None:
            grids[condition.treatment].append(values[split.development])
    choice = Choice(
        candidates={zoned: np.mean(values, axis=0) for zoned, values in grids.items()},
        competed=on(split.development, found.scores) if choosing else {},
        reported=reported, count=len(split.development), published=bool(found.published),
        labels=frozenset() if found.labels is None
        else frozenset(found.labels[split.development].tolist()),
        weights=found.weights,
    )  # fmt: skip
    free = baselines(found.labels, found.texts, found.choices, split)
    pairs = {pair: {**by, **free.scores} for pair, by in on(split.test, found.scores).items()}
    scores: dict[Condition, list[Values]] = defaultdict(list)
    for name, values in (item for by in pairs.values() for item in by.items()):
        scores[name].append(values)
    classified = {}
    if found.labels is not None:
        answered = [{**by, **free.answers} for by in on(split.test, found.answers).values()]
        classified = {
            name: Classified(found.labels[split.test],
                             np.array([by[name] for by in answered if name in by]))
            for name in scores if any(name in by for by in answered)
        }  # fmt: skip
    return Compared(
        scores={name: np.mean(values, axis=0) for name, values in scores.items()},
        selected=choice.selected, benchmark=benchmark, language=language, choice=choice,
        classified=classified, labelled=free.labelled, pairs=pairs, test=tuple(split.test.tolist()),
        likeness=found.metric if found.metric in WRITTEN else "",
        baselines=frozenset(model for model in scores if model.method in BASELINES),
    )  # fmt: skip


def _reported(own: Scores, split: DocumentSplit) -> dict[Condition, Condition]:
    """By name, the models that a pair reports: not a whole grid or setting, but the best of it."""
    choosing = len(split.development) > 0
    grid = [model for model in own if model.zones is not None]
    reported = {
        model.treatment: model for model in own
        if model.zones is None
        and (not choosing or model.method == "ties" or model.method not in TUNED)
    }  # fmt: skip
    tuned: dict[Condition, dict[Condition, Values]] = defaultdict(dict)
    for model, values in own.items():
        if choosing and model.method in TUNED:
            name = replace(model.treatment, variant=CHOSEN.variant)
            tuned[name][model] = values[split.development]
    reported |= {name: choose(tried) for name, tried in tuned.items() if len(tried) > 1}
    if choosing and grid:
        for name, documents in ((CHOSEN, split.development), (FLATTERED, split.test)):
            tried = {model: own[model][documents] for model in grid}
            reported[name] = choose(tried, of_equals="first")
    return reported


def in_other_languages(
    own: Sequence[Compared],
    scores: Mapping[tuple[str, str], BenchmarkScores],
    development: float | None,
) -> dict[str, list[Compared]]:
    """The models of a language in other languages, by benchmark; nothing is chosen there.

    A benchmark that is not among the language's own takes the composition that was chosen on the
    first of them. Documents are those at the places of the test documents.
    """
    by_benchmark = {result.benchmark: result for result in own}
    results: dict[str, list[Compared]] = defaultdict(list)
    for (benchmark, language), found in scores.items():
        choice = by_benchmark.get(benchmark, own[0]).choice
        values: dict[Condition, list[Values]] = defaultdict(list)
        test = found.split(development).test
        for condition, by_document in found.scores.items():
            for name in choice.names_of(condition):
                values[name].append(by_document[test])
        means = {name: np.mean(several, axis=0) for name, several in values.items()}
        results[benchmark].append(Compared(scores=means, benchmark=benchmark, language=language))
    return dict(results)


@lru_cache(maxsize=64)
def language_results(
    language: str, answers: Path, further: tuple[Path, ...], development: float | None, written: int
) -> dict[Compared, Table | None]:
    """The benchmarks of a language, each with the table of its answers as written.

    The scores are those of its answers and baselines; tables and report share them. `written` is
    the time of the answers.
    """
    del written
    own = read_answers(answers)
    rows = [*own, *(row for folder in further for row in read_answers(folder))]
    results = [
        benchmark_result(language, benchmark, scores, development)
        for (benchmark, _), scores in condition_scores(rows).items()
    ]
    return {by: _written(by, own) for by in results}


class Part(NamedTuple):
    """A table of a study, with its kind, its heading and its result."""

    kind: Literal["overview", "scores", "balanced", "written", "elsewhere", "ranks"]
    heading: str
    table: Table
    result: Compared | None = None


@dataclass(frozen=True, eq=False)
class StudyResults:
    """All results of a study.

    Attributes:
        benchmarks: every language on every benchmark.
        elsewhere: by language and benchmark, its models in other languages.
        written: by result, the table of its answers as written.
        english: by result, the task experts in English.
    """

    benchmarks: Sequence[Compared]
    elsewhere: Mapping[str, Mapping[str, Sequence[Compared]]] = field(default_factory=dict)
    written: Mapping[Compared, Table] = field(default_factory=dict)
    english: Mapping[Compared, InEnglish] = field(default_factory=dict)

    @cached_property
    def ranked(self) -> Friedman | None:
        """Friedman's test over languages and benchmarks; None for too few of them.

        A block is the mean over its pairs, which share experts and documents.
        """
        values = [result.intervals for result in self.benchmarks]
        names = [
            name for name in (values[0] if values else ())
            if name != FLATTERED and all(name in by for by in values)
        ]  # fmt: skip
        if len(values) < 3 or len(names) < 3:
            return None
        return friedman({str(name): [by[name].mean for by in values] for name in names})

    @property
    def by_benchmark(self) -> dict[str, list[Compared]]:
        """Every language on each benchmark."""
        return grouped(self.benchmarks, lambda result: result.benchmark)

    @cached_property
    def parts(self) -> list[Part]:
        """Every table, in the order of the report."""
        return [*self._parts()]

    def _parts(self) -> Iterator[Part]:
        for benchmark, same in self.by_benchmark.items():
            if len(same) > 1:
                yield Part("overview", f"{benchmark}, all languages",
                           _over_languages(benchmark, same))  # fmt: skip
            for by in same:
                yield Part("scores", by.heading, scores_table(by), by)
                if table := balanced_table(by):
                    yield Part("balanced", f"{by.heading}: {BY_LABEL}", table, by)
        for by, table in self.written.items():
            yield Part("written", f"{by.heading}: the answers as written", table, by)
        for language, benchmarks in self.elsewhere.items():
            own = {by.benchmark: by for by in self.benchmarks if by.language == language}
            for benchmark, others in benchmarks.items():
                heading = f"{benchmark}, the models of {language} in other languages"
                table = _in_other_languages(own.get(benchmark), others)
                yield Part("elsewhere", heading, table)
        if self.ranked is not None and self.ranked.conditions >= RANKED:
            yield Part("ranks", "Ranks", _rank_table(self.ranked))

    @property
    def tables(self) -> dict[str, Table]:
        """Every table, by its heading."""
        return {part.heading: part.table for part in self.parts}

    def to_dict(self) -> dict[str, Any]:
        """Plain data; every row has the fields of its condition."""
        facts: dict[str, Any] = {
            "languages": {}, "verdicts": {}, "grids": {}, "all_languages": {},
            "other_languages": {},
        }  # fmt: skip
        for result in self.benchmarks:
            rows = {}
            for model, interval in result.intervals.items():
                low, high = result.extremes[model]
                rows[str(model)] = {**model.to_dict(), **asdict(interval),
                                  "low_pair": low, "high_pair": high}  # fmt: skip
                if model in result.classified:
                    rows[str(model)] |= asdict(result.classified[model].balanced)
            grid = {
                "development": [{**model.to_dict(), **asdict(mean_interval(values))}
                                for model, values in result.choice.candidates.items()],
                "chosen": {pair: model.to_dict() for pair, model in result.choice.chosen.items()},
            }  # fmt: skip
            for key, of_result in (
                ("languages", rows), ("verdicts", verdict_facts(result)), ("grids", grid),
            ):  # fmt: skip
                facts[key].setdefault(result.language, {})[result.benchmark] = of_result
        for benchmark, same in self.by_benchmark.items():
            means = {str(name): over_languages(same, name) for name in same[0].scores}
            facts["all_languages"][benchmark] = {
                name: asdict(mean) for name, mean in means.items() if mean is not None
            }
        for language, benchmarks in self.elsewhere.items():
            facts["other_languages"][language] = {
                benchmark: {
                    str(model): {by.language: asdict(by.intervals[model])
                                 for by in others if model in by.scores}
                    for model in dict.fromkeys(model for by in others for model in by.scores)
                }
                for benchmark, others in benchmarks.items()
            }  # fmt: skip
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
    found: list[Compared] = []
    elsewhere: dict[str, dict[str, list[Compared]]] = {}
    written: dict[Compared, Table] = {}
    for language, folder in folders.items():
        others, time = (further or {}).get(language, ()), folder / RESULTS / ANSWERS_TABLE
        own = language_results(
            language, folder / RESULTS, tuple(others), development, time.stat().st_mtime_ns
        )
        found += own
        written |= {by: table for by, table in own.items() if table}
        if (folder / OTHER_LANGUAGES).is_dir():
            there = condition_scores(read_answers(folder / OTHER_LANGUAGES))
            elsewhere[language] = in_other_languages([*own], there, development)
    there = {} if english is None else condition_scores(read_answers(english / RESULTS))
    in_english = {benchmark: scores for (benchmark, _), scores in there.items()}
    return StudyResults(found, elsewhere, written, {
        by: _in_english(in_english[by.benchmark], by) for by in found if by.benchmark in in_english
    })  # fmt: skip


def _in_english(found: BenchmarkScores, own: Compared) -> InEnglish:
    score = mean_interval(np.mean([*found.scores.values()], axis=0))
    places = np.array(own.test) - own.choice.count * own.choice.published
    if found.labels is None or not own.classified or max(places) >= len(found.labels):
        return InEnglish(score, parallel=False)
    labels = next(iter(own.classified.values())).labels
    return InEnglish(score, np.array_equal(found.labels[places], labels))


def _written(result: Compared, answers: Iterable[Answer]) -> Table | None:
    """Tabulate the measures of written answers by treatment; None for choices."""
    shares: dict[tuple[Condition, str], list[float]] = defaultdict(list)
    for score in answers:
        if score.metric in AS_WRITTEN and not score.main and score.benchmark == result.benchmark:
            for name in result.choice.names_of(score.condition):
                if name != FLATTERED:
                    shares[name, score.metric].append(fraction(score))
    columns = {
        heading: {
            model: float(np.mean(shares[model, metric])) if (model, metric) in shares else None
            for model in dict.fromkeys(model for model, _ in shares)
        }
        for metric, heading in AS_WRITTEN.items() if any(key[1] == metric for key in shares)
    }  # fmt: skip
    if not columns:
        return None
    caption = "Per cent, mean over pairs and documents; of letters, over documents with enough."
    return models_table(columns, first="treatment", bold=False, caption=caption)


def condition_scores(answers: Iterable[Answer]) -> dict[tuple[str, str], BenchmarkScores]:
    """Group the scores of answers by benchmark and language, in the order of documents.

    Documents of a published development split come first.
    """
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


def test_documents(result: Compared, answers: Iterable[Answer]) -> list[tuple[str, int]]:
    """The test documents of a result, as task and position; `answers` are to all its documents."""
    ordered = [*dict.fromkeys((row.task, row.document) for row in in_order(answers))]
    return [ordered[i] for i in result.test if i < len(ordered)]


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

    labelled = all(score.label for scores in by.values() for score in scores)
    return BenchmarkScores(
        column(fraction, np.nan), count,
        labels=np.array([row.label for row in asked]) if labelled else None,
        answers=column(lambda row: row.predicted, "") if labelled else {},
        texts=[row.text for row in asked], choices=np.array([row.choices for row in asked]),
        metric="" if labelled else asked[0].metric,
        weights={condition: scores[0].weights for condition, scores in by.items()},
    )  # fmt: skip


def _in_other_languages(own: Compared | None, others: Sequence[Compared]) -> Table:
    """Treatments down, languages across, and their mean (paper 1, tables 2 and 5)."""
    models = list(dict.fromkeys(model for by in others for model in by.scores))
    columns: dict[str, dict[Condition, Any]] = {
        by.language: {model: by.intervals.get(model) for model in models}
        for by in ([own] if own else []) + [*others]
    }
    means = {model: [by[model].mean for by in columns.values() if by[model]] for model in models}
    return models_table(
        {**columns, "mean": {model: sum(known) / len(known) for model, known in means.items()}},
        first="treatment", bold=False,
        caption=f"{others[0].benchmark}: mean over pairs, with its 95% bootstrap interval; per "
        "cent. The compositions are those that were chosen in the language's own documents.",
    )  # fmt: skip


def _over_languages(benchmark: str, results: Sequence[Compared]) -> Table:
    """Treatments down, languages across: mean, lowest and highest pair (paper 1, table 1)."""
    treatments = list(dict.fromkeys(name for by in results for name in by.scores))
    several = any(len(by.pairs) > 1 for by in results)
    spread = ", with the lowest and the highest pair in brackets" if several else ""
    student = len(results) >= RANKED
    kind = "interval over languages (Student)" if student else "bootstrap interval over documents"
    what = ", ".join(filter(None, [benchmark, results[0].metric_in_words]))
    caption = (
        f"{what}: mean over pairs{spread}; per cent. The mean over languages has paired "
        f"differences and a 95% {kind}. {STAR}"
    )
    spreads = {
        by.language: {name: Spread(score.mean, *by.extremes[name])
                      for name, score in by.intervals.items()}
        for by in results
    }  # fmt: skip
    return models_table(
        {**spreads, "mean": {name: over_languages(results, name) for name in treatments}},
        {f"minus {reference}": {name: over_languages(results, name, reference)
                                for name in treatments
                                if not all(by.choice.same(name, reference) for by in results)}
         for reference in references(*results)},
        first="treatment", caption=caption,
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
