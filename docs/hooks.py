"""Makes parts of the site: the home page, the commands, and names in Python."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMMANDS = "{{ commands }}"
ROOT = Path(__file__).parent.parent


def on_files(files: Any, config: Any) -> Any:
    """Make the home page from the README."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", content=home()))
    return files


def home() -> str:
    """The README with links of the site; files outside `docs` are named without a link."""
    readme = (ROOT / "README.md").read_text("utf-8").replace("](docs/", "](")
    return re.sub(r"\[([^]]+)\]\((?:bench/\S+|[A-Z]+\.\w+)\)", r"\1", readme)


def on_page_markdown(markdown: str, **rest: Any) -> str:
    """Put the commands where a page has the mark, and users' names on documented objects."""
    if COMMANDS in markdown:
        return markdown.replace(COMMANDS, _commands())
    return re.sub(r"^::: (layerswap\S+)$", _named, markdown, flags=re.MULTILINE)


def _named(found: re.Match[str]) -> str:
    """A documented object under the name that users type, such as `ls.swap`, if it has one."""
    from layerswap import _HOME

    room, name = found[1].split(".")[1], found[1].rpartition(".")[2]
    for public, home in _HOME.items():
        module, _, there = home.partition(":")
        if module.split(".")[0] == room and (there or public) == name:
            return f"{found[0]}\n    options: {{heading: ls.{public}, toc_label: ls.{public}}}"
    return found[0]


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
