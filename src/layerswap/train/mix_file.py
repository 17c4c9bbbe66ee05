"""Mixes on disk: a YAML file of one's own, or one of the ready recipes of both papers."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from layerswap.compose.explain import explain
from layerswap.compose.mistakes import nearest
from layerswap.compose.schema import Strict
from layerswap.compose.yaml_file import KeyPath, parse_yaml, read_text
from layerswap.errors import RecipeError
from layerswap.train import mix_schema
from layerswap.train.mix_schema import Mix


def read_mix(source: str | Path) -> Mix:
    """The mix in a YAML file, or the ready recipe of that name.

    Args:
        source: a file, or a name that `ready_recipes` gives.

    Raises:
        RecipeError: the file cannot be read, or the mix is wrong; all mistakes at once, each on a
            line with its key path.

    Example: `read_mix("swahili")`
    """
    return parse_mix(mix_text(source), where=str(source))


def mix_text(source: str | Path) -> str:
    """The YAML of a file or of a ready recipe, as it stands; see `read_mix`."""
    path = Path(source)
    if not path.exists() and not path.suffix and len(path.parts) == 1:
        recipes = ready_recipes()
        if str(source) not in recipes:
            hint = nearest(str(source), list(recipes))
            raise RecipeError(f"{source}: no such file, and no such ready recipe{hint}")
        return recipes[str(source)]
    return read_text(path)


def ready_recipes() -> dict[str, str]:
    """The YAML of every recipe that ships with the package, by name."""
    folder = resources.files("layerswap.train") / "recipes"
    texts = {file.name.removesuffix(".yaml"): file.read_text("utf-8") for file in folder.iterdir()}
    return dict(sorted(texts.items()))


def parse_mix(text: str, *, where: str = "mix") -> Mix:
    """The mix in a YAML text; errors name `where`. See `read_mix`."""
    data, lines = parse_yaml(text, where)
    if not isinstance(data, dict):
        raise RecipeError(f"{where}: a mix is a mapping with `name` and `sources`")
    try:
        return Mix.model_validate(data)
    except ValidationError as error:
        raise RecipeError(explain(error, where, lines, _keys_at)) from None


_MODELS: dict[tuple[str | None, ...], type[Strict]] = {
    (): Mix,
    ("sources", None): mix_schema.Source,
    ("sources", None, "messages"): mix_schema.Messages,
    ("filters",): mix_schema.Filters,
    ("filters", "length"): mix_schema.Length,
    ("filters", "math"): mix_schema.Mathematics,
    ("filters", "language"): mix_schema.Language,
    ("filters", "evaluation"): mix_schema.Evaluation,
    ("filters", "evaluation", "against", None): mix_schema.EvaluationSet,
    ("filters", "near_duplicates"): mix_schema.NearDuplicates,
}
"""What stands at a key path; None is any name."""


def _keys_at(path: KeyPath) -> list[str]:
    for pattern, model in _MODELS.items():
        if len(pattern) == len(path) and all(
            key in (None, part) for key, part in zip(pattern, path, strict=True)
        ):
            return list(model.model_fields)
    return []
