"""The page in a real browser: nothing fails in its console, and what it offers works."""

import pytest
from accessibility import AXE, violations

from layerswap.compose.presets import swap
from layerswap.deltas.atlas import measure_delta
from layerswap.evaluation.statistics import Interval, friedman
from layerswap.lab.assets import shipped
from layerswap.report.charts import draw_heat_map, draw_intervals, draw_ranks
from layerswap.report.delta_map import draw_changes
from layerswap.report.page import Answers, Report, Section, ShownAnswer, write_report
from layerswap.report.stack import draw_stack
from layerswap.report.tables import Difference, Table

pytestmark = pytest.mark.slow
COMMAND = "layerswap merge 'a folder/best.yaml' --out merged\nlayerswap play merged"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    lab = shipped()
    experts = {"task": lab.task_experts[0], "furo": lab.language_experts["furo"][0]}
    atlas = measure_delta(lab.base, experts)
    grid = {(b, u): 0.1 * b + 0.02 * u for b in range(3) for u in range(2)}
    examples = [
        ShownAnswer("task", i, f"question {i} </script><b>", "7", ("7", "8"), (True, i % 3 == 0))
        for i in range(30)
    ]
    ranked = friedman({n: [i + k / 9 for k in range(4)] for i, n in enumerate(("a", "b", "c"))})
    rows = [("soup", Interval(0.3, 0.2, 0.4, 9), Difference(Interval(-0.2, -0.3, -0.1, 9)), "x"),
            ("swap", Interval(0.5, 0.4, 0.6, 9), "", "y"),
            ("base", None, Difference(Interval(0.01, -0.03, 0.025, 9)), "z")]  # fmt: skip
    results = Table(("model", "score", "to the swap", "note"), rows, "A caption.", 1, bold={(1, 1)})
    apart = {"soup": Interval(-0.2, -0.3, -0.1, 9), "base": Interval(0.01, -0.03, 0.025, 9)}
    sections = [
        Section("Table", "Words.", COMMAND, table=results),
        Section(
            "Differences",
            figure=draw_intervals(list(apart.items()), measure="difference", differences=True),
        ),
        Section("Grid", figure=draw_heat_map(grid, row_label="bottom", column_label="top")),
        Section("Maps", figure=draw_changes(atlas)),
        Section("Answers", answers=Answers(["swap", "soup"], examples)),
        Section("Ranks", figure=draw_ranks(ranked)),
    ]
    return write_report(tmp_path_factory.mktemp("page") / "report.html",
                        Report("A page", "What was found.", sections,
                               figure=draw_stack(swap(8))))  # fmt: skip


@pytest.fixture
def page(browser, path):
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    page = context.new_page()
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if "http" in request.url else None)
    page.goto(path.as_uri())
    yield page
    assert said == []  # no error, no warning, and nothing asked of a network
    context.close()


def test_the_selected_is_tinted_the_best_bold_and_negative_ends_are_in_words(page):
    table = page.locator("section:has(h2:text('Table'))")
    assert table.locator("tr.highlight th").inner_text() == "swap"
    assert table.locator("td.best").inner_text().split() == ["50.0", "[40.0,", "60.0]"]
    assert table.locator("tbody td").nth(1).inner_text().split("\n") == [
        "\N{MINUS SIGN}20.0 *",
        "[\N{MINUS SIGN}30.0 to \N{MINUS SIGN}10.0]",
    ]
    assert table.locator(".marks").inner_text() == (
        "Tinted: the selected model. Bold: the highest score."
    )


def test_a_command_is_copied_whole_by_one_click(page):
    page.set_viewport_size({"width": 390, "height": 800})
    page.locator(".command code").click()
    assert page.evaluate("getSelection().toString()") == COMMAND


def test_on_paper_there_is_one_column_of_unbroken_figures(page):
    page.emulate_media(media="print")
    style = "one => { const of = getComputedStyle(one); return [of.display, of.breakInside]; }"
    assert page.locator("header").evaluate(style)[0] == "block"
    assert {one.evaluate(style)[1] for one in page.locator("figure, .table").all()} == {"avoid"}
    assert not page.locator("nav").is_visible()
    assert not page.locator("h2", has_text="Answers").is_visible()
    assert page.locator(".command").evaluate("one => one.scrollWidth <= one.clientWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_follow_the_colours_of_the_page(browser, path, scheme):
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto(path.as_uri())
    text, *colours = page.evaluate(
        """() => {
            const probe = document.body.appendChild(document.createElement("p"));
            const colour = name => {
                probe.style.color = `var(--${name})`;
                return getComputedStyle(probe).color;
            };
            const text = document.querySelector(".ls-figure text");
            return [getComputedStyle(text).fill, colour("ink"), colour("muted")];
        }"""
    )
    assert text in colours
    assert len({*colours}) == 2
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_nothing_runs_over_the_edge_and_every_control_has_a_name(browser, path, scheme, width):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    unnamed = page.evaluate(
        """[...document.querySelectorAll("input, select, button")].filter(
            one => !(one.labels?.length || one.textContent.trim() || one.ariaLabel)).length"""
    )
    assert unnamed == 0
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert ink != paper
    context.close()


@pytest.mark.skipif(AXE is None, reason="LAYERSWAP_AXE names no axe.min.js")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_axe_finds_nothing(browser, path, scheme, width):
    viewport = {"width": width, "height": 800}
    assert violations(browser, path, viewport=viewport, color_scheme=scheme) == []
