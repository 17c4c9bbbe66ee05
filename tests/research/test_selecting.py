"""The table of docs/questions.md on the model to save has the computed numbers."""

from pathlib import Path

import pytest
from research.selection import by_study, main

PAGE = Path(__file__).parents[2] / "docs" / "questions.md"


@pytest.mark.slow
def test_the_regrets_of_the_page_are_those_of_the_recorded_scores(capsys):
    assert {len(rows) for rows in by_study().values()} == {3, 10}
    main()
    assert capsys.readouterr().out.strip() in PAGE.read_text("utf-8")
