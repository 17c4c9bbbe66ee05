"""Reads mergekit configurations as recipes."""

from layerswap.compose.mergekit.read import is_mergekit, recipe_data
from layerswap.compose.mergekit.resolve import llama_tensors, resolve
from layerswap.compose.mergekit.schema import MergekitMethod

__all__ = ["MergekitMethod", "is_mergekit", "llama_tensors", "recipe_data", "resolve"]
