"""Friedman's mean ranks as a critical-difference diagram (Demsar, 2006)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerswap.evaluation.statistics import Friedman
from layerswap.report.svg import escaped

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rank_figure(found: Friedman) -> Figure:
    """Treatments along the axis of their mean ranks; a bar joins those that do not differ.

    Those are joined whose mean ranks differ by less than Nemenyi's critical difference at 0.05.

    Args:
        found: what `friedman` gave.
    """
    import pandas as pd
    from matplotlib.figure import Figure
    from scikit_posthocs import critical_difference_diagram

    ranks = pd.Series(found.mean_ranks, index=list(found.treatments))
    p = pd.DataFrame(1.0, index=ranks.index, columns=ranks.index)
    for pair in found.pairs:
        apart = abs(ranks[pair.first] - ranks[pair.second]) > found.critical_difference
        p.loc[pair.first, pair.second] = p.loc[pair.second, pair.first] = 0.0 if apart else 1.0
    figure = Figure(figsize=(8, 1.2 + 0.22 * len(ranks)), layout="constrained")
    axis = figure.subplots()
    critical_difference_diagram(ranks, p, ax=axis, label_fmt_left="{label} ({rank:.1f})  ",
                                label_fmt_right="  ({rank:.1f}) {label}",
                                color_palette=["black"] * len(ranks))  # fmt: skip
    axis.set_title(
        f"Mean ranks over {found.conditions} conditions; critical difference "
        f"{found.critical_difference:.2f}", fontsize="small",
    )  # fmt: skip
    return figure


def inline_svg(figure: Figure, *, title: str, description: str) -> str:
    """A matplotlib figure as an SVG for a page: its black follows the page's colour."""
    import io
    import re

    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "layerswap", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg ") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = drawn.replace("#000000", "currentColor")
    # Text without a fill of its own is black too.
    drawn = drawn.replace("<svg ", f'<svg role="img" aria-label="{escaped(title)}" '
                          'fill="currentColor" ', 1)  # fmt: skip
    head, _, rest = drawn.partition(">")
    return f"{head}><title>{escaped(title)}</title><desc>{escaped(description)}</desc>{rest}"
