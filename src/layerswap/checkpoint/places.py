"""The place of every tensor of a checkpoint, by its name.

Names are read with tables of words that we have checked, one small table per part of a name. A name
with an unknown word is reported, never guessed. For example,
`model.layers.3.self_attn.q_proj.weight` has these parts:

    wrappers   stack    layer   owner       inside
    model      layers   3       self_attn   q_proj.weight

`OWNERS` gives the role of the owner, and `INSIDE` lists the words that may follow it. Outside the
layers there is no stack and no layer, and `OUTSIDE` gives the role of the owner.

To add a family: add it to `tests/helpers/families.py`, which has transformers' models of every
family, and run `python -m research.classes`, which writes the words of their layers into
`classes.json`. Names outside the layers that are reported as unknown are put into `places.json`.
`tests/checkpoint/test_places.py` compares the places with the modules of the models. Unknown words
stay unknown on purpose: `q_proj.weight_scale`, for example, must not be averaged as if it were a
weight.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from layerswap.checkpoint.classes import CLASSES, HEADS, PREFIXES
from layerswap.ground.errors import CheckpointError, RecipeError

_TABLE: Mapping[str, Mapping[str, str]] = json.loads(
    Path(__file__).with_name("places.json").read_text("utf-8")
)
"""Words of names that `classes.json` lacks: part of a name -> origin -> words."""


def _words(part: str) -> frozenset[str]:
    return frozenset(" ".join(_TABLE.get(part, {}).values()).split()).union(
        CLASSES["words"].get(part, ())
    )


WRAPPERS = PREFIXES | _words("wrappers")
LANGUAGE = "language_model"
"""The wrapper of the layers in a multimodal model."""
STACKS = _words("stacks")
ROUTERS = _words("routers")
"""In an mlp, parameters that choose the experts and weigh them; their role is `router`."""
SHARED = _words("shared")
"""Modules that several layers share: stored in one layer, without belonging to it."""
_LEAVES = _words("leaves")
OWNERS = {role: _words(f"owners/{role}") for role in ("attention", "mlp", "norm", "other")}
"""Role -> modules and parameters directly inside a layer."""
INSIDE = {role: _words(f"inside/{role}") | _LEAVES for role in OWNERS}
"""Below an owner: role -> words that may follow, besides numbers (experts, per-head norms) and
numbered experts (`expert_3`: NLLB-MoE, Switch)."""
INSIDE["mlp"] |= ROUTERS
OUTSIDE = {r: _words(f"outside/{r}") for r in ("embedding", "head", "final_norm", "other")}
"""Outside the layers: role -> modules and parameters."""
OUTSIDE["head"] |= HEADS
OUTSIDE_LEAVES = _words("outside/leaves") | _LEAVES

ROLES = (
    "attention", "mlp", "router", "norm", "embedding", "head", "final_norm", "other",
)  # fmt: skip

# Matches modules that several layers may share; a layer's shared experts belong to it.
_SHARES = re.compile(r"shared(?!_(experts?|mlp))", re.IGNORECASE)
_SHOWN = 5  # names, or layers, in a message


class Place(NamedTuple):
    """The layer and role of a tensor.

    `layer` counts from 0 at the input and is None outside the layers. `role` is one of `ROLES`:
    `attention`, `mlp`, `router` and `norm` exist only in a layer, `embedding`, `head` and
    `final_norm` only outside, and `other` in both (a layer's scalar; a vision tower, a projector, a
    rotary table, a transformer that several layers share).

    All parameters of an attention module are `attention`, its norms and buffers too, and so are
    state-space layers and other mixers of tokens in its place. The experts of a mixture are `mlp`,
    and the parameters that choose and weigh them are `router`. `embedding` is everything between a
    token and the input of the first layer: position embeddings, BLOOM's norm after them, OPT's
    `project_in`. OPT's `project_out` is `head`.

    Example:
        >>> import layerswap as ls
        >>> names = ls.open_checkpoint("math-expert").places
        >>> names["model.layers.2.self_attn.q_proj.weight"] == ls.Place(2, "attention")
        True
    """

    layer: int | None
    role: str


HEAD = Place(None, "head")
MOST_REPEATS, MOST_OPTIONAL, LONGEST_NAME = 4, 8, 1000
"""Bounds on expressions from files, and on the names they are tried on: more could take years."""


@lru_cache(maxsize=4096)
def compile_pattern(expression: str) -> re.Pattern[str]:
    """Compile a regular expression from a file; a ValueError says why it is refused."""
    bare = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "", expression, flags=re.DOTALL)
    repeats = len(re.findall(r"[*+{]", bare))
    optional = len(re.findall(r"(?<![*+}(])\?", bare))
    if re.search(r"\)[*+{]", bare) or repeats > MOST_REPEATS or optional > MOST_OPTIONAL:
        raise ValueError(
            f"it repeats a group, has over {MOST_REPEATS} repeats, or over {MOST_OPTIONAL} '?'"
        )
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True)
class Pattern:
    r"""A line of a recipe that places the tensors of an unknown layout.

    `match` is a regular expression for the whole tensor name; a group named `layer` gives the
    layer's index. Roles of a layer need that group, roles outside the layers cannot have it, and
    `other` may.

    Example: `Pattern(r"model\.layers\.(?P<layer>\d+)\.mixer\..*", "attention")`
    """

    match: str
    role: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise RecipeError(f"pattern {self.match!r}: role {self.role!r} is not one of {ROLES}")
        try:
            has_layer = "layer" in compile_pattern(self.match).groupindex
        except ValueError as error:
            message = f"pattern {self.match!r} cannot be used: {error}"
            raise RecipeError(message) from None
        if self.role not in ((*OWNERS, "router") if has_layer else OUTSIDE):
            verb = "cannot have" if has_layer else "needs"
            raise RecipeError(
                f"pattern {self.match!r}: role {self.role!r} {verb} a group (?P<layer>\\d+)"
            )

    def place(self, name: str) -> Place | None:
        """Return the place of `name`; None if the pattern does not match the whole name."""
        match = re.fullmatch(self.match, name) if len(name) <= LONGEST_NAME else None
        if match is None:
            return None
        if "layer" not in match.re.groupindex:
            return Place(None, self.role)
        index = match["layer"]
        if index is None or not _is_index(index):
            raise RecipeError(
                f"pattern {self.match!r}: group 'layer' is {index!r} in {name!r}, not an index"
            )
        return Place(int(index), self.role)


class Numbered(NamedTuple):
    """The layers of a checkpoint whose names do not reveal every role."""

    stack: str
    """The only list with one member per layer, such as `rwkv.blocks`."""
    roleless: frozenset[str]
    """Tensors with a known layer but no known role; their role is `other`."""


class ParsedName(NamedTuple):
    """The parts of a tensor's name."""

    stack: str | None  # the list of layers, as written: "model.layers"
    layer: int | None
    rest: list[str]  # the owner, and the words inside it
    side: str  # "encoder", "decoder", or "" for a model that has no such parts


