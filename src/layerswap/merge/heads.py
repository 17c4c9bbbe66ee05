"""Heads of experts of one base that do different tasks, such as a classifier and a masked LM.

The output is a model of the first expert's class, with its head. An expert or a base of another
class is read with that head in place of its own. A language model that was saved without its head
gets another expert's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from layerswap.checkpoint import Checkpoint
from layerswap.checkpoint.places import HEAD
from layerswap.compose import Composition
from layerswap.compose.blend import Operation
from layerswap.ground.errors import MergeError, visible

MODULES = "modules.json"
"""The list of modules in a folder of sentence-transformers."""
DEFAULT_LABEL = re.compile(r"LABEL_\d+")


def kind_of(checkpoint: Checkpoint) -> str | None:
    """The class of a checkpoint; a tied model without its head counts as a language model."""
    name = checkpoint.class_name
    if checkpoint.headless and not (checkpoint.tied or checkpoint.heads):
        return name
    return name and re.sub("(?:Model|ForCausalLM)$", "ForCausalLM", name)


def with_one_head(
    checkpoints: Mapping[str, Checkpoint], experts: Collection[str]
) -> dict[str, Checkpoint]:
    """Give checkpoints of other classes the head of the first checkpoint."""
    first = next(iter(checkpoints.values()))
    if first.headless and kind_of(first) == first.class_name and not embeds(first):
        writers = (checkpoints[name] for name in experts if checkpoints[name].writes)
        first = next(writers, first)
    return {n: _with_head(c, first, noted=n in experts) for n, c in checkpoints.items()}


def embeds(checkpoint: Checkpoint) -> bool:
    """Return True for a folder of sentence-transformers; such a model needs no head."""
    return (checkpoint.folder / MODULES).is_file()


def _with_head(checkpoint: Checkpoint, first: Checkpoint, *, noted: bool) -> Checkpoint:
    if kind_of(checkpoint) == kind_of(first) or not checkpoint.places or not first.places:
        return checkpoint
    head, own = _head(first), _head(checkpoint)
    classes = (
        f"it is a model of class {checkpoint.class_name}, and the output of class "
        f"{first.class_name}"
    )
    kept = f"its head is left out: {classes}" if own.keys() - head else ""
    note = kept or (f"it gets the head of {first.identity}: {classes}" if first.writes else "")
    config = {**checkpoint.config, "architectures": first.config.get("architectures")}
    return replace(
        checkpoint.with_head(head, config),
        borrowed=frozenset(head),
        notes=(*checkpoint.notes, note) if noted and note else checkpoint.notes,
    )


def _head(checkpoint: Checkpoint) -> dict[str, Any]:
    return {n: i for n, i in checkpoint.tensors.items() if checkpoint.places[n] == HEAD}


def check_heads(
    composition: Composition, experts: Mapping[str, Checkpoint], base: Checkpoint | None
) -> None:
    """Refuse a composition of heads that an expert or the base lacks."""
    first, blend = next(iter(experts.values())), composition[HEAD]
    own = [n for n, c in experts.items() if n in blend.experts and not c.borrowed]
    if not own and any(experts[name].borrowed for name in blend.experts if name in experts):
        name = blend.experts[0]
        raise MergeError(
            f"the head cannot come from {name}: the output is a model of class "
            f"{first.class_name}, and {name} has no head of that class"
        )
    deltas = any(isinstance(member, Operation) and member.base for member in blend.members)
    if len(own) < 2:
        return
    if deltas and base is not None and base.borrowed:
        raise MergeError(
            f"the base has no head of class {first.class_name}, so the changes of the heads of "
            f"{' and '.join(own)} are unknown; {_remedy(own[0])}"
        )
    known = {name: labels for name in own if (labels := labels_of(experts[name]))}
    start = next(iter(known), "")
    for name, labels in known.items():
        if labels == known[start] or (not deltas and sorted(labels) == sorted(known[start])):
            continue
        each = ", ".join(f"{visible(', '.join(known[n]))[:80]} in {n}" for n in (start, name))
        raise MergeError(f"labels differ: {each}; {_remedy(start)}")


def _remedy(name: str) -> str:
    return (
        "take the head from one of them, in a recipe with "
        f"`places: [{{layers: outside, roles: [head], take: {name}}}]`"
    )


def labels_of(checkpoint: Checkpoint) -> list[str]:
    """The names of a classifier's labels in their order; empty if they have no names."""
    names = checkpoint.config.get("id2label")
    if not checkpoint.labelled or not isinstance(names, dict):
        return []
    try:
        labels = [str(names[key]) for key in sorted(names, key=int)]
    except (TypeError, ValueError):
        return []
    return [] if all(map(DEFAULT_LABEL.fullmatch, labels)) else labels


def label_rows(checkpoint: Checkpoint, like: Checkpoint) -> list[int] | None:
    """The rows of a head in the order of another's labels; None if the orders agree."""
    ours, wanted = labels_of(checkpoint), labels_of(like)
    if ours == wanted or sorted(ours) != sorted(wanted) or checkpoint.borrowed:
        return None
    return [ours.index(label) for label in wanted]


def label_notes(
    composition: Composition, experts: Mapping[str, Checkpoint], reference: Checkpoint
) -> Iterator[str]:
    """How the labels of classifiers whose heads are blended are matched."""
    named = next((name for name, c in experts.items() if labels_of(c)), None)
    for name, expert in experts.items():
        if label_rows(expert, reference):
            yield f"the labels of {name} are put into the order of {reference.identity}'s"
        blended = name in composition[HEAD].experts and not expert.borrowed
        if named and blended and expert.labelled and not labels_of(expert):
            yield f"{name} does not name its labels: they are taken in the order of {named}'s"


def label_tensors(checkpoint: Checkpoint) -> Iterable[str]:
    """The tensors of a head with a row for each label."""
    count = len(labels_of(checkpoint))
    return (name for name, info in _head(checkpoint).items() if info.shape[:1] == (count,))
