"""Storage of a study's finished steps on any fsspec file system."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from layerswap.errors import StudyError, one_line

CACHE = Path("~/.cache/layerswap/studies")


class Storage:
    """A folder of an fsspec file system, such as `s3://bucket/study` or `memory://study`.

    Steps work on a local disk. A finished step is copied to the storage, its record last, and a
    machine that needs it copies it back. So the machines need no common disk.

    Raises:
        StudyError: the file system does not exist, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
        try:
            urlsplit(url)  # refuses hosts that cannot be
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError, OSError) as error:
            why = one_line(error)
            raise StudyError(f"{url}: cannot be reached ({why})") from None

    def __reduce__(self) -> tuple[type[Storage], tuple[str]]:
        """Pickle the URL alone: each worker opens its own connection."""
        return Storage, (self.url,)

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist."""
        try:
            return bytes(self._fs.cat_file(self._at(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file."""
        self._fs.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(self._at(name), content)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name))

    def put(self, folder: Path, name: str, *, last: str) -> None:
        """Copy a local folder to the storage, and its file `last` after all others.

        A reader who finds that file finds the whole folder.
        """
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        files.sort(key=lambda path: path == folder / last)
        for path in files:
            target = self._at(f"{name}/{path.relative_to(folder).as_posix()}")
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(path), target)

    def get(self, name: str, folder: Path) -> None:
        """Copy a folder of the storage to a local one."""
        start = self._at(name)
        for path in self._fs.find(start):
            target = folder / path[path.index(start) + len(start) + 1 :]
            if ".." in target.parts:  # object stores have such names
                raise StudyError(f"{self.url}: {path} leads out of its folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(path, str(target))

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def place(out: str) -> tuple[Path, Storage | None]:
    """The local folder of a study, and its storage if `out` is a URL.

    The local folder of a URL is in the user's cache.
    """
    if "://" not in out:
        return Path(out), None
    key = hashlib.sha256(out.encode()).hexdigest()[:16]
    return CACHE.expanduser() / key, Storage(out)