def place_tensors(
    names: Iterable[str], *, layers: int | None = None, patterns: Sequence[Pattern] = ()
) -> dict[str, Place]:
    """Place every tensor of one checkpoint, in the order of `names`.

    `names` cover all shards; `layers` is the number of layers by the config. The
    first matching pattern decides, before the tables. Refuses names that cannot be placed, missing
    or extra layers, and two lists of layers.
    """
    by_name = {name: _by_pattern(name, patterns) for name in names}
    parsed = {name: parse_name(name) for name, where in by_name.items() if where is None}
    parsed = _in_one_order(parsed)
    by_name.update((name, _by_tables(words)) for name, words in parsed.items())
    unknown = [name for name, where in by_name.items() if where is None]
    if any(LANGUAGE in name.split(".") for name in by_name):  # the rest are towers
        by_name.update((n, Place(None, "other")) for n in unknown if LANGUAGE not in n.split("."))
        unknown = [name for name in unknown if by_name[name] is None]
    if unknown:
        shown = _few(map(repr, unknown), len(unknown))
        raise CheckpointError(
            f"cannot tell the layer and role of {len(unknown)} of {len(by_name)} tensors: {shown}; "
            f"{pattern_advice(unknown[0])}"
        )
    places = {name: where for name, where in by_name.items() if where is not None}
    _check_one_stack(parsed.values())
    numbered = {name: where.layer for name, where in places.items() if where.layer is not None}
    remedy = "look for a missing shard"
    if numbered.keys() - parsed.keys():
        remedy = "`patterns` number the layers of the whole model, an encoder's before a decoder's"
    _check_layers({*numbered.values()}, layers, remedy)
    return places


