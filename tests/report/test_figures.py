"""Figures: accessible, deterministic SVG whose text is text and whose colours follow dark mode."""

import re
from xml.etree import ElementTree

import pytest
from example import GRID, NAMES, scores

from layerswap.compose.presets import Zones, swap
from layerswap.evaluation.statistics import friedman
from layerswap.report import draw_heat_map, draw_intervals, draw_stack
from layerswap.report.drawing import CELL_INKS, DARK, contrast, draw_ranks, even_scale, ink_on

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
    used = set(re.findall(r'#(ls-[\w-]+)["\)]', svg))
    assert used <= set(ids)
    dark = svg.partition("prefers-color-scheme:dark")[2].partition("</style>")[0]
    for light, other in DARK.items():
        if f"fill: {light}" in svg:
            assert f"fill:{other}!important" in dark


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


def test_numbers_stand_out_from_their_cells_in_both_modes():
    dark = dict(zip(even_scale(), even_scale(dark=True), strict=True))
    inks = {ink: pair for pair, ink in CELL_INKS.items()}
    for cell in even_scale():
        light_ink, dark_ink = inks[ink_on(cell)]
        assert contrast(light_ink, cell) > 3.9
        assert contrast(dark_ink, dark[cell]) > 3.9


def test_a_heat_map_marks_best_and_default_and_shares_a_scale():
    svg = heat_map().svg()
    assert "the paper's default" in svg
    assert "best: bottom 1, top 1, 48.7 %" in svg
    low = dict.fromkeys(GRID, 0.1)
    shared = [draw_heat_map(v, row_label="b", column_label="t", limits=(0, 1)).svg()
              for v in (GRID, low)]  # fmt: skip
    assert all("100.0 %" in one for one in shared)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="at least one value"):
        draw_heat_map({}, row_label="b", column_label="t")
    with pytest.raises(ValueError, match="not among the values"):
        draw_heat_map({(0, 0): 1.0}, row_label="b", column_label="t", best=(1, 1))
    with pytest.raises(ValueError, match="cannot show nan"):
        draw_heat_map({(0, 0): float("nan")}, row_label="b", column_label="t")
    with pytest.raises(ValueError, match="no row is called 'x'"):
        draw_intervals([("a", scores(0)[0])], measure="m", highlight="x")
    with pytest.raises(ValueError, match="at least one row"):
        draw_intervals([], measure="m")
