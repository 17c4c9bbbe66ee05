"""Filesystems in loop files, and what a test asks of them."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MAKE = {
    "xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"],
    "xfs without reflinks": ["mkfs.xfs", "-q", "-m", "reflink=0"],
    "btrfs": ["mkfs.btrfs", "-q"],
    "ext4": ["mkfs.ext4", "-q"],
}
FIEMAP, SYNC, SHARED = 0xC020660B, 1, 0x2000
ANSWER, EXTENT, MOST = struct.Struct("<QQIIII"), struct.Struct("<QQQ16xI12x"), 4000


@contextmanager
def mounted(kind: str, root: Path, megabytes: int) -> Iterator[Path]:
    """A fresh filesystem in a loop file; skips the test, with the reason, if there can be none."""
    program = MAKE[kind][0]
    if os.geteuid() != 0:
        pytest.skip("mounting a loop file needs root")
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    image, folder = root / "image", root / "mounted"
    folder.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run([*MAKE[kind], image], check=True, capture_output=True)
    done = subprocess.run(["mount", "-o", "loop", image, folder], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"mount -o loop: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
        image.unlink()


def used_bytes(folder: Path) -> int:
    """Bytes in use on the filesystem of a folder, with all of them on the disk.

    XFS frees the blocks of deleted files in the background, so they are read until they stay.
    """
    before, used = -1, 0
    while used != before:
        before = used
        subprocess.run(["sync", "-f", folder], check=True)
        time.sleep(0.2)
        used = shutil.disk_usage(folder).used
    return used


def shared_extents(file: Path) -> int:
    """Bytes of a file in extents that other files share (FIEMAP)."""
    import fcntl

    with file.open("rb") as handle:
        request = bytearray(ANSWER.size + MOST * EXTENT.size)
        ANSWER.pack_into(request, 0, 0, 2**64 - 1, SYNC, 0, MOST, 0)
        fcntl.ioctl(handle, FIEMAP, request)
    count = ANSWER.unpack_from(request)[3]
    assert count < MOST
    found = (EXTENT.unpack_from(request, ANSWER.size + i * EXTENT.size) for i in range(count))
    return sum(length for _, _, length, flags in found if flags & SHARED)
