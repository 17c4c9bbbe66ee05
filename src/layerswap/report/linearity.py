"""Figures of linearity: loss along the line between experts, and departure from additivity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerswap.evaluate.linearity import Additivity, Connectivity

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def linearity_figure(line: Connectivity, sums: Additivity) -> Figure:
    """Three panels: loss along the line, the barrier of each layer, additivity by layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.plot(line.whole.positions, line.whole.losses, marker="o", color="#00224e")
    ends = line.whole.losses[0], line.whole.losses[-1]
    left.plot((0, 1), ends, linestyle=":", color="grey")
    left.set_xlabel("task expert  →  language expert")
    left.set_ylabel("loss, nats per token")
    left.set_title("between the experts")
    layers = range(len(line.layers))
    middle.barh(layers, [one.barrier for one in line.layers], color="#575d6d")
    middle.set_xlabel("barrier, nats per token")
    middle.set_ylabel("layer")
    middle.set_title("one layer interpolated")
    right.barh(layers, sums.layers, color="#a59c74")
    right.axvline(sums.logits, linestyle=":", color="black", label="logits")
    right.set_xlabel("departure from the sum of effects")
    right.set_title("both deltas at once")
    right.legend(fontsize="small")
    return figure
