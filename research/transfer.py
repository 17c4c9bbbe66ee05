"""The tables of real.md, when.md and answers.md in docs, and the README's chart, from scores.

    python -m research.transfer                  # prints them; nothing is trained or evaluated
    python -m research.transfer --write          # writes them, and the README's chart

A page marks where a table stands by `<!-- transfer: NAME -->` and `<!-- end -->`. Pages show the
parts in `SHOWN`; whole tables are CSV files in docs/tables.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet
from scipy.stats import wilcoxon

from layerswap.compose.presets import Zones
from layerswap.evaluation.statistics import (
    RESAMPLES,
    Interval,
    holm,
    mean_interval,
    mean_over_groups,
    paired_difference,
    paired_over_groups,
)
from layerswap.experiment.answers import Values, read_answers
from layerswap.experiment.benchmarks import (
    RESULTS,
    BenchmarkScores,
    condition_scores,
    study_results,
)
from layerswap.experiment.compare import Compared, choose
from layerswap.experiment.conditions import DEFAULT, JOINT, Condition
from layerswap.report.charts import draw_intervals
from layerswap.report.drawing import Drawing
from research import answers, baselines, dose, outer, ten_languages, translation
from research import labels as finished
from research.figures import save_svg
from research.markdown import Table, per_cent, points, table
from research.selection import select
from research.ten_languages import LANGUAGE, SOUP, SWAP, TASK

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGES = tuple(DOCS / f"{name}.md" for name in ("real", "when", "answers"))
LABELS, PROBABILITIES = "labels.json", "probabilities.parquet"
SIGNALS = "signals.json"
TASKS = {
    "headlines": "headline-transfer",
    "sentences": "topic-transfer",
    "tweets": "sentiment-transfer",
}
"""The study of each task."""
LANGUAGES = {"sw": "Swahili", "ha": "Hausa", "yo": "Yoruba"}

PARTIAL, REVERTED = "task expert, partial C", "task expert, reverted C"
LANGUAGE_ALONE, PARTIAL_SWAP = "language expert, reverted C", "swap of partial SFT, C"
CHOSEN_OF = {
    "weighted soup": "weighted average, share chosen",
    "task arithmetic": "task arithmetic, scale chosen",
    "TIES": "TIES, density chosen",
}
NAMES = {
    "swap, default": "swap, default",
    **{f"{name}, chosen on development": words for name, words in CHOSEN_OF.items()},
    "soup": "plain average",
    PARTIAL: "task expert trained in layers 3 to 16 alone",
    "task expert": "task expert",
    "base": "base",
    "language expert": "language expert",
}
"""Names of models in the tables, in their order."""
SEEDS = {
    "headlines": ("headline-seeds", "headline-middle"),
    "sentences": ("topic-seeds", "topic-middle"),
}
"""The studies with experts of three seeds: in full, and task experts of the middle layers alone."""
TIES = "TIES, density 0.075"
"""The one density of TIES for three pairs; it keeps a fifth of the trained weights."""
MIDDLE_SWAP = "swap, task expert trained in layers 3 to 16 alone"
SEED_NAMES = {
    str(DEFAULT): "swap, default",
    MIDDLE_SWAP: MIDDLE_SWAP,
    **{name: words for name, words in NAMES.items() if name != str(DEFAULT)},
    "TIES, chosen on development": "TIES, density 0.075 (tweets: chosen)",
}
"""Names of models in the tables of three pairs."""
PAIRS_OF = {task: f"{task} ({'three pairs' if task in SEEDS else 'one pair'})" for task in TASKS}
JOINT_NAMES = {
    str(DEFAULT): "swap, default",
    str(JOINT): "joint training on both data sets",
    "simultaneous training": "simultaneous training, each data set in its own layers",
    "task expert": "task expert",
    "language expert": "language expert",
}
"""Names of models in the table of joint training."""
PARTIAL_ROWS = (
    ("swap of partial SFT, C", "partial", str(DEFAULT)),
    ("swap, the task expert alone is partial", "middle", str(DEFAULT)),
    ("swap, both trained in full", "seeds", str(DEFAULT)),
    ("task expert trained in layers 3 to 16 alone", "middle", "task expert"),
    ("task expert trained in full", "seeds", "task expert"),
    ("language expert trained in layers 0 to 2 and 17 alone", "partial", "language expert"),
    ("language expert trained in full", "seeds", "language expert"),
)
"""The name of a model in the table, the kind of study that has it, and its name there."""
ZONES = {"headlines": "headline-zones", "sentences": "topic-zones"}
"""The studies of a grid of zones on the experts of seed 1, with recorded signals."""
CSV = DOCS / "tables"
CHART = DOCS / "images" / "summary"
"""The README's chart, without its suffix."""
ROADS = ("commonest label", "task expert", "language expert", "average", "swap", "labels alone",
         "small encoder")  # fmt: skip
