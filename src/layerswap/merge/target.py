"""The output of a merge: settings of writing, and checks of the target.

A target is checked three times: before the sources are opened, before the first byte is written,
and when the finished output takes its place (`ground.commit`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from layerswap.checkpoint import Checkpoint, refuse_target
from layerswap.checkpoint.gguf import read_gguf
from layerswap.checkpoint.header import is_gguf
from layerswap.ground import system
from layerswap.ground.commit import refuse_file
from layerswap.ground.errors import MergeError, RecipeError
from layerswap.ground.types import Advance, Log, PathLike

RECORD = "layerswap.json"
"""The record in every output folder: how it was made, and from which sources."""
RECORD_KEY = "layerswap.record"
"""The metadata entry of a GGUF output with the same content."""
Layout = Literal["auto", "plain"]
"""The layout of the files that a merge is asked for."""


@dataclass(frozen=True)
class MergeOptions:
    """Settings of writing a merge; see `Plan.save`."""

    overwrite: bool = False
    threads: int | None = None
    progress: Advance = lambda count: None
    log: Log = lambda line: None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise RecipeError(f"threads is {self.threads}; write a number from 1")

    @property
    def workers(self) -> int:
        """Number of threads."""
        return self.threads or system.processors()


def is_merged_gguf(path: Path) -> bool:
    """True for a GGUF file that layerswap wrote."""
    return RECORD_KEY in read_gguf(path).metadata


def refuse_output(out: PathLike, *, overwrite: bool) -> Path:
    """The absolute path of a folder or a GGUF file; a MergeError if it may not be written."""
    if is_gguf(out):
        return refuse_file(out, is_ours=is_merged_gguf, overwrite=overwrite)
    return refuse_target(out, marker=RECORD, overwrite=overwrite)


def check_apart(target: Path, sources: Mapping[str, Checkpoint]) -> None:
    """Refuse an output that equals, contains or lies inside a source, links resolved."""
    real = target.expanduser().resolve()
    for name, checkpoint in sources.items():
        local = [file.resolve() for file in checkpoint.all_files if isinstance(file, Path)]
        if checkpoint.folder.is_file():  # which has no folder of its own
            if any(real in (file, *file.parents) for file in local):
                raise MergeError(f"{target}: would overwrite the checkpoint of {name}")
            continue
        # A file may be a link out of its folder: replacing its target would lose the target too.
        files = {file.parent for file in local}
        for folder in (checkpoint.folder.resolve(), *sorted(files)):
            if real == folder or folder in real.parents or real in folder.parents:
                raise MergeError(f"{target}: would write into the checkpoint of {name}")


def check_space(folder: Path, need: int) -> None:
    """Refuse an output of `need` bytes that does not fit on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if free < need:
        from rich.filesize import decimal

        wanted, there = decimal(need), decimal(free)
        if wanted == there:
            wanted, there = f"{need:,} bytes", f"{free:,} bytes"
        raise MergeError(f"{folder}: needs {wanted}, only {there} are free")
