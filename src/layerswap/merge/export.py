"""A recipe for other tools: what a configuration must know of the experts, read from them."""

from __future__ import annotations

from pathlib import Path

from layerswap.checkpoint import Checkpoint, open_checkpoint
from layerswap.compose import Recipe
from layerswap.compose.mergekit.export import Exported, export
from layerswap.merge.outputs import FLOAT_NAMES


def export_mergekit(recipe: Recipe, *, layers: int | None = None) -> Exported:
    """The mergekit configuration that gives the same result as a recipe.

    Opens the headers of the first expert that is a local folder, for its layers, its tensors'
    names and its dtype. Nothing is downloaded: without such a folder, or with `layers`, names
    are taken to be Llama's.

    Args:
        recipe: the recipe.
        layers: number of layers; then nothing is opened.

    Raises:
        LayerswapError: mergekit cannot express it, the number of layers is not known, or the
            folder cannot be read.
    """
    found = None if layers is not None else _first_folder(recipe)
    if found is None:
        return export(recipe, layers=layers)
    stored = {tensor.dtype for tensor in found.tensors.values()}
    dtypes = [name for name, short in FLOAT_NAMES.items() if short in stored]
    dtype = dtypes[0] if len(dtypes) == 1 else None
    return export(recipe, layers=found.layers, tensors=found.places, stored=dtype)


def _first_folder(recipe: Recipe) -> Checkpoint | None:
    for expert in recipe.experts.values():
        if expert.source is not None and Path(expert.source).expanduser().is_dir():
            return open_checkpoint(expert.source, patterns=recipe.place_patterns)
    return None
