"""A LoRA adapter as a checkpoint: over its base, or with other adapters alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from layerswap.checkpoint.adapter import (
    MERGE_FIRST,
    Adapter,
    LowRank,
    match_tensors,
    read_adapter,
    saved_name,
)
from layerswap.checkpoint.checkpoint import CONV1D_TYPES, Checkpoint
from layerswap.checkpoint.configuration import encoder_layers
from layerswap.checkpoint.given import CONFIG, Given, fetch_checkpoint, is_adapter
from layerswap.checkpoint.header import TensorInfo
from layerswap.checkpoint.loading import missing_tensors, opened_classes
from layerswap.checkpoint.names import (
    canonical,
    class_for,
    class_of,
    in_layers,
    in_memory,
    renaming,
    unloaded,
    with_text,
    wrappers_of,
)
from layerswap.checkpoint.places import HEAD, Pattern, Place, place
from layerswap.checkpoint.read import zero_samples
from layerswap.ground.errors import CheckpointError, error_context
from layerswap.ground.strict_json import quoted, read_json_object

LABELS = ("id2label", "label2id")
OF_LABELS = (*LABELS, "problem_type")
"""Settings of an adapter's `config.json`; all others are the base's."""


@dataclass(frozen=True, repr=False)
class AdaptedModel(Checkpoint):
    """A folder with a LoRA adapter; tensors and places come with its base.

    The tensors are the base's, and those that the adapter saves whole. Over a base without tensors
    (`open_configuration`) it can only be composed with other adapters.
    """

    needs_base = True
    no_adapter = "is an adapter itself; give the model as the source"

    adapter: Adapter = field(kw_only=True)

    @classmethod
    def takes(cls, given: Given) -> bool:
        """True for a folder with an adapter and without a full model."""
        return is_adapter(given.fetched[0])

    @classmethod
    def open(cls, given: Given) -> Self:
        """Read the adapter's configuration and headers."""
        folder, commit = given.fetched
        if given.whole:
            raise CheckpointError(f"{folder}: a LoRA adapter, where a full checkpoint is needed")
        if given.in_place and commit:  # small enough to be downloaded
            folder, commit = fetch_checkpoint(given.source, commit)
        beside = read_json_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
        labels = {key: beside[key] for key in OF_LABELS if key in beside}
        return cls(given.name, commit, folder, labels, {}, {}, adapter=read_adapter(folder))

    @property
    def named_base(self) -> tuple[str | None, str | None]:
        """The base in the adapter's configuration, and its revision."""
        keys = "base_model_name_or_path", "revision"
        given = (self.adapter.config.get(key) for key in keys)
        name, revision = (value if isinstance(value, str) and value else None for value in given)
        return name, None if revision == "main" else revision

    def over(
        self, base: Checkpoint, patterns: Sequence[Pattern] = (), *, alone: bool = False
    ) -> Checkpoint:
        """Add the adapter to its base; `alone` is for a merge of adapters without full models."""
        adapter, parts = self.adapter, dict[str, str]()
        with error_context(self.source):
            _refuse_base(base)
            adapter, notes = _without_unloaded(adapter, base)
            base, lost = _with_task(base, adapter)
            _refuse_tied(base, adapter)
            if base.tensors:
                stored = match_tensors(adapter, base.tensors, base.config.get("model_type"))
                parts = _parts(stored, base, alone=alone)
                weights = {path: parts.get(path, name) for path, name in stored.items()}
                new = renaming(adapter.saved.keys(), base.tensors.keys())
                saved = {new.get(name, name): info for name, info in adapter.saved.items()}
                adapter = replace(adapter, saved=saved)
            else:
                weights = {path: f"{path}.weight" for path in adapter.modules}
            low_rank = {weights[path]: low for path, low in adapter.modules.items()}
            places = base.places or _module_places({*low_rank, *adapter.saved}, patterns, base)
            places = {**places, **{parts[path]: places[stored[path]] for path in parts}}
            low_rank = {
                name: replace(low, transposed=_is_transposed(adapter, low, places[name], base))
                for name, low in low_rank.items()
            }
            size = _new_size(base, adapter)
            for name in low_rank.keys() - parts.values():
                _check_shape(name, low_rank[name].shape, base, size)
            for name, info in adapter.saved.items():
                _check_shape(name, info.shape, base, size)
        config = base.config if size is None else with_text(base.config, {"vocab_size": size})
        count = len(self.config.get("id2label") or self.config.get("label2id") or ())
        if base.labelled and any(
            info.shape[:1] == (count,) for n, info in adapter.saved.items() if places[n] == HEAD
        ):
            config = {**config, **self.config}  # Axolotl's may be the base's, with other labels
        tensors = {**base.tensors, **adapter.saved}
        return replace(
            self, config=config, tensors=tensors, places=places, adapter=adapter,
            low_rank=low_rank, ignored=base.ignored, notes=(*self.notes, *notes, *lost),
        )  # fmt: skip

    def merged(
        self, adapters: Collection[AdaptedModel], task: str | None = None
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        """Return the configuration of a merged adapter, and the names of tensors for its class.

        The configuration decides which class of the base PEFT opens. Most adapters have the names
        of their base, and no names are returned. For others transformers is asked; the first class
        with this adapter's names goes before others. The names are by their canonical forms. With
        `task`, the output is for the class of that task.
        """
        config = {**self.adapter.config, **({"task_type": task} if task else {})}
        if not task and all(adapter._wrappers[0] == adapter._wrappers[1] for adapter in adapters):
            return config, {}
        classes = opened_classes(self.config, config)
        if not classes and len({adapter._wrappers[1] for adapter in adapters}) > 1:
            raise CheckpointError(
                "the adapters are of several classes, and transformers is not installed or does "
                "not know them: ask for full weights with `bake: true` (--bake)"
            )
        own = {f"{path}.weight" for path in self.adapter.modules if in_layers(path)}
        found = [each for each in classes if task or own <= {*each[2].values()}] or classes
        for name, module, names in found[:1]:
            if not config.get("task_type"):
                config["auto_mapping"] = {"base_model_class": name, "parent_library": module}
            return config, names
        return config, {}

    @cached_property
    def _wrappers(self) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
        """The words before the base's layers, if it has tensors, and before the adapter's."""
        name = next(filter(in_layers, self.low_rank), None)
        if name is None:
            return (), ()
        stored = wrappers_of(name) if name in self.tensors else None
        return stored, wrappers_of(saved_name(self.low_rank[name].a.name))

    @property
    def own(self) -> Mapping[str, TensorInfo]:
        """The adapter's matrices, and the tensors that it saves whole."""
        infos = [info for low in self.adapter.modules.values() for info in (low.a, low.b)]
        return {info.name: info for info in (*infos, *self.adapter.saved.values())}

    @property
    def changed(self) -> Collection[str]:
        """Names of the weights that the adapter changes or replaces."""
        return {**self.low_rank, **self.adapter.saved}

    def zeros(self) -> str | None:
        """Say that the adapter's deltas are zeros."""
        deltas = [low.b for low in self.low_rank.values() if low.scaling]
        zero = not self.adapter.saved and len([*zero_samples(deltas)]) == len(deltas)
        return "is an adapter of zeros: its training changed nothing" if zero else None


def adapted(checkpoint: Checkpoint) -> AdaptedModel:
    """The checkpoint, which is an adapter."""
    assert isinstance(checkpoint, AdaptedModel), "a plan over adapters holds another checkpoint"
    return checkpoint


def with_adapter(model: Checkpoint, source: str, patterns: Sequence[Pattern]) -> Checkpoint:
    """Add an adapter to a full checkpoint, under the name of the checkpoint."""
    _refuse_base(model)
    given = Given(source)
    if not AdaptedModel.takes(given):
        raise CheckpointError(f"{source} is not a LoRA adapter")
    added = AdaptedModel.open(given).over(model, patterns)
    return replace(model, config=added.config, tensors=added.tensors, low_rank=added.low_rank)


def _refuse_base(base: Checkpoint) -> None:
    if base.no_adapter is not None:
        raise CheckpointError(f"{base.identity} {base.no_adapter}")


def _without_unloaded(adapter: Adapter, base: Checkpoint) -> tuple[Adapter, tuple[str, ...]]:
    """Leave out modules that the class of the base lacks, as PEFT does."""
    gone = unloaded((f"{path}.weight" for path in adapter.modules), base.config)
    if not gone:
        return adapter, ()
    kept = {path: low for path, low in adapter.modules.items() if f"{path}.weight" not in gone}
    note = (
        f"leaves out {len(gone)} of its weights, such as {min(gone)!r}: transformers does not load "
        "them into this model"
    )
    return replace(adapter, modules=kept), (note,)


def _parts(stored: Mapping[str, str], base: Checkpoint, *, alone: bool) -> dict[str, str]:
    """Map modules that the base stores together with others to their weights in memory.

    Their adapters merge with adapters alone: the rows of each module are unknown.
    """
    found = {
        path: f"{path}.weight"
        for path, name in stored.items()
        if len(in_memory(name, base.config.get("model_type"))) > 1
        and canonical(name) != canonical(f"{path}.weight")
    }
    if found and not alone:
        path = min(found)
        raise CheckpointError(
            f"adapts {quoted(path)}, which the base stores in one tensor with other modules "
            f"({quoted(stored[path])}); merge it with adapters alone, or {MERGE_FIRST}"
        )
    return found


def _with_task(base: Checkpoint, adapter: Adapter) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return the base as the class of an adapter's head, and a note on tensors that are lost."""
    name = class_for(base.config, adapter.config.get("task_type"))
    head = {n: i for n, i in adapter.saved.items() if place(n) == HEAD and n not in base.tensors}
    if name is None or not head:
        unsaved = name is not None and not adapter.saved and class_of(base.config) != name
        return base, () if not unsaved else (
            f"saves no head for its class {name}: transformers makes one at random; train it with "
            "its head in modules_to_save",
        )
    rows = min((info.shape[0] for info in head.values() if len(info.shape) == 2), default=0)
    config = {**base.config, "architectures": [name]}
    if len(config.get("id2label") or ()) != rows:
        labels = [f"LABEL_{row}" for row in range(rows)]
        config["id2label"] = {str(row): label for row, label in enumerate(labels)}
        config["label2id"] = {label: row for row, label in enumerate(labels)}
    if not base.tensors:
        return replace(base, config=config), ()
    of_base = {n: info for n, info in base.tensors.items() if base.places[n] == HEAD}
    new = renaming(head, of_base)
    head = {new.get(name, name): info for name, info in head.items()}
    base = base.with_head(head, config)
    lost = missing_tensors(config, {n: info.shape for n, info in base.tensors.items()}) or set()
    cores = {*map(canonical, lost)}  # such as a pooler, which PEFT does not save by itself
    kept = {name: info for name, info in of_base.items() if canonical(name) in cores}
    lost = {name for name in lost if canonical(name) not in {*map(canonical, kept)}}
    return base.with_head({**kept, **head}, config), () if not lost else (
        f"lacks {len(lost)} tensors of its class that its base lacks too, such as {min(lost)!r}: "
        "transformers makes them at random; train it with their modules in modules_to_save",
    )


def _is_transposed(adapter: Adapter, low: LowRank, where: Place, base: Checkpoint) -> bool:
    """True if a weight is stored as [in, out].

    The type of the base's layer decides, as in PEFT. A wrong `fan_in_fan_out` would transpose a
    square delta unnoticed.
    """
    if where.layer is not None:
        return base.config.get("model_type") in CONV1D_TYPES
    return low.transposed and (
        where.role == "embedding" or not adapter.config.get("fan_in_fan_out")
    )


def _refuse_tied(base: Checkpoint, adapter: Adapter) -> None:
    if not base.tied:
        return
    for path in (*adapter.modules, *(name.removesuffix(".weight") for name in adapter.saved)):
        where = place(f"{path}.weight")
        if where == HEAD and base.labelled:
            continue
        if where is not None and where.role in ("embedding", "head"):
            # PEFT changes one of the two; of a merge into the tied base, both would change.
            tying = adapter.config.get("ensure_weight_tying") and path in adapter.modules
            remedy = f"give its base a head of its own, and {MERGE_FIRST}"
            raise CheckpointError(
                f"changes {path!r}, but embedding and head are one tensor here (tied); "
                f"{'PEFT does not merge this exactly' if tying else remedy}"
            )


def _new_size(base: Checkpoint, adapter: Adapter) -> int | None:
    """Return the vocabulary size of an adapter that stores whole embeddings, otherwise None."""
    names = base.vocabulary_tensors
    rows = {adapter.saved[name].shape[:1] for name in names if name in adapter.saved}
    if not names or not adapter.saved.keys() >= {*names} or len(rows) != 1:
        return None
    return next(iter(rows))[0]


def _check_shape(name: str, shape: tuple[int, ...], base: Checkpoint, size: int | None) -> None:
    if not base.tensors:
        return
    if size is not None and name in base.vocabulary_tensors:
        shape = (base.vocabulary_size, *shape[1:])
    if name not in base.tensors:
        raise CheckpointError(f"changes {quoted(name)}, which the base does not have")
    expected = base.tensors[name].shape
    if shape != expected:
        raise CheckpointError(
            f"changes {name!r} of shape {list(shape)}; in {base.identity} it is {list(expected)}"
        )


def _module_places(
    names: set[str], patterns: Sequence[Pattern], base: Checkpoint
) -> dict[str, Place]:
    places = {}
    for name in sorted(names):
        where = place(name, patterns, encoder=encoder_layers(base.config))
        if where is None:
            raise CheckpointError(
                f"cannot tell the layer and role of {quoted(name)}; place it with `patterns` in "
                "the recipe"
            )
        places[name] = where
    return places
