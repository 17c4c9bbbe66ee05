"""The page without a browser: what it holds, and what it never does."""

import re

from example import example

from layerswap.report.page import Answers, Report, Section, ShownAnswer, render


def answered(*right):
    """A document that two models answered."""
    return ShownAnswer("task", 0, "a\n\x1b<b>" + 2000 * "x", "7", ("7", "8"), right)


def test_answers_are_grouped_by_the_model_that_is_right():
    shown = Answers(["swap", "soup"], [answered(True, False), answered(False, False)])
    assert {heading: len(group) for heading, group in shown.groups.items()} == {
        "swap is right, soup is wrong": 1, "swap and soup are wrong": 1,
    }  # fmt: skip
    page = render(Report("t", "l", [Section("Answers", answers=shown)]))
    assert page.count("<details>") == 2
    assert "swap is right, soup is wrong: 1 of 2 documents" in page
    assert page.count("✓ 7") == 1
    assert "\x1b" not in page
    assert page.count("x" * 1200) == 2
    assert "x" * 1201 not in page


def test_a_page_asks_nothing_of_a_network_and_runs_no_script_of_others():
    page = render(example())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy == ("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page).replace("http-equiv", "")
    assert page.count("prefers-color-scheme:dark") == 1  # one stylesheet for all figures


def test_a_page_has_no_script():
    assert "<script" not in render(example())
