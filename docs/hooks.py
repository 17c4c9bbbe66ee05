"""Fills pages with what is written elsewhere: the command line's reference, and the benchmarks."""

import re
from pathlib import Path
from typing import Any

COMMANDS, BENCHMARKS = "{{ commands }}", "{{ benchmarks }}"
BENCH = Path(__file__).parent.parent / "bench"


def on_page_markdown(markdown: str, **rest: Any) -> str:
    """Put what belongs there where a page has a mark."""
    if COMMANDS in markdown:
        return markdown.replace(COMMANDS, _commands())
    if BENCHMARKS in markdown:
        return markdown.replace(BENCHMARKS, _benchmarks())
    return markdown


def _commands() -> str:
    """What Typer's own `utils docs` writes."""
    import typer
    from typer.cli import get_docs_for_click

    from layerswap.cli import app

    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="layerswap")
    return get_docs_for_click(obj=command, ctx=context, name="layerswap")


def _benchmarks() -> str:
    """The files that the scripts in `bench/` write and name, with links that hold in the site."""
    text = (BENCH / "RESULTS.md").read_text("utf-8").replace("../docs/", "")
    merging = (BENCH / "results" / "merge.md").read_text("utf-8")
    both = text.replace("results/merge.md)", "#merging-measured)") + "\n" + merging
    return re.sub(r"^#", "##", both, flags=re.MULTILINE)