"""The rows of the README's chart, for each task."""
SHOWN: dict[str, tuple[str, Sequence[int], str | frozenset[str]]] = {
    "dose in short": ("dose-task", (1, 2, 3, 4, 5), "mean"),
    "ten languages in short": (
        "ten languages",
        (0, 1, 2, 3, 4),
        frozenset(
            {
                "swap, default",
                "plain average",
                "TIES, density 0.075",
                MIDDLE_SWAP,
                "task expert",
                "base",
                "language expert",
            }
        ),
    ),
    "by language in short": ("by language", (0, 2, 3, 4, 5), ""),
    "means in short": ("means", (0, 1, 2, 3, 4), ""),
    "partial in short": ("partial", (0, 1, 3), ""),
    "answers in short": (
        "answers",
        (0, 1, 2, 3, 4, 5, 6),
        frozenset({*answers.MODELS} - {answers.TRUE, *answers.SHOTS}),
    ),
    "translations in short": ("translations", (0, 1, 3, 5, 7, 9, 11), ""),
}
"""Parts of tables that pages show: the table, its columns, and the rows or their beginning."""
MARK = re.compile(r"<!-- transfer: ([\w -]+) -->\n.*?<!-- end -->", re.DOTALL)


@cache
def results(study: str) -> tuple[Compared, ...]:
    """Every language of a recorded study."""
    folders = {code: HERE / study / code for code in LANGUAGES if (HERE / study / code).is_dir()}
    (same,) = study_results(folders, 0.5).by_benchmark.values()
    return tuple(same)


def scores(task: str, model: str) -> list[Values]:
    """The scores of the test documents, a vector per language."""
    found = results(TASKS[task])
    (name,) = {one for by in found for one in by.scores if str(one) == model}
    return [by.scores[name] for by in found]


@cache
def known(task: str) -> frozenset[str]:
    """The models of a task."""
    return frozenset(str(one) for one in results(TASKS[task])[0].scores)


def translations(task: str) -> bool:
    """True if the documents of all languages are translations of each other."""
    return task == "sentences"


def over_languages(task: str, values: Sequence[Values]) -> Interval:
    """The mean over languages of one value for every document; translations are drawn together."""
    if translations(task):
        return mean_interval(np.mean(values, axis=0))
    return mean_over_groups(values)


def mean(task: str, model: str) -> Interval:
    """The mean over languages."""
    return over_languages(task, scores(task, model))


def differences(a: Sequence[Values], b: Sequence[Values]) -> list[Values]:
    """`a` minus `b`, a vector per language."""
    return [first - second for first, second in zip(a, b, strict=True)]


def across(cell: Callable[[str], str], *models: str) -> list[str]:
    """A cell for each task, empty for tasks without one of the models."""
    return [cell(task) if known(task).issuperset(models) else "" for task in TASKS]


def origins_table() -> Table:
    """Scores by the source of the outer and of the inner layers."""
    places = [
        ("task expert", "task expert", "task expert"),
        ("base", "base", "base"),
        ("base", "task expert", REVERTED),
        ("language expert", "base", LANGUAGE_ALONE),
        ("language expert", "task expert (the default swap)", str(DEFAULT)),
        ("base", "task expert, trained there alone", PARTIAL),
        ("language expert, trained there alone", "task expert, trained there alone", PARTIAL_SWAP),
    ]
    rows = [
        [outer, inner, *across(lambda task, name=name: per_cent(mean(task, name)), name)]
        for outer, inner, name in places
    ]
    return table(["layers 0 to 2 and 17", "layers 3 to 16", *TASKS], rows, words=2)