def _in_one_order(names: dict[str, ParsedName]) -> dict[str, ParsedName]:
    """Number the decoder's layers behind the encoder's, from the input to the output.

    An encoder without a decoder beside another list of layers is a tower: its names stay unknown.
    """
    layers: dict[str, int] = {}
    for name in names.values():
        if name.layer is not None:
            layers[name.side] = max(layers.get(name.side, 0), name.layer + 1)
    if not layers.get("encoder"):
        alone = "decoder" in layers
        return {n: name._replace(side="") for n, name in names.items()} if alone else names
    if "" in layers:
        tower = ParsedName(None, None, [""], "")
        return {n: tower if name.side == "encoder" else name for n, name in names.items()}
    return {n: _behind(name, layers["encoder"]) for n, name in names.items()}


def _behind(name: ParsedName, encoder: int) -> ParsedName:
    if name.side != "decoder" or name.layer is None:
        return name
    return name._replace(layer=name.layer + encoder)


def place_by_number(
    names: Iterable[str], *, layers: int, patterns: Sequence[Pattern] = ()
) -> tuple[dict[str, Place], Numbered] | None:
    """Place tensors with unknown names by their index in the only list of layers.

    A composition of whole layers needs no roles. If the names have exactly one outermost list with
    `layers` members, each member is a layer. Tensors keep the roles that the tables know; all
    others have the role `other`, in their layer or outside the layers. Returns None if no list or
    several lists have that many members, another list has more tensors, or a name looks like a
    module that several layers share.

    Example: `rwkv.blocks.0.ffn.w`, `rwkv.blocks.1.ffn.w` and `head.weight` have 2 layers.
    """
    by_name = {name: _by_pattern(name, patterns) for name in names}
    listed = {name: _listed(name) for name, where in by_name.items() if where is None}
    members: dict[str, set[int]] = {}
    for _, stack, member in listed.values():
        members.setdefault(stack, set()).add(member)
    wanted = set(range(min(layers, 1 + len(listed))))  # bounded: a config can claim any number
    stacks = [stack for stack, indices in members.items() if stack and indices == wanted]
    if len(stacks) != 1 or len(wanted) != layers:
        return None
    tensors = Counter(stack for _, stack, _ in listed.values() if stack)
    if tensors[stacks[0]] < max(tensors.values()):  # the layers would be another list
        return None
    roleless = set()
    for name, (place, stack, member) in listed.items():
        layer = member if stack == stacks[0] else None
        if place is not None and place.layer == layer:
            by_name[name] = place
        elif (place is not None and place.layer is not None) or _SHARES.search(name):
            return None
        else:
            by_name[name] = Place(layer, "other")
            roleless.add(name)
    places = {name: where for name, where in by_name.items() if where is not None}
    if {where.layer for where in places.values()} - wanted - {None}:
        return None
    return places, Numbered(stacks[0], frozenset(roleless))


