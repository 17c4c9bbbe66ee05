"""What can be wrong with a mix beyond the type of a field."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from layerswap.compose.mistakes import Mistake
from layerswap.compose.yaml_file import KeyPath
from layerswap.train.mapping import template_mistake

HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


def mistakes(data: Mapping[Any, Any]) -> Iterator[Mistake]:
    """Every mistake in a mix's raw data that the types of its fields do not show."""
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
