"""The same lines of one tensor in several checkpoints, read once into memory that is used again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from layerswap.checkpoint import DTYPE_BITS, Checkpoint
from layerswap.checkpoint.read import open_file, read_into, torch_dtype

if TYPE_CHECKING:
    import torch


def read_chunks(
    checkpoints: Sequence[Checkpoint], name: str, width: int, elements: int
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """One tensor of several checkpoints, some whole lines at a time.

    Args:
        checkpoints: full checkpoints, or adapters over a base, whose deltas are multiplied out.
        name: the tensor; of floating-point dtype, and of one shape in all.
        width: elements of a line.
        elements: elements to read at a time, rounded down to whole lines, at least one.

    Yields:
        Where the chunk starts, and per checkpoint a vector of its elements in the stored dtype
        (float32 where an adapter adds to it). The vectors hold until the next chunk is asked for.

    Raises:
        CheckpointError: a file cannot be read.
    """
    import torch

    infos = [checkpoint.tensors[name] for checkpoint in checkpoints]
    lows = [checkpoint.low_rank.get(name) for checkpoint in checkpoints]
    factors = [low.factors() if low else None for low in lows]
    count = infos[0].elements
    step = min(max(1, elements // width) * width, count)
    buffers = [bytearray(step * (DTYPE_BITS[info.dtype] // 8)) for info in infos]
    with ExitStack() as stack:
        handles = [stack.enter_context(open_file(info.file)) for info in infos]
        for start in range(0, count, step or 1):
            stop = min(start + step, count)
            parts = []
            for i, info in enumerate(infos):
                size = DTYPE_BITS[info.dtype] // 8
                bytes_read = memoryview(buffers[i])[: (stop - start) * size]
                read_into(handles[i], info.offset + start * size, bytes_read, info.file)
                part = torch.frombuffer(bytes_read, dtype=torch_dtype(info.dtype))
                low, pair = lows[i], factors[i]
                if low is not None and pair is not None:
                    part = part.float().add_(low.elements(pair, start, stop))
                parts.append(part)
            yield start, parts
