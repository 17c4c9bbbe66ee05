"""Selects the parameters that train, and their learning rates, from places."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from layerswap.checkpoint.places import Place, place, place_tensors
from layerswap.compose import Composition, partition, read_recipe
from layerswap.compose.composition import all_places
from layerswap.errors import RecipeError, TrainingError
from layerswap.training.expert.spec import ExpertSpec, Lora, Rate, Trained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTED = ("attention", "mlp")
"""Roles whose matrices get adapters (paper 2, section 3.4)."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Matrices that send a token to its experts; they get no adapter."""
Part = frozenset[Place]


def trained_parts(spec: ExpertSpec, layers: int, folder: Path) -> list[Part]:
    """The places that train: one set, or the task's and the language's where they take turns.

    Args:
        spec: the expert.
        layers: number of layers of the base, L.
        folder: base of the path of a recipe.

    Raises:
        RecipeError: the partition, the recipe or the places do not fit the base, or nothing would
            train.
    """
    chosen = spec.train
    if chosen is None:
        return [frozenset(all_places(layers))]
    asked = _places(chosen, layers)
    if not (chosen.partition or chosen.recipe):
        return [asked]
    composition, names = _composition(chosen, layers, folder)
    wanted = names if spec.simultaneous else [_expert(chosen, names)]
    parts = [_part(composition, name) for name in wanted]
    for i, name in enumerate(wanted):
        if not parts[i]:
            raise RecipeError(f"train: no place takes anything from {name!r}; nothing would train")
        parts[i] &= asked
        if not parts[i]:
            raise RecipeError(f"train.places: none belongs to {name!r}; nothing would train")
    if len(parts) == 2 and parts[0] & parts[1]:
        # A blended place has one value, so only one of the two can train it.
        parts[1] = parts[1] - parts[0]
    return parts


def parameter_places(model: PreTrainedModel) -> dict[str, Place]:
    """The place of every parameter of a model without adapters, by name.

    Raises:
        CheckpointError: a name that no layout knows.
    """
    return place_tensors([name for name, _ in model.named_parameters()])


def adapter_targets(model: PreTrainedModel, parts: Iterable[Part], lora: Lora) -> list[str]:
    """Full names of the matrices that get an adapter: attention and mlp, at the trained places.

    `lora.target_modules` and `lora.exclude_modules` restrict them as in PEFT.

    Raises:
        TrainingError: no matrix is at these places.
    """
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    trained = frozenset[Place]().union(*parts)
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, Linear | Conv1D)
        and name.rpartition(".")[2] not in ROUTERS
        and (where := place(f"{name}.weight")) in trained
        and where is not None
        and where.role in ADAPTED
        and where.layer is not None
        and _matches(name, lora.target_modules, default=True)
        and not _matches(name, lora.exclude_modules, default=False)
    ]
    if not found:
        restricted = " and in target_modules" if lora.target_modules else ""
        raise TrainingError(
            f"lora: no attention or mlp matrix is at the places that train{restricted}"
        )
    return found


def _matches(name: str, pattern: list[str] | str | None, *, default: bool) -> bool:
    if pattern is None or pattern == "all-linear":
        return default
    if isinstance(pattern, str):
        return re.fullmatch(pattern, name) is not None
    return any(name == end or name.endswith(f".{end}") for end in pattern)


def names_by_part(
    parameters: Iterable[str], places: Mapping[str, Place], parts: Iterable[Part]
) -> list[list[str]]:
    """The names of the parameters that train in each part.

    Args:
        parameters: names in the trained model, with PEFT's prefix and adapters.
        places: places of the base's parameters.
        parts: the places of each part.
    """
    where_of = _where_of(parameters, places)
    return [[name for name, where in where_of.items() if where in part] for part in parts]


def rates_by_place(rates: Iterable[Rate], layers: int) -> dict[Place, float]:
    """Factors of the learning rate by place; the last rate that names a place wins.

    Raises:
        RecipeError: a rate names a place that a model of `layers` layers does not have.
    """
    scales: dict[Place, float] = {}
    for rate in rates:
        try:
            scales |= dict.fromkeys(rate.places(layers), rate.scale)
        except RecipeError as error:
            raise error.within("rates") from None
    return scales


def rates_by_name(
    parameters: Iterable[str], places: Mapping[str, Place], rates: Mapping[Place, float]
) -> dict[str, float]:
    """Factors of the learning rate by parameter, named as in `names_by_part`."""
    where_of = _where_of(parameters, places)
    return {name: rates[where] for name, where in where_of.items() if where in rates}


def _where_of(parameters: Iterable[str], places: Mapping[str, Place]) -> dict[str, Place]:
    by_module = {name.rpartition(".")[0]: where for name, where in places.items()}
    where_of: dict[str, Place] = {}
    for name in parameters:
        if ".lora_" in name:
            module = name.split(".lora_")[0].removeprefix("base_model.model.")
            where_of[name] = by_module[module]
        elif not name.startswith("base_model."):
            where_of[name] = places[name]
    return where_of


def _places(chosen: Trained, layers: int) -> Part:
    """The places that `places` names; all where it says nothing."""
    if chosen.places is None:
        return frozenset(all_places(layers))
    try:
        return frozenset(p for where in chosen.places for p in where.places(layers))
    except RecipeError as error:
        raise error.within("train.places") from None


def _composition(chosen: Trained, layers: int, folder: Path) -> tuple[Composition, list[str]]:
    if chosen.partition:
        return partition(chosen.partition, layers, outside=chosen.outside), ["task", "language"]
    assert chosen.recipe is not None, "the schema lets nothing else through"
    recipe = read_recipe(folder / chosen.recipe)
    method = recipe.swap or recipe.partition
    names = [method.task, method.language] if method else list(recipe.experts)
    # Experts of a recipe need not exist yet; only their names and places are read.
    flat = {name: recipe.experts[name] for name in names}
    if any(entry.source is None for entry in flat.values()) or len(names) != 2:
        raise RecipeError(f"train.recipe: {chosen.recipe}: needs two experts with a source each")
    return recipe.resolve(layers), names


def _expert(chosen: Trained, names: list[str]) -> str:
    name = chosen.part or chosen.expert
    if name not in names:
        raise RecipeError(f"train.expert: no expert {name!r}; there are {', '.join(names)}")
    return name


def _part(composition: Composition, name: str) -> Part:
    return frozenset(p for p, blend in composition.blends.items() if name in blend.experts)
