"""Fills the page of the command line with what Typer's own `utils docs` writes."""

from typing import Any

MARK = "{{ commands }}"


def on_page_markdown(markdown: str, **rest: Any) -> str:
    """Put the reference where the page has its mark."""
    if MARK not in markdown:
        return markdown
    import typer
    from typer.cli import get_docs_for_click

    from layerswap.cli import app

    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="layerswap")
    return markdown.replace(MARK, get_docs_for_click(obj=command, ctx=context, name="layerswap"))
