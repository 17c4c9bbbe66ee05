"""Compares a plan with a checkpoint that somebody else wrote, tensor by tensor.

Weights on the Hub are read by ranges. A tensor of a file that has the same hash in both is not
read. A tensor that is not as planned is compared with the same tensor of every source, so the
comparison also says where each layer of an unknown merge comes from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layerswap._types import Bars, PathLike, no_bars
from layerswap.checkpoint import Checkpoint, Place, TensorInfo, open_checkpoint
from layerswap.checkpoint.places import ROLES
from layerswap.checkpoint.remote import COMMIT, RemoteFile
from layerswap.errors import RecipeError, visible
from layerswap.merge.compare import Pair, comparisons, differences
from layerswap.merge.compatibility import some_tensors
from layerswap.merge.layout import OutputTensor
from layerswap.merge.plan import Plan
from layerswap.merge.writer import measure_tensors

BLEND = "the planned blend"
NOWHERE = "none of the sources"


@dataclass
class Origins:
    """The outcome of `verify_against`.

    Attributes:
        model: the checkpoint that was compared.
        planned: the origin of every compared tensor in the plan: a source's name, or `BLEND`.
        found: its origin in the model: a source's name, `BLEND`, or `NOWHERE`.
        places: its layer and role.
        problems: tensors that could not be compared, one line each.
        share: share of each tensor that was compared.
        same_files: tensors that were not read, because their files have the same hash.
    """

    model: str
    planned: dict[str, str]
    found: dict[str, str]
    places: Mapping[str, Place]
    share: float
    problems: list[str] = field(default_factory=list)
    same_files: int = 0

    @property
    def different(self) -> list[str]:
        """The names of the tensors that are not as planned."""
        return [name for name in self.planned if self.found[name] != self.planned[name]]

    @property
    def passed(self) -> bool:
        """True if every tensor is as planned."""
        return not self.different and not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The content of `layerswap verify --against --json`."""
        return {
            "model": self.model,
            "passed": self.passed,
            "share": self.share,
            "same_files": self.same_files,
            "problems": self.problems,
            "tensors": {
                name: {"planned": self.planned[name], "found": self.found[name]}
                for name in self.planned
            },
        }

    def __str__(self) -> str:
        lines = [f"{_places(group)}: {line}" for group, line in self._groups()]
        part = "whole" if self.share == 1 else f"{self.share:.0%} of each compared"
        same = len(self.planned) - len(self.different)
        lines.append(f"{self.model}: {same} of {len(self.planned)} tensors as planned ({part})")
        return "\n".join(map(visible, [*self.problems, *lines]))

    def _groups(self) -> list[tuple[list[Place], str]]:
        """Layers in a row whose roles have equal lines, with their line; then other places."""
        by_layer: dict[int | None, dict[str, list[str]]] = {}
        for name in sorted(self.planned, key=lambda name: ROLES.index(self.places[name].role)):
            place = self.places[name]
            by_layer.setdefault(place.layer, {}).setdefault(self._line(name), []).append(place.role)
        groups: list[tuple[list[Place], str]] = []
        for layer in sorted(by_layer, key=lambda number: (number is None, number or 0)):
            lines = by_layer[layer]
            if layer is None:
                groups += [([Place(None, role) for role in dict.fromkeys(roles)], line)
                           for line, roles in lines.items()]  # fmt: skip
                continue
            text = (
                next(iter(lines))
                if len(lines) == 1
                else "; ".join(
                    f"{', '.join(dict.fromkeys(roles))}: {line}" for line, roles in lines.items()
                )
            )
            if groups and groups[-1][1] == text and groups[-1][0][-1].layer == layer - 1:
                groups[-1][0].append(Place(layer, ""))
            else:
                groups.append(([Place(layer, "")], text))
        return groups

    def _line(self, name: str) -> str:
        found, planned = self.found[name], self.planned[name]
        return found if found == planned else f"{found} (the plan: {planned})"


