"""Makes plans: from a recipe, or from the arguments of a swap, soup, partition or revert."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from layerswap.checkpoint.checkpoint import without_unshared
from layerswap.checkpoint.views import restack
from layerswap.compose.presets import Outside
from layerswap.compose.recipe import Recipe, check_recipe, read_recipe
from layerswap.compose.schema import Expert
from layerswap.deltas.measure import magnitude_weight
from layerswap.ground.errors import RecipeError
from layerswap.ground.types import PathLike
from layerswap.merge.compatibility import check_architecture, check_together
from layerswap.merge.folder import FolderFormat
from layerswap.merge.gguf import GGUFFormat
from layerswap.merge.heads import with_one_head
from layerswap.merge.lora import AdapterFormat
from layerswap.merge.plan import Format, Plan, fisher_sources
from layerswap.merge.sources import Opener, Sources, open_fishers, stamps_of
from layerswap.merge.trained import trained_partition
from layerswap.methods.rows import Axis

Weighting = str | Mapping[str, float]
"""Weights of a blend: `uniform`, `magnitude`, or a weight per expert."""


class OutputSettings(TypedDict, total=False):
    """Settings of the output, which every function here takes by keyword.

    Attributes:
        tokenizer: the tokenizer of the output if the experts' differ: an expert's name, or
            `union`.
        bake: write full weights even if all experts are adapters.
        base_as: `nf4` or `nf4-double` adds adapters to the base as QLoRA trains over it.
        rank: largest rank of a merged adapter; exact by default.
        dtype: `float32`, `bfloat16` or `float16`; as stored by default.
        max_shard_size: largest size of an output file, `5GB` by default.
    """

    tokenizer: str | None
    bake: bool
    base_as: str | None
    rank: int | None
    dtype: str | None
    max_shard_size: str


def make_plan(
    recipe: Recipe | PathLike,
    *,
    follow_training: bool = False,
    in_place: bool = False,
) -> Plan:
    """Open the sources of a recipe, check them against each other, and resolve it.

    Reads headers and JSON only, except that magnitude weights read every tensor.

    Args:
        recipe: the recipe, or the path of a recipe file.
        follow_training: compose a swap without zones along the partition that its experts were
            trained on, if their records name one.
        in_place: leave Hub weights outside the local cache where they are; saving the plan reads
            only the spans that it takes. Magnitude weights need whole
            files, which are downloaded.

    Raises:
        LayerswapError: a source cannot be opened, the sources do not fit together, or the
            recipe does not fit them.

    Example:
        >>> import layerswap as ls
        >>> recipe = ls.parse_recipe("{experts: {a: math-expert}, soup: {experts: [a]}}")
        >>> ls.make_plan(recipe).composition.experts
        ('a',)
    """
    if not isinstance(recipe, Recipe):
        recipe = read_recipe(Path(recipe))
    sources = Opener(recipe, in_place).open()
    if recipe.weights == "magnitude":
        sources = sources.each(lambda _, checkpoint: checkpoint.downloaded())
    if follow_training:
        partition = trained_partition(recipe, sources.experts)
        if partition is not None:
            recipe = recipe.changed(
                {"partition": partition}, where="partition", without=("swap", "weights")
            )
    if sources.base is not None and recipe.base is None:
        # The record needs the base that adapters name, to make the same merge again.
        named = Expert(source=sources.base.source, revision=sources.base.revision)
        recipe = recipe.model_copy(update={"base": named})
    together = without_unshared(with_one_head(sources.together, sources.names))
    sources = replace(sources, together=together)
    stamps = stamps_of(together.values())
    form = FORMATS[sources.form]()
    _refuse_settings(recipe, form.cannot)
    for name, checkpoint in together.items():
        _refuse_settings(recipe, checkpoint.cannot, f"{name} ")
    check_architecture(together)
    alignment = form.aligned(recipe, together, sources.base)
    together, drop = check_together(together, aligned=alignment is not None)
    sources = replace(sources, together=together)
    first = next(iter(sources.experts.values()))
    form.check_source(first)
    skip = drop.union(first.vocabulary_rows if alignment else ())
    if sources.base is not None:
        skip |= sources.base.borrowed
    magnitude = _measured_weights(recipe, sources, skip)
    places = {name: place for name, place in first.places.items() if name not in drop}
    depth = first.layers
    composition = recipe.resolve(depth, magnitude, places)
    if composition.taken is not None:
        if not form.moves_layers or any(e.fisher for e in recipe.experts.values()):
            raise RecipeError("moving layers needs safetensors, bake: true, and no Fisher")
        taken = composition.taken
        sources = sources.each(lambda _, checkpoint: restack(checkpoint, taken))
    fishers = open_fishers(recipe, sources.experts, drop, aligned=alignment is not None)
    stamps |= stamps_of(fisher_sources(fishers).values())
    return Plan(
        recipe, composition, sources.experts, sources.base, form, depth, places, drop, magnitude,
        stamps, alignment, fishers,
    )  # fmt: skip


FORMATS: Mapping[str, type[Format]] = {
    form.name: form for form in (FolderFormat, AdapterFormat, GGUFFormat)
}


def _refuse_settings(recipe: Recipe, cannot: Mapping[str, str], whose: str = "") -> None:
    """Refuse settings of a recipe that a form of output, or a kind of input, lacks."""
    for setting, why in cannot.items():
        key, _, value = setting.partition("=")
        given = getattr(recipe, key)
        if given == value if value else given != Recipe.model_fields[key].default:
            raise RecipeError(f"{key}: {whose}{why}")


def _measured_weights(
    recipe: Recipe, sources: Sources, skip: frozenset[str]
) -> dict[str, float] | None:
    """Measure the blended experts' magnitude weights, if the recipe asks for them."""
    if recipe.weights != "magnitude" or sources.base is None:
        return None
    flat = recipe.flat_experts()
    weights: dict[str, float] = {}
    for name in recipe.method.references.values():
        members = flat[name].weights if name in flat else ((name, 1.0),)
        # The base is in no blend, and has no magnitude either.
        if unknown := [member for member, _ in members if member not in sources.experts]:
            raise RecipeError(
                f"weights: the magnitude of {unknown[0]} cannot be measured; give numbers"
            )
        parts = [(sources.experts[str(member)], weight) for member, weight in members]
        weights[name] = magnitude_weight(sources.base, parts, skip)
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def swap(
    *,
    task: PathLike,
    language: PathLike,
    base: PathLike | None = None,
    bottom: int | None = None,
    top: int | None = None,
    bottom_transition: int = 0,
    top_transition: int = 0,
    outside: Outside | None = None,
    weights: Weighting = "uniform",
    **output: Unpack[OutputSettings],
) -> Plan:
    """Plan a layer swap of two experts (paper 1, Algorithm 1). Opens headers, writes nothing.

    If no argument decides the composition and the records of both experts
    (`layerswap-training.json`) name one partition of the second paper, the swap follows it.

    Args:
        task: the task expert, for the middle layers.
        language: the language expert, for the bottom and top layers.
        base: the checkpoint that both were fine-tuned from; magnitude weights need it.
        bottom: layers from the language expert at the input; the scaled default when None.
        top: layers from the language expert at the output; the scaled default when None.
        bottom_transition: blended layers above the bottom zone.
        top_transition: blended layers below the top zone.
        outside: source of embeddings, final norm and head; the blend when None.
        weights: weights of a blend: `uniform`, `magnitude`, or `{"task": w, "language": w}`.
        **output: settings of the output; see `OutputSettings`.

    Raises:
        LayerswapError: the experts cannot be opened or do not fit together, or the zones do not
            fit them.

    Example:
        >>> import layerswap as ls
        >>> plan = ls.swap(task="math-expert", language="swahili-expert", bottom=1, top=1)
        >>> print(plan)
        head, final norm ▒▒▒▒▒▒▒▒▒▒ 0.5 language + 0.5 task
                       2 ██████████ language
                       1 ░░░░░░░░░░ task
                       0 ██████████ language
               embedding ▒▒▒▒▒▒▒▒▒▒ 0.5 language + 0.5 task
        >>> plan.save("merged", overwrite=True).name
        'merged'
    """
    zones = {
        "bottom": bottom, "top": top, "outside": outside,
        "bottom_transition": bottom_transition or None, "top_transition": top_transition or None,
    }  # fmt: skip
    method = {
        "swap": {key: value for key, value in zones.items() if value is not None},
        "weights": weights if isinstance(weights, str) else dict(weights),
    }
    return _plan("swap", {"task": task, "language": language}, base, method, output)


