"""Tables in every format: numbers alike, and names that cannot start markup."""

import re

import pytest
from rich.cells import cell_len

from layerswap.evaluation.statistics import Interval
from layerswap.report.page import Report, Section, render
from layerswap.report.tables import (
    Difference,
    Table,
    best_cells,
    score,
    words_of,
    write_tables,
)

NASTY = 'math [v2] | a_b & 50% $x$ <b> \\cmd{} ~^# `c` "q" [l](javascript:x)\n\x1b[31m'


def table(*names):
    interval = Interval(0.4567, 0.4, -0.01, 50)
    rows = [[name, interval, Difference(interval), 1234] for name in names]
    return Table(["model", "score", "change", "n"], rows)


def test_one_number_format():
    assert [score(v) for v in (0.4567, 1.0, -0.0001, -0.25)] == ["45.7", "100.0", "0.0", "−25.0"]
    assert [score(v, "nats") for v in (1.2346, 0.05, 12.345, -3.0)] == [
        "1.235", "0.050", "12.3", "−3.000",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="cannot show nan"):
        score(float("nan"))
    assert str(words_of(Difference(Interval(0.1, 0.02, 0.2, 9)))) == "+10.0 [2.0 to 20.0] *"
    assert str(words_of(Difference(Interval(-0.1, -0.2, 0.0, 9)))) == "−10.0 [−20.0 to 0.0]"


def test_a_terminal_shows_a_name_as_it_is(monkeypatch):
    """A terminal would read the rest as colours and new lines."""
    monkeypatch.setenv("COLUMNS", "300")
    shown = table("expert [v2]", "expert [v3]", NASTY).text()
    assert "expert [v2]" in shown
    assert "expert [v3]" in shown
    assert "\x1b" not in shown
    assert r"\x1b" in shown
    assert "45.7 [40.0 to -1.0]" in shown  # a minus sign that can be copied
    assert "1,234" in shown


