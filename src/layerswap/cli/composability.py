"""`layerswap composability`: which signal of the experts predicts how good their merge is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def composability(
    table: Annotated[
        Path, typer.Argument(metavar="MERGES.csv", help="One row per merge: csv or parquet.")
    ],
    *,
    merged: Annotated[str, typer.Option(help="The column with the merge's own score.")],
    figure: Annotated[Path | None, typer.Option(help="Draw the correlations: an SVG file.")] = None,
) -> None:
    """Rank correlations of experts' scores with the scores of their merges (paper 2, section 5).

    Every other column with numbers is a signal: the task expert's English score, the language
    expert's reading score, and so on.

    Example: layerswap composability merges.csv --merged mgsm_sw --figure signals.svg
    """
    from layerswap.cli.tables import predictor_table
    from layerswap.evaluation.composability import predictors, read_merges
    from layerswap.report.charts import draw_intervals

    signals, quality = read_merges(table, merged)
    found = predictors(signals, quality)
    typer.echo(predictor_table(found, len(quality)))
    if figure is not None:
        rows = [(one.signal, one.spearman) for one in found]
        title = f"Spearman's correlation with {merged}"
        drawn = draw_intervals(rows, measure=title, unit="rho")
        figure.write_text(drawn.svg() + "\n", "utf-8")
        typer.echo(f"wrote {figure}")
