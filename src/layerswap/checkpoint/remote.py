"""Weight files of the Hub that are read in place.

Headers are read first, then only the bytes that a composition needs. Retries, redirects and
credentials are those of huggingface_hub. Files of a commit cannot change.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from layerswap.ground import system
from layerswap.ground.errors import CheckpointError, one_line

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem

CONNECTIONS = 8
"""Requests at a time."""
STEP_BYTES = 1 << 23
"""Bytes of one request."""


@dataclass(frozen=True)
class RemoteFile:
    """A weight file that is read in place.

    `path` is `owner/name@commit/file`. `etag` is the Hub's hash of the content: the SHA-256 of a
    large file.
    """

    name: str
    path: str
    size: int
    etag: str

    def __str__(self) -> str:
        return f"hf://{self.path}"

    def stream(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield bytes [start, stop) in order."""
        for first in range(start, stop, STEP_BYTES):
            last = min(first + STEP_BYTES, stop)
            with _network(self.path) as hub:
                data: bytes = hub.cat_file(self.path, first, last, cache_type="none")
            if len(data) != last - first:
                raise CheckpointError(
                    f"{self}: the server sent {len(data):,} bytes for {last - first:,}; download "
                    "the checkpoint first"
                )
            yield data

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop)."""
        return b"".join(self.stream(start, stop))


WeightFile = Path | RemoteFile
"""A file with tensors, local or remote."""


@cache
def _hub(endpoint: str) -> HfFileSystem:
    """Return the Hub's filesystem; all threads share it, to list each repository once."""
    from huggingface_hub import HfFileSystem

    return HfFileSystem(endpoint=endpoint)


@contextmanager
def _network(path: str) -> Iterator[HfFileSystem]:
    """Make the client's errors one line with the file's name; FileNotFoundError passes."""
    from huggingface_hub import constants

    try:
        yield _hub(constants.ENDPOINT)
    except FileNotFoundError:
        raise
    except Exception as error:  # the transports have no common class
        why = f"{type(error).__name__}: {one_line(error, 200)}"
        raise CheckpointError(f"hf://{path}: cannot be fetched ({why})") from None


def find_weights(repository: str, folder: Path, commit: str | None) -> Callable[[str], WeightFile]:
    """Return a function that finds a weight file by name, in the local cache or on the Hub.

    The function raises FileNotFoundError for a file that is in neither place.
    """

    @cache
    def find(name: str) -> WeightFile:
        if (folder / name).is_file():
            return folder / name
        path = f"{repository}@{commit}/{name}"
        with _network(path) as hub:
            info = hub.info(path)
        large = info.get("lfs")
        return RemoteFile(name, path, info["size"], large.sha256 if large else info["blob_id"])

    return find


class RemoteHandle:
    """A remote file that is open for positioned reads.

    Bytes that `holding` has fetched are read locally; all others are fetched when they are read.
    """

    def __init__(self, file: RemoteFile) -> None:
        self.file = file
        self._held: dict[int, tuple[int, int]] = {}  # by descriptor: first byte, one past the last

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on."""
        stop = offset + len(buffer)
        for handle, (first, last) in list(self._held.items()):
            if first <= offset and stop <= last:
                done = 0
                while done < len(buffer):
                    done += system.read_at(handle, buffer[done:], offset - first + done)
                return
        for data in self.file.stream(offset, stop):
            buffer[: len(data)] = data
            buffer = buffer[len(data) :]

    @contextmanager
    def holding(self, start: int, stop: int, folder: Path) -> Iterator[None]:
        """Keep bytes [start, stop) in an unnamed temporary file in `folder` during the block."""
        with tempfile.TemporaryFile(dir=folder, buffering=0) as kept:
            self.copy_to(kept.fileno(), start, stop, 0)
            self._held[kept.fileno()] = start, stop
            try:
                yield
            finally:
                del self._held[kept.fileno()]

    def copy_to(self, output: int, start: int, stop: int, offset: int) -> None:
        """Write bytes [start, stop) to `offset` of an open file, as they arrive."""
        for data in self.file.stream(start, stop):
            system.write_at(output, data, offset)
            offset += len(data)
