"""Holds many compositions as one model in memory, re-pointed in milliseconds.

A composition's stored tensors are mapped to the parameters of a transformers model. transformers
renames tensors while it loads them, ties some, and fuses others (the experts of a mixture). A
parameter that shares its memory with a stored tensor is that tensor; what is left over was
converted, and is converted again by transformers whenever it is needed.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Place
from layerswap.checkpoint.loading import check_dtype, open_device
from layerswap.compose.blend import Operation
from layerswap.errors import EvaluationError
from layerswap.merge import Plan
from layerswap.merge.layout import OutputTensor
from layerswap.merge.loading import build_model, load_tensor
from layerswap.merge.terms import merged_tensors
from layerswap.merge.writer import measure_tensors

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
        model: still sharing memory with `weights`, as `merge.loading.build_model` leaves it.
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


Tensors = tuple["torch.Tensor", ...]
FREE_SHARE = 0.5
"""Share of the free memory that made tensors may take where the user sets no bound."""


@dataclass(frozen=True)
class WeightSource:
    """All that one tensor of one composition is made of: equal sources make equal bytes.

    Attributes:
        tensor: what is read, and how it is weighed.
        thresholds: what its operations know of the whole model; see `merge.writer.measure_tensors`.
    """

    tensor: OutputTensor
    thresholds: tuple[tuple[Operation, Any], ...] = ()

    def compute(self) -> torch.Tensor:
        """The tensor on the CPU, bit for bit what `Plan.load` and `Plan.save` give it."""
        return load_tensor(self.tensor, dict(self.thresholds))


class Measurements:
    """Thresholds of operations that rank a whole model, measured once for equal sets of tensors."""

    def __init__(self) -> None:
        self._found: dict[frozenset[OutputTensor], dict[Operation, Any]] = {}

    def sources(self, plan: Plan) -> dict[str, WeightSource]:
        """The source of every tensor of a plan, by the tensor's name."""
        plan = plan.downloaded()
        derived = frozenset(tensor for tensor in plan.tensors if not tensor.linear)
        if derived not in self._found:
            self._found[derived] = measure_tensors(plan.tensors) if derived else {}
        found = self._found[derived]
        return {tensor.name: _source(tensor, found) for tensor in plan.tensors}


class WeightPool:
    """Tensors by the number of what they are made of.

    Those that are an expert's own bytes are read once and stay. Made ones (blends, merge methods)
    stay up to a bound in bytes; the least recently used go first, and are made again when needed.
    Where the experts' stay in the memory of the CPU, their copies on the device come and go so.

    Args:
        max_made_bytes: the bound; None for half of the memory that is free on first need.
        device: where tensors are needed.
        home: where the experts' tensors stay.
    """

    def __init__(
        self, max_made_bytes: int | None, device: torch.device, home: torch.device
    ) -> None:
        self.device, self.home = device, home
        self._bound = max_made_bytes
        self._kept: dict[int, Tensors] = {}
        self._made: OrderedDict[int, Tensors] = OrderedDict()
        self.made_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tensors that stay."""
        return _nbytes(tuple(tensor for tensors in self._kept.values() for tensor in tensors))

    @property
    def max_made_bytes(self) -> int:
        """The bound on made tensors, in bytes."""
        if self._bound is None:
            self._bound = int(free_bytes(self.device) * FREE_SHARE)
        return self._bound

    def get(self, number: int) -> Tensors | None:
        """The tensors of this number, None where they are not at hand."""
        if number in self._made:
            self._made.move_to_end(number)
            return self._made[number]
        kept = self._kept.get(number)
        if kept is None or self.device == self.home:
            return kept
        copies = {id(tensor): moved(tensor, self.device) for tensor in kept}  # tied ones stay one
        tensors = tuple(copies[id(tensor)] for tensor in kept)
        self._keep_bounded(number, tensors)
        return tensors

    def put(self, number: int, tensors: Tensors, *, stays: bool) -> None:
        """Keep tensors, for ever or for as long as they fit.

        Args:
            number: of what they are made of.
            tensors: at home if they stay, on the device otherwise.
            stays: True for an expert's own tensors.
        """
        if stays:
            self._kept[number] = tensors
        else:
            self._keep_bounded(number, tensors)

    def _keep_bounded(self, number: int, tensors: Tensors) -> None:
        self._made[number] = tensors
        self.made_bytes += _nbytes(tensors)
        while self.made_bytes > self.max_made_bytes and len(self._made) > 1:
            _, dropped = self._made.popitem(last=False)
            self.made_bytes -= _nbytes(dropped)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device, a parameter as a parameter."""
    from torch.nn import Parameter

    if tensor.device == device:
        return tensor
    there = tensor.detach().to(device)
    return Parameter(there, requires_grad=False) if isinstance(tensor, Parameter) else there


