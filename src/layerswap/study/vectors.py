"""The step that classifies labelled documents by sentence vectors, without a language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from layerswap.evaluation.classifier import Labels, by_vectors, open_encoder
from layerswap.experiment.answers import ANSWERS_TABLE, Answer, read_answers, write_answers
from layerswap.experiment.benchmarks import RESULTS, condition_scores, in_order
from layerswap.experiment.compare import DocumentSplit
from layerswap.experiment.conditions import VECTORS, Condition
from layerswap.study.kind import Kind
from layerswap.study.runner import Context
from layerswap.study.spec import StepKind
from layerswap.study.trainings import TrainedOn

Taught = tuple[Any, Labels]
"""Vectors `(texts, size)`, and a label of each."""


class VectorsStep(Kind):
    """Trains classifiers on sentence vectors of the task's rows and of development documents."""

    kind: ClassVar[str] = "vectors"
    resources: ClassVar[StepKind] = "evaluate"
    language: str
    encoder: str  # a folder or Hub id that sentence-transformers loads
    device: str
    development: float | None = None
    task: TrainedOn | None = None  # the rows of the task expert

    def check_here(self, name: str, *, device: bool) -> None:
        """Open the encoder."""
        open_encoder(self.encoder, "cpu")

    def run(self, context: Context) -> None:
        """Encode and classify, and write the answers to all documents with labels."""
        taught = self._rows(context.inputs)
        answers = read_answers(context.inputs[f"evaluate/{self.language}"] / RESULTS)
        found: list[Answer] = []
        encode = open_encoder(self.encoder, self.device)
        for (name, _), scores in condition_scores(answers).items():
            if scores.labels is None:
                continue
            first = next(iter(scores.scores))
            rows = in_order(row for row in answers if row.main and row.condition == first
                            and name in (row.benchmark, row.task))  # fmt: skip
            labels = {*scores.labels.tolist()}
            known = [(text, label) for text, label in taught if label in labels]
            context.log(f"encoding {len(rows):,} documents and {len(known):,} rows of the task")
            texts, names = [text for text, _ in known], [label for _, label in known]
            english = (encode(texts), np.array(names)) if known else None
            vectors = encode(scores.texts)
            split = scores.split(self.development)
            for condition, given in _answered(vectors, scores.labels, english, split):
                found += [
                    replace(row, model=str(condition), condition=condition, weights=self.encoder,
                            predicted=str(label), answer=str(label),
                            score=float(label == row.label))
                    for row, label in zip(rows, given, strict=True)
                ]  # fmt: skip
        write_answers(context.folder / ANSWERS_TABLE, found)

    def _rows(self, inputs: Mapping[str, Path]) -> list[tuple[str, str]]:
        """Prompts and completions of the task; none for chats, texts, and experts that exist."""
        rows = self.task.rows(inputs).train if self.task else ()
        pairs = [(row.get("prompt"), row.get("completion")) for row in rows]
        return [(text, label.strip()) for text, label in pairs if isinstance(text, str)]


def _answered(
    vectors: Any, labels: Labels, english: Taught | None, split: DocumentSplit
) -> Iterator[tuple[Condition, Labels]]:
    """Answers to all documents, from the task's rows, from development labels, and from both."""
    own = vectors[split.development], labels[split.development]
    several = len(set(own[1].tolist())) > 1
    if english is not None:
        yield Condition(VECTORS, "on the task's rows"), by_vectors([english], vectors)
    if several:
        yield Condition(VECTORS, "on the development labels"), by_vectors([own], vectors)
    if english is not None and several:
        yield Condition(VECTORS, "on both"), by_vectors([english, own], vectors)
