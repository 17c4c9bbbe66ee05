"""Where the finished steps of a study are kept beside this machine's disk: any fsspec storage."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from layerswap.errors import StudyError

CACHE = Path("~/.cache/layerswap/studies")


class Storage:
    """A folder of an fsspec file system, such as `s3://bucket/study` or `memory://study`.

    Steps work on a local disk; a finished one is copied here, its record last, and whoever needs
    it copies it back. So machines need no disk in common.

    Args:
        url: of the folder.

    Raises:
        StudyError: no such file system, or what it needs is not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError, OSError) as error:
            why = " ".join(str(error).split())[:200]
            raise StudyError(f"{url}: cannot be reached ({why})") from None

    def __reduce__(self) -> tuple[type[Storage], tuple[str]]:
        """Workers open it anew: connections do not travel."""
        return Storage, (self.url,)

    def read(self, name: str) -> bytes | None:
        """A file's content; None where there is none."""
        try:
            return bytes(self._fs.cat_file(self._at(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file."""
        self._fs.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(self._at(name), content)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name))

    def put(self, folder: Path, name: str, *, last: str) -> None:
        """Copy a local folder here; the file `last` of it after all others.

        Whoever sees that file sees a whole folder.
        """
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        files.sort(key=lambda path: path == folder / last)
        for path in files:
            target = self._at(f"{name}/{path.relative_to(folder).as_posix()}")
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(path), target)

    def get(self, name: str, folder: Path) -> None:
        """Copy a folder from here to a local one."""
        start = self._at(name)
        for path in self._fs.find(start):
            target = folder / path[path.index(start) + len(start) + 1 :]
            target.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(path, str(target))

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def place(out: str) -> tuple[Path, Storage | None]:
    """The local folder of a study, and the storage behind it where `out` is a URL.

    Args:
        out: a folder, or the URL of one; a URL's local folder is in this user's cache.
    """
    if "://" not in out:
        return Path(out), None
    key: Any = hashlib.sha256(out.encode()).hexdigest()[:16]
    return CACHE.expanduser() / key, Storage(out)
