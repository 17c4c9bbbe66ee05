"""The compositions of the question about attention and feed-forward are those that are named."""

import json

import numpy as np
import pytest
from lab_files import write_tsv

import layerswap as ls
from layerswap.compose.recipe import check_recipe
from layerswap.lab.assets import shipped
from layerswap.merge import make_plan
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


def test_recorded_answers_become_tables_and_a_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(outer, "RECORDED", tmp_path)
    names = [*outer.recipes(outer.LAYERS)]
    for task, code, runs in (("headlines", "sw", ["1100", "1000"]), ("headlines", "yo", ["11"]),
                             ("sentences", "sw", ["0000"])):  # fmt: skip
        answers = {name: ["0" * len(run) for run in runs] for name in names}
        (tmp_path / f"{task}-{code}.json").write_text(json.dumps(answers | {outer.BOTH: runs}))
    page, languages = outer.page_table(), outer.languages_table()
    assert [row[0] for row in page.rows] == [
        name for name in names if name not in ("bottom 3", outer.PARTITION)
    ]
    # A document counts half if one of two experts is right; then the mean over two languages.
    assert [page.rows[0][i].split(" ")[0] for i in (1, 3)] == ["68.8", "0.0"]
    assert page.rows[1][2].startswith("-68.8 [")
    assert [row[:4] for row in languages.rows if row[3] == outer.BOTH] == [
        ["headlines", "Swahili", "2", outer.BOTH], ["headlines", "Yoruba", "1", outer.BOTH],
        ["sentences", "Swahili", "1", outer.BOTH],
    ]  # fmt: skip
    assert "headlines: attention −68.8" in outer.draw().description


def test_a_composition_is_chosen_by_the_other_languages_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(outer, "RECORDED", tmp_path)
    right = {  # of four documents; the default has two
        "headlines-sw": {outer.EVEN: "1111"}, "headlines-ha": {outer.ATTENTION: "1111"},
        "headlines-yo": {outer.ATTENTION: "1110"}, "sentences-sw": {outer.SOUP: "1111"},
    }  # fmt: skip
    for name, own in right.items():
        answers = {model: ["0000"] for model in outer.recipes(outer.LAYERS)}
        answers |= {outer.BOTH: ["0011"]} | {model: [runs] for model, runs in own.items()}
        (tmp_path / f"{name}.json").write_text(json.dumps(answers))
    rows = {row[0]: row for row in outer.chosen_elsewhere().rows}
    # Swahili's own answers prefer the even split; the average is no choice of layers.
    chosen = [rows[name][1] for name in ("Swahili", "Hausa", "Yoruba")]
    assert chosen == [outer.ATTENTION, outer.BOTH, outer.BOTH]
    assert rows["Swahili"][2].startswith("-50.0 [")
    assert rows["Hausa"][2].startswith("+0.0 [")
    assert rows["mean"][2].startswith("-16.7 [")
    assert rows["mean"][3].startswith("-50.0 [")
