"""Heads of experts of one base that do different tasks, such as a classifier and a masked LM.

The output is a model of the first expert's class, with its head. An expert or a base of another
class is read with that head in place of its own. A language model that was saved without its head
gets another expert's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from layerswap.checkpoint import Checkpoint
from layerswap.checkpoint.adapted import LABELS, OF_LABELS
from layerswap.checkpoint.places import HEAD
from layerswap.compose.blend import Operation
from layerswap.compose.composition import Composition
from layerswap.ground.errors import MergeError, visible
from layerswap.ground.types import counted

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
    head, own = _head(first), _head(checkpoint)
    if not checkpoint.places or not first.places or not (differ := _differ(checkpoint, first)):
        return checkpoint
    left_out = own.keys() - head or checkpoint.labelled
    kept = f"its head is left out: {differ}" if left_out else ""
    gets = first.writes or checkpoint.class_name == first.class_name
    note = kept or (f"it gets the head of {first.identity}: {differ}" if gets else "")
    config = {**checkpoint.config, "architectures": first.config.get("architectures")}
    return replace(
        checkpoint.with_head(head, config),
        borrowed=frozenset(head),
        notes=(*checkpoint.notes, note) if noted and note else checkpoint.notes,
    )


def _differ(checkpoint: Checkpoint, first: Checkpoint) -> str | None:
    """Describe heads of two classes, or with two numbers of labels; None for one kind."""
    if kind_of(checkpoint) != kind_of(first):
        return (
            f"it is a model of class {checkpoint.class_name}, and the output of class "
            f"{first.class_name}"
        )
    trains = [any(c.places.get(n) == HEAD for n in c.changed) for c in (checkpoint, first)]
    if first.labelled and trains == [False, True]:
        return "it trains no head"
    if first.headless and _head(first).keys() > _head(checkpoint).keys():
        return "it has no pooler"
    counts = [_rows(c) for c in (checkpoint, first)] if first.labelled else [0, 0]
    if counts[0] != counts[1] and all(counts):
        return f"it has {counted(counts[0], 'label')}, and the output has {counts[1]}"
    return None


def _head(checkpoint: Checkpoint) -> dict[str, Any]:
    return {n: i for n, i in checkpoint.tensors.items() if checkpoint.places[n] == HEAD}


def _rows(checkpoint: Checkpoint) -> int:
    """The number of labels in a classifier's head; 0 without a head."""
    return min((info.shape[0] for info in _head(checkpoint).values() if info.shape), default=0)


def check_heads(
    composition: Composition, experts: Mapping[str, Checkpoint], base: Checkpoint | None
) -> None:
    """Refuse a composition of heads that an expert or the base lacks."""
    first, blend = next(iter(experts.values())), composition[HEAD]
    own = [n for n, c in experts.items() if n in blend.experts and not c.borrowed]
    if not own and any(experts[name].borrowed for name in blend.experts if name in experts):
        giver = next((name for name, expert in experts.items() if not expert.borrowed), "")
        raise MergeError(
            f"the head cannot come from {blend.experts[0]}: the output is a model of class "
            f"{first.class_name} with the head of {giver}; {_remedy(giver)}"
        )
    deltas = any(isinstance(member, Operation) and member.base for member in blend.members)
    if len(own) < 2:
        return
    if deltas and base is not None and base.borrowed:
        raise MergeError(
            f"the base has no head of class {first.class_name}, so the changes of the heads of "
            f"{' and '.join(own)} are unknown; {_remedy(own[0])}"
        )
    compared = {name: experts[name] for name in own} | ({"base": base} if deltas and base else {})
    known = {name: labels for name, c in compared.items() if (labels := labels_of(c))}
    start = next(iter(known), "")
    for name, labels in known.items():
        if labels == known[start] or (not deltas and sorted(labels) == sorted(known[start])):
            continue
        each = ", ".join(f"{visible(', '.join(known[n]))[:80]} in {n}" for n in (start, name))
        raise MergeError(f"labels differ: {each}; {_remedy(own[0])}")


def _remedy(name: str) -> str:
    return (
        "take the head from one expert, in a recipe with "
        f"`places: [{{layers: outside, roles: [head], take: {name}}}]`"
    )


def labels_of(checkpoint: Checkpoint) -> list[str]:
    """The names of a classifier's labels in their order; empty if they have no names.

    Without names in `id2label`, which transformers then fills, they are those of `label2id`.
    """
    given: list[Any] = [checkpoint.config.get(key) for key in LABELS if checkpoint.labelled]
    with suppress(AttributeError, IndexError, TypeError):
        given[1] = {row: label for label, row in given[1].items()}
    for names in given:
        with suppress(TypeError, ValueError):
            labels = [str(names[key]) for key in sorted(names, key=int)]
            if not all(map(DEFAULT_LABEL.fullmatch, labels)):
                return labels
    return []


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
    for name, expert in experts.items():
        if label_rows(expert, reference):
            yield f"the labels of {name} are put into the order of {reference.identity}'s"
    named = next((name for name, c in experts.items() if labels_of(c)), None)
    own = {n: c for n, c in experts.items() if c.labelled and not c.borrowed}
    blended = {n: c for n, c in own.items() if n in composition[HEAD].experts}
    without = [name for name, c in blended.items() if not labels_of(c)]
    if named:
        for name in without:
            yield f"{name} does not name its labels: they are taken in the order of {named}'s"
    elif len(without) > 1 < _rows(reference) and "Classification" in str(reference.class_name):
        yield (
            f"{' and '.join(without)} do not name their labels, which are taken to be in one "
            "order; if they are not, give id2label in each config.json"
        )
    kinds = {name: c.config.get("problem_type") for name, c in blended.items()}
    if len({*filter(None, kinds.values())}) > 1:
        each = ", ".join(f"{kind} in {name}" for name, kind in kinds.items())
        yield f"problem_type is {each}; the output uses {reference.identity}'s"


def labels_of_head(
    composition: Composition, experts: Mapping[str, Checkpoint], reference: Checkpoint
) -> dict[str, Any]:
    """The settings of other labels than the reference's, if one expert alone gives the head."""
    giver = [experts[name] for name in composition[HEAD].experts if name in experts]
    labels = labels_of(giver[0]) if len(giver) == 1 else []
    if not labels or sorted(labels) == sorted(labels_of(reference)):
        return {}
    return {key: giver[0].config[key] for key in OF_LABELS if key in giver[0].config}


def label_tensors(checkpoint: Checkpoint) -> Iterable[str]:
    """The tensors of a head with a row for each label."""
    count = len(labels_of(checkpoint))
    return (name for name, info in _head(checkpoint).items() if info.shape[:1] == (count,))
