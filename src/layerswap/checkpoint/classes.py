"""Facts about transformers' classes of models, read without transformers.

`python -m research.classes` writes the table from the installed transformers, with one row for each
fact that differs from the rule. Names in it are canonical: without the words of wrappers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

TABLE = Path(__file__).with_name("classes.json")


class Table(TypedDict):
    """The facts of all classes of text models.

    Attributes:
        transformers: version that they are from.
        prefixes: names of the base model inside a model with a head.
        heads: first words of the names outside the base model.
        tasks: classes that answer with labels: type of model -> PEFT's name of the task -> class.
        unused: modules outside the layers that other classes of the type have and this one lacks.
        shared: modules that layers which share keys and values do not have.
        untied: classes that tie no head to the embedding, whatever their configuration says.
        renamed: type of model -> name on disk -> names in memory; `#` is a number.
        layers: what stands before the number of a layer -> classes that load layers from there.
        starts: first words of the names in layers (behind `#.`), of embeddings, final norms and
            heads -> types of models.
        words: the words in names of tensors: `owners` directly inside a layer, `inside` below
            them, and `outside` the layers, each by role.
    """

    transformers: str
    prefixes: list[str]
    heads: list[str]
    tasks: dict[str, dict[str, str]]
    unused: dict[str, list[str]]
    shared: list[str]
    untied: list[str]
    renamed: dict[str, dict[str, list[str]]]
    layers: dict[str, list[str]]
    starts: dict[str, list[str]]
    words: dict[str, list[str]]


CLASSES: Table = json.loads(TABLE.read_text("utf-8"))
PREFIXES = frozenset(CLASSES["prefixes"])
HEADS = frozenset(CLASSES["heads"])
LABELLED = {name: task for listed in CLASSES["tasks"].values() for task, name in listed.items()}
"""Classes that answer with labels, and the task of each."""
