"""Compositions, presets and recipes as pure data: no tensors, no file but the recipe."""

from layerswap.compose.blend import Blend
from layerswap.compose.composition import Composition, draw
from layerswap.compose.presets import (
    Outside,
    Zones,
    default_zones,
    instruct,
    partition,
    soup,
    swap,
    zone_grid,
)
from layerswap.compose.recipe import Recipe, parse_recipe, read_recipe

__all__ = [
    "Blend",
    "Composition",
    "Outside",
    "Recipe",
    "Zones",
    "default_zones",
    "draw",
    "instruct",
    "parse_recipe",
    "partition",
    "read_recipe",
    "soup",
    "swap",
    "zone_grid",
]
