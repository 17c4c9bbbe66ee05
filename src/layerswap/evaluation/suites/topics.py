"""SIB-200 (Adelani et al., 2024) and MasakhaNEWS (Adelani et al., 2023): topics of texts."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from layerswap.errors import EvaluationError
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder, hub_rows

PROMPT = "Text: {{text}}\nTopic:"
DEVELOPMENT = "_dev"
"""How the names of tasks of published validation splits end."""


@dataclass(frozen=True)
class TopicData:
    """A published data set of texts and their topics.

    Attributes:
        name: of its tasks and its folder.
        hub: its name on the Hub.
        splits: its names of the splits there, by ours.
        english: its code of English, whose training split gives the exemplars.
        topics: the words that are scored; rows of other topics are left out.
        numbered: the names that the numbers of a `label` column stand for, where it has them.
    """

    name: str
    hub: str
    splits: dict[str, str]
    english: str
    topics: tuple[str, ...]
    numbered: tuple[str, ...] = ()


SIB = TopicData(
    "sib200",
    "Davlan/sib200",
    {"train": "train", "dev": "validation", "test": "test"},
    "eng_Latn",
    (
        "science/technology", "travel", "politics", "sports", "health", "entertainment",
        "geography",
    ),
)  # fmt: skip
NEWS_NAMES = (
    "business", "entertainment", "health", "politics", "religion", "sports", "technology",
)  # fmt: skip
NEWS = TopicData(
    "masakhanews",
    "masakhane/masakhanews",
    {"train": "train", "dev": "validation", "test": "test"},
    "eng",
    # English has no articles on religion, so no English expert can learn the topic.
    tuple(name for name in NEWS_NAMES if name != "religion"),
    NEWS_NAMES,
)
NEWS_CODES = (
    "amh", "eng", "fra", "hau", "ibo", "lin", "lug", "orm", "pcm", "run", "sna", "som", "swa",
    "tir", "xho", "yor",
)  # fmt: skip


def write_sib200(code: str, shots: int, data: DataFolder, tasks: TaskFolder) -> str:
    r"""Write SIB-200 in one language: 204 test and 99 development sentences, seven topics.

    The topics are scored as continuations of `Text: ...\nTopic:`. Exemplars are English: the
    first training sentence of each topic, then the second, and so on. The development sentences
    are a task of their own, whose name ends in `_dev`.

    Args:
        code: of FLORES-200, such as `swh_Latn`.
        shots: exemplars in the prompt.
        data: where published files may be: `{code}.{train,dev,test}.tsv` in `sib200`, or a copy
            of the Hub's data set.
        tasks: where the tasks go.

    Raises:
        EvaluationError: the data cannot be had, or lack a column.
    """
    return _write(SIB, code, shots, data, tasks)


def write_masakhanews(code: str, shots: int, data: DataFolder, tasks: TaskFolder) -> str:
    """Write MasakhaNEWS in one language: the topic of an article, by its headline.

    The headline alone is what AfroBench (Ojo et al., 2025) shows, too. Six topics: English has
    none on religion. Otherwise as `write_sib200`, with `{code}.*.tsv` in `masakhanews`.

    Args:
        code: of ISO 639-3, such as `swa`.
        shots: exemplars in the prompt.
        data: where published files may be.
        tasks: where the tasks go.

    Raises:
        EvaluationError: the data cannot be had, or lack a column.
    """
    return _write(NEWS, code, shots, data, tasks)


def _write(source: TopicData, code: str, shots: int, data: DataFolder, tasks: TaskFolder) -> str:
    exemplars = {}
    if shots:
        english = _rows(source, source.english, "train", data)
        exemplars = {"train": _in_turns(english, source.topics)}
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
            "doc_to_text": PROMPT,
            "doc_to_target": "{{topic}}",
            "doc_to_choice": list(source.topics),
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
            "metadata": {"version": 1},
        })  # fmt: skip
    return name


def _rows(source: TopicData, code: str, split: str, data: DataFolder) -> list[dict[str, str]]:
    """The texts of a split, with their topics."""
    wanted = f"{source.name}/{code}.{split}.tsv"
    path = data.find(wanted)
    if path is None:
        where = source.hub
        rows = hub_rows(source.hub, code, source.splits[split], data, wanted=wanted)
    else:
        where = str(path)
        rows = list(csv.DictReader(io.StringIO(path.read_text("utf-8")), delimiter="\t"))
    try:
        read = [(_text(row), _topic(row, source)) for row in rows]
    except (KeyError, IndexError, TypeError) as error:
        why = f"has no column {error}" if isinstance(error, KeyError) else "has an unknown label"
        raise EvaluationError(f"{where}: {why}") from None
    return [{"text": text, "topic": topic} for text, topic in read if topic in source.topics]


def _text(row: dict[str, Any]) -> str:
    """A sentence, or the headline of an article."""
    return str(row["headline" if "headline" in row else "text"]).strip()


def _topic(row: dict[str, Any], source: TopicData) -> str:
    return source.numbered[row["label"]] if "label" in row else str(row["category"])


def _in_turns(rows: Sequence[dict[str, str]], topics: Iterable[str]) -> list[dict[str, str]]:
    """The same rows: the first of every topic, the second of every topic, and so on."""
    counts = dict.fromkeys(topics, 0)
    turns = []
    for row in rows:
        turns.append(counts[row["topic"]])
        counts[row["topic"]] += 1
    return [row for _, row in sorted(zip(turns, rows, strict=True), key=lambda pair: pair[0])]
