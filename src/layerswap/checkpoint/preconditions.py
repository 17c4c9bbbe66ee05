"""Checks around a merge: sources that stay as they are, and a safe place for the output."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from layerswap._types import Advance
from layerswap.checkpoint.folder import Checkpoint
from layerswap.checkpoint.read import open_file, read_into
from layerswap.checkpoint.remote import RemoteFile, WeightFile
from layerswap.errors import MergeError

Stamp = tuple[int, int, int] | None
"""Size, time of the last change and inode of a file; None for one that is read in place, which
says with every answer what it is."""
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 1 << 16
"""How many blocks of a file its fingerprint reads, and how long each is, in bytes."""
HASHED_BYTES = 1 << 24
"""Bytes that `sha256_of` reads at a time."""


def fingerprint(path: WeightFile) -> str:
    """SHA-256 over a file's length and 64 blocks of 64 KiB spread evenly over it.

    The first block holds the header. It reads 4 MiB whatever the file's size, and distinguishes
    any two fine-tuned checkpoints; it is no proof against an edit of single bytes.

    Raises:
        CheckpointError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with open_file(path) as handle:
        size = path.size if isinstance(path, RemoteFile) else path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        last = max(0, size - SAMPLE_BYTES)
        for start in sorted({last * i // (SAMPLE_BLOCKS - 1) for i in range(SAMPLE_BLOCKS)}):
            block = memoryview(bytearray(min(SAMPLE_BYTES, size - start)))
            read_into(handle, start, block, path)
            digest.update(block)
    return digest.hexdigest()


def sha256_of(path: Path, progress: Advance = lambda count: None) -> str:
    """SHA-256 of a whole file, in hexadecimal; `progress` gets the number of bytes just read.

    Raises:
        CheckpointError: it cannot be read.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(HASHED_BYTES))
    with open_file(path) as handle:
        size = path.stat().st_size
        for start in range(0, size, HASHED_BYTES):
            part = buffer[: min(HASHED_BYTES, size - start)]
            read_into(handle, start, part, path)
            digest.update(part)
            progress(len(part))
    return digest.hexdigest()


def stamps_of(checkpoints: Iterable[Checkpoint]) -> dict[WeightFile, Stamp]:
    """The stamp of every weight file of the checkpoints.

    Raises:
        MergeError: a file has vanished.
    """
    return {file: _stamp(file) for checkpoint in checkpoints for file in checkpoint.all_files}


def check_unchanged(stamps: Mapping[WeightFile, Stamp]) -> None:
    """Refuse weight files that changed since they were stamped.

    Raises:
        MergeError: naming the first file that changed or vanished.
    """
    for file, stamp in sorted(stamps.items(), key=lambda item: str(item[0])):
        if isinstance(file, RemoteFile):
            if file.commit is None:  # of a commit nothing can change
                file.check_unchanged()
        elif _stamp(file) != stamp:
            raise MergeError(f"{file}: changed since the merge was planned; plan it again")


def check_apart(target: Path, sources: Mapping[str, Checkpoint]) -> None:
    """Refuse an output that is, holds or lies in a source, however either is reached.

    Raises:
        MergeError: naming the source.
    """
    real = target.expanduser().resolve()
    for name, checkpoint in sources.items():
        local = [file.resolve() for file in checkpoint.all_files if isinstance(file, Path)]
        if checkpoint.gguf is not None:  # a file has no folder of its own
            if any(real in (file, *file.parents) for file in local):
                raise MergeError(f"{target}: would write over the checkpoint of {name}")
            continue
        # A file may be a link out of its folder: replacing what it points to would lose it too.
        files = {file.parent for file in local}
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
        wanted, there = _size(need), _size(free)
        if wanted == there:
            wanted, there = f"{need:,} bytes", f"{free:,} bytes"
        raise MergeError(f"{folder}: needs {wanted}, only {there} are free")


def _size(count: int) -> str:
    for size, unit, digits in ((1e9, "GB", 2), (1e6, "MB", 1), (1e3, "kB", 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count} bytes"


def _stamp(file: WeightFile) -> Stamp:
    if isinstance(file, RemoteFile):
        return None
    try:
        status = file.stat()
    except OSError as error:
        raise MergeError(f"{file}: vanished ({error.strerror})") from None
    return status.st_size, status.st_mtime_ns, status.st_ino
