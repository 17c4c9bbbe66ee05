"""Draws figures and writes HTML reports and tables: plain data in, no network.

Example::

    report = Report("Swahili maths", "The swap ...", [Section("Results", table=table)])
    write_report("report.html", report)
"""

from layerswap.report.charts import draw_heat_map, draw_intervals
from layerswap.report.drawing import Drawing
from layerswap.report.page import Report, Section, render, write_report
from layerswap.report.stack import draw_stack
from layerswap.report.tables import Table

__all__ = [
    "Drawing",
    "Report",
    "Section",
    "Table",
    "draw_heat_map",
    "draw_intervals",
    "draw_stack",
    "render",
    "write_report",
]
