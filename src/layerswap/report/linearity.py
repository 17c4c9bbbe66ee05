"""The figure of linearity: loss along the line between experts, and departure from additivity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerswap.evaluate.linearity import Additivity, Connectivity, Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DARK, LIGHT = "#00224e", "#a59c74"
"""Two colours of cividis: apart for colour-blind readers, and in grey."""


def linearity_figure(line: Connectivity, sums: Additivity) -> Figure:
    """Three panels: loss along the line, the barrier of each layer, additivity by layer.

    Args:
        line: loss between two experts.
        sums: additivity of their deltas, over as many layers.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _draw_line(left, line.whole)
    layers = range(len(line.layers))
    middle.barh(layers, [one.barrier for one in line.layers], color=DARK)
    middle.axvline(line.whole.barrier, linestyle=":", color="black", label="whole model")
    middle.set_xlabel("barrier, nats per token")
    middle.set_title(f"one layer interpolated, {line.elsewhere} elsewhere", fontsize="medium")
    right.barh([layer + 0.2 for layer in layers], sums.layers, height=0.4, color=LIGHT,
               label="all layers changed")  # fmt: skip
    if sums.alone:
        right.barh([layer - 0.2 for layer in layers], sums.alone, height=0.4, color=DARK,
                   label="this layer alone")  # fmt: skip
    right.axvline(sums.logits, linestyle=":", color="black", label="logits")
    right.set_xlabel("departure from the sum of effects")
    right.set_title("both deltas at once", fontsize="medium")
    step = max(1, len(line.layers) // 16)
    for axis in (middle, right):
        axis.set_ylabel("layer")
        axis.set_yticks(layers[::step])
        axis.legend(fontsize="small")
    return figure


def _draw_line(axis: Axes, line: Line) -> None:
    axis.plot(line.positions, line.losses, marker="o", markersize=4, color=DARK)
    loss_at = dict(zip(line.positions, line.losses, strict=True))
    axis.plot((0, 1), (loss_at[0.0], loss_at[1.0]), linestyle=":", color="grey")
    axis.set_xticks((0, 1), ("task expert", "language expert"))
    axis.set_ylabel("loss, nats per token")
    axis.set_title("all layers interpolated", fontsize="medium")
