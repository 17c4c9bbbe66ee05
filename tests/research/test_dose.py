"""The trainings and studies of the dose are of their schemas, and fit together."""

import yaml

from layerswap.study.spec import read_study
from layerswap.training.expert.spec import read_expert
from research import languages


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
