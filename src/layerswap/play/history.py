"""The history of a page: a JSON Lines file of answers, maps, tests and merges."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from layerswap.errors import LayerswapError

MOST = 200
"""Most entries that the page shows, the newest."""


class History:
    """Entries in a file, or in memory alone where there is none; `who` names the experts."""

    def __init__(self, path: Path | None, who: Mapping[str, str]) -> None:
        self.path, self._who = path, dict(who)
        self._lock = threading.Lock()
        self._entries: list[dict[str, Any]] = self._read()

    def _read(self) -> list[dict[str, Any]]:
        """Read the entries of the same experts; lines of others stay in the file."""
        if self.path is None or not self.path.exists():
            return []
        try:
            lines = self.path.read_text("utf-8").split("\n")
        except (OSError, ValueError) as error:
            raise LayerswapError(f"{self.path}: cannot be read ({error})") from None
        entries = []
        for line in lines:
            try:
                entry = json.loads(line) if line else None
            except (ValueError, RecursionError):
                continue  # a line that was cut off
            if isinstance(entry, dict) and entry.get("experts") == self._who:
                entries.append(entry)
        return entries

    def add(self, kind: str, **content: Any) -> dict[str, Any]:
        """Append an entry, and return it."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        entry = {"kind": kind, "at": now, "experts": self._who, **content}
        with self._lock:
            self._entries.append(entry)
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        return entry

    @property
    def newest(self) -> list[dict[str, Any]]:
        """The newest entries, the newest first."""
        return self._entries[: -MOST - 1 : -1]

    def tests(self, documents: str) -> int:
        """How often the test split of some documents was asked."""
        return sum(e["kind"] == "test" and e.get("documents") == documents for e in self._entries)
