"""The table on bases in docs/when.md is that of the recorded counts."""

from pathlib import Path

from research.bases import articles_of, summary, table

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_is_the_recorded_one():
    text = (DOCS / "when.md").read_text("utf-8")
    assert f"<!-- bases -->\n{summary()}\n<!-- end -->" in text
    assert sum(int(row["unknown"]) for row in table()) == 0


def test_articles_are_paragraphs_without_headings():
    page = (
        "<article><h2>Article 1</h2><ol><li><p>One &amp;</p></li><li><p>two</p></li></ol></article>"
    )
    assert articles_of(page) == ["One & two"]
