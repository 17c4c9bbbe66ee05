"""Many compositions in one transformers model, which switches between them in milliseconds.

A composition's stored tensors are mapped to the parameters of a transformers model. transformers
renames tensors while it loads them, ties some, and fuses others (the experts of a mixture). A
parameter that shares its memory with a stored tensor is that tensor. The others were converted, and
transformers converts them again whenever they are needed.

An example: of a model with two layers, composition 0 takes layer 0 from the language expert and
composition 1 takes it from the task expert. Both take layer 1 from the task expert and blend the
rest.

    depth                  0 before    1 layer 0    2 layer 1    3 outside
    bindings               embedding   9 matrices   9 matrices   embedding, norm, head
    path of composition 0  blend       language     task         blend
    path of composition 1  blend       task         task         blend

- A *depth* is a part of the model that is switched as a whole: 0 for the part before the layers,
  1 + l for layer l, and the last for everything outside the layers. The embedding belongs to both
  ends: a forward pass needs it at depth 0, and a head tied to it at the last depth.
- A *binding* says which parameters are made of which stored tensors.
- A *content* is a binding with the sources of its stored tensors, and the key of the weight pool.
  Contents with equal sources, which give equal bytes, are one object.
- A *variant* is one choice of weights at one depth: a content per binding. A composition's *path*
  has one variant per depth. Compositions with equal variants share their work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Place
from layerswap.checkpoint.loading import check_dtype, open_device
from layerswap.checkpoint.read import equal
from layerswap.compose.blend import Operation
from layerswap.engine.memory import Tensors, WeightPool
from layerswap.engine.transformers_inside import convert
from layerswap.ground.errors import EvaluationError
from layerswap.merge.folder import build_model, load_tensor
from layerswap.merge.layout import OutputTensor
from layerswap.merge.plan import Plan
from layerswap.merge.terms import merged_tensors, stored_tensors
from layerswap.merge.writer import measure_tensors

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class WeightSource:
    """The source of one tensor of one composition: equal sources give equal bytes."""

    tensor: OutputTensor
    thresholds: tuple[tuple[Operation, Any], ...]  # see `measure_tensors`

    def compute(self) -> torch.Tensor:
        """Compute the tensor on the CPU, bit for bit as `Plan.load` and `Plan.save` do."""
        return load_tensor(self.tensor, dict(self.thresholds))


class Measurements:
    """Thresholds of operations that rank a whole model, measured once per set of tensors.

    Tensors that are equal in several experts, such as a frozen embedding, have one source.
    """

    def __init__(self) -> None:
        self._thresholds: dict[frozenset[OutputTensor], dict[Operation, Any]] = {}
        self._stored: dict[str, list[OutputTensor]] = defaultdict(list)  # by name, all different

    def sources(self, plan: Plan) -> dict[str, WeightSource]:
        """Return the source of every tensor of a plan, by the tensor's name."""
        plan = plan.downloaded()
        merged = frozenset(tensor for tensor in plan.tensors if not tensor.linear)
        if merged not in self._thresholds:
            self._thresholds[merged] = measure_tensors(plan.tensors) if merged else {}
        thresholds = self._thresholds[merged]

        def source(tensor: OutputTensor) -> WeightSource:
            used = dict.fromkeys(part.operation for part in merged_tensors(tensor.inputs))
            return WeightSource(tensor, tuple((o, thresholds[o]) for o in used if o in thresholds))

        return {tensor.name: source(self._first_equal(tensor)) for tensor in plan.tensors}

    def _first_equal(self, tensor: OutputTensor) -> OutputTensor:
        """Return the first tensor with the same bytes; a computed tensor itself."""
        if not tensor.verbatim:
            return tensor
        known, info = self._stored[tensor.name], next(stored_tensors(tensor.inputs))
        for other in known:
            if other.dtype == tensor.dtype and equal(next(stored_tensors(other.inputs)), info):
                return other
        known.append(tensor)
        return tensor


@dataclass(frozen=True)
class Binding:
    """Parameters (or buffers) of a model, and the stored tensors that give their values."""

    sources: tuple[str, ...]  # names of the stored tensors
    targets: tuple[str, ...]  # names of the parameters; tied ones are in one binding
    converted: bool = False  # True if transformers computes the targets from the sources


@dataclass(frozen=True, eq=False)
class Content:
    """A binding with the source of each of its stored tensors; compared by identity, for speed."""

    binding: Binding
    sources: tuple[WeightSource, ...]

    @cached_property
    def verbatim(self) -> bool:
        """True if the tensors are an expert's own."""
        return all(source.tensor.verbatim for source in self.sources)


