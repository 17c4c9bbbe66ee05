"""Checkpoints of a training: which one to go on from, and what old ones need not keep."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from layerswap.errors import TrainingError

STATE = "trainer_state.json"
"""The last file that a checkpoint gets: with it, the checkpoint is whole."""
OPTIMIZER = ("optimizer.pt", "optimizer.bin", "scheduler.pt")
_NAME = re.compile(r"checkpoint-(\d+)", re.ASCII)


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, in the order of their steps."""
    found = {
        int(match[1]): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name)) and is_whole(path)
    }
    return [found[step] for step in sorted(found)]


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end."""
    try:
        state = json.loads((checkpoint / STATE).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and "global_step" in state


def newest(folder: Path) -> Path | None:
    """The checkpoint to go on from; None where there is none. Unfinished ones are removed.

    Raises:
        TrainingError: the newest has no optimiser state.
    """
    whole = checkpoints(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        if _NAME.fullmatch(path.name) and path not in whole:
            shutil.rmtree(path, ignore_errors=True)
    if not whole:
        return None
    sharded = any(whole[-1].glob("optimizer_*")) or any(whole[-1].glob("global_step*"))
    if not sharded and not any((whole[-1] / name).is_file() for name in OPTIMIZER[:2]):
        raise TrainingError(f"{whole[-1]}: has no optimiser state, so it cannot be gone on from")
    return whole[-1]


def forget_older_states(folder: Path) -> None:
    """Remove optimiser states, two thirds of a checkpoint, from all but the newest checkpoint."""
    for path in checkpoints(folder)[:-1]:
        for name in OPTIMIZER:
            (path / name).unlink(missing_ok=True)
        for shards in (*path.glob("optimizer_*"), *path.glob("global_step*")):
            shutil.rmtree(shards, ignore_errors=True)
