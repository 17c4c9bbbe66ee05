"""A report as the quickstart writes it, with invented numbers."""

from __future__ import annotations

from dataclasses import dataclass

from layerswap.compose.presets import Zones, swap
from layerswap.report.charts import draw_heat_map, draw_intervals
from layerswap.report.page import Report, Section
from layerswap.report.stack import draw_stack
from layerswap.report.tables import Table

NAMES = {"language": "Swahili expert", "task": "math expert"}
MODELS = ("base", "math expert", "Swahili expert", "soup", "swap, paper's default", "swap, best")
MEASURES = ("maths, Swahili", "maths, English", "reading, Swahili", "reading, English")
GRID = {
    (b, u): 0.31 + 0.05 * (3 - abs(b - 1)) + 0.02 * (2 - abs(u - 1)) - 0.013 * b * u
    for b in range(5)
    for u in range(4)
}


@dataclass(frozen=True)
class Score:
    """Stands in for an interval: figures and tables only read these three numbers."""

    mean: float
    low: float
    high: float


def scores(model: int) -> list[Score]:
    means = [0.21 + 0.057 * model, 0.4 + 0.11 * (model % 3), 0.52 + 0.06 * (model % 4), 0.9]
    return [Score(mean, mean - 0.042, mean + 0.043) for mean in means]


def example() -> Report:
    rows = [(name, *scores(i)) for i, name in enumerate(MODELS)]
    results = Table(("model", *MEASURES), rows, caption="Accuracy in per cent.", highlight=5)
    grid = draw_heat_map(
        GRID, row_label="bottom layers", column_label="top layers",
        best=max(GRID, key=lambda cell: GRID[cell]), default=(1, 1),
    )  # fmt: skip
    task = draw_intervals(
        [(name, first) for name, first, *_ in rows],
        measure="accuracy on Swahili maths", highlight="swap, best",
    )  # fmt: skip
    return Report(
        title="Maths in Swahili, without Swahili maths",
        lead="The swap solves 49.5% of Swahili problems.\n\nNo training: two experts recomposed.",
        figure=draw_stack(swap(8, zones=Zones(1, 1, 1, 0)), NAMES),
        sections=[
            Section("What each model can do", "Six models.", table=results, note="A note."),
            Section("The task in the target language", "Each dot is a model.", figure=task),
            Section("Choosing the layers", "Scores on the development split.", figure=grid),
        ],
        colophon="layerswap 0.1.0; seed 0; test split of 500 problems.",
    )
