"""Rules of a recipe beyond the types of its fields: names, counts and combinations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from typing import Any

from layerswap.compose.blend import METHODS
from layerswap.compose.yaml_file import KeyPath, Mistake, nearest
from layerswap.errors import RecipeError

METHOD_KEYS = ("swap", "soup", "partition", "merge", "instruct")
PAIRS = {
    "swap": ("task", "language"), "partition": ("task", "language"),
    "instruct": ("language", "instruct"),
}  # fmt: skip
"""The two experts of the methods that have two, by the keys that name them."""
DEPTH = 16
"""Most levels of experts that are made of experts; each one can double the terms of a blend."""
SHARD_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB)?", re.IGNORECASE)


def mistakes(data: Mapping[Any, Any]) -> list[Mistake]:
    """Every mistake in a recipe's raw data that the types of its fields do not show.

    Tolerates data of any shape: what has the wrong type is left to the type check.

    Example: `mistakes({"experts": {"a": "x"}})` finds that no method is given.
    """
    found = list(_method_mistakes(data))
    experts = data.get("experts")
    if isinstance(experts, dict) and experts:
        unknown = list(_unknown_names(data, experts))
        found += unknown or _cycles(experts) or _too_deep(experts)
        found += _wrong_weights(data)
        found += _base_mistakes(data, experts)
        found += _fisher_mistakes(data, experts)
    size = data.get("max_shard_size")
    if isinstance(size, str):
        try:
            parse_size(size)
        except RecipeError as error:
            found.append((("max_shard_size",), str(error)))
    if data.get("weights") == "magnitude" and data.get("base") is None:
        found.append((("weights",), "magnitude weights need the base; give `base`"))
    return found


def parse_size(text: str) -> int:
    """A size such as `5GB` in bytes (1 GB = 1e9 bytes, as on the Hub).

    Raises:
        RecipeError: not a positive number with B, KB, MB or GB.
    """
    match = SHARD_SIZE.fullmatch(text.strip())
    unit = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    size = float(match[1]) * unit[(match[2] or "B").upper()] if match else 0
    if not 1 <= size < 2**63:
        raise RecipeError(f"{text!r:.40} is not a size; write for example 5GB or 500MB")
    return int(size)


def _method_mistakes(data: Mapping[Any, Any]) -> Iterator[Mistake]:
    given = [name for name in (*METHOD_KEYS, "mergekit") if data.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        empty = [name for name in METHOD_KEYS if name in data and data[name] is None]
        hint = f"; for the defaults write `{empty[0]}: {{}}`" if empty and not given else ""
        yield (), f"give exactly one of {', '.join(METHOD_KEYS)}; found {found}{hint}"
    for method, parts in PAIRS.items():
        pair = [name for path, name in _method_names(data).items() if path[0] == method]
        if len(pair) == 2 and pair[0] == pair[1]:
            yield (method,), f"the {parts[0]} and the {parts[1]} expert are both {pair[0]!r}"
    if data.get("instruct") is not None:
        if "weights" in data:
            yield ("weights",), "the weight of a chat vector is `instruct.weight`; remove `weights`"
        if data.get("base") is None:
            yield ("instruct",), "a chat vector is the difference from a base; give `base`"
        elif "base" in (data.get("experts") or ()):
            yield ("instruct",), "with deltas no expert can be called 'base'; give it another name"
    if data.get("partition") is not None and "weights" in data:
        yield ("weights",), "a partition blends nothing; remove `weights`"
    if data.get("mergekit") is not None and "weights" in data:
        yield ("weights",), "weights stand in `mergekit`; remove `weights`"
    if data.get("mergekit") is not None and data.get("stack") is not None:
        yield ("stack",), "the layers stand in `mergekit`; remove `stack`"
    if data.get("merge") is not None and "weights" in data:
        yield ("weights",), "weights of a merge stand in `merge.experts`; remove `weights`"
    base = data.get("base")
    if isinstance(base, dict) and base.get("soup") is not None:
        yield ("base", "soup"), "the base is one checkpoint, never a soup"


def _unknown_names(data: Mapping[Any, Any], experts: Mapping[Any, Any]) -> Iterator[Mistake]:
    known = {*experts, *(["base"] if data.get("base") is not None else [])}
    for path, name in _references(data, experts):
        if isinstance(name, str) and name not in known:
            yield path, f"no expert {name!r}{nearest(name, [str(key) for key in experts])}"


def _references(
    data: Mapping[Any, Any], experts: Mapping[Any, Any]
) -> Iterator[tuple[KeyPath, object]]:
    for name, expert in experts.items():
        if isinstance(expert, dict):
            yield from _parts(("experts", name), expert)
    for path, name in _method_names(data).items():
        yield path, name
    places = data.get("places")
    for i, override in enumerate(places if isinstance(places, list) else ()):
        if isinstance(override, dict):
            yield from _names(("places", i, "take"), override.get("take"))
    if isinstance(data.get("weights"), dict | list):
        yield from _names(("weights",), data["weights"])


def _method_names(data: Mapping[Any, Any]) -> dict[KeyPath, object]:
    """The experts that the method combines, by the key path that names them."""
    names: dict[KeyPath, object] = {}
    for method, parts in PAIRS.items():
        if isinstance(data.get(method), dict):
            names |= {(method, part): data[method].get(part, part) for part in parts}
    soup = data.get("soup")
    if isinstance(soup, dict) and isinstance(soup.get("experts"), list):
        names |= {("soup", "experts", i): name for i, name in enumerate(soup["experts"])}
    names |= dict(_parts((), {"merge": data.get("merge")}))
    names |= dict(_models(("mergekit",), data.get("mergekit"), data.get("base") is not None))
    return names


def _models(path: KeyPath, value: object, base: bool) -> Iterator[tuple[KeyPath, object]]:
    """The experts that a mergekit configuration in a recipe names; it calls the base `base`."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if key in ("model", "base_model") and not (base and item == "base"):
            yield (*path, key), item
        elif key != "parameters":
            yield from _models((*path, key), item, base)
    for i, item in enumerate(value if isinstance(value, list) else ()):
        yield from _models((*path, i), item, base)