def verify_against(
    plan: Plan,
    model: PathLike,
    *,
    share: float = 0.1,
    seed: int = 0,
    threads: int | None = None,
    progress: Bars | None = None,
) -> Origins:
    """Compare a plan with a checkpoint that another program wrote, bit for bit.

    Each tensor of the checkpoint is compared with the plan's; one that differs, with those of the
    experts and of the base. So the result also says which of them a merged model is made of, by
    layer, whatever the plan takes there.

    Args:
        plan: the expected merge. Its sources are the candidates.
        model: folder, Hub id or URL. Weights on the Hub are read by ranges.
        share: share of the blocks of each tensor to compare, in (0, 1]; at least one block.
        seed: seed of the sample.
        threads: number of workers; the number of usable processors when None.
        progress: opens a progress bar.

    Raises:
        LayerswapError: the checkpoint cannot be opened, or `share` is out of its range.

    Example:
        >>> import layerswap as ls
        >>> plan = ls.swap(task="math-expert", language="swahili-expert", bottom=1, top=1)
        >>> ls.verify_against(plan, plan.save("merged", overwrite=True)).passed
        True
    """
    if not 0 < share <= 1:
        raise RecipeError(f"share is {share:g}; write a number above 0 and at most 1")
    other = open_checkpoint(model, patterns=plan.recipe.place_patterns, in_place=True)
    workers = threads or len(os.sched_getaffinity(0))
    bars = progress or no_bars
    origins = Origins(os.fspath(model), {}, {}, other.places, share)
    pairs = _pairs(plan, other, origins)
    sources = {name: c for name, c in plan.opened.items() if not name.startswith("fisher of ")}
    owner = {info: name for name, c in sources.items() for info in c.tensors.values()}
    for name, pair in pairs.items():
        term = _copied(pair)
        origins.planned[name] = BLEND if term is None else owner.get(term, BLEND)
    facts = measure_tensors([pair.expected for pair in pairs.values()], workers)

    def unequal(candidates: Sequence[Pair], what: str) -> set[str]:
        work = comparisons(candidates, share=share, seed=seed, facts=facts, sample_copies=True)
        with bars(f"comparing with {what}", sum(part.nbytes for part in work), "bytes") as advance:
            wrong, _ = differences(work, facts=facts, threads=workers, progress=advance)
        return {*wrong}

    read = [pair for pair in pairs.values() if not _of_equal_files(pair)]
    origins.same_files = len(pairs) - len(read)
    left = unequal(read, "the plan")
    origins.found = {name: NOWHERE if name in left else origins.planned[name] for name in pairs}
    for source, checkpoint in sources.items():
        candidates = [
            Pair(OutputTensor(name, info.dtype, info.shape, ((info, 1.0),)), pairs[name].stored)
            for name in sorted(left)
            if (info := checkpoint.tensors.get(name)) is not None
            and (info.dtype, info.shape) == (pairs[name].stored.dtype, pairs[name].stored.shape)
            and origins.planned[name] != source
        ]
        equal = {pair.expected.name for pair in candidates} - unequal(candidates, source)
        origins.found |= dict.fromkeys(equal, source)
        left -= equal
    return origins


def _pairs(plan: Plan, other: Checkpoint, origins: Origins) -> dict[str, Pair]:
    """The tensors of both by name, where dtype and shape agree; the rest becomes problems."""
    expected = {tensor.name: tensor for tensor in plan.tensors}
    stored = {name: info for name, info in other.tensors.items() if name not in plan.drop}
    pairs: dict[str, Pair] = {}
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, tensor in expected.items():
        if (info := stored.get(name)) is None:
            continue
        if (tensor.dtype, tensor.shape) == (info.dtype, info.shape):
            pairs[name] = Pair(tensor, info)
        else:
            kind = f"{info.dtype} {list(info.shape)}", f"{tensor.dtype} {list(tensor.shape)}"
            kinds.setdefault(kind, []).append(name)
    for (there, planned), names in kinds.items():
        origins.problems.append(f"{some_tensors(names)}: {there}; the plan writes {planned}")
    if missing := expected.keys() - stored.keys():
        origins.problems.append(f"{other.source} lacks {some_tensors(missing)}")
    if extra := stored.keys() - expected.keys():
        origins.problems.append(f"{other.source} has {some_tensors(extra)}, which the plan has not")
    return pairs


def _copied(pair: Pair) -> TensorInfo | None:
    """The source's tensor that the plan copies, if it copies one."""
    term = pair.expected.inputs[0][0]
    return term if pair.expected.verbatim and isinstance(term, TensorInfo) else None


def _of_equal_files(pair: Pair) -> bool:
    """True if the bytes must be equal: the same place in files of the Hub with the same hash."""
    term = _copied(pair)
    if term is None:
        return False
    files = [info.file for info in (term, pair.stored)]
    hashes = [f.etag.strip('"') if isinstance(f, RemoteFile) else "" for f in files]
    # The Hub's mark of a large file is its SHA-256.
    known = COMMIT.fullmatch(hashes[0]) is not None and len(hashes[0]) == 64
    return known and hashes[0] == hashes[1] and term.offset == pair.stored.offset


def _places(places: Sequence[Place]) -> str:
    first, last = places[0].layer, places[-1].layer
    if first is None:
        return ", ".join(place.role for place in places)
    return f"layer {first}" if first == last else f"layers {first} to {last}"
