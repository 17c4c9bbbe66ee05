"""The dose of text: trainings and studies fit together, and its numbers are the recorded ones."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from layerswap.evaluation.results import SCORES_TABLE
from layerswap.study.results import RESULTS, read_condition_scores
from layerswap.study.spec import read_study
from layerswap.training.expert.spec import read_expert
from research import dose, languages


def test_the_dose_evaluates_the_experts_that_it_trains(tmp_path):
    trained = {}
    for name, spec in languages.specs("/models/gemma"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(spec), "utf-8")
        trained[name] = read_expert(path)
    asked = set()
    for name, study in languages.dose_studies("/models/gemma"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(study), "utf-8")
        for kind in read_study(path).kinds.values():
            asked |= {one.removeprefix("trained/") for one in kind.experts}
    assert asked == set(trained)


def test_studies_leave_out_experts_that_are_not_trained():
    trained = {"task-1", "sw-73k-1", "sw-290k-1", "sn-73k-1", "after-task-1"}
    studies = dict(languages.dose_studies("/models/gemma", trained))
    assert studies.keys() == {"dose-task", "dose-after-task"}
    assert studies["dose-task"]["task"] == {"experts": ["trained/task-1"]}
    assert studies["dose-task"]["languages"] == {
        "sw": {"experts": ["trained/sw-73k-1", "trained/sw-290k-1"]},
        "sn": {"experts": ["trained/sn-73k-1"]},
    }


EVALUATED = [
    (study, code, own)
    for study in dose.STUDIES
    for code in dose.recorded(study)
    for own in dose.doses(study, code)
]


@pytest.mark.parametrize(("study", "code", "own"), EVALUATED)
def test_scores_of_a_dose_are_those_of_its_experts(study, code, own):
    ((_, recorded),) = read_condition_scores(dose.HERE / study / code / RESULTS).items()
    names = dose.experts(study)[code]
    of_dose = {f"-{i}" for i, name in enumerate(names) if name.startswith(f"{code}-{own}-")}
    for model in (dose.SWAP, dose.SOUP, dose.TASK, dose.LANGUAGE):
        values = [
            value for one, value in recorded.scores.items()
            if str(one.treatment) == model and one.pair[1:] in of_dose
        ]  # fmt: skip
        assert len(values) == 3 * len(of_dose)
        found = dose.classified(study, code, model, own).right
        assert found == pytest.approx(np.mean(values, axis=0))


def test_answers_of_experts_that_are_gone_stay(tmp_path):
    """Three language experts, recorded as two and then the third by a study of its own."""
    recorded = dose._rows(dose.HERE / "dose-task", "sn")
    path = tmp_path / "sn" / RESULTS / SCORES_TABLE
    path.parent.mkdir(parents=True)
    schema = pq.read_schema(dose.HERE / "dose-task" / "sn" / RESULTS / SCORES_TABLE)
    before = [row for row in recorded if not row["pair"].endswith("-2")]
    third = [
        {**row, **{key: row[key].replace(f"{row['pair']}", f"{row['pair'][:1]}-0")
                   for key in ("pair", "model")}}
        for row in recorded if row["pair"].endswith("-2")
    ]  # fmt: skip
    alone = [row for row in recorded if not row["pair"]] + third
    pq.write_table(pa.Table.from_pylist(alone, schema), path)
    assert dose._join(tmp_path, "sn", before, ["a", "b"], ["c"]) == ["a", "b", "c"]
    assert sorted(map(str, dose._rows(tmp_path, "sn"))) == sorted(map(str, recorded))

    other = [{**row, "predicted": "none"} for row in before]
    with pytest.raises(SystemExit, match="the task experts do not answer as recorded"):
        dose._join(tmp_path, "sn", other, ["a", "b"], ["c"])


@pytest.mark.parametrize("task", languages.TASKS)
def test_scores_after_the_task_are_those_of_its_experts(task):
    study = f"dose-after-{task}"
    ((_, recorded),) = read_condition_scores(dose.HERE / study / "sw" / RESULTS).items()
    names = dose.experts(study)["task"]
    for kind in dose.AFTER:
        own = [one for one in names if one.startswith(f"{kind}-{task}-")]
        values = [
            value for one, value in recorded.scores.items()
            if str(one.treatment) == dose.TASK and names[int(one.pair[0])] in own
        ]  # fmt: skip
        assert len(values) == len(own) == 3
        found = dose.classified(study, "sw", dose.TASK, tasks=own).right
        assert found == pytest.approx(np.mean(values, axis=0))


def test_a_larger_dose_shares_what_a_smaller_shares_with_the_test():
    found = json.loads((dose.HERE / "dose-task" / dose.DUPLICATES).read_text("utf-8"))
    assert found["headlines"].keys() == languages.TRAINED.keys()
    for own in (one for of_task in found.values() for one in of_task.values()):
        small, middle, whole = (set(own[one]) for one in languages.DOSES)
        assert small <= middle <= whole


def test_a_gain_without_shared_documents_is_that_of_the_others():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]]
            for line in dose.duplicates_table().splitlines()]  # fmt: skip
    cell = next(row[-1] for row in rows if row[0] == "Somali, headlines")
    shared = json.loads((dose.HERE / "dose-task" / dose.DUPLICATES).read_text("utf-8"))
    means = []
    for size in ("all", "73k"):
        one = dose.classified("dose-task", "so", dose.SWAP, size)
        right = (one.labels == one.predicted).mean(axis=0)
        kept = [i for i in range(len(right)) if i not in shared["headlines"]["so"]["all"]]
        means.append(100 * right[kept].mean())
    assert cell.startswith(f"{means[0] - means[1]:+.1f} [")


def test_the_curve_is_that_of_the_recorded_scores(tmp_path):
    from research.figures import save_svg

    save_svg(dose.draw(), tmp_path / "dose")
    assert (tmp_path / "dose.svg").read_text("utf-8") == dose.FIGURE.with_suffix(".svg").read_text(
        "utf-8"
    )
