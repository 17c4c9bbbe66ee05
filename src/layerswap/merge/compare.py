"""Compares weights with the writer's output, bit for bit: `verify`, `verify_against`.

Memory does not grow with the model: each worker holds one chunk of every input.

`verify_against` compares a plan with a checkpoint of another program. Weights on the Hub are read
by ranges. A tensor that is not as planned is compared with the same tensor of every source, so the
comparison also says where each layer of an unknown merge comes from.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from layerswap.checkpoint import Place, TensorInfo, open_checkpoint
from layerswap.checkpoint.header import block_of
from layerswap.checkpoint.places import ROLES
from layerswap.checkpoint.read import FLOAT_DTYPES, is_finite, numpy_dtype, read_bytes
from layerswap.ground import system
from layerswap.ground.errors import RecipeError, visible
from layerswap.ground.types import Advance, Bars, PathLike, no_bars
from layerswap.merge.compatibility import some_tensors
from layerswap.merge.layout import OutputTensor
from layerswap.merge.plan import Plan
from layerswap.merge.terms import Handles, ModelFacts, TermEvaluator, merged_tensors
from layerswap.merge.writer import (
    Piece,
    chunks,
    hold_remote,
    measure_tensors,
    open_all,
    piece_bytes,
    run_all,
)

PIECE_BYTES = 1 << 24
"""Bytes of output compared at a time by one worker."""
BLOCK_BYTES = 1 << 18
"""Bytes of a block of output in a sample."""
BLEND = "the planned blend"
NOWHERE = "none of the sources"

Item = TypeVar("Item")


@dataclass(frozen=True)
class TensorPair:
    """An output tensor as planned, and as stored."""

    expected: OutputTensor
    stored: TensorInfo


@dataclass(frozen=True)
class Comparison:
    """A range of elements of two tensors to compare."""

    pair: TensorPair
    piece: Piece

    @property
    def nbytes(self) -> int:
        """Bytes to compare."""
        length, size = block_of(self.pair.expected.dtype)
        return (self.piece.stop - self.piece.start) // length * size


def check_share(share: float) -> None:
    """Refuse a share of the blocks of a tensor outside (0, 1]."""
    if not 0 < share <= 1:
        raise RecipeError(f"share is {share:g}; write a number above 0 and at most 1")


def match(
    expected: Iterable[OutputTensor], stored: Mapping[str, TensorInfo]
) -> tuple[list[TensorPair], list[str]]:
    """Pair tensors of equal dtype and shape; describe each kind of mismatch in a line."""
    named = {tensor.name: tensor for tensor in expected}
    pairs: list[TensorPair] = []
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, tensor in named.items():
        if (info := stored.get(name)) is None:
            continue
        if (tensor.dtype, tensor.shape) == (info.dtype, info.shape):
            pairs.append(TensorPair(tensor, info))
        else:
            formats = f"{info.dtype} {list(info.shape)}", f"{tensor.dtype} {list(tensor.shape)}"
            kinds.setdefault(formats, []).append(name)
    lines = []
    if extra := stored.keys() - named.keys():
        lines.append(f"holds {some_tensors(extra)}, which the merge does not write there")
    if missing := named.keys() - stored.keys():
        lines.append(f"lacks {some_tensors(missing)}, which the merge writes there")
    for (there, planned), names in kinds.items():
        lines.append(f"{some_tensors(names)}: {there}; the merge writes {planned}")
    return pairs, lines


def comparisons(
    pairs: Sequence[TensorPair],
    *,
    share: float,
    seed: int,
    facts: ModelFacts,
    sample_copies: bool = False,
) -> list[Comparison]:
    """Every verbatim tensor, and a sample of the computed tensors, in pieces.

    Of every computed tensor, at least `share` of its blocks of `BLOCK_BYTES` are drawn, and at
    least one. A tensor that its method must measure is drawn whole or not at all; of those at
    least `share`, and at least one. The draw depends on seed, tensor names and sizes alone.
    With `sample_copies`, verbatim tensors are drawn from as well.
    """
    work: list[Comparison] = []
    measured: list[Comparison] = []
    for pair in sorted(pairs, key=lambda pair: pair.expected.name):
        tensor = pair.expected
        whole = Piece(tensor, 0, tensor.elements, 0)
        merged = merged_tensors(tensor.inputs)
        if any(t.method.measure is not None and t.operation not in facts for t in merged):
            measured.append(Comparison(pair, whole))
            continue
        sampled_share = share if sample_copies or not tensor.verbatim else 1
        pieces = [*chunks(whole, PIECE_BYTES if sampled_share == 1 else BLOCK_BYTES)]
        drawn = _drawn(pieces, sampled_share, f"{seed}/{tensor.name}")
        work += [Comparison(pair, piece) for piece in drawn]
    return work + _drawn(measured, share, f"{seed}")


def differences(
    work: Sequence[Comparison], *, facts: ModelFacts, threads: int, progress: Advance
) -> tuple[dict[str, int], set[str]]:
    """Find each tensor's first wrong byte, and verbatim tensors with NaN or infinity."""
    wrong: dict[str, int] = {}
    non_finite: set[str] = set()
    lock = Lock()
    files = {file for comparison in work for file in comparison.pair.expected.files}
    with ExitStack() as stack:
        handles = open_all(stack, files | {comparison.pair.stored.file for comparison in work})

        def run(comparison: Comparison) -> None:
            name = comparison.pair.expected.name
            position, finite = _compare(comparison, handles, facts)
            with lock:
                if position is not None:
                    wrong[name] = min(position, wrong.get(name, position))
                if not finite:
                    non_finite.add(name)
            progress(comparison.nbytes)

        run_all(run, work, threads)
    return dict(sorted(wrong.items())), non_finite


