"""Figures: accessible, deterministic SVG whose text is text and whose colours follow dark mode."""

import re
from xml.etree import ElementTree

import pytest
from example import GRID, NAMES, scores
from matplotlib.colors import to_rgb

from layerswap.compose.presets import Zones, swap
from layerswap.evaluation.statistics import friedman
from layerswap.report.charts import draw_heat_map, draw_intervals, draw_ranks
from layerswap.report.drawing import COLOURS, EXPERTS, HIGH, stylesheet
from layerswap.report.stack import draw_stack

SVG = "{http://www.w3.org/2000/svg}"
STRANGE = 'expert [v2] <b> & $x_1$ \x1b "q" مثال 例'


def stack():
    return draw_stack(swap(8, zones=Zones(1, 1, 1, 0)), {**NAMES, "task": STRANGE})


def heat_map(**settings):
    return draw_heat_map(GRID, row_label="bottom", column_label="top", best=(1, 1),
                         default=(1, 1), **settings)  # fmt: skip


def intervals():
    rows = [(STRANGE, scores(1)[0]), ("swap", scores(2)[0])]
    return draw_intervals(rows, measure="accuracy", highlight="swap")


def ranks():
    return draw_ranks(friedman({n: [i + k / 9 for k in range(4)] for i, n in enumerate("abc")}))


@pytest.mark.parametrize("draw", [stack, heat_map, intervals, ranks])
def test_a_figure_is_well_formed_accessible_and_the_same_every_time(draw):
    drawing = draw()
    svg = drawing.svg()
    assert svg == draw().svg()
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label") == root.find(f"{SVG}title").text
    assert len(root.find(f"{SVG}desc").text) > 10
    assert not root.findall(f".//{SVG}image")
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg)
    ids = [one.get("id") for one in root.iter() if one.get("id")]
    assert len(set(ids)) == len(ids)
    used = set(re.findall(r'(?:href="|url\()#([\w-]+)["\)]', svg))
    assert used <= set(ids)
    drawn = svg.partition("</style>")[2]
    colours = set(re.findall(r"(?:fill|stroke): (#\w+)", drawn))
    assert colours <= {light for light, _ in COLOURS.values()} | set(EXPERTS)
    assert svg.replace(f"<style>{stylesheet()}</style>", "") == drawing.svg(style=False)


def test_names_are_text_and_nothing_else():
    for drawing in (stack(), intervals()):
        root = ElementTree.fromstring(drawing.svg())
        words = " ".join("".join(one.itertext()) for one in root.iter(f"{SVG}text"))
        assert "[v2]" in words
        assert "$x_1$" in words
        assert "\\x1b" in words
        assert "例" in words


def test_two_figures_of_a_page_share_no_identifier():
    ids = [set(re.findall(r'\bid="([^"]+)"', draw().svg())) for draw in (stack, intervals)]
    assert not ids[0] & ids[1]


@pytest.mark.slow
def test_the_files_are_the_same_every_time(tmp_path):
    for name in ("one", "two"):
        paths = intervals().save(tmp_path / name)
        assert [path.suffix for path in paths] == [".svg", ".pdf", ".png"]
    for kind in ("svg", "pdf", "png"):
        one, two = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("one", "two"))
        assert one == two


def luminance(colour: list[float]) -> float:
    """Relative luminance of WCAG 2."""
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("mode", "paper"), [(0, "#fcfbf9"), (1, "#14171c")])
def test_text_on_the_scale_is_readable_in_both_modes(mode, paper):
    shade, low, high = (to_rgb(COLOURS[name][mode]) for name in ("shade", "on-low", "on-high"))
    for step in range(1001):
        share = step / 1000
        cell = [p + share * (s - p) for p, s in zip(to_rgb(paper), shade, strict=True)]
        pair = sorted((luminance(cell), luminance(high if share > HIGH else low)))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) > 4.5


def test_a_heat_map_marks_best_and_default_and_shares_a_scale():
    svg = heat_map().svg()
    assert "the paper's default" in svg
    assert "best: bottom 1, top 1, 48.7 %" in svg
    shared = [draw_heat_map(values, row_label="b", column_label="t", limits=(0, 0.5)).svg()
              for values in (dict.fromkeys(GRID, 0.1), {(0, 0): 0.1, (1, 1): 0.4})]  # fmt: skip
    assert all("fill-opacity: 0.2" in svg for svg in shared)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="cannot show nan"):
        draw_heat_map({(0, 0): float("nan")}, row_label="b", column_label="t")
