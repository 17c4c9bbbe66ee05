"""Compares two merged checkpoints tensor by tensor; part of the merge benchmark.

    python bench/compare_weights.py OURS THEIRS [--ties SOURCES DENSITY]

Prints one JSON object with counts of elements: equal bits, apart by one step of the dtype (what
one rounding can do), and further apart. With `--ties`, the last are looked up in the sources (the
folder of `base`, `task` and `language`): TIES leaves open which of equal magnitudes at the
threshold are kept, and which sign wins where the kept deltas cancel exactly.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Weights:
    """The tensors of a checkpoint folder, read one at a time."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        files = sorted(folder.glob("*.safetensors"))
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name).flatten()


def steps(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """How many representable bfloat16 values apart two tensors are, element by element."""
    import torch

    def ordered(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.view(torch.int16).int()
        return torch.where(bits >= 0, bits, -(bits & 0x7FFF))

    return (ordered(ours) - ordered(theirs)).abs()


def open_in_ties(deltas: list[torch.Tensor], density: float, far: torch.Tensor) -> tuple[int, int]:
    """How many elements of `far` lie at a threshold, and how many others cancel exactly."""
    import torch

    at_threshold = torch.zeros(len(far), dtype=torch.bool)
    total, weight = torch.zeros(len(far)), torch.zeros(len(far))
    for delta in deltas:
        magnitude = delta.abs()
        kept = max(1, int(density * len(delta)))
        threshold = magnitude.kthvalue(len(delta) - kept + 1).values
        at_threshold |= (magnitude[far] == threshold) & (threshold > 0)
        kept_here = torch.where(magnitude[far] >= threshold, delta[far], 0.0)
        total += kept_here
        weight += kept_here.abs()
    cancels = (total == 0) & (weight > 0) & ~at_threshold
    return int(at_threshold.sum()), int(cancels.sum())


def compare(ours: Weights, theirs: Weights, sources: list[Weights], density: float) -> Counter[str]:
    counts: Counter[str] = Counter()
    for name in sorted(ours.names):
        apart = steps(ours[name], theirs[name])
        counts["tensors"] += 1
        counts["elements"] += len(apart)
        counts["equal"] += int((apart == 0).sum())
        counts["one step"] += int((apart == 1).sum())
        far = (apart > 1).nonzero().squeeze(1)
        counts["further"] += len(far)
        if sources and len(far):
            base = sources[0][name].float()
            deltas = [expert[name].float().sub_(base) for expert in sources[1:]]
            at_threshold, cancel = open_in_ties(deltas, density, far)
            counts["at a threshold"] += at_threshold
            counts["cancel exactly"] += cancel
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ours", type=Path)
    parser.add_argument("theirs", type=Path)
    parser.add_argument("--ties", nargs=2, metavar=("SOURCES", "DENSITY"))
    options = parser.parse_args()
    with ExitStack() as stack:
        ours, theirs = Weights(options.ours, stack), Weights(options.theirs, stack)
        sources, density = [], 1.0
        if options.ties:
            density = float(options.ties[1])
            names = ("base", "task", "language")
            sources = [Weights(Path(options.ties[0]) / name, stack) for name in names]
        if ours.names != theirs.names:
            print(json.dumps({"other names": sorted(ours.names ^ theirs.names)[:5]}))
            return
        print(json.dumps(compare(ours, theirs, sources, density)))


if __name__ == "__main__":
    main()
