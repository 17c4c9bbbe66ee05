"""Data models and validation of a mix: the YAML of sources, filters, templates and shares.

A template turns a row of a data set into text: `{column}` fields, or sandboxed Jinja.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from layerswap.compose.schema import Strict
from layerswap.compose.yaml_file import (
    KeyPath,
    Mistake,
    nearest,
    parse_yaml,
    read_text,
    validate,
    validate_whole,
)
from layerswap.errors import DataError, RecipeError

DatasetRow = Mapping[str, Any]

_FIELD = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
_KEY = re.compile(r"\[([^\[\]]+)\]")
_BLANK_LINES = re.compile(r"\n{3,}")


def template_mistake(text: str, syntax: str, *, constant: bool = False) -> str | None:
    """What is wrong with a template, or None; one that is `constant` need not name a column."""
    try:
        columns = template_columns(text, syntax)
    except ValueError as error:
        return str(error)
    return None if columns or constant else "names no column, so every row would be the same"


def template_columns(text: str, syntax: str) -> set[str]:
    """The columns that a template reads.

    Args:
        text: the template.
        syntax: `plain` or `jinja`.

    Raises:
        ValueError: the text is not a template.
    """
    if syntax == "jinja":
        from jinja2 import Environment, meta

        _compile_jinja(text)
        return meta.find_undeclared_variables(Environment().parse(text))
    return {path[0] for _, path in _parse_plain(text) if path}


def make_renderer(
    text: str, syntax: str, columns: list[str], key: str
) -> Callable[[DatasetRow], str]:
    """A function from a row to the text that a template makes of it.

    Args:
        text: the template.
        syntax: `plain` or `jinja`.
        columns: the columns of the rows.
        key: key of the template, for messages.

    Raises:
        DataError: the template names a column that the rows do not have.
    """
    check_columns(template_columns(text, syntax), columns, key)
    if syntax == "jinja":
        template = _compile_jinja(text)

        def jinja(row: DatasetRow) -> str:
            try:
                return str(template.render(dict(row)))
            except Exception as error:  # jinja2 lets every error of the expression through
                raise DataError(f"{key}: the template fails on a row ({error})") from None

        return jinja
    pieces = _parse_plain(text)

    def plain(row: DatasetRow) -> str:
        parts = [(literal, _value(row, path, key) if path else None) for literal, path in pieces]
        joined = "".join(literal + (value or "") for literal, value in parts)
        if any(value == "" for _, value in parts):
            # An optional input that is empty leaves no hole, and no loose end.
            joined = _BLANK_LINES.sub("\n\n", joined)
            joined = joined.rstrip() if parts[-1][1] == "" else joined
            joined = joined.lstrip() if parts[0] == ("", "") else joined
        return joined

    return plain


def check_columns(names: set[str], columns: list[str], key: str) -> None:
    """Refuse names that are not columns.

    Raises:
        DataError: naming the key and the nearest column.
    """
    for name in sorted(names - set(columns)):
        raise DataError(f"{key}: no column {name!r}{nearest(name, columns)}")


def _parse_plain(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Pieces of literal text, each followed by the path of a field (empty at the end)."""
    pieces: list[tuple[str, tuple[str, ...]]] = []
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(
            f"not a template ({error}); a brace of the text is written twice"
        ) from None
    for literal, field, layout, conversion in parsed:
        if field is None:
            pieces.append((literal, ()))
            continue
        match = _FIELD.fullmatch(field)
        if match is None or layout or conversion:
            found = f"{field}!{conversion}" if conversion else field
            found = f"{{{found}:{layout}}}" if layout else f"{{{found}}}"
            raise ValueError(
                f"{found} is not {{column}} or {{column[key]}}; for more write template: jinja"
            )
        pieces.append((literal, (match[1], *_KEY.findall(match[2]))))
    return pieces


def _compile_jinja(text: str) -> Any:
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, keep_trailing_newline=True
        )
        return environment.from_string(text)
    except TemplateError as error:
        raise ValueError(f"not a jinja template ({error})") from None


