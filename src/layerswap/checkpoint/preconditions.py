"""What must hold around a merge: a safe place for the output, and sources that stay as they are."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from layerswap.checkpoint import Checkpoint
from layerswap.errors import MergeError

Stamp = tuple[int, int, int]
"""Size, time of the last change and inode of a file."""


def stamps_of(checkpoints: Iterable[Checkpoint]) -> dict[Path, Stamp]:
    """The stamp of every weight file of the checkpoints.

    Raises:
        MergeError: a file has vanished.
    """
    files = {file for c in checkpoints for file in (*c.files, *_files(c))}
    return {file: _stamp(file) for file in files}


def check_unchanged(stamps: Mapping[Path, Stamp]) -> None:
    """Refuse weight files that changed since they were stamped.

    Raises:
        MergeError: naming the first file that changed or vanished.
    """
    for file, stamp in sorted(stamps.items()):
        if _stamp(file) != stamp:
            raise MergeError(f"{file}: changed since the merge was planned; plan it again")


def check_apart(target: Path, sources: Mapping[str, Checkpoint]) -> None:
    """Refuse an output that is, holds or lies in a source, however either is reached.

    Raises:
        MergeError: naming the source.
    """
    real = target.expanduser().resolve()
    for name, checkpoint in sources.items():
        # A file may be a link out of its folder: replacing what it points to would lose it too.
        files = {file.resolve().parent for file in (*checkpoint.files, *_files(checkpoint))}
        for folder in (checkpoint.folder.resolve(), *sorted(files)):
            if real == folder or folder in real.parents or real in folder.parents:
                raise MergeError(f"{target}: would write into the checkpoint of {name}")


def check_space(folder: Path, need: int) -> None:
    """Refuse an output of `need` bytes that does not fit on the disk of `folder`.

    Raises:
        MergeError: with both sizes.
    """
    free = shutil.disk_usage(folder).free
    if free < need:
        raise MergeError(f"{folder}: needs {_size(need)}, only {_size(free)} are free")


def _files(checkpoint: Checkpoint) -> set[Path]:
    """Every weight file behind a checkpoint, those of an adapter's base too."""
    return {tensor.file for tensor in checkpoint.tensors.values()}


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _stamp(file: Path) -> Stamp:
    try:
        status = file.stat()
    except OSError as error:
        raise MergeError(f"{file}: vanished ({error.strerror})") from None
    return status.st_size, status.st_mtime_ns, status.st_ino
