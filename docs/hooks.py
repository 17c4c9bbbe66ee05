"""Fills pages with what is written elsewhere: the command line's reference, and the benchmarks."""

import re
from collections.abc import Iterator
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
    """The page of Typer's own `utils docs`, with whole summaries that link to their commands."""
    import typer
    from typer.cli import get_docs_for_click

    from layerswap.cli import app

    root = typer.main.get_command(app)
    context = typer.Context(root, info_name="layerswap")
    page = get_docs_for_click(obj=root, ctx=context, name="layerswap")
    summaries = dict(_summaries(root, "layerswap"))
    lines, group = [], "layerswap"
    for line in page.splitlines()[1:]:
        if heading := re.match(r"#+ `(.+)`$", line):
            group = heading[1]
        listed = re.match(r"\* `([\w-]+)`:", line)
        path = f"{group} {listed[1]}" if listed else ""
        whole = f"* [`{path.rpartition(' ')[2]}`](#{path.replace(' ', '-')}): "
        lines.append(whole + summaries[path] if path in summaries else line)
    return "\n".join(lines)


def _summaries(command: Any, path: str) -> Iterator[tuple[str, str]]:
    """The first paragraph of every command's help, by its path."""
    for name, one in getattr(command, "commands", {}).items():
        yield f"{path} {name}", " ".join((one.help or "").split("\n\n")[0].split())
        yield from _summaries(one, f"{path} {name}")


def _benchmarks() -> str:
    """The files that the scripts in `bench/` write and name, with links that hold in the site."""
    text = (BENCH / "RESULTS.md").read_text("utf-8").replace("../docs/", "")
    merging = (BENCH / "results" / "merge.md").read_text("utf-8")
    both = text.replace("results/merge.md)", "#merging-measured)") + "\n" + merging
    return re.sub(r"^#", "##", both, flags=re.MULTILINE)
