"""Ranks signals of experts by how well they predict the quality of a merge (paper 2, section 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from layerswap.compose.yaml_file import nearest
from layerswap.errors import RecipeError
from layerswap.evaluation.statistics import LEVEL, RESAMPLES, Interval

FEWEST = 4
"""Smallest number of merges for a rank correlation."""
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Predictor:
    """One signal."""

    signal: str
    spearman: Interval  # with its bootstrap interval over merges
    kendall: Interval  # tau-b, with its bootstrap interval
    p_spearman: float  # two-sided, by permutation; exact for few merges


def read_merges(path: Path, merged: str) -> tuple[dict[str, list[float]], list[float]]:
    """Read signals and quality of merges from a table with one row per merge.

    Args:
        path: CSV or Parquet file.
        merged: column with the scores of the merges; every other numeric column is a signal.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    read = pyarrow.parquet.read_table if path.suffix == ".parquet" else pyarrow.csv.read_csv
    try:
        table = read(path)
    except (OSError, pa.ArrowInvalid) as error:
        why = " ".join(str(error).split())[:160]
        raise RecipeError(f"{path}: cannot be read ({why})") from None
    numeric = {
        field.name: [float("nan") if v is None else float(v) for v in table[field.name].to_pylist()]
        for field in table.schema
        if pa.types.is_floating(field.type) or pa.types.is_integer(field.type)
    }
    if merged not in numeric:
        raise RecipeError(f"{path}: no numeric column {merged!r}{nearest(merged, list(numeric))}")
    gaps = sorted(name for name, values in numeric.items() if not np.isfinite(values).all())
    if gaps:
        raise RecipeError(f"{path}: {', '.join(gaps)}: a number is missing")
    quality = numeric.pop(merged)
    if not numeric:
        raise RecipeError(f"{path}: no other numeric column, so no signal")
    return numeric, quality


def predictors(signals: Mapping[str, Sequence[float]], merged: Sequence[float]) -> list[Predictor]:
    """Correlate each signal with the quality of merges; the strongest comes first.

    Args:
        signals: for each signal one number per merge, such as the English score of its task
            expert.
        merged: the score of each merge, in the same order.
    """
    from scipy.stats import permutation_test

    quality = np.asarray(merged, dtype=np.float64)
    ranked = []
    for name, values in signals.items():
        signal = np.asarray(values, dtype=np.float64)
        if signal.shape != quality.shape or len(quality) < FEWEST:
            raise RecipeError(
                f"{name}: a signal needs one number per merge, and at least {FEWEST} merges; "
                f"{len(signal)} numbers for {len(quality)} merges"
            )
        test = permutation_test(
            [signal], lambda shuffled: _spearman(shuffled, quality), permutation_type="pairings",
            n_resamples=RESAMPLES, rng=np.random.default_rng(0),
        )  # fmt: skip
        spearman, kendall = (_interval(one, signal, quality) for one in (_spearman, _kendall))
        ranked.append(Predictor(name, spearman, kendall, float(test.pvalue)))
    return sorted(ranked, key=lambda one: -abs(one.spearman.mean))


def _interval(
    statistic: Callable[[Values, Values], float], signal: Values, quality: Values
) -> Interval:
    """Compute a correlation with its percentile bootstrap interval over merges."""
    rng, count = np.random.default_rng(0), len(quality)
    drawn = (rng.integers(count, size=count) for _ in range(RESAMPLES))
    resampled = [statistic(signal[rows], quality[rows]) for rows in drawn]
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(statistic(signal, quality), float(low), float(high), count)


def _spearman(a: Values, b: Values) -> float:
    """Compute Spearman's rank correlation; 0 if one side is constant."""
    from scipy.stats import spearmanr

    return 0.0 if np.ptp(a) == 0 or np.ptp(b) == 0 else float(spearmanr(a, b).statistic)


def _kendall(a: Values, b: Values) -> float:
    """Compute Kendall's tau-b; 0 if one side is constant."""
    from scipy.stats import kendalltau

    return 0.0 if np.ptp(a) == 0 or np.ptp(b) == 0 else float(kendalltau(a, b).statistic)
