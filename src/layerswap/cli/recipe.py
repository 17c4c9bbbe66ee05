"""`layerswap recipe`: check a recipe, or write it for mergekit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from layerswap.cli import options, output

app = typer.Typer(
    cls=options.PlainGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Check a recipe, or write it for mergekit.",
)

File = Annotated[Path, typer.Argument(help="Recipe or mergekit configuration.")]
Layers = Annotated[
    int | None, typer.Option(min=1, help="Number of layers, so that no expert is opened.")
]


@options.command(app)
def check(file: File, *, layers: Layers = None) -> None:
    """Check a recipe without opening its experts, and draw it if --layers is given.

    Example: layerswap recipe check recipe.yaml --layers 32
    """
    from layerswap.compose.recipe import read_recipe

    recipe = read_recipe(file)
    composition = None if layers is None else recipe.resolve(layers)
    output.say(f"{file}: {recipe}")
    if composition is not None:
        output.say(composition)


@options.command(app)
def export(
    file: File,
    *,
    form: Annotated[
        Literal["mergekit"], typer.Option("--format", help="Format to write.")
    ] = "mergekit",
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: standard output.")
    ] = None,
    layers: Layers = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Overwrite the file if it exists.")
    ] = False,
) -> None:
    """Write a recipe as a mergekit configuration with the same result, where mergekit can.

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
    output.say(f"wrote {out}")
