"""From a recipe to a plan: open the sources, check them against each other, resolve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from layerswap.checkpoint import Checkpoint, open_checkpoint
from layerswap.checkpoint.commit import PARTIAL
from layerswap.compose import Recipe
from layerswap.compose.blend import Member
from layerswap.compose.mergekit import MergekitMethod
from layerswap.compose.schema import MergeMethod, SoupMethod, SwapMethod
from layerswap.delta.magnitude import magnitude_weights
from layerswap.errors import LayerswapError, MergeError, RecipeError
from layerswap.merge.check import check_together
from layerswap.merge.guard import stamps_of
from layerswap.merge.plan import Plan, with_base
from layerswap.merge.tokenizer import check_tokenizers


def make_plan(recipe: Recipe) -> Plan:
    """Open the sources of a recipe, check them against each other, and resolve it.

    Reads headers and JSON only, except that magnitude weights read every tensor.

    Raises:
        LayerswapError: a source cannot be opened, the sources do not fit together, or the
            recipe does not fit them.
    """
    sources: dict[str, Checkpoint] = {}
    for name in _in_order(recipe):
        expert = recipe.experts[name]
        if expert.source is not None:
            sources[name] = _open(name, expert.source, expert.revision, recipe)
    base = None
    if recipe.base is not None and recipe.base.source is not None:
        base = _open("base", recipe.base.source, recipe.base.revision, recipe)
    together = with_base(sources, base)
    stamps = stamps_of(together.values())
    drop = check_together(together)
    check_tokenizers(together)
    magnitude = _measure(recipe, sources, base, drop)
    first = next(iter(sources.values()))
    tensors = {name: place for name, place in first.places.items() if name not in drop}
    composition = recipe.resolve(first.layers, magnitude, tensors)
    return Plan(recipe, composition, sources, base, drop, magnitude, stamps)


def _in_order(recipe: Recipe) -> list[str]:
    """The experts: those of the method in its order, then the others by name.

    The order of the recipe's mapping must not decide which expert gives the configuration.
    """
    method = recipe.method
    first = (
        list(method.experts)
        if isinstance(method, SoupMethod | MergeMethod | MergekitMethod)
        else [method.task, method.language]
    )
    first = [name for name in first if name in recipe.experts]  # mergekit names the base too
    flat = [part for name in first for part in recipe.flat(name).experts if part in recipe.experts]
    return list(dict.fromkeys([*flat, *sorted(recipe.experts)]))


def _open(name: str, source: str, revision: str | None, recipe: Recipe) -> Checkpoint:
    unfinished = MergeError(f"{name}: {source} is an unfinished merge; merge it again")
    if PARTIAL in Path(source).name:
        raise unfinished
    try:
        found = open_checkpoint(source, revision=revision, patterns=recipe.place_patterns)
    except LayerswapError as error:
        raise error.within(name) from None
    if PARTIAL in found.folder.resolve().name:
        raise unfinished
    return found


def _measure(
    recipe: Recipe,
    sources: Mapping[str, Checkpoint],
    base: Checkpoint | None,
    drop: frozenset[str],
) -> dict[str, float] | None:
    if recipe.weights != "magnitude" or base is None:
        return None
    method = recipe.method
    names = (
        [method.task, method.language]
        if isinstance(method, SwapMethod)
        else list(getattr(method, "experts", ()))
    )
    parts = {
        name: [(_checkpoint(sources, part), weight) for part, weight in recipe.flat(name).weights]
        for name in names
    }
    return magnitude_weights(base, parts, skip=drop)


def _checkpoint(sources: Mapping[str, Checkpoint], member: Member) -> Checkpoint:
    if isinstance(member, str):
        return sources[member]
    raise RecipeError(f"weights: the magnitude of {member} cannot be measured; give numbers")
