"""A language identifier that is learned from a person's own files, with its held-out errors.

For languages that py3langid does not know. Character n-grams (Cavnar & Trenkle, 1994) under a
linear model of scikit-learn; every fifth line is held out and measures the identifier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from layerswap.evaluation.languages import Speaks, identified_code
from layerswap.ground.errors import DataError, RecipeError
from layerswap.ground.types import PathLike
from layerswap.reading.files import check_text, evenly_spaced, lines_of
from layerswap.versions import need_extras

MOST_LINES = 4000
"""Lines that are read of each language, evenly spaced."""
FEWEST_LINES = 50
HELD_OUT = 5
"""One line in this many is held out."""
WORST = 0.25
"""Share of a language's held-out lines that may be taken for another; above it, it is refused."""
NOTABLE = 0.1
SHORTEST = 20
"""Letters below which a line teaches nothing."""


@dataclass(frozen=True)
class Identifier:
    """A learned identifier and its measure on held-out lines."""

    languages: Sequence[str]  # in the order of the model's classes
    held_out: Mapping[str, int]  # lines by language
    confusion: Mapping[str, Mapping[str, float]]  # share taken for each language, by true one
    model: Any

    def probabilities(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        """Compute the probability of each language, `(texts, languages)`."""
        return np.asarray(self.model.predict_proba([*texts]))

    def speaks(self, language: str) -> Speaks:
        """Return the test of a text for a language: it is the most probable one."""
        place = list(self.languages).index(language)
        return cache(lambda text: int(self.probabilities([text])[0].argmax()) == place)

    def error(self, language: str) -> float:
        """Return the share of a language's held-out lines that get another language."""
        return 1 - self.confusion[language].get(language, 0.0)

    def describe(self, language: str) -> str:
        """Describe the held-out error of a language, and what it is taken for, in one line."""
        others = sorted(self.confusion[language].items(), key=lambda item: -item[1])
        taken = ", ".join(f"{share:.0%} for {code}" for code, share in others
                          if code != language and share >= 0.005)  # fmt: skip
        ending = f" ({taken})" if taken else ""
        return (f"{language}: {self.error(language):.1%} of {self.held_out[language]:,} held-out "
                f"lines are taken for another language{ending}")  # fmt: skip


def learn_identifier(files: Mapping[str, Path | str]) -> Identifier:
    """Learn to tell languages from a text of each, plain and line by line.

    Raises:
        DataError: there are fewer than two languages, a file is no plain text or too short, or a
            language is mistaken more often than `WORST` on held-out lines.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    if len(files) < 2:
        raise DataError("an identifier needs texts in at least two languages; add English and the "
                        "languages that the text may be mixed with")  # fmt: skip
    lines = {language: _lines(str(file)) for language, file in files.items()}
    taught = [(line, code) for code, texts in lines.items()
              for i, line in enumerate(texts) if i % HELD_OUT]  # fmt: skip
    model = make_pipeline(
        TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 4), sublinear_tf=True, min_df=2),
        LogisticRegression(C=100, class_weight="balanced", max_iter=200),
    )
    model.fit([line for line, _ in taught], [code for _, code in taught])
    held = {language: texts[::HELD_OUT] for language, texts in lines.items()}
    guessed = {language: [str(guess) for guess in model.predict(texts)]
               for language, texts in held.items()}  # fmt: skip
    confusion = {language: {guess: guesses.count(guess) / len(guesses) for guess in {*guesses}}
                 for language, guesses in guessed.items()}  # fmt: skip
    counts = {language: len(texts) for language, texts in held.items()}
    made = Identifier([str(code) for code in model.classes_], counts, confusion, model)
    for language in files:
        if made.error(language) > WORST:
            raise DataError(f"{files[language]}: {made.describe(language)}; give more text, or "
                            "leave the language that it is taken for out")  # fmt: skip
    return made


def identifying(language: str, texts: Mapping[str, PathLike]) -> tuple[str | Speaks, list[str]]:
    """Return what identifies a language in answers, and a line on each held-out error.

    That is the language itself if py3langid identifies it, or a test learned from texts.

    Raises:
        LayerswapError: see `learn_identifier`; or no text is in the language, or py3langid does
            not know it and there are no texts.
    """
    if not texts:
        identified_code(language)
        return language, []
    need_extras("an identifier that is learned from texts", "train")
    if language not in texts:
        raise RecipeError(
            f"answer texts: {', '.join(texts)} has no text of the answer language {language!r}"
        )
    made = learn_identifier({code: str(file) for code, file in texts.items()})
    return made.speaks(language), [made.describe(code) for code in texts]


def _lines(file: str) -> list[str]:
    check_text(file)
    every = (line.strip() for line in lines_of(file))
    # A repeated line would stand on both sides of the split.
    full = [*dict.fromkeys(line for line in every if sum(map(str.isalpha, line)) >= SHORTEST)]
    if len(full) < FEWEST_LINES:
        raise DataError(f"{file}: {len(full)} different lines of {SHORTEST} letters or more; an "
                        f"identifier needs at least {FEWEST_LINES}")  # fmt: skip
    return [*evenly_spaced(full, MOST_LINES)]