@cache
def labels(task: str) -> dict[str, list[str]]:
    """The labels of the test documents, by language."""
    found: dict[str, list[str]] = json.loads((HERE / TASKS[task] / LABELS).read_text("utf-8"))
    return found


def labels_table(task: str, first: str, second: str) -> Table:
    """The paired difference of two models by the label of the documents."""
    own = labels(task)
    a, b = scores(task, first), scores(task, second)
    names = sorted({name for code in LANGUAGES for name in own[code]})
    rows = []
    for name in names:
        masks = [np.array(own[code]) == name for code in LANGUAGES]
        held = [i for i, mask in enumerate(masks) if mask.any()]
        kept_a, kept_b = [a[i][masks[i]] for i in held], [b[i][masks[i]] for i in held]
        number = sum(int(masks[i].sum()) for i in held)
        each = [
            f"{100 * (a[i][mask].mean() - b[i][mask].mean()):+.1f}" if mask.any() else "none"
            for i, mask in enumerate(masks)
        ]
        rows.append([name, str(number), *each, points(paired_over_groups(kept_a, kept_b))])
    return table(["", "n", *LANGUAGES.values(), "mean"], rows)


def balanced(task: str, *models: str) -> Interval:
    """Balanced accuracy of a model, or of the first minus the second.

    The mean over languages and pairs. Documents are resampled; translations are drawn together.
    """
    rng = np.random.default_rng(0)
    drawn = []
    for number, code in enumerate(LANGUAGES):
        first, *second = (over_pairs(task, one)[number] for one in models)
        values = first - second[0] if second else first
        own, n = np.array(labels(task)[code]), len(values)
        if not (drawn and translations(task)):
            rows = [np.bincount(rng.integers(n, size=n), minlength=n) for _ in range(RESAMPLES)]
            counts = np.array([np.ones(n), *rows])
        masks = np.array([own == name for name in np.unique(own)]).T
        held, right = counts @ masks, counts @ (masks * values[:, None])
        drawn.append(np.nanmean(np.where(held > 0, right / np.maximum(held, 1), np.nan), axis=1))
    whole = np.mean(drawn, axis=0)
    return Interval(whole[0], *np.quantile(whole[1:], [0.025, 0.975]), len(whole))


@cache
def probabilities(task: str) -> list[dict[str, npt.NDArray[np.float64]]]:
    """By language, the log-probabilities of the labels by model, `(documents, labels)`.

    Those of the development documents come first.
    """
    found = []
    for code in LANGUAGES:
        read = pyarrow.parquet.read_table(HERE / TASKS[task] / code / PROBABILITIES)
        words = read.column_names[2:]
        values = np.stack([read[word].to_numpy() for word in words], axis=1).astype(np.float64)
        names = np.array([one.replace("ties,", "TIES,") for one in read["model"].to_pylist()])
        found.append({name: values[names == name] for name in dict.fromkeys(names.tolist())})
    return found


def words_of(task: str) -> list[str]:
    """The labels of a task, in the order of `probabilities`."""
    path = HERE / TASKS[task] / next(iter(LANGUAGES)) / PROBABILITIES
    return list(pyarrow.parquet.read_schema(path).names[2:])


