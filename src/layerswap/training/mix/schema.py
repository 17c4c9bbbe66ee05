"""Data models of a mix, its validation, and the ready recipes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from layerswap.ground.errors import RecipeError
from layerswap.ground.strict import Strict
from layerswap.ground.yaml_file import (
    KeyPath,
    Mistake,
    dump_yaml,
    nearest,
    parse_yaml,
    read_text,
    refuse_mistakes,
    validate,
)
from layerswap.reading.origins import Count, NonEmpty, Origin
from layerswap.training.mix.tasks import TaskKeys, fill_tasks
from layerswap.training.mix.templates import PARAMETERS, Values, fill_parameters, template_mistake

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FilterName = Literal[
    "length", "exact_duplicates", "math", "language", "evaluation", "near_duplicates"
]
_HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


def _switch(value: object) -> object:
    """Read `true` as a filter with its defaults and `false` as no filter."""
    return {} if value is True else None if value is False else value


def _total(value: object) -> object:
    """Read `all` as None, and the text of a number, which parameters give, as a number."""
    if value == "all":
        return None
    if isinstance(value, str) and not value.isdecimal():
        raise ValueError(f"write a whole number or all; found {value!r:.60}")
    return int(value) if isinstance(value, str) else value


def _held_out(value: float) -> float:
    if value < 0 or (value >= 1 and not value.is_integer()) or value == math.inf:
        raise ValueError("write a number of examples such as 200, or a share such as 0.1")
    return value if 0 < value < 1 else int(value)


class Messages(Strict):
    """The column that holds a conversation, and its layout.

    The layout is `messages` (mappings with a role and a content), `pairs` (lists of a user's and an
    assistant's text), or `alternating` (texts, the user first).
    """

    column: NonEmpty
    layout: Literal["messages", "pairs", "alternating"] = "messages"
    role: NonEmpty = "role"  # key of the role in a message
    content: NonEmpty = "content"  # key of the text in a message
    roles: dict[NonEmpty, Literal["system", "user", "assistant"]] = {}  # by the data set's name


class MixSource(Origin, TaskKeys):
    """One source of a mix: the origin of its rows, and the templates of examples."""

    prompt: NonEmpty | None = None  # template
    completion: NonEmpty | None = None  # template
    text: NonEmpty | None = None  # template of a raw text, for continued pretraining
    messages: Messages | None = None
    answers: list[NonEmpty] = []  # completions to keep, without blanks around; empty: all
    template: Literal["plain", "jinja"] = "plain"  # syntax of the templates
    weight: Positive = 1.0  # share of the mix's `total`, relative to the other sources' weights
    seed: NonNegativeInt | None = None  # of the order of the rows; None: the mix's seed
    language: NonEmpty | None = None  # ISO 639-1 code, for the language filter
    licence: NonEmpty | None = None
    skip: list[FilterName] = []  # filters of the mix that this source bypasses
    note: NonEmpty | None = None  # for readers of the recipe
    unverified: list[NonEmpty] = []  # facts that could not be checked, for the card


class EvaluationSet(Origin):
    """Items that must not be trained on: the columns of a data set with their texts."""

    columns: Annotated[list[NonEmpty], Field(min_length=1)]
    note: NonEmpty | None = None  # for readers of the recipe


class Length(Strict):
    """Fewest and most characters of a text, or of a prompt with its completion."""

    min_text: NonNegativeInt = 1
    max_text: PositiveInt | None = None


class LanguageFilter(Strict):
    """Keeps completions in the language of their source.

    py3langid identifies it, or an identifier learned from `texts`.
    """

    texts: Annotated[dict[NonEmpty, NonEmpty], Field(min_length=2)] | None = None  # file by code


class EvaluationFilter(Strict):
    """Drops examples that share an n-gram with an evaluation item; see `ItemIndex`."""

    against: Annotated[dict[NonEmpty, EvaluationSet], Field(min_length=1)]


class NearDuplicates(Strict):
    """Drops near-duplicates of an earlier example by MinHash."""

    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.8


class Filters(Strict):
    """The filters of a mix: `true` runs one with its defaults; the others do not run."""

    length: Annotated[Length | None, BeforeValidator(_switch)] = None
    exact_duplicates: bool = True
    math: bool = False
    language: Annotated[LanguageFilter | None, BeforeValidator(_switch)] = None
    evaluation: Annotated[EvaluationFilter | None, BeforeValidator(_switch)] = None
    near_duplicates: Annotated[NearDuplicates | None, BeforeValidator(_switch)] = None


class Mix(Strict):
    """A whole mix.

    Its rows are of one kind: `chat` (prompt and completion as lists of messages),
    `prompt-completion` (texts), `messages`, or `text`.
    """

    name: NonEmpty
    description: str = ""
    kind: Literal["chat", "prompt-completion", "messages", "text"] = "chat"
    sources: Annotated[dict[NonEmpty, MixSource], Field(min_length=1)]
    # Examples, shared by the sources' weights; None, and `all` in YAML: every one that passes
    total: Annotated[Count | None, BeforeValidator(_total)] = None
    validation: Annotated[float, AfterValidator(_held_out)] = 0  # a number of them, or a share
    row_tokens: PositiveInt | None = None  # mean of a row, for a study's estimates
    separator: str = "\n"  # between prompt and completion where they are joined as plain text
    filters: Filters = Filters()
    seed: NonNegativeInt = 0  # of every random choice
    languages: list[NonEmpty] = []  # for the card, as are the next two
    note: NonEmpty | None = None
    unverified: list[NonEmpty] = []

    @model_validator(mode="after")
    def _consistent(self) -> Mix:
        return refuse_mistakes(self, _mistakes(self))


def _mistakes(mix: Mix) -> Iterator[Mistake]:
    """Yield the mistakes across the fields of a mix."""
    for name, source in mix.sources.items():
        path: KeyPath = ("sources", name)
        yield from _origin_mistakes(path, source)
        yield from _example_mistakes(path, source, mix.kind)
        if "weight" in source.model_fields_set and "total" not in mix.model_fields_set:
            yield (*path, "weight"), "a weight divides `total`; give `total`"
    against = mix.filters.evaluation.against if mix.filters.evaluation else {}
    for name, origin in against.items():
        yield from _origin_mistakes(("filters", "evaluation", "against", name), origin)
    if mix.total is not None and mix.validation >= mix.total:
        text = f"{mix.validation} of {mix.total} examples leaves none for training"
        yield ("validation",), text


def _origin_mistakes(path: KeyPath, origin: Origin) -> Iterator[Mistake]:
    given = [key for key in ("id", "path", "parallel") if getattr(origin, key)]
    if len(given) != 1:
        yield path, "give one of id (a Hub data set), path (a local file) and parallel (files)"
    if origin.id is not None and not _HUB_ID.fullmatch(origin.id):
        text = f"{origin.id!r:.60} is not a Hub id like 'owner/name'; for a file give path"
        yield (*path, "id"), text
    for key in ("config", "revision", "files", "without"):
        if given and given != ["id"] and getattr(origin, key):
            yield (
                (*path, key),
                f"is for a Hub data set; remove it, or give id in place of {given[0]}",
            )
    if len(origin.parallel) == 1:
        yield (*path, "parallel"), "give two or more files; for a single one give path"
    if origin.parallel and origin.format is not None:
        yield (*path, "format"), "parallel files have a row in each line; remove it"
    if origin.without and not origin.files:
        yield (*path, "without"), "excludes files from `files`; give `files`"


def _example_mistakes(path: KeyPath, source: MixSource, kind: str) -> Iterator[Mistake]:
    given = [key for key in ("prompt", "text", "messages") if getattr(source, key) is not None]
    if len(given) != 1:
        yield path, "give one of prompt (with completion), messages and text"
    if (source.prompt is None) != (source.completion is None):
        yield path, "prompt and completion go together"
    if given == ["text"] and kind != "text":
        yield (*path, "text"), f"a text has no prompt, but kind: {kind} needs one; give kind: text"
    for key in ("prompt", "completion", "text"):
        text = getattr(source, key)
        mistake = text and template_mistake(text, source.template, constant=key == "prompt")
        if mistake:
            yield (*path, key), mistake


def read_mix(source: str | Path, settings: Values | None = None) -> Mix:
    """Read a mix from a YAML file, or the ready recipe of that name.

    Args:
        source: a file, or a name in `ready_recipes`.
        settings: values of the mix's parameters by name.

    Example: `read_mix("swahili")`
    """
    text, settings = _open_recipe(source, settings)
    return parse_mix(text, where=str(source), settings=settings, folder=Path(source).parent)


def mix_text(source: str | Path, settings: Values | None = None) -> str:
    """Return the YAML of a mix: verbatim, or with values in place of parameters and tasks.

    Args and errors as in `read_mix`, but the mix is not validated.
    """
    text, settings = _open_recipe(source, settings)
    data, lines = parse_yaml(text, str(source))
    filled, _ = fill_parameters(data, lines, settings, where=str(source))
    filled = fill_tasks(filled, Path(source).parent, where=str(source))
    return text if filled is data else dump_yaml(filled)


def parse_mix(
    text: str, *, where: str = "mix", settings: Values | None = None, folder: Path = Path()
) -> Mix:
    """Parse the YAML of a mix in `folder`; errors name `where`. See `read_mix`."""
    data, lines = parse_yaml(text, where)
    data, lines = fill_parameters(data, lines, settings or {}, where=where)
    data = fill_tasks(data, folder, where=where)
    expected = "a mix is a mapping with `name` and `sources`"
    return validate(Mix, data, where=where, expected=expected, lines=lines)


def ready_recipes() -> list[str]:
    """List the names of the recipes that ship with the package."""
    return sorted(_shipped())


def missing_parameters(source: str | Path) -> list[str]:
    """List the parameters of a file or of a ready recipe that have no value."""
    text, settings = _open_recipe(source)
    data, _ = parse_yaml(text, str(source))
    declared = data.get(PARAMETERS, {})
    return [name for name, value in {**declared, **settings}.items() if value is None]


def _open_recipe(source: str | Path, settings: Values | None = None) -> tuple[str, Values]:
    """Read the YAML of a file or of a ready recipe, and add the recipe's own settings."""
    path = Path(source)
    if path.exists() or path.suffix or len(path.parts) != 1:
        return read_text(path), settings or {}
    recipes = _shipped()
    if str(source) not in recipes:
        hint = nearest(str(source), list(recipes))
        raise RecipeError(f"{source}: no such file, and no such ready recipe{hint}")
    text, ready = recipes[str(source)]
    return text, {**ready, **(settings or {})}


@cache
def _shipped() -> dict[str, tuple[str, Values]]:
    """Read the recipes of the package: their YAML and settings by name.

    A file is a mix. A YAML document before it names ready settings of its parameters.
    """
    recipes: dict[str, tuple[str, Values]] = {}
    for file in (resources.files("layerswap.training.mix") / "recipes").iterdir():
        variants, _, text = file.read_text("utf-8").rpartition("\n---\n")
        recipes[file.name.removesuffix(".yaml")] = (text, {})
        for name, settings in (yaml.safe_load(variants) or {}).items():
            recipes[name] = (text, settings)
    return recipes
