"""The compositions of the question about attention and feed-forward are those that are named."""

import numpy as np
import pytest
from lab_files import write_tsv

import layerswap as ls
from layerswap.compose.recipe import check_recipe
from layerswap.lab.assets import shipped
from layerswap.merge.api import make_plan
from research import outer

PAIR = shipped().task_experts[0], shipped().language_experts["furo"][0]
ROWS = [("politics", "bunge la nchi"), ("sports", "timu ya mpira"), ("health", "daktari mpya"),
        ("business", "bei ya mafuta"), ("sports", "goli la pili")]  # fmt: skip


@pytest.mark.slow
def test_every_composition_has_its_own_answers(tmp_path):
    for split in ("dev", "test"):
        news = [(category, headline, headline) for category, headline in ROWS]
        file = tmp_path / "masakhanews" / f"swa.{split}.tsv"
        write_tsv(file, ("category", "headline", "text"), news)
    task, language = PAIR
    found = outer.asked(task, language, "masakhanews", "sw", tmp_path, tmp_path / "out", layers=8)
    assert found.keys() == outer.recipes(8).keys()
    alone = ls.evaluate([task, language], suite="masakhanews", language="sw", data=tmp_path,
                        out=tmp_path / "alone", dtype="float32", device="cpu")  # fmt: skip
    scores = {row["model"]: row["score"] for row in alone.records() if row["metric"] == "acc"}
    for name, folder in ((outer.TASK, task), (outer.LANGUAGE, language)):
        assert len(found[name]) == len(ROWS)  # the test split alone
        assert np.isclose(found[name].mean(), scores[folder.name])


def test_one_role_of_the_outer_layers_comes_from_the_language_expert():
    def experts(name):
        recipe = outer.with_experts(outer.recipes(8)[name], *PAIR)
        composition = make_plan(check_recipe(recipe, where=name)).composition
        return {(place.layer, place.role): blend.experts
                for place, blend in composition.blends.items()}  # fmt: skip

    for name, role in ((outer.ATTENTION, "attention"), (outer.FEED_FORWARD, "mlp")):
        taken = {place for place, names in experts(name).items() if "language" in names}
        assert taken - {(0, "router"), (7, "router")} == {(0, role), (7, role)}