def _value(row: DatasetRow, path: tuple[str, ...], key: str) -> str:
    value: Any = row
    for step in path:
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, TypeError, ValueError):
            raise DataError(f"{key}: a row has no {path[0]}[{']['.join(path[1:])}]") from None
    return "" if value is None else str(value).strip()


KINDS = ("chat", "prompt-completion", "messages", "text")
FORMATS = ("jsonl", "json", "csv", "parquet", "text")
FILTERS = ("length", "exact_duplicates", "math", "language", "evaluation", "near_duplicates")
"""The filters in the order in which they run, from cheap to expensive."""

NonEmpty = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _as_lists(where: dict[str, Any]) -> dict[str, list[Any]]:
    lists = {key: value if isinstance(value, list) else [value] for key, value in where.items()}
    for key, values in lists.items():
        if not values or not all(isinstance(value, str | int | bool) for value in values):
            raise ValueError(f"{key}: write a value, or a list of values, to keep")
    return lists


def _switch(value: object) -> object:
    """`true` is a filter with its defaults, `false` is no filter."""
    return {} if value is True else None if value is False else value


class Origin(Strict):
    """Where rows come from: a Hub data set (`id`) or local files (`path`).

    Attributes:
        id: id of a data set on the Hub, `owner/name`, with its `config`, `split` and `revision`.
        path: a local file or a pattern of files, relative to the mix's folder.
        files: patterns of files in the data set's repository, or URLs, read instead of the files
            that the `datasets` library would choose.
        without: patterns of files to exclude from `files`.
        format: format of the files; detected from their names if not given.
        delimiter: csv delimiter.
        header: column names of a csv without a header line.
        quotes: True if csv fields may be quoted.
        where: allowed values by column; other rows are left out.
        read: number of rows to read, from the start; all if not given.
    """

    id: NonEmpty | None = None
    config: NonEmpty | None = None
    split: NonEmpty = "train"
    revision: NonEmpty | None = None
    path: NonEmpty | None = None
    files: list[NonEmpty] = []
    without: list[NonEmpty] = []
    format: Literal[FORMATS] | None = None  # type: ignore[valid-type]
    delimiter: NonEmpty = ","
    header: list[NonEmpty] | None = None
    quotes: bool = True
    where: Annotated[dict[NonEmpty, Any], AfterValidator(_as_lists)] = {}
    read: PositiveInt | None = None


class Messages(Strict):
    """The column that holds a conversation, and its layout.

    Attributes:
        column: its name.
        layout: `messages` (mappings with a role and a content), `pairs` (lists of a user's and an
            assistant's text), or `alternating` (texts, the user first).
        role: key of the role.
        content: key of the content.
        roles: system, user or assistant by the data set's name of the role.
    """

    column: NonEmpty
    layout: Literal["messages", "pairs", "alternating"] = "messages"
    role: NonEmpty = "role"
    content: NonEmpty = "content"
    roles: dict[NonEmpty, Literal["system", "user", "assistant"]] = {}


class MixSource(Origin):
    """One source of a mix: where its rows come from and how they become examples.

    Attributes:
        prompt: template of the prompt; `{column}` stands for a column's value.
        completion: template of the completion.
        text: template of a raw text, for continued pretraining.
        messages: the column that holds a conversation.
        template: syntax of the templates, `plain` or `jinja`.
        cap: maximum number of examples.
        weight: share of the mix's `total`, relative to the other sources' weights.
        seed: seed of the order in which rows are drawn; the mix's seed if not given.
        language: ISO 639-1 code, for the language filter.
        licence, note, unverified: for the card; `unverified` lists facts that could not be checked.
        skip: filters of the mix that this source bypasses.
    """

    prompt: NonEmpty | None = None
    completion: NonEmpty | None = None
    text: NonEmpty | None = None
    messages: Messages | None = None
    template: Literal["plain", "jinja"] = "plain"
    cap: PositiveInt | None = None
    weight: Positive = 1.0
    seed: NonNegativeInt | None = None
    language: NonEmpty | None = None
    licence: NonEmpty | None = None
    skip: list[Literal[FILTERS]] = []  # type: ignore[valid-type]
    note: NonEmpty | None = None
    unverified: list[NonEmpty] = []


