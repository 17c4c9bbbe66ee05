"""The figure of linearity: loss along the line between experts, and departure from additivity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerswap.evaluate.linearity import Additivity, Connectivity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DARK, LIGHT = "#00224e", "#a59c74"
"""Two colours of cividis: apart for colour-blind readers, and in grey."""


def linearity_figure(line: Connectivity, sums: Additivity) -> Figure:
    """Three panels: loss along the line, the same for each layer, and additivity by layer.

    Args:
        line: loss between two experts.
        sums: additivity of their deltas, over as many layers.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.3), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.plot(line.whole.positions, line.whole.losses, marker="o", markersize=3, color=DARK)
    loss_at = dict(zip(line.whole.positions, line.whole.losses, strict=True))
    left.plot((0, 1), (loss_at[0.0], loss_at[1.0]), linestyle=":", color="grey")
    left.set_title("all layers interpolated", fontsize="medium")
    _draw_layers(figure, middle, line)
    for axis in (left, middle):
        axis.set_xticks((0, 1), ("task expert", "language expert"))
        axis.set_ylabel("loss, nats per token")
    _draw_departures(right, sums)
    return figure


def _draw_layers(figure: Figure, axis: Axes, line: Connectivity) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    last, shades = max(1, len(line.layers) - 1), colormaps["cividis_r"]
    for layer, one in enumerate(line.layers):
        axis.plot(one.positions, one.losses, color=shades(layer / last))
    figure.colorbar(ScalarMappable(Normalize(0, last), shades), ax=axis, label="layer")
    axis.set_title(f"one layer interpolated, {line.elsewhere} elsewhere", fontsize="medium")


def _draw_departures(axis: Axes, sums: Additivity) -> None:
    layers = range(len(sums.layers))
    axis.barh([layer + 0.2 for layer in layers], sums.layers, height=0.4, color=LIGHT,
              label="all layers changed")  # fmt: skip
    if sums.alone:
        axis.barh([layer - 0.2 for layer in layers], sums.alone, height=0.4, color=DARK,
                  label="this layer alone")  # fmt: skip
    axis.axvline(sums.logits, linestyle=":", color="black", label="logits")
    axis.set_yticks(layers[:: max(1, len(layers) // 16)])
    axis.set_ylabel("layer")
    axis.set_xlabel("departure from the sum of effects")
    axis.set_title("both deltas at once", fontsize="medium")
    axis.legend(fontsize="x-small", loc="lower right")
