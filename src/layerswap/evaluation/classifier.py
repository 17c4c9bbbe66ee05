"""Linear classifiers on labelled texts: what labels give without any language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from layerswap.checkpoint.given import fetch_checkpoint
from layerswap.evaluation.statistics import LEVEL, Classified, resampled_counts
from layerswap.ground.errors import EvaluationError, error_context, one_line
from layerswap.versions import need_extras

Texts = Sequence[str]
Labels = npt.NDArray[np.str_]
"""One label per text, `(texts,)`."""
Folds = Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]
"""Positions to train on and to answer, a pair per fold; every document is answered once."""
SIZES = (10, 25, 50, 100)
"""Numbers of labels at which a curve is measured, before all of them."""
DRAWS = 5
"""Random draws of labels at each number."""
FOLDS = 5
MOST = 1000
"""Most labels that a classifier is trained on; it takes seconds with as many."""


def in_text_order(texts: Texts, labels: Labels) -> npt.NDArray[np.int64]:
    """Returns positions in a random order that depends on the texts, not on their order."""
    hashes = [sha256(text.encode("utf-8", "surrogatepass")).digest() for text in texts]
    return np.array(sorted(range(len(texts)), key=lambda i: (hashes[i], labels[i])), np.int64)


def cross_validation(texts: Texts, labels: Labels) -> Folds:
    """Splits documents into folds to answer in turn, with every label in each fold.

    Equal texts share a fold. The same documents in another order have the same folds.
    """
    order = in_text_order(texts, labels)
    label_of = {texts[i]: labels[i] for i in order}
    folds = {text: i % FOLDS for i, text in enumerate(sorted(label_of, key=label_of.__getitem__))}
    fold = np.array([folds[texts[i]] for i in order])
    return [(order[fold != i], order[fold == i]) for i in sorted({*folds.values()})]


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """Texts with labels, and the folds by which a classifier is trained and asked.

    The classifier is a logistic regression on TF-IDF of character 3-grams to 5-grams within words,
    with every label weighted equally. It needs no tokenizer and suits any script.

    Attributes:
        texts: one text per document.
        labels: the right labels, `(documents,)`.
        folds: as `Folds`; one fold for a split into development and test documents.
    """

    texts: Texts
    labels: Labels
    folds: Folds

    @property
    def asked(self) -> npt.NDArray[np.int64]:
        """Positions of the answered documents, ascending."""
        return np.sort(np.concatenate([asked for _, asked in self.folds]))

    @property
    def most(self) -> int:
        """Largest number of training labels."""
        return min(MOST, *(len(known) for known, _ in self.folds))

    @cached_property
    def answers(self) -> Labels:
        """The answers after training on all labels, in the order of `asked`."""
        return self.predicted(self.most)

    def predicted(self, size: int, draw: int = 0) -> Labels:
        """Returns the answers after training on a draw of labels, in the order of `asked`."""
        answers = np.empty(len(self.labels), dtype=self.labels.dtype)
        for (known, asked), matrices in zip(self.folds, self._matrices, strict=True):
            drawn = np.random.default_rng(draw).permutation(len(known))[:size]
            answers[asked] = self._answered(matrices[0][drawn], self.labels[known[drawn]],
                                            matrices[1])  # fmt: skip
        answered: Labels = answers[self.asked]
        return answered

    @cached_property
    def curve(self) -> dict[int, Classified]:
        """Answers by number of labels, with `DRAWS` draws of each number."""
        right = self.labels[self.asked]
        sizes = [size for size in SIZES if size < self.most]
        by_size = {size: [self.predicted(size, draw) for draw in range(DRAWS)] for size in sizes}
        by_size[self.most] = [self.answers]
        return {size: Classified(right, np.array(rows)) for size, rows in by_size.items()}

    @cached_property
    def _matrices(self) -> list[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
        """Features of the texts to train on and to answer, by fold."""
        from sklearn.feature_extraction.text import TfidfVectorizer

        made = []
        for known, asked in self.folds:
            features = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True)
            first = features.fit_transform([self.texts[i] for i in known])
            made.append((first, features.transform([self.texts[i] for i in asked])))
        return made

    @staticmethod
    def _answered(
        known: npt.NDArray[np.float64], labels: Labels, asked: npt.NDArray[np.float64]
    ) -> Labels:
        from sklearn.linear_model import LogisticRegression

        if len(set(labels.tolist())) == 1:
            return np.full(asked.shape[0], labels[0])
        model = LogisticRegression(C=10, class_weight="balanced", max_iter=500)
        answered: Labels = model.fit(known, labels).predict(asked)
        return answered


def open_encoder(source: str, device: str) -> Callable[[Texts], npt.NDArray[np.float32]]:
    """Opens an encoder of sentence-transformers; it maps texts to vectors `(texts, size)`.

    Pooling, dense layers and the prompt `query` are those of the encoder's own files.

    Raises:
        LayerswapError: no such folder or repository, or the library cannot load the encoder.
    """
    need_extras("an encoder", "eval")
    with error_context("encoder"):
        fetch_checkpoint(source, weights=False)
    from sentence_transformers import SentenceTransformer

    try:
        model = SentenceTransformer(source, device=device)
    except Exception as error:  # damaged files, another format, the net: no common class
        why = f"{type(error).__name__}: {one_line(error, 200)}"
        raise EvaluationError(f"encoder: {source}: cannot be loaded ({why})") from None
    prompt = "query" if "query" in model.prompts else None

    def encode(texts: Texts) -> npt.NDArray[np.float32]:
        vectors: npt.NDArray[np.float32] = model.encode(
            list(texts), prompt_name=prompt, show_progress_bar=False
        )
        return vectors

    return encode


def by_vectors(taught: Sequence[tuple[Any, Labels]], asked: Any) -> Labels:
    """Answers by logistic regression on standardised vectors.

    Args:
        taught: vectors and labels, of one source or of two. A second source, the labels of the
            language, weighs half as much as the first, however few they are.
        asked: the vectors to answer, `(documents, size)`.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    known, labels = (np.concatenate(parts) for parts in zip(*taught, strict=True))
    sizes = [len(part) for _, part in taught]
    shares = [1.0, sizes[0] / 2 / sizes[-1]][: len(sizes)]
    scale = StandardScaler().fit(known)
    model = LogisticRegression(C=0.01, max_iter=1000)
    model.fit(scale.transform(known), labels, sample_weight=np.repeat(shares, sizes))
    answered: Labels = model.predict(scale.transform(asked))
    return answered


