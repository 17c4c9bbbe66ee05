"""The figures of ten languages are those of the recorded scores."""

import pytest

from research import ten_languages as ten


@pytest.mark.slow
def test_figures_have_a_row_for_each_language_and_means(tmp_path):
    ten.draw_figures(tmp_path)
    text = (tmp_path / "forest-task.svg").read_text("utf-8")
    assert text == (ten.IMAGES / "forest-task.svg").read_text("utf-8")
    for row in (*ten.LANGUAGES.values(), "mean over languages", "mean, balanced"):
        assert row in text
