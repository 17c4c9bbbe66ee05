"""The table of docs/evaluation.md on the model to save has the computed numbers."""

from pathlib import Path

import numpy as np
import pytest
from research.selection import by_study, main, select

from layerswap.experiment.conditions import CHOSEN, DEFAULT

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


@pytest.mark.slow
def test_the_regrets_of_the_page_are_those_of_the_recorded_scores(capsys):
    assert {len(rows) for rows in by_study().values()} == {3, 10}
    main([])
    assert capsys.readouterr().out.strip() in PAGE.read_text("utf-8")


@pytest.mark.parametrize(
    ("right", "selected"),
    [(range(40), CHOSEN), (range(20), CHOSEN), (range(10, 23), DEFAULT), ((), DEFAULT)],
)
def test_the_chosen_one_is_selected_if_it_is_clearly_better(right, selected):
    """The default answers the first 10 of 40 development documents."""
    default, chosen = np.zeros(40), np.zeros(40)
    default[:10] = 1
    chosen[list(right)] = 1
    assert select({DEFAULT: default, CHOSEN: chosen}, CHOSEN, DEFAULT) == selected
    assert select({CHOSEN: chosen}, CHOSEN, DEFAULT) == CHOSEN, "without a default"
