"""Open questions of the lab: settings become steps, and steps become tables."""

from dataclasses import replace

import numpy as np
import pytest
from research.__main__ import answered
from research.lab.train import ModelShape, Training, Trainings
from research.pairs import choice
from research.questions import Question, Setting, find, plan, questions

from layerswap import LayerswapError

SHORT = replace(
    Trainings(),
    shape=ModelShape(layers=4, hidden=16, heads=2, mlp=16),
    base=Training(steps=3, learning_rate=1e-3, batch=4, warmup=1),
    task=Training(steps=2, learning_rate=1e-2, batch=4, warmup=1, part="task"),
    language=Training(steps=2, learning_rate=1e-2, batch=4, warmup=1, part="language"),
)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    setting = Setting("a base of its own", SHORT, base="own")
    asked = {
        "own": Question("Why?", (setting, replace(setting, name="twice", rounds=2))),
        "alone": Question("What is it worth?", (setting,)),
    }
    return answered(asked, tmp_path_factory.mktemp("questions"), seeds=2, n=8)


@pytest.mark.slow
def test_a_question_is_answered_in_tables_with_intervals(tables):
    text = tables["own"]
    assert text.startswith("# Why?")
    for language in ("nela", "furo"):
        assert f"## {language}: the models" in text
    assert text.count("| a base of its own |") == text.count("| twice |") == 8
    assert "| setting | top | bottom 0 | bottom 1 | bottom 2 |" in text
    assert "8 test problems, mean over 2 seeds" in text


@pytest.mark.slow
def test_a_setting_alone_is_shown_model_by_model(tables):
    for language in ("nela", "furo"):
        table = tables["alone"].split(f"## {language}: the models")[1].split("##")[0]
        for model in ("base", "task expert", "language expert", "soup", "TIES", "swap, chosen"):
            assert f"\n| {model} |" in table
    assert "2 pairs of experts with a seed each, 8 test problems" in tables["alone"]


@pytest.mark.parametrize(
    ("better", "selected"), [(range(10, 40), "swap 2,0,0,blend"), ((10,), "swap, default")]
)
def test_development_alone_decides_from_what_a_second_round_starts(better, selected):
    """The default answers the first 10 of 40 problems, and all of the test."""
    other = np.isin(np.arange(40), [*range(10), *better])
    scores = {
        "swap, default": {"development": np.arange(40) < 10, "test": np.ones(40, bool)},
        "swap 2,0,0,blend": {"development": other, "test": np.zeros(40, bool)},
        "soup": {"development": np.ones(40, bool), "test": np.ones(40, bool)},
    }
    assert choice(scores) == ("swap 2,0,0,blend", selected)


@pytest.mark.slow
def test_settings_share_a_base_however_their_experts_are_trained():
    depth = find(["depth"])
    graph = plan(depth, seeds=1, n=10)
    assert [step.name for step in graph if step.kind == "base"] == ["base/4 layers"]
    assert len(depth["depth"].settings) == 4
    assert graph["pair/4 layers, full SFT/5000"].needs == graph["pair/4 layers/5000"].needs
    assert graph.keys["pair/4 layers, full SFT/5000"] != graph.keys["pair/4 layers/5000"]


@pytest.mark.slow
def test_questions_share_the_steps_that_they_have_in_common():
    every = questions()
    graph = plan(every, seeds=1, n=10)
    shared = [step for step in graph if step.name == "pair/as shipped/5000"]
    assert len(shared) == 1
    assert len([step for step in graph if step.kind == "answer"]) == len(every)
    with pytest.raises(LayerswapError, match="no question 'size2'"):
        find(["size2"])
