"""Ranks signals of experts by how well they predict the merge's quality (paper 2, section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from layerswap.compose.yaml_file import nearest
from layerswap.errors import RecipeError
from layerswap.evaluation.statistics import Interval

FEWEST = 4
"""Merges below which a rank correlation says nothing."""


@dataclass(frozen=True)
class Predictor:
    """One signal.

    Attributes:
        signal: its name.
        spearman: rank correlation with the merges' quality, with its bootstrap interval.
        kendall: tau-b, likewise.
        p_spearman: two-sided, by permutation.
    """

    signal: str
    spearman: Interval
    kendall: Interval
    p_spearman: float


def read_merges(path: Path, merged: str) -> tuple[dict[str, list[float]], list[float]]:
    """Signals and quality of merges from a table with one row per merge.

    Args:
        path: csv or parquet.
        merged: the column with the merge's own score; every other column of numbers is a signal.

    Raises:
        RecipeError: it cannot be read, has no such column, or has no signal.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    try:
        table = (
            pyarrow.parquet.read_table(path)
            if path.suffix == ".parquet"
            else pyarrow.csv.read_csv(path)
        )
    except (OSError, pa.ArrowInvalid) as error:
        why = " ".join(str(error).split())[:160]
        raise RecipeError(f"{path}: cannot be read ({why})") from None
    numeric = {
        field.name: [float("nan") if v is None else float(v) for v in table[field.name].to_pylist()]
        for field in table.schema
        if pa.types.is_floating(field.type) or pa.types.is_integer(field.type)
    }
    if merged not in numeric:
        raise RecipeError(
            f"{path}: no column of numbers {merged!r}{nearest(merged, list(numeric))}"
        )
    gaps = sorted(name for name, values in numeric.items() if not np.isfinite(values).all())
    if gaps:
        raise RecipeError(f"{path}: {', '.join(gaps)}: a number is missing")
    quality = numeric.pop(merged)
    if not numeric:
        raise RecipeError(f"{path}: no other column of numbers, so no signal")
    return numeric, quality


def predictors(
    signals: Mapping[str, Sequence[float]],
    merged: Sequence[float],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> list[Predictor]:
    """How well each signal orders merges; the best first, by the size of its correlation.

    Args:
        signals: by name, one number per merge: the score of its task expert on English problems,
            of its language expert on reading, and so on.
        merged: the score of each merge, in the same order.
        level: of the intervals.
        resamples: of the bootstrap over merges, and of the permutation test.
        seed: of both.

    Raises:
        RecipeError: fewer than four merges, or a signal for another number of them.
    """
    quality = np.asarray(merged, dtype=np.float64)
    found = []
    for name, values in signals.items():
        signal = np.asarray(values, dtype=np.float64)
        if signal.shape != quality.shape or len(quality) < FEWEST:
            raise RecipeError(
                f"{name}: a signal needs one number per merge, and at least {FEWEST} merges; "
                f"{len(signal)} numbers for {len(quality)} merges"
            )
        rng = np.random.default_rng(seed)
        chosen = [rng.integers(len(quality), size=len(quality)) for _ in range(resamples)]
        found.append(
            Predictor(
                name,
                _interval(spearman, signal, quality, chosen, level),
                _interval(kendall, signal, quality, chosen, level),
                _permutation_p(signal, quality, rng, resamples),
            )
        )
    return sorted(found, key=lambda one: -abs(one.spearman.mean))


def spearman(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Spearman's rank correlation; 0 where one of the two is constant."""
    from scipy.stats import rankdata

    if _constant(a) or _constant(b):
        return 0.0
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


def kendall(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Kendall's tau-b; 0 where one of the two is constant."""
    if _constant(a) or _constant(b):
        return 0.0
    above, over = (np.sign(values[:, None] - values) for values in (a, b))
    return float((above * over).sum() / np.sqrt((above**2).sum() * (over**2).sum()))


def _interval(
    correlation: object,
    signal: npt.NDArray[np.float64],
    quality: npt.NDArray[np.float64],
    chosen: Sequence[npt.NDArray[np.int64]],
    level: float,
) -> Interval:
    assert callable(correlation)
    values = [correlation(signal[rows], quality[rows]) for rows in chosen]
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(correlation(signal, quality), float(low), float(high), len(quality))


def _permutation_p(
    signal: npt.NDArray[np.float64],
    quality: npt.NDArray[np.float64],
    rng: np.random.Generator,
    resamples: int,
) -> float:
    seen = abs(spearman(signal, quality))
    extreme = sum(
        abs(spearman(rng.permutation(signal), quality)) >= seen - 1e-12 for _ in range(resamples)
    )
    return (extreme + 1) / (resamples + 1)


def _constant(values: npt.NDArray[np.float64]) -> bool:
    return bool((values == values[0]).all())
