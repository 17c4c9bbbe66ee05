"""The dose of text: trainings and studies fit together, and its numbers are the recorded ones."""

import json

import pytest
from research.figures import save_svg

from research import answers, dose, labels, languages, transfer


def test_the_dose_evaluates_the_experts_that_it_trains():
    evaluated = {
        expert.removeprefix("trained/")
        for _, study in languages.dose_studies("/models/gemma")
        for kind in (study["task"], *study["languages"].values())
        for expert in kind["experts"]
    }
    assert evaluated == {name for name, _ in languages.specs("/models/gemma")}


def test_studies_leave_out_experts_that_are_not_trained():
    trained = {"task-1", "sw-73k-1", "sw-290k-1", "sn-73k-1", "after-task-1"}
    studies = dict(languages.dose_studies("/models/gemma", trained))
    assert studies.keys() == {"dose-task", "dose-after-task"}
    assert studies["dose-task"]["task"] == {"experts": ["trained/task-1"]}
    assert studies["dose-task"]["languages"] == {
        "sw": {"experts": ["trained/sw-73k-1", "trained/sw-290k-1"]},
        "sn": {"experts": ["trained/sn-73k-1"]},
    }


def test_a_larger_dose_shares_what_a_smaller_shares_with_the_test():
    found = json.loads((dose.HERE / "dose-task" / dose.DUPLICATES).read_text("utf-8"))
    assert found["headlines"].keys() == languages.TRAINED.keys()
    for by_dose in (by_dose for of_task in found.values() for by_dose in of_task.values()):
        small, middle, whole = (set(by_dose[dose]) for dose in languages.DOSES)
        assert small <= middle <= whole


FIGURES = {
    dose.FIGURE: dose.draw, answers.FIGURE: answers.draw, labels.FIGURE: labels.draw,
    transfer.CHART: transfer.draw_summary,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_figure_is_that_of_the_recorded_scores(figure, tmp_path):
    save_svg(FIGURES[figure](), tmp_path / "drawn")
    drawn = (tmp_path / "drawn.svg").read_text("utf-8")
    assert drawn == figure.with_suffix(".svg").read_text("utf-8")