NAMES = (
    "base",
    "swap, chosen on development",
    "org--gemma-3-270m-swahili-instruct",
    "दक्ष 例え話 例",
)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_of_any_width_loses_nothing(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [[name, *(Interval((i + k) / 20, i / 20, (i + k + 1) / 20, 9)
                     for k in range(3))] for i, name in enumerate(NAMES)]  # fmt: skip
    one = Table(["model", "x", "y", "z"], rows, "A caption that is long. " * 5, highlight=1,
                bold=best_cells(rows))  # fmt: skip
    lines = one.text().split("\n")
    assert max(map(cell_len, lines)) <= width
    assert next(line for line in lines if line.startswith(">")).startswith(">  swap, ")
    words = "".join(one.text().split())
    assert all("".join(name.split()) in words for name in NAMES if width > 60)
    numbers = re.findall(r"(?<![\d.\[])\d+\.\d(?![\d,\]])|\[[\d., ]+\]", one.text())
    assert sorted(numbers) == sorted(
        part for row in rows for i in row[1:] for part in str(words_of(i)).split(" ", 1)
    )
    assert one.styled().count("\x1b[1m") > one.text().count("\x1b[1m") == 0


def test_the_best_of_each_column_but_for_those_left_out():
    rows = [["a", Interval(0.5, 0, 1, 9), "x"], ["b", Interval(0.7, 0, 1, 9), "y"],
            ["c", Interval(0.9, 0, 1, 9), "z"]]  # fmt: skip
    assert best_cells(rows) == {(2, 1)}
    assert best_cells(rows, leave=[2]) == {(1, 1)}


def test_markdown_escapes_everything_that_starts_markup():
    lines = table(NASTY).markdown().splitlines()
    assert len(lines) == 3
    assert lines[1] == "|---|---:|---:|---:|"
    assert re.sub(r"\\.", "", lines[2]).count("|") == 5
    for mark in ("\\[v2\\]", "\\|", "a\\_b", "\\<b\\>", "\\`c\\`", "\\$x\\$", "\\&", "\\~"):
        assert mark in lines[2]
    assert "](" not in re.sub(r"\\.", "", lines[2])
    assert "45.7 [40.0 to -1.0]" in lines[2]


def test_latex_escapes_every_special_character():
    found = table(NASTY).latex("tab:x")
    row = next(line for line in found.splitlines() if line.startswith("math"))
    left = re.sub(r"\\[a-z]+\{\}|\\[&%$#_{}]|\{\[\}|\{\]\}", "", row.removesuffix(r" \\"))
    first = left.split(" & ")[0]
    assert not set('\\{}$&#^_~%<>|`"[]') & set(first.replace("n", ""))
    assert r"\begin{tabular}{lrrr}" in found
    assert "$-$1.0" in found
    assert found.count(r"\label{tab:x}") == 1
    # A bracket after the end of a row would be read as its height.
    assert r"{[}v2{]} &" in table("[v2]").latex()


def test_bold_is_for_the_best_number_or_the_highlighted_row(tmp_path):
    one = Table(["m", "s"], [["a", 0.5], ["b", 0.25]], "Both.", highlight=1, bold={(0, 1)})
    assert "| a | **50.0** |" in one.markdown()
    assert "| **b** | **25.0** |" in one.markdown()
    assert r"a & \textbf{50.0} \\" in one.latex()
    assert one.latex().endswith("% Both.")
    write_tables(tmp_path / "t", {"First & last": one}, title="A_title")
    assert (tmp_path / "t.md").read_text().startswith("# A\\_title\n\n## First \\& last\n")
    assert r"\caption{Both.}" in (tmp_path / "t.tex").read_text()


def test_a_page_shows_control_characters_escaped_and_commands_line_by_line():
    page = render(Report("t\x00", "l", [Section("s", "", "one\ntwo\x1b", table=table(NASTY))]))
    assert "<code>one\ntwo\\x1b</code>" in page
    assert not {"\x00", "\x1b"} & {*page}
    assert "\\n\\x1b[31m" in page
    assert "&lt;b&gt;" in page


def test_a_table_refuses_rows_of_another_width():
    with pytest.raises(ValueError, match="2 columns, but a row has 1 cells"):
        Table(["a", "b"], [["x"]])
    with pytest.raises(ValueError, match="cannot be highlighted"):
        Table(["a"], [["x"]], highlight=1)


def test_csv_has_the_numbers_unrounded_and_no_formula():
    import csv
    import io

    interval = Interval(0.4567891, 0.4, 0.5, 50)
    one = Table(
        ["model", "score", "n"], [["=cmd()", interval, 3], ["b, c", None, 4], ["-x", 0.5, 5]]
    )
    rows = list(csv.reader(io.StringIO(one.csv())))
    assert rows == [
        ["model", "score", "score, low", "score, high", "n"],
        ["'=cmd()", "0.4567891", "0.4", "0.5", "3"],
        ["b, c", "", "", "", "4"],
        ["'-x", "0.5", "", "", "5"],
    ]
    page = render(Report("t", "l", [Section("A table", table=one)]))
    assert 'download="A-table.csv" href="data:text/csv;charset=utf-8,model%2Cscore' in page


@pytest.mark.parametrize(
    "cell", ["+1+cmd|' /C calc'!A0", "-2+3+cmd|' /C calc'!A0", "-1\n=1", "\r=1", "\uff1d1", "+"]
)
def test_only_a_number_begins_with_a_sign(cell):
    assert Table(["model"], [[cell]]).csv().splitlines()[1].lstrip('"').startswith("'")
    for number in ("-1", "+.5", "-1.5e-05", "plain", ""):
        assert Table(["a", "b"], [[number, 1]]).csv().splitlines()[1] == f"{number},1"


def test_a_page_of_many_parts_has_a_table_of_contents():
    parts = [Section(f"part <{i}>", "words") for i in range(5)]
    page = render(Report("t", "l", parts))
    assert page.count('<a href="#part-') == 5
    assert '<h2 id="part-5">part &lt;4&gt;</h2>' in page
    assert "<nav" not in render(Report("t", "l", parts[:3]))
