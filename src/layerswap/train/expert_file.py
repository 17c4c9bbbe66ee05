"""`EXPERT.yaml` on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from layerswap.compose.explain import explain
from layerswap.compose.schema import Strict, Where
from layerswap.compose.yaml_file import KeyPath, parse_yaml, read_text
from layerswap.errors import RecipeError
from layerswap.train import expert_schema
from layerswap.train.expert_schema import ExpertSpec


def read_expert(path: Path) -> ExpertSpec:
    """The expert in a YAML file; paths in it are relative to the file.

    Raises:
        RecipeError: the file cannot be read, or what is wrong in it, each on a line with its key
            path.
    """
    data, lines = parse_yaml(read_text(path), str(path))
    return check_expert(data, where=str(path), lines=lines)


def check_expert(
    data: Any, *, where: str = "expert", lines: dict[KeyPath, int] | None = None
) -> ExpertSpec:
    """The expert in plain data; errors name `where`. See `read_expert`."""
    if not isinstance(data, dict):
        raise RecipeError(f"{where}: an expert is a mapping with `base` and `data`")
    try:
        return ExpertSpec.model_validate(data)
    except ValidationError as error:
        raise RecipeError(explain(error, where, lines or {}, _keys_at)) from None


_MODELS: dict[str, type[Strict]] = {
    "train": expert_schema.Trained,
    "lora": expert_schema.Lora,
    "sparse": expert_schema.Sparse,
    "simultaneous": expert_schema.Simultaneous,
    "data": expert_schema.Files,
    "places": Where,
    "rates": expert_schema.Rate,
}


def _keys_at(path: KeyPath) -> list[str]:
    named = [part for part in path if isinstance(part, str)]
    model = _MODELS.get(named[-1]) if named else ExpertSpec
    return list(model.model_fields) if model else []
