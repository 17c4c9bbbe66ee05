"""What a search chooses, as parameters, and as a recipe with an override for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from layerswap.compose import Recipe
from layerswap.compose.schema import Override
from layerswap.errors import EvaluationError
from layerswap.evaluate.sweep_spec import SearchSpec
from layerswap.merge.plan import Plan

OUTSIDE = "outside"
Choices = Mapping[str, str]
"""Per parameter what it takes, as text; a share of the language expert as a number in text."""


def parameters(spec: SearchSpec, layers: int) -> dict[str, list[str]]:
    """What is chosen, and from what: `outside`, and `3` or `3.attention` and `3.mlp`."""
    takes = [str(value) for value in spec.take]
    roles = [""] if spec.each == "layer" else [".attention", ".mlp"]
    return {
        OUTSIDE: list(spec.outside),
        **{f"{layer}{role}": takes for layer in range(layers) for role in roles},
    }


def with_choices(recipe: Recipe, choices: Choices) -> Recipe:
    """The recipe with an override for every choice; norms go with attention."""
    assert recipe.swap is not None, "a sweep's recipe is a swap"
    places = [*recipe.places, *_overrides(recipe, choices)]
    swap = recipe.swap.model_copy(update={"outside": choices[OUTSIDE]})
    return recipe.model_copy(update={"swap": swap, "places": places})


def with_choices_plan(start: Plan, choices: Choices) -> Plan:
    """The plan of `with_choices`, over checkpoints that are open already."""
    recipe = with_choices(start.recipe, choices)
    composition = recipe.resolve(start.composition.layers, start.magnitude)
    return replace(start, recipe=recipe, composition=composition)


def _overrides(recipe: Recipe, choices: Choices) -> Iterator[Override]:
    method = recipe.swap
    assert method is not None, "a sweep's recipe is a swap"
    for key, choice in choices.items():
        if key == OUTSIDE:
            continue
        layer, _, role = key.partition(".")
        take: dict[str, float] = {choice: 1.0}
        if choice not in (*recipe.experts, "base"):
            share = float(choice)
            weights = {method.task: 1 - share, method.language: share}
            take = {name: weight for name, weight in weights.items() if weight}
        # Attention comes first and brings the layer's norms; the mlp then takes its own.
        roles = ["mlp"] if role == "mlp" else None
        yield Override(layers=layer, roles=roles, take=take)


def check_names(spec: SearchSpec, recipe: Recipe) -> None:
    """Refuse names that the recipe does not have.

    Raises:
        EvaluationError: naming the first.
    """
    known = [*recipe.experts, *(["base"] if recipe.base else [])]
    unknown = next((v for v in spec.take if isinstance(v, str) and v not in known), None)
    if unknown is not None:
        raise EvaluationError(
            f"search.take: no expert {unknown!r} in the recipe; it has {', '.join(known)}"
        )
