"""The table of a comparison by speakers, separate from all scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from layerswap.evaluation.preferences import Judgement
from layerswap.ground.errors import StudyError
from layerswap.report.tables import Table

VOTES = "preferences*.json"
"""Pattern of the files that `layerswap ask read --out` writes into a study's folder."""


def vote_table(judgement: Judgement) -> Table:
    """The table of the pairs of models."""
    rows: list[list[Any]] = [
        [f"{pair.first} against {pair.second}", pair.wins, pair.losses, pair.ties, pair.both_bad,
         pair.share] for pair in judgement.pairs
    ]  # fmt: skip
    columns = ["pair", "prompts won", "lost", "even", "votes both bad", "share won"]
    return Table(
        columns, rows,
        "% of decided prompts, with exact intervals (Clopper-Pearson) that hold together at 95%",
    )  # fmt: skip


def read_judgements(folder: Path) -> list[Judgement]:
    """Read the comparisons by speakers in a study's folder.

    Raises:
        StudyError: a file is no comparison.
    """
    judgements = []
    for path in sorted(folder.glob(VOTES)):
        try:
            judgements.append(TypeAdapter(Judgement).validate_json(path.read_bytes()))
        except ValidationError:
            raise StudyError(
                f"{path}: is no comparison by speakers; write it by `layerswap ask read FOLDER "
                f"FILE... --out {path.name}`, or move it away"
            ) from None
    return judgements