def free_bytes(device: torch.device) -> int:
    """Memory that could be taken on a device now, in bytes."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        # Beside what is free, what holds copies of files and is given back when it is needed.
        words = FilePath("/proc/meminfo").read_text("ascii").split()
        return int(words[words.index("MemAvailable:") + 1]) << 10
    except (ValueError, OSError):  # not every system tells; then a bound that suits a laptop
        return 4 << 30


def _source(tensor: OutputTensor, thresholds: dict[Operation, Any]) -> WeightSource:
    used = dict.fromkeys(merged.operation for merged in merged_tensors(tensor.inputs))
    known = [(operation, thresholds[operation]) for operation in used if operation in thresholds]
    return WeightSource(tensor, tuple(known))


def _nbytes(tensors: Tensors) -> int:
    # Tied parameters are one tensor under several names.
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct)


def _same_bits(first: Tensors, second: Tensors) -> bool:
    """True for tensors that are equal to the last bit, on one device."""
    import torch

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().reshape(-1).view(torch.uint8)

    return all(
        (a.device, a.dtype) == (b.device, b.dtype) and torch.equal(bits(a), bits(b))
        for a, b in zip(first, second, strict=True)
    )


Key = int
"""One choice of sources for all tensors of a slot; equal keys mean equal bytes."""
Path = tuple[Key, ...]
"""A composition: a key before the layers, one per layer, one for all that lies outside them."""


class VirtualModel:
    """Compositions of the same experts that share one transformers model and their tensors.

    At verbatim places the model's parameters are the experts' tensors, read once and shared by
    every composition; blended and merged places are made on demand by the same kernels as
    `Plan.save`, and kept up to a bound. Whichever composition the model is switched to, its
    weights are bit for bit those of `Plan.load`.

    Args:
        plans: at least one; more can be added later. They agree on the model's shape.
        device: where the tensors live and the model runs.
        dtype: `float32`, `bfloat16` or `float16`; the plans' own when None.
        max_made_bytes: bound on blended and merged tensors; None for half of the free memory.
        experts_on: `device` or `cpu`: where the experts' tensors stay. From the CPU they are copied
            to the device when they are needed, and count among the bounded.

    Raises:
        EvaluationError: no plan; plans of different dtypes or shapes; an unknown model.
        MergeError: as `Plan.load`.

    Example:
        virtual = VirtualModel(plan.grid(bottom=range(3), top=range(3)))
        model = virtual.switch(4)
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        *,
        device: str | torch.device = "cpu",
        dtype: str | None = None,
        max_made_bytes: int | None = None,
        experts_on: str = "device",
    ) -> None:
        import torch

        if not plans:
            raise EvaluationError("there is no composition to evaluate")
        check_dtype(dtype)
        if experts_on not in ("device", "cpu"):
            raise EvaluationError(f"experts_on is {experts_on!r}; it must be device or cpu")
        self.device = open_device(device)
        self._dtype = dtype
        self.plans: list[Plan] = []
        self.paths: list[Path] = []
        self._measurements = Measurements()
        home = torch.device("cpu") if experts_on == "cpu" else self.device
        self.pool = WeightPool(max_made_bytes, self.device, home)
        sources = self._measurements.sources(plans[0])
        self._shape = _shape_of(plans[0], dtype)
        # What a group is made of has a number, because hashing all of it takes long.
        self._numbers: dict[tuple[WeightSource, ...], int] = {}
        self._made_of: list[tuple[WeightSource, ...]] = []
        self._held: dict[str, list[Tensors]] = defaultdict(list)  # the experts', by target
        self.model, self.map = self._load(plans[0], sources)
        slots = (self.map.before, *self.map.layers, self.map.outside)
        self._slots: tuple[tuple[Group, ...], ...] = slots
        self._keys: list[dict[tuple[int, ...], Key]] = [{} for _ in slots]
        self._choices: list[list[tuple[int, ...]]] = [[] for _ in slots]
        self._current: list[Key | None] = [None] * len(slots)
        self._owners = self._find_owners()
        self.add(plans)

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The model's layers; none where they are not in one list."""
        if self.map.stack is None:
            return ()
        found: Any = self.model.get_submodule(self.map.stack)
        return found  # type: ignore[no-any-return]

    def add(self, plans: Sequence[Plan]) -> list[int]:
        """More compositions; returns their indices.

        Raises:
            EvaluationError: a plan for another model, or in another dtype.
        """
        added = []
        for plan in plans:
            if _shape_of(plan, self._dtype) != self._shape:
                raise EvaluationError(
                    "the compositions do not make models of one kind: tensors differ in name, "
                    "shape or dtype; give a dtype, or evaluate them apart"
                )
            sources = self._measurements.sources(plan)
            self.paths.append(tuple(self._key(s, sources) for s in range(len(self._slots))))
            self.plans.append(plan)
            added.append(len(self.plans) - 1)
        return added

    def switch(self, index: int) -> PreTrainedModel:
        """The model as composition `index`; the same object every time."""
        path = self.paths[index]
        for layer, key in enumerate(path[1:-1]):
            self.use_layer(layer, key)
        self.use_outside(path[-1])
        return self.model

    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of all distinct tensors of the compositions: the experts' own, and made ones."""
        stays = made = 0
        for made_of in self._made_of:
            count = sum(source.tensor.elements for source in made_of) * self.model.dtype.itemsize
            verbatim = all(source.tensor.verbatim for source in made_of)
            stays, made = (stays + count, made) if verbatim else (stays, made + count)
        return stays, made

    def use_before(self, key: Key) -> None:
        """Give all that acts before the layers these tensors."""
        self._use(0, key)

    def use_layer(self, layer: int, key: Key) -> None:
        """Give one layer these tensors."""
        self._use(1 + layer, key)

    def use_outside(self, key: Key) -> None:
        """Give all that lies outside the layers these tensors."""
        self._use(len(self._slots) - 1, key)

    def _key(self, slot: int, sources: dict[str, WeightSource]) -> Key:
        choice = tuple(self._number(group, sources) for group in self._slots[slot])
        known = self._keys[slot]
        if choice not in known:
            known[choice] = len(known)
            self._choices[slot].append(choice)
        return known[choice]

    def _number(self, group: Group, sources: dict[str, WeightSource]) -> int:
        made_of = tuple(sources[name] for name in group.sources)
        if made_of not in self._numbers:
            self._numbers[made_of] = len(self._made_of)
            self._made_of.append(made_of)
        return self._numbers[made_of]

    def _use(self, slot: int, key: Key) -> None:
        last = len(self._slots) - 1
        if self._current[slot] == key:
            return
        for group, number in zip(self._slots[slot], self._choices[slot][key], strict=True):
            tensors = self.pool.get(number)
            if tensors is None:
                self._make(group, number)
                tensors = self.pool.get(number) or ()
            for target, tensor in zip(group.targets, tensors, strict=True):
                owner, name = self._owners[target]
                owner[name] = tensor
        self._current[slot] = key
        if slot in (0, last):  # they have parameters in common
            self._current[last - slot] = None

    def _make(self, group: Group, number: int) -> None:
        made_of = self._made_of[number]
        stays = all(source.tensor.verbatim for source in made_of)
        where = self.pool.home if stays else self.device
        if group.converted:
            made = convert(self.model, group, {s.tensor.name: s.compute() for s in made_of})
            pairs = zip(group.targets, made, strict=True)
            tensors = tuple(self._placed(target, tensor, where) for target, tensor in pairs)
        else:
            tensor = self._placed(group.targets[0], made_of[0].compute(), where)
            tensors = (tensor,) * len(group.targets)
        # What no expert trained, such as an embedding, is held once for all of them.
        held = self._held[group.targets[0]]
        equal = next((one for one in held if _same_bits(one, tensors)), None)
        if stays and equal is None:
            held.append(tensors)
        self.pool.put(number, equal or tensors, stays=stays or equal is not None)

    def _placed(self, target: str, tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
        """A tensor as its parameter (or buffer) must be: dtype, device and class."""
        from torch.nn import Parameter

        owner, name = self._owners[target]
        placed = tensor.detach().to(where, owner[name].dtype)
        is_parameter = isinstance(owner[name], Parameter)
        return Parameter(placed, requires_grad=False) if is_parameter else placed

    def _load(
        self, plan: Plan, sources: dict[str, WeightSource]
    ) -> tuple[PreTrainedModel, ParameterMap]:
        import torch

        wanted = getattr(torch, self._dtype) if self._dtype else None
        weights = {name: source.compute() for name, source in sources.items()}
        if wanted is not None:
            weights = {n: t.to(wanted) if t.is_floating_point() else t for n, t in weights.items()}
        model = build_model(plan, weights, wanted)
        mapped = parameter_map(model, weights, plan.reference.places)
        model.requires_grad_(False).to(self.pool.home)  # type: ignore[arg-type]
        state = model.state_dict(keep_vars=True)
        for group in (*mapped.outside, *(g for layer in mapped.layers for g in layer)):
            number = self._number(group, sources)
            stays = all(source.tensor.verbatim for source in self._made_of[number])
            where = self.pool.home if stays else self.device
            placed = {id(t): moved(t, where) for t in (state[name] for name in group.targets)}
            tensors = tuple(placed[id(state[name])] for name in group.targets)
            if stays:
                self._held[group.targets[0]].append(tensors)
            self.pool.put(number, tensors, stays=stays)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.device)
        return model, mapped

    def _find_owners(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Per parameter or buffer, the dictionary that its module keeps it in, and its name."""
        owners = {}
        for group in (group for slot in self._slots for group in slot):
            for target in group.targets:
                path, _, name = target.rpartition(".")
                module = self.model.get_submodule(path)
                inside = module._parameters if name in module._parameters else module._buffers
                owners[target] = (inside, name)
        return owners


def _shape_of(plan: Plan, dtype: str | None) -> frozenset[tuple[str, tuple[int, ...], str | None]]:
    """What compositions that share a model have in common."""
    return frozenset((t.name, t.shape, None if dtype else t.dtype) for t in plan.tensors)
