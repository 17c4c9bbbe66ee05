"""`layerswap report`: the page of a study."""

from __future__ import annotations

from typing import Annotated

import typer


def report(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="The folder of a study, or its URL.")
    ],
) -> None:
    """Write report.html, tables (Markdown, LaTeX) and figures (SVG, PDF) of a study.

    Works on a study that is not finished too, with what is done.

    Example: layerswap report study
    """
    from layerswap.study.report import write_study_report
    from layerswap.study.storage import place

    typer.echo(f"wrote {write_study_report(*place(folder))}")