def soup(
    experts: Sequence[PathLike] | Mapping[str, PathLike],
    *,
    base: PathLike | None = None,
    weights: Weighting = "uniform",
    **output: Unpack[OutputSettings],
) -> Plan:
    """Plan a model soup: the same blend at every place (Wortsman et al., 2022).

    Args:
        experts: the experts by name, or a list of them, named `expert_1`, `expert_2` and so on.
        base: the checkpoint that they were fine-tuned from; magnitude weights need it.
        weights: `uniform`, `magnitude`, or a weight per name.
        **output: settings of the output; see `OutputSettings`.

    Raises:
        LayerswapError: the experts cannot be opened or do not fit together.

    Example:
        >>> import layerswap as ls
        >>> plan = ls.soup(["math-expert", "swahili-expert"])
        >>> plan.composition.experts
        ('expert_1', 'expert_2')
    """
    if isinstance(experts, str | os.PathLike):
        raise RecipeError("a soup needs a list of experts, or a mapping from names to experts")
    if not isinstance(experts, Mapping):
        experts = {f"expert_{i}": source for i, source in enumerate(experts, start=1)}
    blend = weights if isinstance(weights, str) else dict(weights)
    method = {"soup": {"experts": list(experts)}, "weights": blend}
    return _plan("soup", experts, base, method, output)