@dataclass(frozen=True)
class Worth:
    """The number of labels with which a linear classifier reaches a model's score.

    0 means fewer than the smallest number tried, infinity more than the largest.
    """

    labels: float
    low: float  # of the 95% bootstrap interval over documents
    high: float
    tried: tuple[int, int]  # smallest and largest number of labels

    def __str__(self) -> str:
        words = [self._word(end) for end in (self.labels, self.low, self.high)]
        interval = f" [{words[1]}, {words[2]}]" if len({*words}) > 1 else ""
        return f"{words[0]} labels{interval}"

    def _word(self, labels: float) -> str:
        if labels <= self.tried[0]:
            return f"fewer than {self.tried[0]}"
        if labels == np.inf:
            return f"more than {self.tried[1]}"
        step = 5 if labels < 100 else 10
        return f"{step * round(labels / step):,}"


def worths_in_words(found: Mapping[str, Worth]) -> str:
    """Write the worth of a model, such as `85 labels [60, 130] in accuracy`."""
    return " and ".join(f"{labels} in {measure}" for measure, labels in found.items())


def worth(model: Classified, curve: dict[int, Classified], *, balanced: bool = False) -> Worth:
    """Finds where the curve of a linear classifier crosses a model's score.

    Between two numbers of labels the score is interpolated over the logarithm of the number. A
    curve never falls: more labels can be left out.

    Args:
        model: the model's answers to the documents of the curve.
        curve: answers of the classifier by number of labels, see `LabelledTexts.curve`.
        balanced: compare balanced accuracy in place of accuracy.
    """

    def drawn(answers: Classified) -> npt.NDArray[np.float64]:
        if balanced:
            shares: npt.NDArray[np.float64] = answers.resampled[0]
        else:
            right = answers.right.astype(np.float64)
            shares = resampled_counts(len(right)) @ right / len(right)
        return shares

    sizes = np.log(list(curve))
    scores = np.maximum.accumulate([drawn(answers) for answers in curve.values()])
    crossings = np.array([
        _crossing(sizes, by_size, score)
        for by_size, score in zip(scores.T, drawn(model), strict=True)
    ])  # fmt: skip
    low, high = np.quantile(crossings[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="nearest")
    return Worth(float(crossings[0]), float(low), float(high), (min(curve), max(curve)))


def _crossing(
    sizes: npt.NDArray[np.float64], scores: npt.NDArray[np.float64], score: float
) -> float:
    """The number of labels at which ascending scores reach a score."""
    reached = np.flatnonzero(scores >= score)
    if not len(reached):
        return float(np.inf)
    first = int(reached[0])
    if first == 0:
        return 0.0
    below, above = scores[first - 1], scores[first]
    share = (score - below) / (above - below)
    return float(np.exp(sizes[first - 1] + share * (sizes[first] - sizes[first - 1])))
