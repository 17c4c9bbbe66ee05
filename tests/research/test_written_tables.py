"""Every table beside a page is made by a script, made from the code, or checked against itself."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from research.lab.world import WorldSettings

from layerswap.evaluation.statistics import mean_interval
from layerswap.methods import METHODS
from research import tables

DOCS = Path(__file__).parents[2] / "docs"
CELL = re.compile(r"([+-]?\d*\.?\d+)%? \[([+-]?[\d.]+), ([+-]?[\d.]+)\]( \*)?")
SAID = {
    "lab-scores": [("lab", "| TIES, half kept | 31.0 [28.7, 33.6] | +0.1 [-1.3, +1.5] | 32.3"),
                   ("papers", "`furo`: 27.9, 15.3, 9.1, 6.0, 7.2")],
    "lab-study": [("lab", "answers 47.4% in `nela` and 37.0% in `furo`, the default swap 29.6 and"),
                  ("lab", "Simultaneous training has 32.0 and 23.2."), ("lab", "27.4 and 16.8."),
                  ("papers", "`furo`: swap 29.8, joint 37.0, TIES 19.4"),
                  ("papers", "pair 29.8, multilingual soup 16.8; `nela`: 29.6, 27.4")],
    "lab-questions": [("lab", "the default swap 13.8%"), ("lab", "and 9.6%")],
    "lab-layers-put-back": [("lab", "expert solves 45%"), ("lab", "partial expert 97%")],
    "lab-first-world": [("lab", "swap answers 68.0%, the task expert 67.7%"),
                        ("lab", "answer 37.1%, the language expert alone 36.8%")],
    "lab-regimes": [("lab", "language alone 36.9%, simultaneous along partition C 35.2"),
                    ("papers", "`furo`: 34.2, 35.2, 34.3, 32.9, 36.9, 30.1, 35.0")],
}  # fmt: skip
"""Words of the pages with numbers of a table."""


def read(name):
    with (DOCS / "tables" / f"{name}.csv").open(newline="") as file:
        return [*csv.DictReader(file)]


def numbers(cell):
    """Mean, low and high of a cell, and its star."""
    *found, star = CELL.match(cell).groups()
    return (*map(float, found), star)


def test_the_table_of_methods_is_that_of_the_registry():
    page = (DOCS / "recipes.md").read_text("utf-8")
    (listed,) = re.findall(r"^The methods are (.*?)\. \[", page, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == METHODS.keys()
    text = (DOCS / "tables" / "methods.csv").read_text("utf-8")
    assert text == tables.methods_table().csv()


@pytest.mark.parametrize("name", [name for name, (count, _) in tables.MEASURED.items() if count])
def test_a_score_is_a_count_of_documents_with_the_interval_of_the_package(name):
    count, found = tables.MEASURED[name][0], 0
    for cell in (cell for row in read(name) for cell in row.values()):
        scores = re.fullmatch(r"(\d+\.?\d*)%?(?: (\[.*))?", cell)
        if scores is None:
            continue
        score = float(scores[1])
        right = round(score * count / 100)
        rounded = 0.051 if "." in scores[1] else 0.51
        assert abs(100 * right / count - score) < rounded, cell
        found += 1
        if scores[2]:  # which documents are right moves an interval by two at most
            interval = mean_interval(np.r_[np.ones(right), np.zeros(count - right)])
            shown = 100 * np.array([interval.low, interval.high])
            assert np.abs(shown - numbers(cell)[1:3]).max() < rounded + 200 / count, cell
    assert found > 30


@pytest.mark.parametrize("name", tables.MEASURED)
def test_an_interval_holds_its_mean_and_a_star_says_that_it_excludes_zero(name):
    for cell in (cell for row in read(name) for cell in row.values() if CELL.match(cell)):
        mean, low, high, star = numbers(cell)
        assert low <= mean <= high, cell
        if name == "lab-scores" and cell.startswith(("+", "-")):
            assert bool(star) == (low > 0 or high < 0), cell


def test_differences_and_rows_that_two_tables_share_are_equal():
    scores = {(row["language"], row["model"]): row for row in read("lab-scores")}
    means = {model: numbers(row["score, %"])[0] for model, row in scores.items()}
    for (language, model), row in scores.items():
        assert float(row["lowest pair"]) <= means[language, model] <= float(row["highest pair"])
        for swap in ("swap, default", "swap, chosen"):
            if cell := row[f"{swap}, minus it"]:
                apart = means[language, swap] - means[language, model]
                assert numbers(cell)[0] == pytest.approx(apart, abs=0.11)
    for row in read("lab-grid"):
        if row["top"] == "1":  # the default swap
            assert row["bottom 1"] == scores[row["language"], "swap, default"]["score, %"]
    shared = {one.name: one.shared for one in WorldSettings().languages}
    for row in (row for row in read("lab-distance") if row["language"].endswith("as shipped")):
        language = row["language"].split(",")[0]
        assert float(row["words shared"]) == shared[language]
        for model, at in (("task expert", "task expert"), ("swap, default", "default swap")):
            assert float(row[at]) == means[language, model]


@pytest.mark.parametrize("name", SAID)
def test_a_page_says_what_the_table_says(name):
    table = (DOCS / "tables" / f"{name}.csv").read_text("utf-8")
    for page, words in SAID[name]:
        text = " ".join((DOCS / f"{page}.md").read_text("utf-8").split())
        assert words in text
        for number in re.findall(r"\d+\.?\d*", words):
            share = float(number) / 100
            forms = number, f"{share:.3f}", f"{share:.3f}".lstrip("0"), f"{share:.2f}"
            assert any(re.search(rf"(?<![\d.]){re.escape(f)}(?!\d)", table) for f in forms), number


def test_the_page_on_deploying_has_the_shares_of_the_table_of_types():
    page = (DOCS / "deploy.md").read_text("utf-8")
    for row in read("types"):
        base, kind, *cells = row.values()
        if kind != "BF16":
            shares = " | ".join(cell.partition(" ")[0] for cell in cells)
            assert f"| {base} | `{kind}` | {shares} |" in page
