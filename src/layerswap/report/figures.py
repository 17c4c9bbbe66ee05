"""The figures of a report, each a standalone SVG document as a string."""

from layerswap.report.heat_map import heat_map_svg
from layerswap.report.intervals import interval_svg
from layerswap.report.stack import stack_svg

__all__ = ["heat_map_svg", "interval_svg", "stack_svg"]
