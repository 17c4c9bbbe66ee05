"""`layerswap recipe`: check a recipe, or write it for mergekit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(help="Check a recipe, or write it for mergekit.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="A recipe, or a mergekit configuration.")]
Layers = Annotated[
    int | None, typer.Option(min=1, help="Number of layers of the experts; nothing is opened.")
]


@app.command()
def check(file: File, *, layers: Layers = None) -> None:
    """Check a recipe without opening its experts; with --layers, also draw what it composes.

    Example: layerswap recipe check recipe.yaml --layers 32
    """
    from layerswap.compose.recipe import read_recipe

    recipe = read_recipe(file)
    composition = None if layers is None else recipe.resolve(layers)
    typer.echo(f"{file}: {recipe}")
    if composition is not None:
        typer.echo(str(composition))


@app.command()
def export(
    file: File,
    *,
    form: Annotated[
        Literal["mergekit"], typer.Option("--format", help="What to write it for.")
    ] = "mergekit",
    out: Annotated[
        Path | None, typer.Option(help="The file to write; standard output if not given.")
    ] = None,
    layers: Layers = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there.")
    ] = False,
) -> None:
    """Write a mergekit configuration that gives the same result, where mergekit can express it.

    Example: layerswap recipe export recipe.yaml --format mergekit --out mergekit.yml
    """
    from layerswap.compose.recipe import read_recipe
    from layerswap.compose.yaml_file import write_text
    from layerswap.merge.api import export_mergekit

    text = str(export_mergekit(read_recipe(file), layers=layers))
    if out is None:
        typer.echo(text, nl=False)
        return
    write_text(out, text, overwrite=overwrite)
    typer.echo(f"wrote {out}")