def _listed(name: str) -> tuple[Place | None, str, int]:
    """Return the place by the tables, the outermost list ("" for none), and the number in it."""
    place, words = _by_tables(parse_name(name)), name.split(".")
    at = next((i for i, word in enumerate(words) if i and _is_index(word)), None)
    if at is None or place == Place(None, "other"):  # a vision tower has layers of its own
        return place, "", -1
    return place, ".".join(words[:at]), int(words[at])


def place(name: str, patterns: Sequence[Pattern] = (), *, encoder: int = 0) -> Place | None:
    """Return the place of one tensor; None if neither `patterns` nor the tables know its name.

    `encoder` is the number of an encoder-decoder's encoder layers, which come first.
    """
    return _by_pattern(name, patterns) or _by_tables(_behind(parse_name(name), encoder))


def count_layers(places: Mapping[str, Place]) -> int:
    """Return the number of layers of a checkpoint that `place_tensors` has placed."""
    return 1 + max(
        (where.layer for where in places.values() if where.layer is not None), default=-1
    )


def alias(name: str) -> str | None:
    """Return the papers' name for a weight matrix of a layer; None if they have none.

    Attention has `wq`, `wk`, `wv` and `wo`; the mlp has `w1` (gate, or the first of two matrices),
    `w3` (up) and `w2` (down), of each expert in a mixture. Fused matrices (qkv, gate and up),
    biases, norms and routers have none.

    Example: `alias("model.layers.3.mlp.gate_proj.weight")` gives `"w1"`.
    """
    where, words = place(name), name.split(".")
    if where is None or where.layer is None:
        return None
    last = words[-2] if words[-1] == "weight" else words[-1]
    named = _TABLE.get(f"aliases/{where.role}", {}).items()
    return next((ours for ours, theirs in named if last in theirs.split()), None)


def _by_pattern(name: str, patterns: Sequence[Pattern]) -> Place | None:
    """Return the place by the first matching pattern; shared modules belong to no layer."""
    if not SHARED.isdisjoint(name.split(".")):
        return Place(None, "other")
    return next((where for pattern in patterns if (where := pattern.place(name))), None)


def parse_name(name: str) -> ParsedName:
    """Cut a name into the list of layers, the layer, and the words inside."""
    words = name.split(".")
    start, side = _skip_wrappers(words, 0), ""
    if start < len(words) and words[start] == "encoder":
        side, start = "encoder", _skip_wrappers(words, start + 1)
    elif "decoder" in words[:start]:
        side = "decoder"
    rest = words[start:]
    if len(rest) > 2 and rest[0] in STACKS and _is_index(rest[1]):
        # T5 numbers the parts of a layer, which have lists of their own.
        inner = rest[4:] if rest[0] == "block" and rest[2] == "layer" else rest[2:]
        return ParsedName(".".join(words[: start + 1]), int(rest[1]), inner, side)
    return ParsedName(None, None, rest, side)


def _skip_wrappers(words: Sequence[str], start: int) -> int:
    """Return the position behind the wrappers; a parameter keeps its module."""
    while start + 1 < len(words) and words[start] in WRAPPERS and words[start + 1] not in _LEAVES:
        start += 1
    return start


@lru_cache(1 << 14)
def _is_index(word: str) -> bool:
    # One spelling per index, so that two names cannot mean the same layer by accident.
    return re.fullmatch(r"0|[1-9][0-9]{0,4}", word) is not None


def _by_tables(name: ParsedName) -> Place | None:
    role = _role(tuple(name.rest), in_layer=name.layer is not None)
    if role == "final_norm" and name.side == "encoder":
        role = "other"  # the decoder follows
    return None if role is None else Place(name.layer, role)


