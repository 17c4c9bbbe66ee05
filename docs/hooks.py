"""Fills pages of the site: the commands, the benchmarks, the result, and names in Python."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMMANDS, BENCHMARKS, RESULT = "{{ commands }}", "{{ benchmarks }}", "{{ result }}"
ROOT = Path(__file__).parent.parent
BENCH = ROOT / "bench"


def on_page_markdown(markdown: str, **rest: Any) -> str:
    """Put what belongs there where a page has a mark."""
    if COMMANDS in markdown:
        return markdown.replace(COMMANDS, _commands())
    if BENCHMARKS in markdown:
        return markdown.replace(BENCHMARKS, _benchmarks())
    if RESULT in markdown:
        return markdown.replace(RESULT, _result())
    return re.sub(r"^::: (layerswap\S+)\n    options: \{", _named, markdown, flags=re.MULTILINE)


def _named(found: re.Match[str]) -> str:
    """A documented object under the name that users type, such as `ls.swap`, if it has one."""
    from layerswap import _HOME

    room, name = found[1].split(".")[1], found[1].rpartition(".")[2]
    for public, home in _HOME.items():
        module, _, there = home.partition(":")
        if module.split(".")[0] == room and (there or public) == name:
            return f"{found[0]}heading: ls.{public}, toc_label: ls.{public}, "
    return found[0]


def _result() -> str:
    """The README's answer to "Does it work?", with links of the site."""
    readme = (ROOT / "README.md").read_text("utf-8")
    found = re.search(r"<!-- result -->\n(.*?)<!-- end -->", readme, re.DOTALL)
    assert found, "README.md has no result"
    return found[1].replace("](docs/", "](")


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
    names = list(dict.fromkeys(re.findall(r"\(results/([\w-]+\.md)\)", text)))
    for name in names:
        text += "\n" + (BENCH / "results" / name).read_text("utf-8")
    for name in names:
        heading = (BENCH / "results" / name).read_text("utf-8").splitlines()[0]
        anchor = re.sub(r"[^\w ]", "", heading).strip().lower().replace(" ", "-")
        text = re.sub(rf"\((results/)?{name}\)", f"(#{anchor})", text)
    return re.sub(r"^#", "##", text, flags=re.MULTILINE)
