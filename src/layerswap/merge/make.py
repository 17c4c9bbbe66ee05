"""From a recipe to a plan: open the sources, check them against each other, resolve."""

from __future__ import annotations

from collections.abc import Mapping

from layerswap.checkpoint import Checkpoint
from layerswap.compose import Recipe
from layerswap.compose.blend import Member
from layerswap.compose.schema import Expert, SwapMethod
from layerswap.delta.magnitude import magnitude_weights
from layerswap.errors import RecipeError
from layerswap.merge.adapter_plan import AdapterPlan
from layerswap.merge.check import check_together
from layerswap.merge.fisher import open_fishers, stored_fishers
from layerswap.merge.guard import stamps_of
from layerswap.merge.opening import open_sources
from layerswap.merge.plan import Plan, with_base
from layerswap.merge.vocabulary import align, vocabulary_tensors


def make_plan(recipe: Recipe, *, allow_pickle: bool = False) -> Plan:
    """Open the sources of a recipe, check them against each other, and resolve it.

    Reads headers and JSON only, except that magnitude weights read every tensor.

    Args:
        recipe: what to merge.
        allow_pickle: read pickled weights (`.bin`), as tensors only.

    Raises:
        LayerswapError: a source cannot be opened, the sources do not fit together, or the
            recipe does not fit them.
    """
    opened = open_sources(recipe, recipe.experts_in_order, allow_pickle=allow_pickle)
    sources, base = opened.experts, opened.base
    if recipe.rank is not None and not opened.adapters_only:
        raise RecipeError("rank: only a merge of adapters into an adapter has one; remove it")
    if base is not None and recipe.base is None:
        # The base that adapters name is recorded, or the merge could not be made again.
        named = Expert(source=base.source, revision=base.revision)
        recipe = recipe.model_copy(update={"base": named})
    together = with_base(sources, base)
    stamps = stamps_of(together.values())
    alignment = align(recipe, together, base)
    drop = check_together(together, aligned=alignment is not None)
    first = next(iter(sources.values()))
    rows = vocabulary_tensors(first) if alignment else ()
    magnitude = _measure(recipe, sources, base, drop.union(rows))
    tensors = {name: place for name, place in first.places.items() if name not in drop}
    composition = recipe.resolve(first.layers, magnitude, tensors)
    fishers = open_fishers(recipe, sources, drop, aligned=alignment is not None)
    stamps |= stamps_of(stored_fishers(fishers).values())
    kind = AdapterPlan if opened.adapters_only else Plan
    return kind(recipe, composition, sources, base, drop, magnitude, stamps, alignment, fishers)


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
