"""Tables of a comparison by speakers, separate from all scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from layerswap.evaluation.preferences import Judgement
from layerswap.ground.errors import StudyError
from layerswap.report.tables import Number, Table

VOTES = "preferences*.json"
"""Pattern of the files that `layerswap ask read --out` writes into a study's folder."""


def vote_tables(judgement: Judgement) -> tuple[Table, Table, list[str]]:
    """The table of pairs, the table of strengths, and notes."""
    rows: list[list[Any]] = [
        [f"{pair.first} against {pair.second}", pair.wins, pair.losses, pair.ties, pair.both_bad,
         Number(p, ".3f")] for pair, p in zip(judgement.pairs, judgement.corrected, strict=True)
    ]  # fmt: skip
    columns = ["pair", "prompts won", "lost", "even", "votes both bad", "p"]
    pairs = Table(columns, rows, "exact sign test over prompts, corrected by Holm")
    strengths = Table(
        ["model", "strength"], [[name, strength] for name, strength in judgement.strengths.items()],
        "% won against an average model (Bradley-Terry), with 95% intervals over prompts and "
        "speakers",
    )  # fmt: skip
    bias = judgement.position
    notes = [f"the first answer won {100 * bias.mean:.0f}% of decided votes "
             f"[{100 * bias.low:.0f}, {100 * bias.high:.0f}]" if bias else "no vote is decided",
             f"stopping rule: {'stop' if judgement.stop else 'go on'}"]  # fmt: skip
    return pairs, strengths, notes


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