Variant = tuple[Content, ...]
"""One choice of weights at one depth."""


# --- parameters and stored tensors ---


def map_parameters(
    model: PreTrainedModel, weights: Mapping[str, torch.Tensor], places: Mapping[str, Place]
) -> tuple[str | None, list[tuple[Binding, ...]]]:
    """Map the parameters of a model to the stored tensors that they came from.

    Returns the name of the list of layers, such as `model.layers`, and the bindings by depth. If
    the model keeps its layers elsewhere the name is None, and both depths have all bindings. The
    model still shares memory with `weights`, as `merge.folder.build_model` leaves it.
    """
    direct, loose_sources, loose_targets = _match(model.state_dict(keep_vars=True), weights)
    layers = 1 + max(place.layer for place in places.values() if place.layer is not None)
    stack = _find_stack(model, direct, places, layers)
    if stack is None:
        loose = [Binding(tuple(loose_sources), tuple(loose_targets), True)] * bool(loose_targets)
        return None, [(*direct, *loose)] * 2
    by_layer: dict[int | None, list[Binding]] = {layer: [] for layer in (None, *range(layers))}
    for binding in direct:
        by_layer[places[binding.sources[0]].layer].append(binding)
    for layer, bindings in by_layer.items():
        sources = tuple(name for name in loose_sources if places[name].layer == layer)
        targets = tuple(n for n in loose_targets if _layer_of(n, stack, layers) == layer)
        if targets:
            bindings.append(Binding(sources, targets, converted=True))
    outside = by_layer.pop(None)
    before = [b for b in outside if {places[n].role for n in b.sources} - {"final_norm", "head"}]
    return stack, [tuple(part) for part in (before, *by_layer.values(), outside)]


