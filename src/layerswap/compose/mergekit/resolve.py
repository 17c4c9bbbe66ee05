"""From a mergekit configuration to a composition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from layerswap.checkpoint.places import Place
from layerswap.compose.blend import Blend
from layerswap.compose.composition import Composition
from layerswap.compose.mergekit.methods import METHODS, PER_MODEL, Entry, Shared, merged
from layerswap.compose.mergekit.schema import MergekitMethod
from layerswap.compose.mergekit.stack import Slice, Source, read_stack
from layerswap.errors import RecipeError

LLAMA = {
    "embedding": ("model.embed_tokens.weight",),
    "attention": tuple(f"self_attn.{word}_proj.weight" for word in "qkvo"),
    "mlp": tuple(f"mlp.{word}_proj.weight" for word in ("gate", "up", "down")),
    "norm": ("input_layernorm.weight", "post_attention_layernorm.weight"),
    "final_norm": ("model.norm.weight",),
    "head": ("lm_head.weight",),
}
"""The names of Llama's tensors by role; those of a layer without `model.layers.N.` before them."""


def llama_tensors(layers: int) -> dict[str, Place]:
    """The tensors of a Llama of `layers` layers, whose names most families share."""
    found = {}
    for role, names in LLAMA.items():
        inside = role in ("attention", "mlp", "norm")
        for layer in range(layers) if inside else [None]:
            prefix = "" if layer is None else f"model.layers.{layer}."
            found.update({prefix + name: Place(layer, role) for name in names})
    return found


def resolve(
    method: MergekitMethod, layers: int, tensors: Mapping[str, Place] | None = None
) -> Composition:
    """The composition of a configuration, over the models as it names them.

    Every tensor's parameters are looked up as mergekit does, by its name and layer; the tensors
    of one place must agree.

    Args:
        method: the configuration.
        layers: number of layers of the models, L.
        tensors: the place of every tensor; those of a Llama when None.

    Raises:
        RecipeError: another number of layers, a filter that divides a place, or weights that no
            blend has.
    """
    stack = read_stack(method.model_dump(exclude_none=True), layers)
    total = sum(one.length for one in stack)
    if total != layers:
        raise RecipeError(
            f"the slices have {total} layers and the models {layers}; layerswap keeps the depth: "
            "frankenmerges are out of scope"
        )
    found: dict[Place, tuple[str, Blend]] = {}
    positions = _positions(stack)
    for tensor, place in (tensors or llama_tensors(layers)).items():
        blend = _blend_at(method.merge_method, stack, positions, tensor, place)
        first, other = found.setdefault(place, (tensor, blend))
        if other != blend:
            raise RecipeError(_divided(place, first, other, tensor, blend))
    blends = {place: blend for place, (_, blend) in found.items()}

    return Composition.build(layers, lambda place: _nearest(place, blends))


def _nearest(place: Place, blends: Mapping[Place, Blend]) -> Blend:
    """The blend of a place; one without tensors goes with another, as nothing is computed there.

    A tied head has none: it is the embedding.
    """
    if place.layer is None:
        roles = ["embedding"] if place.role == "head" else ["final_norm", "embedding"]
    else:
        roles = ["mlp", "attention", "norm"]
    for other in (place, *(Place(place.layer, role) for role in roles)):
        if other in blends:
            return blends[other]
    return next(iter(blends.values()))


def _positions(stack: Iterable[Slice]) -> list[tuple[int, float]]:
    """For every layer its slice, and where in the slice it is, 0..1."""
    found = []
    for number, one in enumerate(stack):
        steps = one.length - 1
        found += [(number, i / steps if steps else 1.0) for i in range(one.length)]
    return found


def _blend_at(
    name: str,
    stack: list[Slice],
    positions: list[tuple[int, float]],
    tensor: str,
    place: Place,
) -> Blend:
    """What one tensor is made of.

    Outside the layers mergekit takes the first slice for what comes before them and the last for
    what comes after, at position 0 of both; of the last it takes as many sources as the first has.
    """
    if place.layer is not None:
        number, t = positions[place.layer]
        one = stack[number]
        sources = one.sources
    elif place.role == "embedding":
        one, t = stack[0], 0.0
        sources = one.sources
    else:
        one, t = stack[-1], 0.0
        sources = one.sources[: len(stack[0].sources)]
    if (METHODS[name].deltas or name == "slerp") and one.base not in [s.model for s in sources]:
        raise RecipeError(
            f"{tensor}: mergekit takes as many sources of the last slice as the first has, which "
            f"leaves out the base model {one.base!r}; write it first"
        )
    try:
        entries = [_entry(name, one, source, tensor, t) for source in sources]
        return merged(name, entries, one.base, _shared(name, one, tensor, t))
    except RecipeError as error:
        raise error.within(tensor) from None


def _entry(name: str, one: Slice, source: Source, tensor: str, t: float) -> Entry:
    values = {}
    for parameter, default in PER_MODEL.items():
        found = one.value(parameter, tensor, t, source)
        needed = parameter in METHODS[name].required and (
            not METHODS[name].deltas or source.model != one.base
        )
        if found is None and needed:
            raise RecipeError(
                f"no {parameter} for {source.model!r}: no filter matches, and there is no default"
            )
        values[parameter] = default if found is None else float(found)
    return Entry(source.model, **values)


def _shared(name: str, one: Slice, tensor: str, t: float) -> Shared:
    method = METHODS[name]
    normalize = one.value("normalize", tensor, t)
    rescale = one.value("rescale", tensor, t)
    scale = one.value("lambda", tensor, t)
    position = one.value("t", tensor, t)
    if position is None and "t" in method.required:
        raise RecipeError("no t: no filter matches, and there is no default")
    return Shared(
        method.normalize if normalize is None else bool(normalize),
        True if rescale is None else bool(rescale),
        1.0 if scale is None else float(scale),
        float(position or 0.0),
    )


def _divided(place: Place, first: str, other: Blend, tensor: str, blend: Blend) -> str:
    where = place.role if place.layer is None else f"layer {place.layer} {place.role}"
    return (
        f"{where}: {first} would be {other} and {tensor} {blend}; layerswap merges all of it "
        "alike, so filters can tell self_attn, mlp and norms apart, but not parts of them"
    )
