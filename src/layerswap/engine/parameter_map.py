"""Maps stored tensors to the parameters of a transformers model, and finds its layers.

transformers renames tensors while it loads them, ties some, and fuses others (the experts of a
mixture). A parameter that shares its memory with a stored tensor is that tensor; what is left
over was converted, and is converted again by transformers whenever it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Place

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Group:
    """Parameters (or buffers) of a model that are made together.

    Attributes:
        sources: names of the stored tensors that they are made of.
        targets: their own names; tied parameters are together in one group.
        converted: True if transformers computes them from the sources; otherwise every target is
            the one source.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    converted: bool = False


@dataclass(frozen=True)
class ParameterMap:
    """The parts of a model that a composition can exchange.

    Attributes:
        stack: name of the list of layers, such as `model.layers`; None for a model that keeps
            them otherwise, all of whose groups are `before` and `outside` then.
        layers: the groups of every layer.
        before: the groups outside the layers that act before them.
        outside: all groups outside the layers.
    """

    stack: str | None
    layers: tuple[tuple[Group, ...], ...]
    before: tuple[Group, ...]
    outside: tuple[Group, ...]


def parameter_map(
    model: PreTrainedModel, weights: Mapping[str, torch.Tensor], places: Mapping[str, Place]
) -> ParameterMap:
    """Map the parameters of a freshly loaded model to the stored tensors that they came from.

    Args:
        model: still sharing memory with `weights`, as `merge.load.build_model` leaves it.
        weights: what it was loaded from.
        places: the place of every stored tensor.

    """
    direct, loose_sources, loose_targets = _match(model.state_dict(keep_vars=True), weights)
    layers = 1 + max(place.layer for place in places.values() if place.layer is not None)
    stack = _find_stack(model, direct, places, layers)
    if stack is None:
        loose = [Group(tuple(loose_sources), tuple(loose_targets), True)] * bool(loose_targets)
        return ParameterMap(None, (), (*direct, *loose), (*direct, *loose))
    groups: dict[int | None, list[Group]] = {layer: [] for layer in (None, *range(layers))}
    for group in direct:
        groups[places[group.sources[0]].layer].append(group)
    for layer, found in groups.items():
        sources = tuple(name for name in loose_sources if places[name].layer == layer)
        targets = tuple(n for n in loose_targets if _layer_of(n, stack, layers) == layer)
        if targets:
            found.append(Group(sources, targets, converted=True))
    outside = tuple(groups[None])
    first = tuple(
        g for g in outside if {places[n].role for n in g.sources} - {"final_norm", "head"}
    )
    return ParameterMap(stack, tuple(tuple(groups[i]) for i in range(layers)), first, outside)


def convert(
    model: PreTrainedModel, group: Group, weights: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The targets of a converted group, made by transformers; the model holds them afterwards.

    Args:
        model: the model, in the dtype that is wanted.
        group: a converted one.
        weights: its sources by name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    from layerswap.checkpoint.loading import without_progress_bars

    mapping: Any = get_model_conversion_mapping(model)
    plan = model._get_dtype_plan(model.dtype)
    config = LoadStateDictConfig(dtype=model.dtype, dtype_plan=plan, weight_mapping=mapping)
    with without_progress_bars():
        convert_and_load_state_dict_in_model(model, dict(weights), config)
    found = model.state_dict(keep_vars=True)
    return tuple(found[name] for name in group.targets)


def _match(
    state: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> tuple[list[Group], list[str], list[str]]:
    """Groups of parameters that are stored tensors, then the sources and targets left over."""
    by_memory: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        if tensor.numel():
            by_memory.setdefault(_memory(tensor), []).append(name)
    direct, loose = [], []
    for name, tensor in weights.items():
        targets = by_memory.pop(_memory(tensor), None) if tensor.numel() else []
        if targets:
            direct.append(Group((name,), tuple(targets)))
        elif targets is None:
            loose.append(name)
    return direct, loose, [name for names in by_memory.values() for name in names]


def _memory(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _find_stack(
    model: nn.Module, groups: Sequence[Group], places: Mapping[str, Place], layers: int
) -> str | None:
    from torch.nn import ModuleList

    inside = [
        (target, places[group.sources[0]].layer)
        for group in groups
        for target in group.targets
        if places[group.sources[0]].layer is not None
    ]
    for name, module in model.named_modules():
        if isinstance(module, ModuleList) and len(module) == layers:
            prefix = f"{name}." if name else ""
            if all(target.startswith(f"{prefix}{layer}.") for target, layer in inside):
                return str(name)
    return None


def _layer_of(name: str, stack: str, layers: int) -> int | None:
    head, _, rest = name.partition(f"{stack}.")
    index = rest.partition(".")[0]
    return int(index) if not head and index.isdigit() and int(index) < layers else None
