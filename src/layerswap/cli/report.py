"""`layerswap report`: write the page of a study."""

from __future__ import annotations

from typing import Annotated

import typer

from layerswap.cli import output


def report(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder of a study, or its URL.")],
) -> None:
    """Write the report of a study: report.html, tables (Markdown, LaTeX) and figures.

    Covers the finished steps of an unfinished study. Writes into the study's folder.

    Example: layerswap report study
    """
    from layerswap.study.report import write_study_report
    from layerswap.study.storage import place

    output.say(f"wrote {write_study_report(*place(folder))}")