@lru_cache(1 << 14)  # layers have the same names inside
def _role(words: tuple[str, ...], *, in_layer: bool) -> str | None:
    owner, *inside = words or ("",)
    for role in (
        role for role, owned in (OWNERS if in_layer else OUTSIDE).items() if owner in owned
    ):
        if in_layer:
            known = INSIDE[role]
            recognised = all(w in known or _is_index(w.removeprefix("expert_")) for w in inside)
        else:
            # The layout inside a tower does not matter: every tensor in it is `other`.
            recognised = role == "other" or OUTSIDE_LEAVES.issuperset(inside)
        if recognised:
            return "router" if role == "mlp" and not ROUTERS.isdisjoint(words) else role
    return None


def _check_one_stack(names: Iterable[ParsedName]) -> None:
    named = dict.fromkeys((name.side, name.stack) for name in names if name.stack is not None)
    stacks = [stack for _, stack in named]
    if len({side for side, _ in named}) < len(stacks):
        raise CheckpointError(
            f"two lists of layers, {stacks[0]!r} and {stacks[1]!r}; place the tensors that are not "
            "the decoder's with `patterns` in the recipe"
        )


def _check_layers(indices: set[int], layers: int | None, remedy: str) -> None:
    if not indices:
        raise CheckpointError("no tensor belongs to a layer, so there is nothing to recompose")
    last = max(indices)
    count = last + 1 if layers is None else layers
    if last >= count:
        raise CheckpointError(
            f"there are tensors of layer {last}, but the config has {count} layers, from 0 to "
            f"{count - 1}; if they are something else, place them with `patterns` in the recipe"
        )
    missing = count - len(indices)
    if missing:
        # Lazily: a config can claim any number of layers.
        gaps = islice((str(i) for i in range(count) if i not in indices), _SHOWN)
        raise CheckpointError(
            f"{missing} of {count} layers have no tensors: {_few(gaps, missing)}; {remedy}"
        )


def _few(items: Iterable[str], total: int) -> str:
    shown = list(islice(items, _SHOWN))
    return ", ".join(shown) + (", ..." if total > len(shown) else "")


def pattern_advice(name: str) -> str:
    """Return the advice on placing a tensor by a recipe, which ends a message."""
    # A name is untrusted text: unprintable characters, and YAML's quote, become \W.
    safe = "".join(
        re.escape(char) if char.isprintable() and char != "'" else r"\W" for char in name
    )
    example = re.sub(r"(?<=\\\.)\d+(?=\\\.)", lambda _: r"(?P<layer>\d+)", safe, count=1)
    return (
        f"say so in the recipe, as `patterns: [{{match: '{example}', role: ...}}]` "
        f"with a role of {', '.join(ROLES)}"
    )


# --- layers in another order ---


def restacked_names(
    places: Mapping[str, Place], taken: Sequence[int]
) -> dict[str, tuple[str, Place]]:
    """Map each tensor name in the new stack to its old name and new place; layers in order.

    Example: with `taken=(0, 0)`, `model.layers.1.mlp.up_proj.weight` comes from
    `model.layers.0.mlp.up_proj.weight`.
    """
    by_layer: dict[int, list[str]] = {}
    for name, place in places.items():
        if place.layer is not None:
            by_layer.setdefault(place.layer, []).append(name)
    restacked: dict[str, tuple[str, Place]] = {}
    for name, place in places.items():
        if place.layer is None:
            restacked[name] = name, place
        elif by_layer:  # all layers stand where the first tensor of a layer stood
            for layer, source in enumerate(taken):
                for stored in by_layer.get(source, ()):
                    new = Place(layer, places[stored].role)
                    restacked[renumbered(stored, source, layer)] = stored, new
            by_layer = {}
    return restacked


def renumbered(name: str, old: int, new: int) -> str:
    """Replace layer `old` by `new` in a tensor's name."""
    parts = name.split(".")
    if str(old) in parts:
        parts[parts.index(str(old))] = str(new)
        return ".".join(parts)
    return re.sub(rf"(?<!\d){old}(?!\d)", str(new), name, count=1)
