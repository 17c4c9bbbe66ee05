"""Weight files read in place, on the Hub or any other filesystem of fsspec.

Headers are read first, then only the bytes that a composition needs. Retries, redirects and
credentials are those of huggingface_hub and fsspec. A file that changes is refused.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from layerswap.checkpoint.hub import BESIDE_WEIGHTS
from layerswap.ground import system
from layerswap.ground.errors import CheckpointError, LayerswapError, one_line
from layerswap.ground.strict_json import MAX_JSON_BYTES

CONNECTIONS = 8
"""Requests at a time."""
STEP_BYTES = 1 << 23
"""Bytes of one request."""
HUB = "hf://"
MARKS = ("ETag", "etag", "md5Hash", "checksum", "LastModified", "last_modified", "mtime",
         "modified", "created")  # fmt: skip
"""Keys under which filesystems identify a file's content, the surest first."""


@dataclass(frozen=True)
class RemoteFile:
    """A weight file that is read in place; `etag` identifies its content."""

    name: str
    url: str
    size: int
    etag: str
    commit: str | None = None

    def __str__(self) -> str:
        return self.url

    def stream(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield bytes [start, stop) in order."""
        options = {"cache_type": "none"} if self.commit else {}
        for first in range(start, stop, STEP_BYTES):
            last = min(first + STEP_BYTES, stop)
            with _network(self.url):
                filesystem, path = _filesystem(self.url)
                data: bytes = filesystem.cat_file(path, first, last, **options)
            if len(data) != last - first:
                raise CheckpointError(
                    f"{self.url}: sent {len(data):,} bytes for {last - first:,}; its server may "
                    "send whole files only, or the file has changed; download the checkpoint first"
                )
            yield data

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop)."""
        return b"".join(self.stream(start, stop))

    def check_unchanged(self) -> None:
        """Refuse a file that has changed since it was opened; a commit cannot."""
        if self.commit is None and (now := _open(self.name, self.url)) != self:
            raise CheckpointError(
                f"{self.url}: changed since the merge was planned (it was {self.etag}, "
                f"{self.size} bytes; it is {now.etag}, {now.size} bytes); plan it again"
            )


WeightFile = Path | RemoteFile
"""A file with tensors, local or remote."""


@contextmanager
def _network(url: str) -> Iterator[None]:
    """Name the file and the cause of what the libraries raise; missing files pass through."""
    try:
        yield
    except (FileNotFoundError, LayerswapError):
        raise
    except Exception as error:  # the transports have no common class
        why = f"{type(error).__name__}: {one_line(error, 200)}"
        raise CheckpointError(f"{url}: cannot be fetched ({why})") from None


def _filesystem(url: str) -> tuple[Any, str]:
    if url.startswith(HUB):
        from huggingface_hub import HfFileSystem, constants

        return HfFileSystem(endpoint=constants.ENDPOINT), url.removeprefix(HUB)
    from fsspec.core import url_to_fs

    filesystem, path = url_to_fs(url)
    return filesystem, path


def _open(name: str, url: str, commit: str | None = None) -> RemoteFile:
    """Ask for a file's size and mark; raises FileNotFoundError if it does not exist."""
    with _network(url):
        filesystem, path = _filesystem(url)
        if commit is None:
            filesystem.invalidate_cache()
        info = filesystem.info(path)
        if info.get("type") == "directory":
            raise FileNotFoundError(url)
        mark = next((info[key] for key in MARKS if info.get(key)), "")
        if (large := info.get("lfs")) is not None:
            mark = large.sha256
        etag = str(mark).removeprefix("W/").strip('"')
        return RemoteFile(name, url, int(info["size"]), etag, commit)


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


def find_weights(source: str, folder: Path, commit: str | None) -> Callable[[str], WeightFile]:
    """Return a function that finds a weight file by name, in the local folder or remotely.

    The function raises FileNotFoundError for a file that is in neither place. `source` is a Hub id
    without its revision, or the URL of a folder, which has no commit.
    """
    root = source.rstrip("/") if commit is None else f"{HUB}{source}@{commit}"

    @cache
    def find(name: str) -> WeightFile:
        if (folder / name).is_file():  # in the local cache of the Hub
            return folder / name
        return _open(name, f"{root}/{name}", commit)

    return find


# --- folders at a URL ---


def is_url(source: str) -> bool:
    """True for `https://…`, `s3://…` and the like."""
    return "://" in source


def check_url(source: str) -> None:
    """Refuse pages of the Hub, and URLs with a password, a query or a fragment."""
    try:
        parts = urlsplit(source)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None
    if parts.scheme == "file":
        raise CheckpointError(f"{source}: give the path without file://")
    if parts.hostname in ("huggingface.co", "hf.co"):
        name = "/".join(parts.path.strip("/").split("/")[:2])
        raise CheckpointError(f"{source}: a page of the Hub; give the repository's id: {name}")
    if parts.query or parts.fragment or parts.password or (parts.username and "http" in source):
        shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
        raise CheckpointError(
            f"{shown}: a checkpoint's URL cannot hold a password, '?' or '#'; give "
            "credentials in the settings of the filesystem's library"
        )


def fetch_beside(url: str) -> Path:
    """Fetch the files next to the weights of a checkpoint; return a folder for this process.

    An adapter is fetched whole.
    """
    folder = Path(tempfile.mkdtemp(prefix="layerswap-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(lambda name: _fetch(url, name, folder, MAX_JSON_BYTES), BESIDE_WEIGHTS))
    names = {path.name for path in folder.iterdir()}
    if not names:
        raise CheckpointError(f"{url}: no config.json can be fetched from there")
    if "adapter_config.json" in names and "config.json" not in names:
        _fetch(url, "adapter_model.safetensors", folder, shutil.disk_usage(folder).free)
    return folder


def _fetch(url: str, name: str, folder: Path, most: int) -> None:
    """Fetch a file into a folder, if it exists."""
    with suppress(FileNotFoundError):
        file = _open(name, f"{url.rstrip('/')}/{name}")
        if file.size > most:
            raise CheckpointError(f"{file}: has {file.size:,} bytes; at most {most:,} are fetched")
        with (folder / name).open("wb") as output:
            RemoteHandle(file).copy_to(output.fileno(), 0, file.size, 0)
