"""Rules of a recipe that span several keys, checked on its raw data.

They read raw data and pass over values of a wrong type, which the type check reports. So a person
sees the mistakes of both at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from layerswap.compose.mergekit_file import mistakes as mergekit_mistakes
from layerswap.compose.schema import parse_size
from layerswap.compose.yaml_file import KeyPath, Mistake, nearest
from layerswap.errors import RecipeError
from layerswap.methods import METHODS

METHOD_KEYS = ("swap", "soup", "partition", "merge", "instruct")
PAIRS = {
    "swap": ("task", "language"), "partition": ("task", "language"),
    "instruct": ("language", "instruct"),
}  # fmt: skip
"""The keys that name the two experts of a method with two."""
CONFLICTS = {
    ("instruct", "weights"): "the weight of a chat vector is `instruct.weight`; remove `weights`",
    ("partition", "weights"): "a partition blends nothing; remove `weights`",
    ("merge", "weights"): "weights of a merge belong in `merge.experts`; remove `weights`",
    ("mergekit", "weights"): "weights belong in `mergekit`; remove `weights`",
    ("mergekit", "stack"): "the layers belong in `mergekit`; remove `stack`",
}
"""Keys that cannot be given beside a method."""
MERGES = 256
"""Most merge methods inside an expert; the record writes each as often as it is used."""
DEPTH = 16
"""Most levels of experts made of experts; each level can double the terms of a blend."""

Data = Mapping[Any, Any]


def mistakes(data: Data) -> list[Mistake]:
    """Every mistake in a recipe's raw data that the types of its fields do not show.

    Example: `mistakes({"experts": {"a": "x"}})` reports that no method is given.
    """
    errors = list(_method_mistakes(data))
    experts = data.get("experts")
    if isinstance(experts, dict) and experts:
        unknown = list(_unknown_names(data, experts))
        errors += unknown or _nesting_mistakes(experts)
        errors += _wrong_weights(data)
        errors += _base_mistakes(data, experts)
        errors += _fisher_mistakes(data, experts)
    size = data.get("max_shard_size")
    if isinstance(size, str):
        try:
            parse_size(size)
        except RecipeError as error:
            errors.append((("max_shard_size",), str(error)))
    if data.get("weights") == "magnitude" and data.get("base") is None:
        errors.append((("weights",), "magnitude weights need the base; give `base`"))
    inner = data.get("mergekit")
    if isinstance(inner, dict):
        errors += [(("mergekit", *path), text) for path, text in mergekit_mistakes(inner)]
    return errors


def _method_mistakes(data: Data) -> Iterator[Mistake]:
    given = [name for name in (*METHOD_KEYS, "mergekit") if data.get(name) is not None]
    if len(given) != 1:
        names = " and ".join(given) if given else "none"
        empty = [name for name in METHOD_KEYS if name in data and data[name] is None]
        hint = f"; for the defaults write `{empty[0]}: {{}}`" if empty and not given else ""
        yield (), f"give exactly one of {', '.join(METHOD_KEYS)}; found {names}{hint}"
    for method, parts in PAIRS.items():
        pair = [name for path, name in _method_names(data).items() if path[0] == method]
        if len(pair) == 2 and pair[0] == pair[1]:
            yield (method,), f"the {parts[0]} and the {parts[1]} expert are both {pair[0]!r}"
    for (method, key), text in CONFLICTS.items():
        if data.get(method) is not None and data.get(key) is not None:
            yield (key,), text
    if data.get("instruct") is not None:
        if data.get("base") is None:
            yield ("instruct",), "a chat vector is the difference from a base; give `base`"
        elif isinstance(experts := data.get("experts"), dict) and "base" in experts:
            yield ("instruct",), "with deltas no expert can be called 'base'; give it another name"
    base = data.get("base")
    if isinstance(base, dict) and base.get("soup") is not None:
        yield ("base", "soup"), "the base is one checkpoint, never a soup"


def _unknown_names(data: Data, experts: Data) -> Iterator[Mistake]:
    known = {*experts, *(["base"] if data.get("base") is not None else [])}
    for path, name in _references(data, experts):
        if isinstance(name, str) and name not in known:
            yield path, f"no expert {name!r}{nearest(name, [str(key) for key in experts])}"


def _references(data: Data, experts: Data) -> Iterator[tuple[KeyPath, object]]:
    for name, expert in experts.items():
        if isinstance(expert, dict):
            yield from _parts(("experts", name), expert)
    yield from _method_names(data).items()
    places = data.get("places")
    for i, override in enumerate(places if isinstance(places, list) else ()):
        if isinstance(override, dict):
            yield from _names(("places", i, "take"), override.get("take"))
    if isinstance(data.get("weights"), dict | list):
        yield from _names(("weights",), data["weights"])


def _method_names(data: Data) -> dict[KeyPath, object]:
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
    """The experts in a recipe's mergekit configuration, which calls the base `base`."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if key in ("model", "base_model") and not (base and item == "base"):
            yield (*path, key), item
        elif key != "parameters":
            yield from _models((*path, key), item, base)
    for i, item in enumerate(value if isinstance(value, list) else ()):
        yield from _models((*path, i), item, base)


