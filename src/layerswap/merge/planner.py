"""From a recipe's sources to checkpoints: full ones, and adapters over their base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from layerswap.checkpoint import (
    Adapter,
    Checkpoint,
    adapt,
    is_adapter,
    open_checkpoint,
    open_configuration,
    read_adapter,
)
from layerswap.checkpoint.commit import PARTIAL
from layerswap.checkpoint.folder import INDEX, SINGLE
from layerswap.checkpoint.hub import fetch_checkpoint
from layerswap.checkpoint.preconditions import stamps_of
from layerswap.compose import Recipe
from layerswap.compose.blend import Member
from layerswap.compose.schema import Expert, SwapMethod
from layerswap.deltas.measure import magnitude_weights
from layerswap.errors import LayerswapError, MergeError, RecipeError
from layerswap.merge.compatibility import check_together
from layerswap.merge.fisher import open_fishers, stored_fishers
from layerswap.merge.lora import AdapterPlan
from layerswap.merge.plan import Plan, with_base
from layerswap.merge.vocabulary import align, vocabulary_tensors


@dataclass(frozen=True)
class Sources:
    """What a recipe's sources turned out to be.

    Attributes:
        experts: the experts by name, in the order asked for.
        base: the base, from the recipe or from the adapters.
        adapters_only: whether the merge is of adapters into an adapter.
    """

    experts: Mapping[str, Checkpoint]
    base: Checkpoint | None
    adapters_only: bool


def open_sources(recipe: Recipe, names: Sequence[str], *, allow_pickle: bool = False) -> Sources:
    """Open the experts of these names, and the base.

    Raises:
        LayerswapError: naming the expert that cannot be opened, and why.
    """
    adapters: dict[str, tuple[Adapter, str | None]] = {}
    full: dict[str, Checkpoint] = {}
    for name in names:
        expert = recipe.experts[name]
        if expert.source is None:
            continue
        _refuse_unfinished(name, expert.source, Path(expert.source))
        try:
            folder, commit = fetch_checkpoint(expert.source, expert.revision)
            if is_adapter(folder):
                adapters[name] = read_adapter(folder), commit
            else:
                full[name] = _open(expert, recipe, allow_pickle)
        except LayerswapError as error:
            raise error.within(name) from None
        _refuse_unfinished(name, expert.source, folder.resolve())
    only = bool(adapters) and not full and not recipe.bake
    named = {name: adapter for name, (adapter, _) in adapters.items()}
    base = _open_base(recipe, named, only, allow_pickle)
    for name, (adapter, commit) in adapters.items():
        assert base is not None, "adapters were opened without their base"
        source = str(recipe.experts[name].source).partition("@")[0 if commit else 2]
        source = source or str(recipe.experts[name].source)
        patterns = recipe.place_patterns
        try:
            full[name] = adapt(base, adapter, source=source, revision=commit, patterns=patterns)
        except LayerswapError as error:
            raise error.within(name) from None
    return Sources({name: full[name] for name in names if name in full}, base, only)


def _open_base(
    recipe: Recipe, adapters: Mapping[str, Adapter], adapters_only: bool, allow_pickle: bool
) -> Checkpoint | None:
    if recipe.base is not None and recipe.base.source is not None:
        entry, context = recipe.base, "base"
        _refuse_unfinished("base", str(entry.source), Path(str(entry.source)))
    elif adapters:
        entry, context = _named_base(adapters), "the base that the adapters name"
    else:
        return None
    try:
        if adapters_only and recipe.weights != "magnitude" and not _has_weights(entry):
            return open_configuration(str(entry.source), revision=entry.revision)
        return _open(entry, recipe, allow_pickle)
    except LayerswapError as error:
        raise error.within(context) from None


def _named_base(adapters: Mapping[str, Adapter]) -> Expert:
    """The one base that all adapters name."""
    named = {name: (a.base, a.base_revision) for name, a in adapters.items()}
    for name, (base, _) in named.items():
        if base is None:
            raise MergeError(f"{name}: the adapter names no base; give one with `base` (--base)")
    first = next(iter(named))
    for name, found in named.items():
        if found != named[first]:
            raise MergeError(
                f"{first} adapts {named[first][0]} and {name} adapts {found[0]}; if they are the "
                "same model, say which to take with `base` (--base)"
            )
    source, revision = named[first]
    return Expert(source=source, revision=revision)


def _has_weights(entry: Expert) -> bool:
    folder = Path(str(entry.source)).expanduser()
    return any((folder / name).is_file() for name in (SINGLE, INDEX))


def _open(expert: Expert, recipe: Recipe, allow_pickle: bool) -> Checkpoint:
    return open_checkpoint(
        str(expert.source),
        revision=expert.revision,
        patterns=recipe.place_patterns,
        allow_pickle=allow_pickle,
    )


def _refuse_unfinished(name: str, source: str, folder: Path) -> None:
    if PARTIAL in folder.name:
        raise MergeError(f"{name}: {source} is an unfinished merge; merge it again")


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