class EvaluationSet(Origin):
    """Items that must not be trained on: the columns of a data set that hold their texts."""

    columns: Annotated[list[NonEmpty], Field(min_length=1)]
    note: NonEmpty | None = None
    unverified: list[NonEmpty] = []


class Length(Strict):
    """Bounds on characters, ends included."""

    min_prompt: NonNegativeInt = 1
    max_prompt: PositiveInt | None = None
    min_completion: NonNegativeInt = 1
    max_completion: PositiveInt | None = None
    min_text: NonNegativeInt = 1
    max_text: PositiveInt | None = None


class MathFilter(Strict):
    """Drops mathematics; see `math_probability`."""

    threshold: Fraction = 0.5


class LanguageFilter(Strict):
    """Keeps examples that py3langid detects as one of the languages.

    Attributes:
        allow: ISO 639-1 codes; the source's language if not given.
        look_at: part of an example that must be in the language.
        min_probability: minimum probability of the allowed languages together.
        min_letters: shorter texts are not reliable, and pass.
    """

    allow: Annotated[list[NonEmpty], Field(min_length=1)] | None = None
    look_at: Literal["completion", "prompt", "all"] = "completion"
    min_probability: Fraction = 0.5
    min_letters: NonNegativeInt = 20


class EvaluationFilter(Strict):
    """Drops examples that share an n-gram with an evaluation item; see `ItemIndex`."""

    against: Annotated[dict[NonEmpty, EvaluationSet], Field(min_length=1)]
    words: Annotated[int, Field(ge=8)] = 13
    characters: Annotated[int, Field(ge=15)] = 20


class NearDuplicates(Strict):
    """Drops near-duplicates of an earlier example by MinHash."""

    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.8
    permutations: Annotated[int, Field(ge=16, le=1024)] = 128
    shingle: PositiveInt = 5


class Filters(Strict):
    """The filters of a mix: `true` runs one with its defaults; the others do not run."""

    length: Annotated[Length | None, BeforeValidator(_switch)] = None
    exact_duplicates: bool = True
    math: Annotated[MathFilter | None, BeforeValidator(_switch)] = None
    language: Annotated[LanguageFilter | None, BeforeValidator(_switch)] = None
    evaluation: Annotated[EvaluationFilter | None, BeforeValidator(_switch)] = None
    near_duplicates: Annotated[NearDuplicates | None, BeforeValidator(_switch)] = None


class Mix(Strict):
    """A whole mix.

    Attributes:
        name, description, languages, note, unverified: for the card.
        kind: kind of rows: `chat` (prompt and completion as lists of messages),
            `prompt-completion` (texts), `messages`, or `text`.
        sources: the sources by name.
        total: number of examples, shared by the sources' weights; all if not given.
        validation: how many of them are held out for validation.
        row_tokens: mean tokens of a row, for estimates of a study before the mix is built.
        separator: text between prompt and completion where they are joined as plain text.
        chat_template: a file with a chat template that turns messages into text.
        filters: the filters.
        seed: seed of every random choice.
    """

    name: NonEmpty
    description: str = ""
    kind: Literal[KINDS] = "chat"  # type: ignore[valid-type]
    sources: Annotated[dict[NonEmpty, MixSource], Field(min_length=1)]
    total: PositiveInt | None = None
    validation: NonNegativeInt = 0
    row_tokens: PositiveInt | None = None
    separator: str = "\n"
    chat_template: NonEmpty | None = None
    filters: Filters = Filters()
    seed: NonNegativeInt = 0
    languages: list[NonEmpty] = []
    note: NonEmpty | None = None
    unverified: list[NonEmpty] = []

    @model_validator(mode="wrap")
    @classmethod
    def _whole(cls, data: Any, handler: ModelWrapValidatorHandler[Mix]) -> Mix:
        return validate_whole(cls.__name__, data, handler, _mistakes)


HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


def _mistakes(data: Mapping[Any, Any]) -> Iterator[Mistake]:
    """Every mistake in a mix's raw data beyond the types of its fields."""
    sources = data.get("sources")
    for name, source in sources.items() if isinstance(sources, dict) else ():
        if isinstance(source, dict):
            yield from _origin_mistakes(("sources", name), source)
            yield from _example_mistakes(("sources", name), source, data.get("kind", "chat"))
            if source.get("weight") is not None and data.get("total") is None:
                yield ("sources", name, "weight"), "a weight shares out `total`; give `total`"
    filters = data.get("filters")
    evaluation = filters.get("evaluation") if isinstance(filters, dict) else None
    against = evaluation.get("against") if isinstance(evaluation, dict) else None
    for name, origin in against.items() if isinstance(against, dict) else ():
        if isinstance(origin, dict):
            yield from _origin_mistakes(("filters", "evaluation", "against", name), origin)
    total, validation = data.get("total"), data.get("validation")
    if isinstance(total, int) and isinstance(validation, int) and validation >= total:
        yield ("validation",), f"{validation} of {total} examples leaves none to train on"
    if data.get("chat_template") is not None and data.get("kind", "chat") in ("chat", "messages"):
        yield ("chat_template",), "makes text; give kind: prompt-completion or kind: text"


def _origin_mistakes(path: KeyPath, origin: Mapping[Any, Any]) -> Iterator[Mistake]:
    name, local = origin.get("id"), origin.get("path")
    if (name is None) == (local is None):
        yield path, "give one of id (a Hub data set) and path (a local file)"
    if isinstance(name, str) and not HUB_ID.fullmatch(name):
        yield (*path, "id"), f"{name!r:.60} is not a Hub id like 'owner/name'; for a file give path"
    for key in ("config", "revision", "files", "without"):
        if local is not None and origin.get(key):
            yield (*path, key), "belongs to a Hub data set; a path takes none"
    if origin.get("without") and not origin.get("files"):
        yield (*path, "without"), "takes away from `files`; give `files`"


def _example_mistakes(path: KeyPath, source: Mapping[Any, Any], kind: object) -> Iterator[Mistake]:
    given = [key for key in ("prompt", "text", "messages") if source.get(key) is not None]
    if len(given) != 1:
        yield path, "give one of prompt (with completion), messages and text"
    if (source.get("prompt") is None) != (source.get("completion") is None):
        yield path, "prompt and completion go together"
    if given == ["text"] and kind != "text":
        yield (*path, "text"), f"a text has no prompt, as kind: {kind} needs; give kind: text"
    for key in ("prompt", "completion", "text"):
        text = source.get(key)
        if isinstance(text, str) and source.get("template", "plain") in ("plain", "jinja"):
            syntax = source.get("template", "plain")
            wrong = template_mistake(text, syntax, constant=key == "prompt")
            if wrong:
                yield (*path, key), wrong


def read_mix(source: str | Path) -> Mix:
    """The mix in a YAML file, or the ready recipe of that name.

    Args:
        source: a file, or a name that `ready_recipes` gives.

    Raises:
        RecipeError: the file cannot be read, or the mix is wrong; one line for each mistake, with
            its key path.

    Example: `read_mix("swahili")`
    """
    return parse_mix(mix_text(source), where=str(source))


def mix_text(source: str | Path) -> str:
    """The YAML of a file or of a ready recipe, verbatim; see `read_mix`."""
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
    folder = resources.files("layerswap.training.mix") / "recipes"
    texts = {file.name.removesuffix(".yaml"): file.read_text("utf-8") for file in folder.iterdir()}
    return dict(sorted(texts.items()))


def parse_mix(text: str, *, where: str = "mix") -> Mix:
    """The mix in a YAML text; errors name `where`. See `read_mix`."""
    data, lines = parse_yaml(text, where)
    expected = "a mix is a mapping with `name` and `sources`"
    return validate(Mix, data, where=where, expected=expected, lines=lines)