def partition(
    name: Literal["A", "B", "C", "Z"],
    *,
    task: PathLike,
    language: PathLike,
    base: PathLike | None = None,
    outside: Literal["language", "task"] | None = None,
    **output: Unpack[OutputSettings],
) -> Plan:
    """Plan a merge along a partition of the second paper (section 3.3).

    Args:
        name: `A`, `B`, `C` or `Z`; see `compose.presets.partition`.
        task: the task expert.
        language: the language expert.
        base: the checkpoint that both were fine-tuned from.
        outside: source of the places outside the layers; the partition's when None.
        **output: settings of the output; see `OutputSettings`.

    Raises:
        LayerswapError: the experts cannot be opened or do not fit together, or there is no such
            partition.

    Example:
        >>> import layerswap as ls
        >>> print(ls.partition("B", task="math-expert", language="swahili-expert"))
        head, final norm ░░░░░░░░░░ task
                       2 ██████████ language
                       1 ░░░░░░░░░░ task
                       0 ██████████ language
               embedding ░░░░░░░░░░ task
    """
    method = {"partition": {"name": name, "outside": outside}}
    return _plan("partition", {"task": task, "language": language}, base, method, output)


def instruct(
    *,
    base: PathLike,
    instruct: PathLike,
    language: PathLike,
    weight: float = 1.0,
    bottom: int = 0,
    top: int = 0,
    bottom_transition: int = 0,
    top_transition: int = 0,
    outside: Literal["add", "language"] = "add",
    **output: Unpack[OutputSettings],
) -> Plan:
    """Plan a language model with the instruction tuning of another (2310.04799; 2603.28263).

    Adds the chat vector, `instruct` minus `base`, to the language model layer by layer. The
    tokenizer is the instruct model's, with its chat template. If the language model has other
    tokens, it is the language model's, and tokens that it added keep their rows.

    Args:
        base: the base of both models.
        instruct: the base after instruction tuning.
        language: the base after training on a language.
        weight: of the chat vector.
        bottom: layers without the chat vector at the input.
        top: layers without it at the output.
        bottom_transition: layers with half of it above the bottom zone.
        top_transition: layers with half of it below the top zone.
        outside: `add`: embeddings, final norm and head get it too; `language`: they are the
            language model's.
        **output: settings of the output; see `OutputSettings`.

    Raises:
        LayerswapError: the models cannot be opened or do not fit together.

    Example:
        >>> import layerswap as ls
        >>> models = {"instruct": "math-expert", "language": "swahili-expert"}
        >>> plan = ls.instruct(base="base", **models, top=1)
        >>> plan.composition[ls.Place(2, "mlp")] == ls.Blend.of("language")
        True
    """
    settings = {
        "weight": weight, "bottom": bottom, "top": top, "outside": outside,
        "bottom_transition": bottom_transition, "top_transition": top_transition,
    }  # fmt: skip
    models = {"language": language, "instruct": instruct}
    return _plan("instruct", models, base, {"instruct": settings}, output)


