"""`layerswap recipe`: check a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli import options, output

app = typer.Typer(
    cls=options.PlainGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Check a recipe.",
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
