"""Figures and the HTML report. Strings in, strings out: no plotting library, no network.

Example::

    report = Report("Swahili maths", "The swap ...", [Section("Results", table=table)])
    write_report("report.html", report)
"""

from layerswap.report.heat_map import heat_map_svg
from layerswap.report.intervals import interval_svg
from layerswap.report.page import Report, Section, Table, render, write_report
from layerswap.report.stack import stack_svg

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
