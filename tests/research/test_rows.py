"""The lab's rows of docs/papers.md: tables and numbers are those of the recorded scores."""

from pathlib import Path

import numpy as np
import pytest
from research.lab.world import PEOPLE, make_world

from research import rows

DOCS = Path(__file__).parents[2] / "docs"


def test_seeds_and_documents_are_drawn_at_once():
    by_seed = np.repeat([[0.0], [1.0]], 500, axis=1)
    apart = rows.crossed(by_seed)
    assert (apart.low, apart.high) == pytest.approx((0, 1)), "two seeds apart"
    same = rows.crossed(np.tile(np.arange(500) % 2, (3, 1)).astype(float))
    assert 0.4 < same.low < same.mean == 0.5 < same.high < 0.6


def test_raw_text_has_neither_questions_nor_other_languages():

    world = make_world()
    spoken = world.language("furo")
    known = {*spoken.words.values(), *(str(n) for n in range(10)), *PEOPLE}
    stream = rows.text_stream(world, "furo", seed=1)
    for told in (next(stream) for _ in range(200)):
        assert told.prompt == ""
        assert set(told.completion.replace(".", "").split()) <= known
        assert "?" not in told.completion


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=[pytest.mark.slow] * (one in ("lab-signals", "lab-reverted")))
        for one in rows.TABLES
    ],
)
def test_the_tables_are_those_of_the_recorded_scores(name):
    assert (DOCS / "tables" / f"{name}.csv").read_text("utf-8") == rows.TABLES[name]().csv()


def test_the_numbers_of_the_page_are_the_recorded_ones():
    text = " ".join((DOCS / "lab.md").read_text("utf-8").split())
    for words in rows.numbers():
        assert words in text, words


def test_the_correlations_of_the_page_are_those_of_the_table():
    text = " ".join((DOCS / "lab.md").read_text("utf-8").split())
    table = (DOCS / "tables" / "lab-signals.csv").read_text("utf-8")
    shown = ["+0.77 [+0.33, +0.97]", "+0.36 [-0.46, +0.86]", "+0.87 [+0.32, +1.00]",
             "+0.81 [+0.24, +0.99]", "+0.68 [+0.19, +0.92]", "-0.26 [-0.90, +0.58]"]  # fmt: skip
    assert all(one in text and one in table for one in shown)


def test_the_page_of_the_papers_takes_its_numbers_from_the_tables():
    page = (DOCS / "papers.md").read_text("utf-8")
    assert "| not measured" not in page
    asked = "problem furo test"
    every = [rows.mean(f"turns-{one}-#", asked).mean for one in rows.SETTINGS["turns"]["every"]]
    assert ", ".join(f"{100 * one:.1f}" for one in every) in page
    swaps = [rows.mean(f"task-# + {one}-furo-#", asked).mean for one in ("text", "language")]
    assert "raw text {:.1f}, usual swap {:.1f}".format(*(100 * one for one in swaps)) in page
