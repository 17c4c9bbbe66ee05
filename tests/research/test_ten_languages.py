"""The numbers of ten languages are those of the recorded scores."""

import numpy as np
import pytest

from layerswap.study.results import RESULTS, read_condition_scores
from research import ten_languages as ten


@pytest.mark.parametrize("code", ten.LANGUAGES)
def test_accuracy_is_the_mean_of_the_recorded_scores(code):
    middle = {ten.TASK: ten.PARTIAL, ten.SWAP: ten.PARTIAL_SWAP}
    whole = {model: model for model in ten.MODELS if model not in middle.values()}
    for study, names in ((ten.STUDY, whole), (ten.MIDDLE, middle)):
        ((_, recorded),) = read_condition_scores(study / code / RESULTS).items()
        assert recorded.published == 0  # the test documents alone
        for model, name in names.items():
            own = [v for one, v in recorded.scores.items() if str(one.treatment) == model]
            assert len(own) == (1 if model == ten.BASE else 3)
            assert ten.accuracy(code, name) == pytest.approx(np.mean(own))


def test_figures_have_a_row_for_each_language_and_means(tmp_path):
    ten.draw_figures(tmp_path)
    for name in ("forest-task", "forest-soup"):
        text = (tmp_path / f"{name}.svg").read_text("utf-8")
        assert text == (ten.IMAGES / f"{name}.svg").read_text("utf-8")
        for row in (*ten.LANGUAGES.values(), "mean over languages", "mean, balanced"):
            assert row in text