def _compare(
    comparison: Comparison, handles: Handles, facts: ModelFacts
) -> tuple[int | None, bool]:
    """The position of the first wrong byte, and True if all copied values are finite."""
    import numpy as np

    stored, expected = comparison.pair.stored, comparison.pair.expected
    evaluator = TermEvaluator(handles, facts)
    copies_floats = expected.verbatim and expected.dtype in FLOAT_DTYPES
    first, finite = None, True
    with ExitStack() as held:
        hold_remote(held, comparison.piece, handles, Path(tempfile.gettempdir()))
        for data, offset in piece_bytes(comparison.piece, evaluator):
            start = stored.offset + offset
            actual = read_bytes(handles[stored.file], start, start + len(data), stored.file)
            # A bytearray compares by memcmp; two memoryviews would compare item by item.
            if actual != data and first is None:
                unequal = np.frombuffer(actual, np.uint8) != np.frombuffer(data, np.uint8)
                first = offset + int(unequal.argmax())
            if copies_floats and finite:
                values = np.frombuffer(data, numpy_dtype(expected.dtype))
                finite = is_finite(values, expected.dtype)
    return first, finite


def _drawn(items: Sequence[Item], share: float, key: str) -> list[Item]:
    # Seeded by text, which Python hashes with SHA-512: no PYTHONHASHSEED.
    positions = random.Random(key).sample(range(len(items)), math.ceil(share * len(items)))
    return [items[position] for position in sorted(positions)]


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
    """

    model: str
    planned: dict[str, str]
    found: dict[str, str]
    places: Mapping[str, Place]
    share: float
    problems: list[str] = field(default_factory=list)

    @property
    def different(self) -> list[str]:
        """Names of the tensors that differ from the plan."""
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
            "problems": self.problems,
            "tensors": {
                name: {"planned": self.planned[name], "found": self.found[name]}
                for name in self.planned
            },
        }

    def __str__(self) -> str:
        lines = self._lines()
        extent = "whole" if self.share == 1 else f"{self.share:.0%} of each compared"
        same = len(self.planned) - len(self.different)
        lines.append(f"{self.model}: {same} of {len(self.planned)} tensors as planned ({extent})")
        return "\n".join(map(visible, [*self.problems, *lines]))

    def _lines(self) -> list[str]:
        """Describe runs of layers with equal origins, and each origin outside the layers."""
        origins: dict[int | None, dict[str, dict[str, None]]] = {}
        for name in sorted(self.planned, key=lambda name: ROLES.index(self.places[name].role)):
            place = self.places[name]
            found, planned = self.found[name], self.planned[name]
            line = found if found == planned else f"{found} (the plan: {planned})"
            roles = origins.setdefault(place.layer, {}).setdefault(line, {})
            roles[place.role] = None
        each = {
            layer: [f"{', '.join(roles)}: {line}" for line, roles in lines.items()]
            for layer, lines in origins.items()
        }
        outside = each.pop(None, [])
        texts = [
            (layer, "; ".join(each[layer]) if len(each[layer]) > 1 else next(iter(origins[layer])))
            for layer in sorted(layer for layer in each if layer is not None)
        ]
        lines = []
        for (text, _), group in groupby(
            enumerate(texts), key=lambda item: (item[1][1], item[1][0] - item[0])
        ):
            layers = [layer for _, (layer, _) in group]
            where = f"layers {layers[0]} to {layers[-1]}" if layers[1:] else f"layer {layers[0]}"
            lines.append(f"{where}: {text}")
        return lines + outside


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

    Each tensor of the checkpoint is compared with the plan's. A tensor that differs is compared
    with the experts' and the base's too. So the result also shows, by layer, the experts in a
    merged model, whatever the plan takes there.

    Args:
        plan: the expected merge. Its sources are the candidates.
        model: folder or Hub id. Weights on the Hub are read by ranges.
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
    check_share(share)
    other = open_checkpoint(model, patterns=plan.recipe.place_patterns, in_place=True)
    workers = threads or system.processors()
    bars = progress or no_bars
    tensors = {name: info for name, info in other.tensors.items() if name not in plan.drop}
    matched, problems = match(plan.tensors, tensors)
    problems = [f"{other.source}: {line}" for line in problems]
    origins = Origins(os.fspath(model), {}, {}, other.places, share, problems)
    pairs = {pair.expected.name: pair for pair in matched}
    sources = {name: c for name, c in plan.opened.items() if not name.startswith("fisher of ")}
    owner = {info: name for name, c in sources.items() for info in c.tensors.values()}
    for name, pair in pairs.items():
        copies = pair.expected.verbatim
        origins.planned[name] = owner.get(pair.expected.copied, BLEND) if copies else BLEND
    facts = measure_tensors([pair.expected for pair in pairs.values()], workers)

    def unequal(candidates: Sequence[TensorPair], what: str) -> set[str]:
        work = comparisons(candidates, share=share, seed=seed, facts=facts, sample_copies=True)
        with bars(
            f"comparing with {what}", sum(comparison.nbytes for comparison in work), "bytes"
        ) as advance:
            wrong, _ = differences(work, facts=facts, threads=workers, progress=advance)
        return {*wrong}

    left = unequal([*pairs.values()], "the plan")
    origins.found = {name: NOWHERE if name in left else origins.planned[name] for name in pairs}
    for source, checkpoint in sources.items():
        candidates = [
            TensorPair(
                OutputTensor(name, info.dtype, info.shape, ((info, 1.0),)), pairs[name].stored
            )
            for name in sorted(left)
            if (info := checkpoint.tensors.get(name)) is not None
            and (info.dtype, info.shape) == (pairs[name].stored.dtype, pairs[name].stored.shape)
            and origins.planned[name] != source
        ]
        equal = {pair.expected.name for pair in candidates} - unequal(candidates, source)
        origins.found |= dict.fromkeys(equal, source)
        left -= equal
    return origins
