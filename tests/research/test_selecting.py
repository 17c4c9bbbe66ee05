"""The row of docs/questions.md on selecting among all models has the computed numbers."""

from pathlib import Path

from research.markdown import points
from research.selection import gains

from layerswap.evaluation.statistics import student_interval

PAGE = Path(__file__).parents[2] / "docs" / "questions.md"


def test_the_gains_of_the_page_are_those_of_the_recorded_scores():
    (row,) = (one for one in PAGE.read_text("utf-8").splitlines() if "research/selection" in one)
    found = gains()
    assert len(found) == 2
    for values in found.values():
        assert len(values) == 9
        assert points(student_interval(values)) in row
