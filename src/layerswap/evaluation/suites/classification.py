"""Writes tasks of text classification: SIB-200, MasakhaNEWS (topics) and AfriSenti (sentiment)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from layerswap.errors import EvaluationError
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder, hub_rows

DEVELOPMENT = "_dev"
"""How the names of tasks of published validation splits end."""


@dataclass(frozen=True)
class LabelledTexts:
    """A published data set of texts and their labels.

    Attributes:
        name: of its tasks and its folder.
        hub: its name on the Hub.
        labels: the words that are scored; rows of other labels are left out.
        prompt: the question, with the column `text`.
        numbered: the names that the numbers of a `label` column stand for, where it has them.
        english: its code of English, whose training split gives the exemplars.
        exemplars: the data set that gives them instead, where this one has no English.
    """

    name: str
    hub: str
    labels: tuple[str, ...]
    prompt: str = "Text: {{text}}\nTopic:"
    numbered: tuple[str, ...] = ()
    english: str = "eng"
    exemplars: LabelledTexts | None = None


HUB_SPLITS = {"train": "train", "dev": "validation", "test": "test"}
"""The splits' names on the Hub, by ours."""
# Adelani et al., 2024: 204 test and 99 development sentences, the same in all languages.
SIB = LabelledTexts(
    "sib200",
    "Davlan/sib200",
    (
        "science/technology", "travel", "politics", "sports", "health", "entertainment",
        "geography",
    ),
    english="eng_Latn",
)  # fmt: skip
NEWS_NAMES = (
    "business", "entertainment", "health", "politics", "religion", "sports", "technology",
)  # fmt: skip
# Adelani et al., 2023; the headline alone is what AfroBench (Ojo et al., 2025) shows, too.
NEWS = LabelledTexts(
    "masakhanews",
    "masakhane/masakhanews",
    # English has no articles on religion, so no English expert can learn the topic.
    tuple(name for name in NEWS_NAMES if name != "religion"),
    numbered=NEWS_NAMES,
)
NEWS_CODES = (
    "amh", "eng", "fra", "hau", "ibo", "lin", "lug", "orm", "pcm", "run", "sna", "som", "swa",
    "tir", "xho", "yor",
)  # fmt: skip
SENTIMENTS = ("negative", "neutral", "positive")
SENTIMENT_PROMPT = "Tweet: {{text}}\nSentiment:"
# Barbieri et al., 2020.
ENGLISH_TWEETS = LabelledTexts(
    "tweeteval", "cardiffnlp/tweet_eval", SENTIMENTS, SENTIMENT_PROMPT, SENTIMENTS, "sentiment"
)
# Muhammad et al., 2023.
TWEETS = LabelledTexts(
    "afrisenti", "masakhane/afrisenti", SENTIMENTS, SENTIMENT_PROMPT, exemplars=ENGLISH_TWEETS
)
TWEET_CODES = (
    "amh", "arq", "ary", "hau", "ibo", "kin", "orm", "pcm", "por", "swa", "tir", "tso", "twi",
    "yor",
)  # fmt: skip


def write_classification(
    source: LabelledTexts, code: str, shots: int, data: DataFolder, tasks: TaskFolder
) -> str:
    """Write a task of one language: its test split, and its development split as `NAME_dev`.

    The labels are scored as continuations of the prompt. Exemplars are English: the first training
    text of each label, then the second, and so on.

    Args:
        source: the data set.
        code: its code of the language, such as `swh_Latn` or `swa`.
        shots: exemplars in the prompt.
        data: where published files may be: `{code}.{train,dev,test}.tsv` in the data set's folder,
            or a copy of the Hub's data set.
        tasks: where the tasks go.

    Raises:
        EvaluationError: the data cannot be had, or lack a column.
    """
    exemplars = {}
    if shots:
        others = source.exemplars or source
        english = _rows(others, others.english, "train", data)
        exemplars = {"train": _in_turns(english, source.labels)}
    name = f"{source.name}_{code}_{shots}shot"
    for split, task in (("dev", name + DEVELOPMENT), ("test", name)):
        rows = _rows(source, code, split, data)
        first_n = {"sampler": "first_n"}
        tasks.task(task, {
            **tasks.rows(task, {**exemplars, "test": rows}),
            "output_type": "multiple_choice",
            "test_split": "test",
            **({"training_split": "train", "fewshot_split": "train", "fewshot_config": first_n}
               if shots else {}),
            "num_fewshot": shots,
            "doc_to_text": source.prompt,
            "doc_to_target": "{{label}}",
            "doc_to_choice": list(source.labels),
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
            "metadata": {"version": 1},
        })  # fmt: skip
    return name


def _rows(source: LabelledTexts, code: str, split: str, data: DataFolder) -> list[dict[str, str]]:
    """The texts of a split, with their labels."""
    wanted = f"{source.name}/{code}.{split}.tsv"
    path = data.find(wanted)
    if path is None:
        where = source.hub
        rows = hub_rows(source.hub, code, HUB_SPLITS[split], data, wanted=wanted)
    else:
        where = str(path)
        rows = list(csv.DictReader(io.StringIO(path.read_text("utf-8")), delimiter="\t"))
    try:
        read = [(_text(row), _label(row, source)) for row in rows]
    except (KeyError, IndexError, TypeError) as error:
        why = f"has no column {error}" if isinstance(error, KeyError) else "has an unknown label"
        raise EvaluationError(f"{where}: {why}") from None
    return [{"text": text, "label": label} for text, label in read if label in source.labels]


def _text(row: dict[str, Any]) -> str:
    """A sentence, the headline of an article, or a tweet."""
    return str(row[next((one for one in ("headline", "tweet") if one in row), "text")]).strip()


def _label(row: dict[str, Any], source: LabelledTexts) -> str:
    found = row["label"] if "label" in row else row["category"]
    return source.numbered[found] if isinstance(found, int) else str(found)


def _in_turns(rows: Sequence[dict[str, str]], labels: Iterable[str]) -> list[dict[str, str]]:
    """The same rows: the first of every label, the second of every label, and so on."""
    counts = dict.fromkeys(labels, 0)
    turns = []
    for row in rows:
        turns.append(counts[row["label"]])
        counts[row["label"]] += 1
    return [row for _, row in sorted(zip(turns, rows, strict=True), key=lambda pair: pair[0])]