def _match(
    state: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> tuple[list[Binding], list[str], list[str]]:
    """Bind parameters that share memory with a stored tensor; return the other names too."""
    by_memory: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        if tensor.numel():
            by_memory.setdefault(_memory(tensor), []).append(name)
    direct, loose = [], []
    for name, tensor in weights.items():
        targets = by_memory.pop(_memory(tensor), None) if tensor.numel() else []
        if targets:
            direct.append(Binding((name,), tuple(targets)))
        elif targets is None:
            loose.append(name)
    return direct, loose, [name for names in by_memory.values() for name in names]


def _memory(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _find_stack(
    model: nn.Module, bindings: Sequence[Binding], places: Mapping[str, Place], layers: int
) -> str | None:
    """Find the one list of modules that holds all parameters of all layers."""
    from torch.nn import ModuleList

    inside = [
        (target, layer)
        for binding in bindings
        for target in binding.targets
        if (layer := places[binding.sources[0]].layer) is not None
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


# --- the model ---


class VirtualModel:
    """Compositions of the same experts that share one transformers model and their tensors.

    Unchanged tensors are the experts' own, read once and shared by every composition. Blended and
    merged tensors are computed on demand by the code of `Plan.save`, and kept within a bound. The
    weights equal `Plan.load`'s bit for bit, whichever composition the model is switched to.

    Args:
        plans: at least one; more can be added later. They must agree on the model's shape.
        device: where the tensors live and the model runs.
        dtype: `float32`, `bfloat16` or `float16`; the plans' own when None.
        max_made_bytes: bound on blended and merged tensors; None for half of the free memory.

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
    ) -> None:

        if not plans:
            raise EvaluationError("there is no composition to evaluate")
        check_dtype(dtype)
        self.device = open_device(device)
        self._dtype = dtype
        self.plans: list[Plan] = []
        self.paths: list[tuple[Variant, ...]] = []
        self._measurements = Measurements()
        self.pool = WeightPool(max_made_bytes, self.device)
        self._signature = _signature(plans[0], dtype)
        self._contents: dict[tuple[Binding, tuple[WeightSource, ...]], Content] = {}
        self.model, self._stack, self._bindings = self._load(plans[0])
        # Per depth, the variant that the model has; None if another depth has changed it.
        self._current: list[Variant | None] = [None] * len(self._bindings)
        targets = (t for part in self._bindings for binding in part for t in binding.targets)
        self._owners = {target: _owner(self.model, target) for target in targets}
        self.add(plans)

    def __len__(self) -> int:
        return len(self.plans)

    def __repr__(self) -> str:
        layers = self.plans[0].composition.layers
        return f"<{type(self).__name__} of {len(self)} compositions: {layers} layers>"

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The model's layers; empty if they are not in one list."""
        stack: Any = () if self._stack is None else self.model.get_submodule(self._stack)
        return stack  # type: ignore[no-any-return]

    def add(self, plans: Sequence[Plan]) -> list[int]:
        """Add compositions for the same model, in the same dtype, and return their numbers."""
        for plan in plans:
            if _signature(plan, self._dtype) != self._signature:
                raise EvaluationError(
                    "the compositions cannot share a model, since tensors differ in name, shape "
                    "or dtype; set dtype, or evaluate them separately"
                )
            sources = self._measurements.sources(plan)
            self.paths.append(
                tuple(tuple(self._content(b, sources) for b in part) for part in self._bindings)
            )
            self.plans.append(plan)
        return list(range(len(self.plans) - len(plans), len(self.plans)))

    def switch(self, index: int) -> PreTrainedModel:
        """Load composition `index` into the model; return it, always the same object."""
        for depth, variant in enumerate(self.paths[index]):
            if depth:  # the last depth has the parameters of the first
                self.use(depth, variant)
        return self.model

    def weight_bytes(self) -> tuple[int, int]:
        """Return the bytes of all distinct tensors: the experts' own, and blended ones."""
        nbytes = {True: 0, False: 0}
        for content in self._contents.values():
            elements = sum(source.tensor.elements for source in content.sources)
            nbytes[content.verbatim] += elements * self.model.dtype.itemsize
        return nbytes[True], nbytes[False]

    def use(self, depth: int, variant: Variant) -> None:
        """Load a variant at one depth of the model."""
        if self._current[depth] == variant:
            return
        for content in variant:
            tensors = self._tensors(content)
            for target, tensor in zip(content.binding.targets, tensors, strict=True):
                owner, name = self._owners[target]
                owner[name] = tensor
        last = len(self._bindings) - 1
        if depth in (0, last):  # both have the parameters of the part before the layers
            self._current[last - depth] = None
        self._current[depth] = variant

    def _content(self, binding: Binding, sources: Mapping[str, WeightSource]) -> Content:
        key = binding, tuple(sources[name] for name in binding.sources)
        return self._contents.setdefault(key, Content(*key))

    def _tensors(self, content: Content) -> Tensors:
        """Return the tensors of a content for the targets of its binding, computed if need be."""
        tensors = self.pool.get(content)
        if tensors is None:
            tensors = self._compute(content)
            self.pool.put(content, tensors, stays=content.verbatim)
        return tensors

    def _compute(self, content: Content) -> Tensors:
        binding = content.binding
        if binding.converted:
            weights = {source.tensor.name: source.compute() for source in content.sources}
            computed = convert(self.model, weights, binding.targets)
            pairs = zip(binding.targets, computed, strict=True)
            return tuple(self._fitted(target, tensor) for target, tensor in pairs)
        tensor = self._fitted(binding.targets[0], content.sources[0].compute())
        return (tensor,) * len(binding.targets)

    def _fitted(self, target: str, tensor: torch.Tensor) -> torch.Tensor:
        """Give a tensor the device, dtype and class of its parameter or buffer."""
        from torch.nn import Parameter

        owner, name = self._owners[target]
        fitted = tensor.detach().to(self.device, owner[name].dtype)
        is_parameter = isinstance(owner[name], Parameter)
        return Parameter(fitted, requires_grad=False) if is_parameter else fitted

    def _load(self, plan: Plan) -> tuple[PreTrainedModel, str | None, list[tuple[Binding, ...]]]:
        """Load the model with one plan's weights, and put its tensors into the pool."""
        import torch

        sources = self._measurements.sources(plan)
        weights = {name: source.compute() for name, source in sources.items()}
        dtype = getattr(torch, self._dtype) if self._dtype else None
        if dtype is not None:
            weights = {n: t.to(dtype) if t.is_floating_point() else t for n, t in weights.items()}
        model = build_model(plan, weights, dtype)
        stack, bindings = map_parameters(model, weights, plan.reference.places)
        model.requires_grad_(False).to(self.device)  # type: ignore[arg-type]
        state = model.state_dict(keep_vars=True)
        for binding in dict.fromkeys(binding for part in bindings for binding in part):
            content = self._content(binding, sources)
            tensors = tuple(state[name] for name in binding.targets)
            self.pool.put(content, tensors, stays=content.verbatim)
        return model, stack, bindings


def _owner(model: nn.Module, target: str) -> tuple[dict[str, Any], str]:
    """Find the dictionary of the module that holds a parameter or buffer, and its name there."""
    path, _, name = target.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if name in module._parameters else module._buffers), name


def _signature(plan: Plan, dtype: str | None) -> frozenset[tuple[str, tuple[int, ...], str | None]]:
    """Return names, shapes and dtypes of tensors, which all compositions of a model share."""
    return frozenset((t.name, t.shape, None if dtype else t.dtype) for t in plan.tensors)
