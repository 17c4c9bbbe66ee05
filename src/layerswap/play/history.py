"""The history of a page: a JSON Lines file of answers, maps, tests and merges."""

from __future__ import annotations

import json
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
        self._path, self._who = path, dict(who)
        self._entries: list[dict[str, Any]] = []
        if path is None:
            return
        try:
            with path.open("a+", encoding="utf-8") as file:
                file.seek(0)
                lines = file.read().split("\n")
        except (OSError, ValueError) as error:
            raise LayerswapError(f"{path}: cannot keep the history ({error})") from None
        for line in lines:
            try:
                entry = json.loads(line or "null")
            except (ValueError, RecursionError):
                continue  # a line that was cut off
            # Entries of other experts stay in the file.
            if isinstance(entry, dict) and entry.get("experts") == self._who:
                self._entries.append(entry)

    def add(self, kind: str, **content: Any) -> dict[str, Any]:
        """Append an entry, and return the event that tells pages of it."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        entry = {"kind": kind, "at": now, "experts": self._who, **content}
        self._entries.append(entry)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        return {"type": "history", "entry": entry}

    @property
    def newest(self) -> list[dict[str, Any]]:
        """The newest entries, the newest first."""
        return self._entries[: -MOST - 1 : -1]

    def tests(self, documents: str) -> int:
        """How often the test split of some documents was asked."""
        return sum(e["kind"] == "test" and e.get("documents") == documents for e in self._entries)
