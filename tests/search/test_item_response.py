"""Item-response screening against finite differences, simulations, and estimates by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from lm_eval_world import write_sweep
from scipy.optimize import approx_fprime
from scipy.special import log_expit
from typer.testing import CliRunner

from layerswap.cli import app
from layerswap.errors import EvaluationError, RecipeError
from layerswap.search.conditions import Condition
from layerswap.search.item_response import (
    HARDNESS,
    SPREAD,
    Estimator,
    Items,
    ability_of,
    choose_anchors,
    estimate,
    fit_items,
    posterior,
    screen,
)
from layerswap.search.spec import read_sweep


def simulated(people, documents, seed=0):
    """Abilities, items and answers of a two-parameter logistic world."""
    rng = np.random.default_rng(seed)
    ability = rng.standard_normal(people)
    items = Items(np.exp(rng.normal(0, 0.5, documents)), rng.normal(0, 1.5, documents))
    chances = np.stack([items.probability(one) for one in ability])
    return ability, items, (rng.random(chances.shape) < chances).astype(float)


def test_the_posterior_and_its_gradient():
    rng = np.random.default_rng(1)
    responses = rng.random((3, 4)).round(1)
    values = rng.standard_normal(2 * 4 + 3)
    found, gradient = posterior(values, responses)
    a, d, t = np.exp(values[:4]), values[4:8], values[8:]
    by_hand = 0.0
    for i in range(3):
        for j in range(4):
            p = 1 / (1 + np.exp(-(a[j] * t[i] - d[j])))
            by_hand -= responses[i, j] * np.log(p) + (1 - responses[i, j]) * np.log(1 - p)
    by_hand += (values[:4] ** 2).sum() / (2 * SPREAD**2) + (d**2).sum() / (2 * HARDNESS**2)
    by_hand += (t**2).sum() / 2
    assert found == pytest.approx(by_hand, rel=1e-12)
    slopes = approx_fprime(values, lambda v: posterior(v, responses)[0], 1e-7)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-4, atol=1e-5)


def test_items_and_abilities_are_recovered():
    ability, items, answers = simulated(80, 120)
    found, abilities = fit_items(answers)
    assert np.corrcoef(abilities, ability)[0, 1] > 0.95
    assert np.corrcoef(found.difficulty, items.difficulty)[0, 1] > 0.9
    assert np.corrcoef(np.log(found.discrimination), np.log(items.discrimination))[0, 1] > 0.5
    assert posterior(
        np.concatenate([np.log(found.discrimination), found.difficulty, abilities]), answers
    )[1] == pytest.approx(0, abs=0.05)


def test_the_ability_is_the_mode():
    _, items, answers = simulated(2, 30, seed=3)
    grid = np.linspace(-8, 8, 160_001)
    score = items.discrimination[:, None] * grid - items.difficulty[:, None]
    logs = log_expit(score), log_expit(-score)
    likelihood = answers[0] @ logs[0] + (1 - answers[0]) @ logs[1]
    best = grid[(likelihood - grid**2 / 2).argmax()]
    assert ability_of(items, answers[0]) == pytest.approx(best, abs=2e-4)


def test_an_estimate_by_hand():
    items = Items(np.array([1.0, 2.0, 0.5, 1.5]), np.array([0.0, 1.0, -1.0, 0.5]))
    anchors, weights, answers = np.array([0, 2]), np.array([0.7, 0.3]), np.array([1.0, 0.0])
    ability = ability_of(Items(items.discrimination[anchors], items.difficulty[anchors]), answers)
    rest = [1 / (1 + np.exp(-(a * ability - d))) for a, d in ((2.0, 1.0), (1.5, 0.5))]
    model = 0.5 * 0.7 + 0.5 * np.mean(rest)
    assert estimate(items, anchors, weights, answers) == pytest.approx(0.5 * 0.7 + 0.5 * model)
    everything = np.array([1.0, 0.0, 1.0, 1.0])
    all_of_them = estimate(items, np.arange(4), np.full(4, 0.25), everything)
    assert all_of_them == pytest.approx(0.75)


def test_anchors_stand_for_clusters():
    discrimination = np.repeat([1.0, 2.0, 3.0], [5, 3, 2])
    items = Items(discrimination, np.repeat([0.0, 5.0, -5.0], [5, 3, 2]))
    anchors, weights = choose_anchors(items, 3)
    assert sorted(discrimination[anchors]) == [1, 2, 3]
    assert sorted(weights) == pytest.approx([0.2, 0.3, 0.5])
    more, shares = choose_anchors(items, 6)  # some documents are exactly alike
    assert len(set(more)) == 6
    for value, share in ((1.0, 0.5), (2.0, 0.3), (3.0, 0.2)):
        assert shares[discrimination[more] == value].sum() == pytest.approx(share)
    everything, equal = choose_anchors(items, 10)
    assert everything.tolist() == list(range(10))
    assert equal == pytest.approx(np.full(10, 0.1))


def test_screening_finds_a_good_composition_and_counts_its_scores():
    regrets = []
    for seed in range(10):
        _, _, answers = simulated(40, 200, seed)
        asked = np.zeros_like(answers)

        def score(members, places, answers=answers, asked=asked):
            asked[np.ix_(list(members), list(places))] = 1
            return answers[np.ix_(list(members), list(places))]

        went = screen(score, range(40), 200, calibration=6, anchors=40, finalists=3)
        assert went.examples == tuple(asked.sum(axis=1).astype(int))
        assert went.saved == pytest.approx(1 - asked.mean())
        assert [i for i, n in enumerate(went.examples) if n == 200] == list(went.survivors)
        truth = answers.mean(axis=1)
        for i in went.survivors:
            assert went.estimates[i] == pytest.approx(truth[i])
        best = max(went.survivors, key=lambda i: went.estimates[i])
        regrets.append(truth.max() - truth[best])
    assert np.mean(regrets) < 0.02
    assert "9 of 40 compositions were scored on all 200 examples" in str(went)


def test_few_compositions_are_all_scored():
    _, _, answers = simulated(3, 20)
    went = screen(lambda m, p: answers[np.ix_(list(m), list(p))], range(3), 20)
    assert went.survivors == (0, 1, 2)
    assert went.saved == 0


def test_settings_out_of_range():
    answers = np.full((4, 5), 2.0)
    with pytest.raises(EvaluationError, match="a screening needs"):
        screen(lambda m, p: answers, range(4), 5, calibration=1)
    with pytest.raises(EvaluationError, match="scores between 0 and 1"):
        screen(lambda m, p: answers, range(4), 5)


def test_compositions_that_come_one_after_another():
    _, _, answers = simulated(30, 150)
    asked = np.zeros_like(answers)

    def score(members, places):
        asked[np.ix_(list(members), list(places))] = 1
        return answers[np.ix_(list(members), list(places))]

    estimator = Estimator(score, 150, calibration=6, anchors=30)
    found = [*estimator(range(4)), *estimator(range(4, 17)), *estimator([3, 20, 20, 29])]
    counts = asked.sum(axis=1)
    assert (counts[:6] == 150).all()
    assert (counts[6:17] == 30).all()
    truth = answers.mean(axis=1)
    assert found[:6] == pytest.approx(truth[:6])
    assert found[17] == found[3]
    assert np.corrcoef(found[6:17], truth[6:17])[0, 1] > 0.8
    # However they come, the same compositions give the same estimates: a search can resume.
    again = Estimator(score, 150, calibration=6, anchors=30)
    assert again([*range(17), 20, 29]) == [*found[:17], found[18], found[20]]
    went = estimator.finish(list(range(17)), 2)
    assert len(went.survivors) == 8
    assert [went.estimates[i] for i in went.survivors] == pytest.approx(truth[list(went.survivors)])


def test_a_sweep_that_is_screened(world, tmp_path):
    settings = {"item_response": {"calibration": 2, "documents": 1, "finalists": 1}}
    out = {}
    for name, changes in (("whole", {}), ("screened", settings)):
        path = write_sweep(world, tmp_path / f"{name}.yaml", tasks=["maembe_choose"], **changes)
        done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
        out[name] = json.loads((tmp_path / name / "board.json").read_text())
    went = out["screened"]["item_response"]
    assert sorted(went["examples"]) == [1, 1, 1, 3, 3, 3]
    whole = {Condition.from_dict(one): one["mean"] for one in out["whole"]["development"]}
    found = {Condition.from_dict(one): one["mean"] for one in out["screened"]["development"]}
    names = list(found)
    for place in went["survivors"]:
        assert found[names[place]] == pytest.approx(whole[names[place]])
    chosen = Condition.from_dict(out["screened"]["chosen"])
    assert names.index(chosen) in went["survivors"]
    assert whole[chosen] == max(whole[names[i]] for i in went["survivors"])
    assert "3 of 6 compositions were scored" in (tmp_path / "screened/report.html").read_text()


def test_item_response_and_halving_exclude_each_other(world, tmp_path):
    for changes, message in (
        ({"halving": {}, "item_response": {}}, "give halving or item_response, not both"),
        ({"grid": None, "search": {}, "halving": {}}, "halving is for a grid"),
    ):
        with pytest.raises(RecipeError, match=message):
            read_sweep(write_sweep(world, tmp_path / "s.yaml", **changes))