def calibrate(
    logprobs: npt.NDArray[np.float64], others: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Divide the probability of each label by its mean over documents (Zhou et al., 2024, 3.3).

    Both are natural logarithms `(documents, labels)`, of any scale in a row, and the mean is over
    `others`.
    """
    logs, batch = (
        rows - np.logaddexp.reduce(rows, axis=1, keepdims=True) for rows in (logprobs, others)
    )
    prior = np.logaddexp.reduce(batch, axis=0) - np.log(len(batch))
    # A label that is impossible everywhere stays impossible.
    calibrated = np.full_like(logs, -np.inf)
    possible = np.isfinite(prior)
    calibrated[:, possible] = logs[:, possible] - prior[possible]
    return calibrated


def calibrated(task: str, model: str) -> list[Values]:
    """The scores of the test documents after batch calibration (Zhou et al., 2024), by language.

    Every label's probability is divided by its mean over the development documents, whose labels
    are not looked at.
    """
    own, words = labels(task), words_of(task)
    found = []
    for code, by_model in zip(LANGUAGES, probabilities(task), strict=True):
        logs, test = by_model[model], len(own[code])
        answers = calibrate(logs[-test:], logs[:-test]).argmax(axis=1)
        right = [words[i] == word for i, word in zip(answers, own[code], strict=True)]
        found.append(np.array(right, dtype=np.float64))
    return found


def has_probabilities(task: str, model: str) -> bool:
    """True if the probabilities of a model are recorded in every language."""
    return all(model in by for by in probabilities(task))


def calibrated_table() -> Table:
    """Models after batch calibration, with its gain."""

    def cell(task: str, model: str) -> str:
        values = calibrated(task, model)
        gains = over_languages(task, differences(values, scores(task, model)))
        return f"{100 * over_languages(task, values).mean:.1f} ({points(gains)})"

    return _by_task("calibrated", cell)


def calibrated_differences_table() -> Table:
    """The default swap minus each model, both calibrated."""

    def cell(task: str, model: str) -> str:
        both = differences(calibrated(task, str(DEFAULT)), calibrated(task, model))
        return points(over_languages(task, both))

    return _by_task("calibrated default swap minus the calibrated", cell, leave=str(DEFAULT))


def _by_task(heading: str, cell: Callable[[str, str], str], leave: str = "") -> Table:
    """Models with recorded probabilities down, tasks across."""
    rows = []
    for model, words in NAMES.items():
        cells = [cell(task, model) if model != leave and has_probabilities(task, model) else ""
                 for task in TASKS]  # fmt: skip
        if any(cells):
            rows.append([words, *cells])
    return table([heading, *TASKS], rows)


def cases_table() -> Table:
    """The gains of English fine-tuning and of the swap, by task and language."""
    found = []
    for task in TASKS:
        gained, added = (
            _gains(task, *models)
            for models in (("task expert", "base"), (str(DEFAULT), "task expert"))
        )
        found += [
            (
                f"{task}, {language}",
                mean_interval(gain),
                mean_interval(more),
                float(wilcoxon(more).pvalue) if more.any() else None,
            )
            for language, gain, more in zip(LANGUAGES.values(), gained, added, strict=True)
        ]
    corrected = holm([1.0 if p is None else p for *_, p in found])
    rows = [
        (gain.mean, [name, points(gain), points(more), f"{p:.2f}" if p >= 0.01 else "< 0.01"])
        for (name, gain, more, _), p in zip(found, corrected, strict=True)
    ]
    head = ["", "task expert minus base", "default swap minus task expert", "p of that, corrected"]
    return table(head, [row for _, row in sorted(rows, key=lambda row: row[0])])


def densities_table() -> Table:
    """TIES of the one pair by density, the mean of the languages."""
    tried = sorted({name for task in TASKS for name in known(task) if name.startswith("TIES, d")})
    rows = [
        [name.rpartition(" ")[2], *across(lambda task, name=name: per_cent(mean(task, name)), name)]
        for name in tried
    ]
    return table(["density", *TASKS], rows)


def chosen_setting(found: BenchmarkScores, method: str) -> Condition:
    """The setting of a method, or the zones of the swap, that development documents choose."""
    development = found.split(0.5).development
    tried = {
        one: values[development] for one, values in found.scores.items()
        if (one.zones is not None if method == "swap" else one.method == method)
    }  # fmt: skip
    return choose(tried, of_equals="first")


def _setting(one: Condition) -> str:
    assert one.zones is not None
    return f"{one.zones.bottom}, {one.zones.top}"


def partial_table() -> Table:
    """Swahili, three pairs of experts, trained in full or in their own layers alone."""
    rows = []
    swaps = {}
    for words, kind, model in PARTIAL_ROWS:
        cells = []
        for task, study in (("headlines", "headline"), ("sentences", "topic")):
            (by,) = [one for one in results(f"{study}-{kind}") if one.language == "sw"]
            (values,) = [v for one, v in by.scores.items() if str(one) == model]
            first = swaps.setdefault(task, values)
            apart = "" if first is values else points(paired_difference(first, values))
            cells += [per_cent(mean_interval(values)), apart]
        rows.append([words, *cells])
    head = ["Swahili, three pairs", "headlines", "the first minus it", "sentences",
            "the first minus it"]  # fmt: skip
    return table(head, rows)


def without_labels_table() -> Table:
    """Zones of one pair by signal or label, and their scores."""
    models = {task: chosen_without_labels(study) for task, study in ZONES.items()}
    rows = []
    for name in next(iter(models.values())):
        cells = []
        for task, found in models.items():
            (values, zones), (default, usual) = found[name], found["the default"]
            apart = over_languages(task, differences(values, default))
            cells += [
                "; ".join(zones),
                per_cent(over_languages(task, values)),
                "" if zones == usual else points(apart),
            ]
        rows.append([name, *cells])
    head = [part for task in ZONES for part in (f"{task}: zones", "right", "minus the default")]
    return table(["zones by", *head], rows)


def chosen_without_labels(study: str) -> dict[str, tuple[list[Values], list[str]]]:
    """The test scores and zones of every way of choosing, a list over languages."""
    signals = json.loads((HERE / study / SIGNALS).read_text("utf-8"))
    by_way: dict[str, tuple[list[Values], list[str]]] = {}
    for code in LANGUAGES:
        ((_, found),) = condition_scores(read_answers(HERE / study / code / RESULTS)).items()
        test = found.split(0.5).test
        zones = {_setting(one): values[test] for one, values in found.scores.items() if one.zones}
        chosen = chosen_setting(found, "swap")
        ways = {
            "the default": "3, 1",
            **{name: max(values, key=values.get) for name, values in signals[code].items()},
            "labels, chosen": _setting(chosen),
            "labels, selected": _setting(selected_zones(found, chosen)),
            "the test documents themselves": max(zones, key=lambda one: zones[one].mean()),
        }
        for name, setting in ways.items():
            values, settings = by_way.setdefault(name, ([], []))
            values.append(zones[setting])
            settings.append(setting)
    return by_way


def selected_zones(found: BenchmarkScores, chosen: Condition) -> Condition:
    """The chosen composition, or the default swap if the chosen one is not clearly better."""
    development = found.split(0.5).development
    scores = {one: values[development] for one, values in found.scores.items()}
    default = next(one for one in scores if one.zones == Zones(3, 1))
    return select(scores, chosen, default)


def few_shot_table() -> Table:
    """The base with English examples in its prompt, and models without examples.

    Calibrated are the former with the documents that are asked, the latter with the development
    documents.
    """
    rows = []
    for task, study in TASKS.items():
        folder = HERE / study / "few-shot"
        if not folder.is_dir():
            continue
        plain, after = (_few_shot(folder, metric) for metric in ("acc", "acc_calibrated"))
        found = [("base, with examples", plain, after)]
        found += [
            (NAMES[name], scores(task, name), calibrated(task, name))
            for name in ("base", "task expert", str(DEFAULT))
        ]
        rows += [
            [task, words, *(per_cent(over_languages(task, one)) for one in both)]
            for words, *both in found
        ]
    return table(["", "model", "mean", "calibrated"], rows, words=2)


def _few_shot(folder: Path, metric: str) -> list[Values]:
    """The scores of the base with examples in its prompt, a vector per language."""
    found: dict[str, dict[int, float]] = {code: {} for code in LANGUAGES}
    for one in read_answers(folder):
        if one.metric == metric:
            found[one.language][one.document] = one.score
    return [np.array([by[document] for document in sorted(by)]) for by in found.values()]


def checkpoints_table() -> Table:
    """The task expert of the sentences at its end and at its lowest validation loss, in Swahili."""
    (early,) = study_results({"sw": HERE / "topic-transfer" / "earlier" / "sw"}, 0.5).benchmarks
    (before,) = [v for one, v in early.scores.items() if str(one) == "task expert"]
    after = scores("sentences", "task expert")[0]
    rows = [["finished", per_cent(mean_interval(after))],
            ["lowest validation loss", per_cent(mean_interval(before))],
            ["difference", points(paired_difference(after, before))]]  # fmt: skip
    return table(["task expert of the sentences", "Swahili"], rows)


@cache
def by_pair(task: str) -> dict[str, dict[str, list[Values]]]:
    """A task's models with experts of several seeds: by pair, their scores, a vector per language.

    The last "pair" is the mean over pairs, of which every document has several answers.
    """
    found: dict[str, dict[str, list[Values]]] = {}
    for study, renamed in zip(
        SEEDS[task], ({}, {"task expert": PARTIAL, str(DEFAULT): MIDDLE_SWAP}), strict=True
    ):
        if not (HERE / study).is_dir():
            continue
        names = renamed or {name: name for name in SEED_NAMES} | {
            TIES: "TIES, chosen on development"
        }
        for by in results(study):
            pairs = {str(i): by.pairs[pair] for i, pair in enumerate(sorted(by.pairs), start=1)}
            for called, own in {**pairs, "mean": by.scores}.items():
                for one, values in own.items():
                    if str(one) in names:
                        model = found.setdefault(names[str(one)], {})
                        model.setdefault(called, []).append(values)
    return found


def over_pairs(task: str, model: str) -> list[Values]:
    """The scores of the test documents, a vector per language: the mean over pairs of experts.

    Those of one pair, of a task that was not repeated.
    """
    return by_pair(task)[model]["mean"] if task in SEEDS else scores(task, model)


def across_pairs(cell: Callable[[str], str], *models: str) -> list[str]:
    """A cell for each task, as `across`, over all pairs of experts."""
    asked = {task: by_pair(task).keys() if task in SEEDS else known(task) for task in TASKS}
    return [cell(task) if asked[task] >= set(models) else "" for task in TASKS]


def correct(task: str, *models: str) -> Interval:
    """The share of right answers of a model, or of the first minus the second.

    The mean over languages and pairs. Intervals are over documents alone.
    """
    first, *second = (over_pairs(task, one) for one in models)
    return over_languages(task, differences(first, second[0]) if second else first)


def models_table(measure: Callable[..., Interval], words: str) -> Table:
    """Models down, tasks across: each model's score, and the default swap minus it."""
    swap, rows = str(DEFAULT), []
    for name, called in SEED_NAMES.items():
        means = across_pairs(lambda task, name=name: f"{100 * measure(task, name).mean:.1f}", name)
        gaps = across_pairs(lambda task, name=name: points(measure(task, swap, name)), name)
        gaps = gaps if name != swap else [""] * len(gaps)
        rows.append([called, *(one for both in zip(means, gaps, strict=True) for one in both)])
    head = [part for task in PAIRS_OF.values() for part in (task, "the swap minus it")]
    return table([words, *head], rows)


def summary() -> list[tuple[str, Interval]]:
    """The roads in Swahili with all text, on headlines and sentences, without a choice."""
    rows = []
    for task, study in (("headlines", "dose-task"), ("sentences", "dose-sentences")):
        alone = {"commonest label": baselines.COMMONEST, "labels alone": baselines.LABELS,
                 "small encoder": baselines.ENCODER}  # fmt: skip
        merged = {"task expert": TASK, "language expert": LANGUAGE, "average": SOUP, "swap": SWAP}
        own = {name: baselines.right(task, "sw", key) for name, key in alone.items()} | {
            name: dose.classified(study, "sw", key, "all").right for name, key in merged.items()
        }
        rows += [(f"{task}: {name}", mean_interval(own[name])) for name in ROADS]
    return rows


def draw_summary() -> Drawing:
    """Draw the README's chart: what each road answers in Swahili."""
    return draw_intervals(summary(), measure="right answers in Swahili")


def _gains(task: str, first: str, second: str) -> list[Values]:
    return differences(over_pairs(task, first), over_pairs(task, second))


def pairs_table(task: str) -> Table:
    """Models down, pairs of experts of several seeds across: the mean over languages."""
    found = by_pair(task)
    rows = [
        [words, *(f"{100 * over_languages(task, one).mean:.1f}" for one in found[name].values())]
        for name, words in SEED_NAMES.items() if name in found
    ]  # fmt: skip
    numbers = [one for one in found[str(DEFAULT)] if one != "mean"]
    return table([task, *(f"pair {one}" for one in numbers), "mean"], rows)


def gains_table() -> Table:
    """Paired differences of models by task and language, the mean over pairs."""
    steps = [
        (str(DEFAULT), "task expert"),
        (str(DEFAULT), "soup"),
        (PARTIAL, "task expert"),
        (MIDDLE_SWAP, PARTIAL),
    ]
    rows = []
    for first, second in steps:
        for task in SEEDS:
            if by_pair(task).keys() >= {first, second}:
                gains = _gains(task, first, second)
                each = [points(mean_interval(one)) for one in gains]
                whole = points(over_languages(task, gains))
                words = f"{SEED_NAMES[first]}, minus the {SEED_NAMES[second]}"
                rows.append([words, task, *each, whole])
    return table(["", "", *LANGUAGES.values(), "mean"], rows, words=2)


def float32_table() -> Table:
    """Headlines in Swahili, two pairs of experts that were trained in float32 throughout."""
    (by,) = study_results({"sw": HERE / "headline-seeds" / "float32" / "sw"}, 0.5).benchmarks
    rows = []
    for number, pair in enumerate(sorted(by.pairs, reverse=True), start=1):
        own = {str(one): values for one, values in by.pairs[pair].items()}
        swap, expert = own[str(DEFAULT)], own["task expert"]
        means = [per_cent(mean_interval(one)) for one in (expert, own["soup"], swap)]
        rows.append([str(number), *means, points(paired_difference(swap, expert))])
    names = ("task expert", "plain average", "swap, default")
    return table(["pair", *names, "swap minus task expert"], rows)


def joint_table() -> Table:
    """Headlines in Swahili: one model trained on both data sets, and the swap."""
    (by,) = results("headline-joint")
    own = {str(one): values for one, values in by.scores.items()}
    swap = own[str(DEFAULT)]
    rows = []
    for name, words in JOINT_NAMES.items():
        paired = "" if name == str(DEFAULT) else points(paired_difference(swap, own[name]))
        rows.append([words, per_cent(mean_interval(own[name])), paired])
    return table(["headlines", "Swahili", "the default swap minus it"], rows)


def tables() -> dict[str, Table]:
    """The tables by name."""
    return {
        "means": models_table(correct, "% correct"),
        **ten_languages.tables(),
        **dose.tables(),
        **outer.tables(),
        **answers.tables(),
        **translation.tables(),
        **baselines.tables(),
        **finished.tables(),
        "balanced": models_table(balanced, "balanced accuracy"),
        "origins": origins_table(),
        **{f"labels of {task}": labels_table(task, str(DEFAULT), "task expert") for task in TASKS},
        "calibrated": calibrated_table(),
        "calibrated differences": calibrated_differences_table(),
        "cases": cases_table(),
        "densities": densities_table(),
        "few-shot": few_shot_table(),
        "checkpoints": checkpoints_table(),
        **{f"pairs of {task}": pairs_table(task) for task in SEEDS},
        "gains": gains_table(),
        "float32": float32_table(),
        "joint": joint_table(),
        "partial": partial_table(),
        "without labels": without_labels_table(),
    }


def filled(text: str, tables: Mapping[str, Table]) -> str:
    """A page with new tables."""

    def shown(name: str) -> Table:
        if name not in SHOWN:
            return tables[name]
        whole, columns, rows = SHOWN[name]
        return tables[whole].part(columns, rows)

    return MARK.sub(
        lambda found: f"<!-- transfer: {found[1]} -->\n{shown(found[1])}\n<!-- end -->", text
    )


def csv_name(name: str) -> str:
    """The file of a table in `CSV`."""
    return f"{name.replace(' ', '-')}.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    given = parser.parse_args()
    every = tables()
    for name, text in every.items():
        print(f"## {name}\n\n{text}\n")
    if given.write:
        CSV.mkdir(exist_ok=True)
        save_svg(draw_summary(), CHART)
        for name, found in every.items():
            (CSV / csv_name(name)).write_bytes(found.csv().encode())
        for page in PAGES:
            page.write_text(filled(page.read_text("utf-8"), every), "utf-8")


if __name__ == "__main__":
    main()
