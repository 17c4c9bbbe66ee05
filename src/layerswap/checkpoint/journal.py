"""What of an unfinished output folder is finished, so that a later run can go on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from layerswap.checkpoint.strict_json import read_json_object
from layerswap.errors import CheckpointError

JOURNAL = "journal.json"


class Journal:
    """The finished files of a folder that is being written, for work of one key.

    A file is entered only once it is on the disk, so that what the journal names can be trusted
    after a power cut too. Flushing happens beside the writing of the next file.

    Attributes:
        finished: sizes in bytes of the files that need not be written again, by name.

    Example:
        with Journal(folder, key) as journal:
            for file in files:
                if file.name not in journal.finished:
                    write(file)
                    journal.enter(file.name)
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key
        self.finished = read_journal(folder, key) or {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._flushes: list[Future[None]] = []
        _remove_all_but(folder, (*self.finished, JOURNAL))

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=error is not None)
        if error is None:
            for flush in self._flushes:
                flush.result()
            (self._folder / JOURNAL).unlink(missing_ok=True)

    def enter(self, file: str) -> None:
        """Note that a file is finished, as soon as it is on the disk."""
        self._flushes.append(self._pool.submit(self._enter, file))

    def _enter(self, file: str) -> None:
        path = self._folder / file
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        self.finished[file] = path.stat().st_size
        draft = self._folder / f"{JOURNAL}.draft"
        with draft.open("w", encoding="utf-8") as stream:
            json.dump({"key": self._key, "finished": self.finished}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(self._folder / JOURNAL)


def read_journal(folder: Path, key: str) -> dict[str, int] | None:
    """Sizes of the finished files of a folder, by name; None when it is not work of this key."""
    try:
        data = read_json_object(folder / JOURNAL)
    except (OSError, CheckpointError):
        return None
    finished = data.get("finished")
    if data.get("key") != key or not isinstance(finished, dict):
        return None
    return {name: size for name, size in finished.items() if _size(folder / name) == size}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _remove_all_but(folder: Path, keep: Iterable[str]) -> None:
    for path in folder.iterdir():
        if path.name not in set(keep) and path.is_file():
            path.unlink()
