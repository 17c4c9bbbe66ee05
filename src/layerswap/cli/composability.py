"""`layerswap composability`: rank the signals that predict the quality of a merge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli import output


def composability(
    table: Annotated[
        Path, typer.Argument(metavar="MERGES.csv", help="One row per merge: CSV or Parquet.")
    ],
    *,
    merged: Annotated[str, typer.Option(help="Column with the scores of the merges.")],
    figure: Annotated[
        Path | None, typer.Option(help="SVG file to write, with the correlations drawn.")
    ] = None,
) -> None:
    """Correlate the scores of experts with the scores of their merges (paper 2, section 5).

    Every other numeric column is a signal, such as the task expert's English score. Prints a
    table of rank correlations.

    Example: layerswap composability merges.csv --merged mgsm_sw --figure signals.svg
    """
    from layerswap.cli.tables import predictor_table
    from layerswap.evaluation.composability import predictors, read_merges
    from layerswap.report.drawing import draw_intervals

    signals, quality = read_merges(table, merged)
    found = predictors(signals, quality)
    output.say(predictor_table(found, len(quality)))
    if figure is not None:
        rows = [(one.signal, one.spearman) for one in found]
        title = f"Spearman's correlation with {merged}"
        drawn = draw_intervals(rows, measure=title, unit="rho")
        figure.write_text(drawn.svg() + "\n", "utf-8")
        output.say(f"wrote {figure}")