def _parts(path: KeyPath, expert: Mapping[Any, Any]) -> Iterator[tuple[KeyPath, object]]:
    """The experts that a soup or a merge is made of, by the key path that names them."""
    yield from _names((*path, "soup"), expert.get("soup"))
    merge = expert.get("merge")
    if isinstance(merge, dict):
        yield from _names((*path, "merge", "experts"), merge.get("experts"))


def _names(path: KeyPath, value: object) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name in value:
            yield (*path, name), name
    elif isinstance(value, list):
        for i, name in enumerate(value):
            yield (*path, i), name


def _wrong_weights(data: Mapping[Any, Any]) -> Iterator[Mistake]:
    weights, blended = data.get("weights"), list(_method_names(data).values())
    if isinstance(weights, list):
        weights = {name: 1 for name in weights if isinstance(name, str)}
    if isinstance(weights, dict) and blended:
        for name in blended:
            if isinstance(name, str) and name not in weights:
                yield ("weights",), f"no weight for {name!r}"
        for name in weights:
            if name in data["experts"] and name not in blended:
                yield ("weights", name), "the method does not blend this expert"


def _base_mistakes(data: Mapping[Any, Any], experts: Mapping[Any, Any]) -> Iterator[Mistake]:
    if data.get("mergekit") is not None and data.get("base") is not None and "base" in experts:
        yield ("mergekit",), "beside the base no expert can be called 'base'; give it another name"
    for path, method, merge in _merges(data, experts):
        if not METHODS[method].needs_base(merge):
            continue
        if data.get("base") is None:
            yield path, f"{method} works on deltas; give `base`"
        if "base" in experts:
            yield path, "with deltas no expert can be called 'base'; give it another name"


def _fisher_mistakes(data: Mapping[Any, Any], experts: Mapping[Any, Any]) -> Iterator[Mistake]:
    for _, method, merge in _merges(data, experts):
        names = merge.get("experts") if METHODS[method].fisher else None
        for name in names if isinstance(names, dict | list) else ():
            if not isinstance(name, str) or name not in experts:
                continue
            if not isinstance(experts[name], dict) or experts[name].get("fisher") is None:
                yield ("experts", name), f"{method} needs its Fisher; give `fisher`"
            if f"fisher of {name}" in experts:
                yield ("experts", f"fisher of {name}"), "the name of a Fisher; give it another"


def _merges(
    data: Mapping[Any, Any], experts: Mapping[Any, Any]
) -> Iterator[tuple[KeyPath, str, Mapping[Any, Any]]]:
    """Every merge with a method that there is, by its key path."""
    merges: dict[KeyPath, object] = {("merge",): data.get("merge")}
    for name, expert in experts.items():
        if isinstance(expert, dict):
            merges["experts", name, "merge"] = expert.get("merge")
    for path, merge in merges.items():
        method = merge.get("method") if isinstance(merge, dict) else None
        if isinstance(merge, dict) and isinstance(method, str) and method in METHODS:
            yield path, method, merge


def _parts_of_experts(experts: Mapping[Any, Any]) -> dict[Any, list[Any]]:
    """By name of an expert, the names of those that it is made of."""
    return {
        name: [part for _, part in _parts((), expert) if isinstance(part, str)]
        for name, expert in experts.items()
        if isinstance(expert, dict)
    }


def _cycles(experts: Mapping[Any, Any]) -> list[Mistake]:
    parts = _parts_of_experts(experts)

    def reached(start: object) -> set[object]:
        found: set[object] = set()
        todo = list(parts.get(start, ()))
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += parts.get(name, ())
        return found

    return [(("experts", name), "is made of itself") for name in parts if name in reached(name)]


def _too_deep(experts: Mapping[Any, Any]) -> list[Mistake]:
    """The first expert that is nested too deeply, where none is made of itself."""
    parts = _parts_of_experts(experts)
    depth: dict[Any, int] = {}
    for name in TopologicalSorter(parts).static_order():
        depth[name] = 1 + max((depth[part] for part in parts.get(name, ())), default=0)
        if depth[name] > DEPTH:
            why = f"is made of experts that are made of others, more than {DEPTH} levels deep"
            return [(("experts", name), why)]
    return []
