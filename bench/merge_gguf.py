"""Swapping two quantised GGUF files against `cp`: seconds and memory, in one run.

    python bench/merge_gguf.py model-Q4_K_M.gguf

The second expert is the same file with some of its quantised numbers changed by one step. Every
contestant writes a file and flushes it to the disk; they take turns. Prints a table in Markdown,
with the least of the seconds first, which a busy machine disturbs least.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from layerswap.checkpoint.gguf import read_gguf
from merge_runs import LAYERSWAP, Contestant, run_rounds

NUMBERS = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8, "Q8_0": 2, "Q4_K": 16, "Q5_K": 48, "Q6_K": 0}
"""The byte of a block at which its numbers begin, for types whose numbers can be stepped."""


def second_expert(source: Path, target: Path) -> None:
    """The file with the lowest bit of a quarter of its numbers flipped, tensor by tensor."""
    from layerswap.checkpoint.header import block_of

    target.write_bytes(source.read_bytes())
    data = np.memmap(target, np.uint8, "r+")
    draws = np.random.default_rng(0)
    for tensor in read_gguf(target).tensors.values():
        if tensor.dtype in NUMBERS:
            size = block_of(tensor.dtype)[1]
            blocks = data[tensor.offset : tensor.offset + tensor.nbytes].reshape(-1, size)
            first = NUMBERS[tensor.dtype]
            last = min(size, first + 16)
            flips = draws.integers(0, 4, (len(blocks), last - first), np.uint8) == 0
            blocks[:, first:last] ^= flips.astype(np.uint8)
    data.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    task = arguments.model.resolve()
    with tempfile.TemporaryDirectory(dir=task.parent) as name:
        folder = Path(name)
        language = folder / "language.gguf"
        # In a process of its own: what it maps would count as memory of every later child.
        maker = get_context("spawn").Process(target=second_expert, args=(task, language))
        maker.start()
        maker.join()
        merge = f"rm -f {folder}/o.gguf && {LAYERSWAP} merge -q --task {task} --language {language}"
        merge += f" --out {folder}/o.gguf"
        contestants = [
            Contestant("cp, sync", f"cp {task} {folder}/c && sync {folder}/c && rm {folder}/c", 99),
            Contestant("layerswap merge, outside: language", f"{merge} --outside language", 99),
            Contestant("layerswap merge, outside: blend", merge, min(arguments.rounds, 3)),
        ]
        for contestant in contestants:
            contestant.rounds = min(contestant.rounds, arguments.rounds)
        run_rounds(contestants, folder)
        check = Contestant("layerswap verify", f"{LAYERSWAP} verify {folder}/o.gguf", 1)
        run_rounds([check], folder)
    floor = min(contestants[0].seconds)
    print(f"\n{task.stat().st_size / 1e9:.2f} GB each\n")
    print("| what | least seconds | median | least / cp | peak memory (MB) |")
    print("|---|---:|---:|---:|---:|")
    for contestant in [*contestants, check]:
        least, median = min(contestant.seconds), statistics.median(contestant.seconds)
        peak = max(contestant.peaks) / 1e6
        ratio = least / floor
        print(f"| {contestant.name} | {least:.2f} | {median:.2f} | {ratio:.2f} | {peak:.0f} |")


if __name__ == "__main__":
    main()
