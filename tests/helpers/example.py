"""A report as the quickstart makes one, with invented numbers."""

from __future__ import annotations

from dataclasses import dataclass

from layerswap.compose import Zones, swap
from layerswap.report import Report, Section, Table, draw_heat_map, draw_intervals, draw_stack

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
    best = swap(8, zones=Zones(1, 1, 1, 0))
    results = Table(
        columns=("model", *MEASURES),
        rows=[(name, *scores(i)) for i, name in enumerate(MODELS)],
        caption="Accuracy on the test split in per cent, with 95% intervals over 500 problems.",
        highlight=5,
    )
    grid = draw_heat_map(
        GRID,
        row_label="bottom layers",
        column_label="top layers",
        best=max(GRID, key=lambda cell: GRID[cell]),
        default=(1, 1),
    )
    task = draw_intervals(
        [(name, scores(i)[0]) for i, name in enumerate(MODELS)],
        measure="accuracy on Swahili maths",
        highlight="swap, best",
    )
    return Report(
        title="Maths in Swahili, without Swahili maths",
        lead="Taking the outer layers from the Swahili expert and the middle from the math "
        "expert solves 49.5% of Swahili problems. The math expert alone solves 26.7%, "
        "the usual average of both 38.1%.\n\nNo training: the two experts were recomposed.",
        figure=draw_stack(best, NAMES),
        sections=[
            Section(
                "What each model can do",
                "Six models of the same size, on four measures.",
                table=results,
                note="The difference to the task expert is not significant "
                "(paired bootstrap, 95% interval -1.2 to 3.4 points).",
            ),
            Section(
                "The task in the target language",
                "Each dot is a model; the whisker is the 95% interval of its mean.",
                figure=task,
            ),
            Section(
                "Choosing the layers",
                "Every pair of bottom and top layers was scored on the development split. The "
                "best one was then measured, once, on the test split above.",
                figure=grid,
            ),
        ],
        colophon="layerswap 0.1.0; seed 0; test split of 500 problems.",
    )
