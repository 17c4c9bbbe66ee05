"""Figures and the HTML report. Strings in, strings out: no plotting library, no network.

Example::

    report = Report("Swahili maths", "The swap ...", [Section("Results", table=table)])
    write_report("report.html", report)
"""

from layerswap.report.figures import heat_map_svg, interval_svg, stack_svg
from layerswap.report.page import Report, Section, Table, render, write_report

__all__ = [
    "Report",
    "Section",
    "Table",
    "heat_map_svg",
    "interval_svg",
    "render",
    "stack_svg",
    "write_report",
]
