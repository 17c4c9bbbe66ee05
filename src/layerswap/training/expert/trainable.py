"""Selects the parameters that train, from places."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from layerswap.checkpoint.places import Place, place, place_tensors
from layerswap.compose.composition import Composition, all_places
from layerswap.compose.presets import partition
from layerswap.compose.recipe import read_recipe
from layerswap.ground.errors import RecipeError, TrainingError, error_context
from layerswap.training.expert.spec import ExpertSpec, Lora, Trained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTED = ("attention", "mlp")
"""Roles whose matrices get adapters (paper 2, section 3.4)."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Matrices that send a token to its experts; they get no adapter."""
Part = frozenset[Place]


def trained_parts(spec: ExpertSpec, layers: int, folder: Path) -> list[Part]:
    """Return the places that train: one set, or two sets that take turns, the task's first.

    `layers` is the depth of the base; the path of a recipe is relative to `folder`.
    """
    chosen = spec.train
    if chosen is None:
        return [frozenset(all_places(layers))]
    selected = _selected_places(chosen, layers)
    if not (chosen.partition or chosen.recipe):
        return [selected]
    composition, names = _composition(chosen, layers, folder)
    experts = names if spec.simultaneous else [_expert(chosen, names)]
    parts = []
    for name in experts:
        part = frozenset(p for p, blend in composition.blends.items() if name in blend.experts)
        if not part:
            raise RecipeError(
                f"train: the recipe takes no place from {name!r}; nothing would train"
            )
        if not part & selected:
            raise RecipeError(f"train.places: no place belongs to {name!r}; nothing would train")
        parts.append(part & selected)
    if len(parts) == 2:
        # A blended place has one value, so only one of the two can train it.
        parts[1] -= parts[0]
    return parts


def parameter_places(model: PreTrainedModel) -> dict[str, Place]:
    """Return the place of every parameter of a model without adapters, by name."""
    return place_tensors([name for name, _ in model.named_parameters()])


def adapter_targets(model: PreTrainedModel, parts: Iterable[Part], lora: Lora) -> list[str]:
    """List the full names of the matrices that get an adapter.

    These are the attention and mlp matrices at the trained places, restricted by
    `lora.target_modules` and `lora.exclude_modules` as in PEFT.
    """
    from torch.nn import Linear
    from transformers import Conv1D

    every = frozenset[Place]().union(*parts)
    adapted = {p for p in every if p.role in ADAPTED and p.layer is not None}
    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, Linear | Conv1D)
        and name.rpartition(".")[2] not in ROUTERS
        and place(f"{name}.weight") in adapted
        and _matches(name, lora.target_modules, default=True)
        and not _matches(name, lora.exclude_modules, default=False)
    ]
    if not targets:
        restricted = " and in target_modules" if lora.target_modules else ""
        raise TrainingError(
            f"lora: no attention or mlp matrix is at the places that train{restricted}"
        )
    return targets


def _matches(name: str, pattern: list[str] | str | None, *, default: bool) -> bool:
    if pattern is None or pattern == "all-linear":
        return default
    if isinstance(pattern, str):
        return re.fullmatch(pattern, name) is not None
    return any(name == end or name.endswith(f".{end}") for end in pattern)


def names_by_part(
    parameters: Iterable[str], places: Mapping[str, Place], parts: Iterable[Part]
) -> list[list[str]]:
    """List the names of the parameters that train in each part: adapters, or all without adapters.

    `parameters` are names in the trained model, with PEFT's prefix and adapters; `places` are those
    of the base's parameters.
    """
    by_module = {name.rpartition(".")[0]: where for name, where in places.items()}
    place_of: dict[str, Place] = {}
    for name in parameters:
        if ".lora_" in name:
            module = name.split(".lora_")[0].removeprefix("base_model.model.")
            place_of[name] = by_module[module]
        elif not name.startswith("base_model."):
            place_of[name] = places[name]
    return [[name for name, where in place_of.items() if where in part] for part in parts]


def _selected_places(chosen: Trained, layers: int) -> Part:
    """Return the places in `places`; all if it is not given."""
    if chosen.places is None:
        return frozenset(all_places(layers))
    with error_context("train.places"):
        return frozenset(p for where in chosen.places for p in where.places(layers))


def _composition(chosen: Trained, layers: int, folder: Path) -> tuple[Composition, list[str]]:
    """Resolve the partition or the recipe; return the names of its two experts too."""
    if chosen.partition:
        return partition(chosen.partition, layers, outside=chosen.outside), ["task", "language"]
    assert chosen.recipe is not None, "the schema lets nothing else through"
    recipe = read_recipe(folder / chosen.recipe)
    method = recipe.swap or recipe.partition
    names = [method.task, method.language] if method else list(recipe.experts)
    # Experts of a recipe need not exist yet; only their names and places are read.
    if len(names) != 2 or any(recipe.experts[name].source is None for name in names):
        raise RecipeError(f"train.recipe: {chosen.recipe}: needs two experts with a source each")
    return recipe.resolve(layers), names


def _expert(chosen: Trained, names: list[str]) -> str:
    name = chosen.part or chosen.expert
    if name not in names:
        raise RecipeError(f"train.expert: no expert {name!r}; there are {', '.join(names)}")
    return name