def revert(
    base: PathLike,
    expert: PathLike,
    *,
    keep: float | None = None,
    threshold: float | None = None,
    axis: Axis = "input",
    scope: Literal["tensor", "model"] = "tensor",
    layers: str | int | Sequence[str | int] | None = None,
    roles: str | Sequence[str] | None = None,
    partition: str | None = None,
    part: Literal["task", "language"] | None = None,
    **output: Unpack[OutputSettings],
) -> Plan:
    """Plan resetting part of an expert to the base. Opens headers, writes nothing.

    Resets by magnitude (paper 1, section 3.3: rows that changed little), or by place (paper 2,
    Table 2: all but one part of a partition; or chosen layers and roles). Weights are copied bit
    for bit from the expert or the base.

    Args:
        base: the checkpoint that the expert was fine-tuned from.
        expert: a full checkpoint or an adapter.
        keep: the share of rows to keep, those with the largest MAV.
        threshold: the smallest MAV of a row to keep.
        axis: direction of a row; the papers' is an input feature.
        scope: `tensor` ranks the rows for `keep` in each tensor, `model` over all tensors.
        layers: layers to reset, as numbers and ranges such as `3-7`, `outside` or `all`.
        roles: only these roles of those layers; all layers when `layers` is None.
        partition: a partition of the second paper, `A`, `B`, `C` or `Z`.
        part: the part of the partition that the expert keeps.
        **output: settings of the output; see `OutputSettings`. Always writes full weights.

    Raises:
        LayerswapError: the checkpoints cannot be opened or do not fit together, or the part to
            reset is not given, or given twice.

    Example:
        >>> import layerswap as ls
        >>> print(ls.revert("base", "math-expert", layers="0-1"))
        head, final norm ██████████ expert
                       2 ██████████
                       1 ░░░░░░░░░░ base
                       0 ░░░░░░░░░░
               embedding ██████████ expert
    """
    by_size = {"keep": keep, "threshold": threshold}
    by_size = {name: value for name, value in by_size.items() if value is not None}
    by_place = layers is not None or roles is not None
    if len(by_size) + by_place + (partition is not None) != 1:
        raise RecipeError(
            "choose one way to revert: keep or threshold; layers or roles; or partition"
        )
    if part is not None and partition is None:
        raise RecipeError("`part` needs `partition`; give the name of a partition")
    method: dict[str, Any]
    if by_size:
        settings = {"axis": axis, "scope": scope, **by_size}
        method = {"merge": {"method": "revert", "experts": ["expert"], **settings}}
    elif by_place:
        only = {"roles": _listed(roles)} if roles else {}
        places = [{"layers": at, "take": "base", **only} for at in _listed(layers) or ("all",)]
        method = {"soup": {"experts": ["expert"]}, "places": places}
    else:
        if part not in ("task", "language"):
            raise RecipeError("`partition` needs the part that the expert keeps: task or language")
        sides = {"task": "base", "language": "base", part: "expert"}
        method = {"partition": {"name": partition, **sides}}
    return _plan("revert", {"expert": expert}, base, method, {**output, "bake": True})


def _plan(
    where: str,
    experts: Mapping[str, PathLike],
    base: PathLike | None,
    method: Mapping[str, Any],
    output: OutputSettings,
) -> Plan:
    data = {
        "experts": {name: os.fspath(source) for name, source in experts.items()},
        "base": None if base is None else os.fspath(base),
        **method,
        **output,
    }
    return make_plan(check_recipe(data, where=where), follow_training=True, in_place=True)


def _listed(value: str | int | Sequence[str | int] | None) -> list[str | int]:
    if value is None:
        return []
    return [value] if isinstance(value, str | int) else list(value)