def _parts(path: KeyPath, expert: Data) -> Iterator[tuple[KeyPath, object]]:
    """The experts that a soup or a merge is made of, by key path."""
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


def _wrong_weights(data: Data) -> Iterator[Mistake]:
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


def _base_mistakes(data: Data, experts: Data) -> Iterator[Mistake]:
    if data.get("mergekit") is not None and data.get("base") is not None and "base" in experts:
        yield ("mergekit",), "beside the base no expert can be called 'base'; give it another name"
    for path, method, merge in _merges(data, experts):
        if not METHODS[method].needs_base(merge):
            continue
        if data.get("base") is None:
            yield path, f"{method} takes deltas from the base; give `base`"
        if "base" in experts:
            yield path, "with deltas no expert can be called 'base'; give it another name"


def _fisher_mistakes(data: Data, experts: Data) -> Iterator[Mistake]:
    for _, method, merge in _merges(data, experts):
        names = merge.get("experts") if METHODS[method].fisher else None
        for name in names if isinstance(names, dict | list) else ():
            if not isinstance(name, str) or name not in experts:
                continue
            if not isinstance(experts[name], dict) or experts[name].get("fisher") is None:
                yield ("experts", name), f"{method} needs its Fisher; give `fisher`"
            if f"fisher of {name}" in experts:
                taken = ("experts", f"fisher of {name}")
                yield taken, "is the name of a Fisher; choose another name"


def _merges(data: Data, experts: Data) -> Iterator[tuple[KeyPath, str, Data]]:
    """Every merge with a known method, by its key path."""
    merges: dict[KeyPath, object] = {("merge",): data.get("merge")}
    for name, expert in experts.items():
        if isinstance(expert, dict):
            merges["experts", name, "merge"] = expert.get("merge")
    for path, merge in merges.items():
        method = merge.get("method") if isinstance(merge, dict) else None
        if isinstance(merge, dict) and isinstance(method, str) and method in METHODS:
            yield path, method, merge


def _nesting_mistakes(experts: Data) -> list[Mistake]:
    """The experts of the first cycle, or the first expert that is nested too deeply or often."""
    parts = {
        name: [part for _, part in _parts((), expert) if isinstance(part, str)]
        for name, expert in experts.items()
        if isinstance(expert, dict)
    }
    depth: dict[Any, int] = {}
    merges: dict[Any, int] = {}
    try:
        order = list(TopologicalSorter(parts).static_order())
    except CycleError as error:
        cycle = error.args[1]
        return [(("experts", name), "is made of itself") for name in parts if name in cycle]
    for name in order:
        depth[name] = 1 + max((depth[part] for part in parts.get(name, ())), default=0)
        if depth[name] > DEPTH:
            why = f"is made of experts that are made of others, more than {DEPTH} levels deep"
            return [(("experts", name), why)]
        own = isinstance(experts.get(name), dict) and "merge" in experts[name]
        merges[name] = own + sum(merges[part] for part in parts.get(name, ()))
        if merges[name] > MERGES:
            why = f"is made of {merges[name]:,} merges written out; the most is {MERGES:,}"
            return [(("experts", name), why)]
    return []
