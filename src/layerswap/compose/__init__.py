"""Compositions, presets and recipes as pure data: no tensors, no file but the recipe."""
