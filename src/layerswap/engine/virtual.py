"""Many compositions as one model in memory, which becomes another of them in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from layerswap.engine.devices import check_dtype, open_device
from layerswap.engine.parameter_map import Group, ParameterMap, convert, parameter_map
from layerswap.engine.weight_pool import Measurements, WeightPool, WeightSource, moved
from layerswap.errors import EvaluationError
from layerswap.merge.load import build_model
from layerswap.merge.planner import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

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
        self.model, self.anatomy = self._load(plans[0], sources)
        slots = (self.anatomy.before, *self.anatomy.layers, self.anatomy.outside)
        self._slots: tuple[tuple[Group, ...], ...] = slots
        self._keys: list[dict[tuple[int, ...], Key]] = [{} for _ in slots]
        self._choices: list[list[tuple[int, ...]]] = [[] for _ in slots]
        self._current: list[Key | None] = [None] * len(slots)
        self._owners = self._find_owners()
        self.add(plans)

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def layers(self) -> nn.ModuleList:
        """The model's layers."""
        found: Any = self.model.get_submodule(self.anatomy.stack)
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
        self.pool.put(number, tensors, stays=stays)

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
        anatomy = parameter_map(model, weights, plan.reference.places)
        model.requires_grad_(False).to(self.pool.home)  # type: ignore[arg-type]
        state = model.state_dict(keep_vars=True)
        for group in (*anatomy.outside, *(g for layer in anatomy.layers for g in layer)):
            number = self._number(group, sources)
            stays = all(source.tensor.verbatim for source in self._made_of[number])
            where = self.pool.home if stays else self.device
            placed = {id(t): moved(t, where) for t in (state[name] for name in group.targets)}
            tensors = tuple(placed[id(state[name])] for name in group.targets)
            self.pool.put(number, tensors, stays=stays)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.device)
        return model, anatomy

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
