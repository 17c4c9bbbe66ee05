"""Carries tensors that transformers ignores over to checkpoints that lack them.

The Hub's base has layers of multi-token prediction, and its fine-tunes lost them when transformers
saved them; older checkpoints store buffers that newer ones compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from layerswap.checkpoint import Checkpoint
from layerswap.merge.compatibility import some_tensors

Named = Mapping[str, Checkpoint]


def completed(
    experts: Named, base: Checkpoint | None
) -> tuple[dict[str, Checkpoint], Checkpoint | None]:
    """Return experts and base with all ignored tensors; who lacks one borrows it from the first."""
    owners: dict[str, Checkpoint] = {}
    for checkpoint in (*experts.values(), *([base] if base else [])):
        for tensor in sorted(checkpoint.ignored - checkpoint.borrowed):
            if tensor in checkpoint.tensors:
                owners.setdefault(tensor, checkpoint)
    whole = {name: _completed(expert, owners) for name, expert in experts.items()}
    return whole, base and _completed(base, owners)


def _completed(checkpoint: Checkpoint, owners: Mapping[str, Checkpoint]) -> Checkpoint:
    lacks = {n: owner for n, owner in owners.items() if n not in checkpoint.tensors}
    if not lacks or not checkpoint.tensors or checkpoint.gguf is not None:
        return checkpoint
    return replace(
        checkpoint,
        tensors={**checkpoint.tensors, **{n: c.tensors[n] for n, c in lacks.items()}},
        places={**checkpoint.places, **{n: c.places[n] for n, c in lacks.items()}},
        ignored=checkpoint.ignored.union(lacks),
        borrowed=checkpoint.borrowed.union(lacks),
    )


def borrowing_notes(checkpoints: Named) -> list[str]:
    """A note on tensors that only some of the checkpoints have."""
    borrowed = frozenset[str]().union(*(c.borrowed for c in checkpoints.values()))
    groups: dict[tuple[str, ...], list[str]] = {}
    for tensor in sorted(borrowed):
        have = (n for n, c in checkpoints.items() if tensor in c.tensors.keys() - c.borrowed)
        groups.setdefault(tuple(have), []).append(tensor)
    return [
        f"{some_tensors(tensors)}: only {' and '.join(have)} has them, and transformers does not "
        f"load them; copied from {have[0] if have else 'there'}"
        for have, tensors in groups.items()
    ]
