"""Pages that threads serve, and clients of their routes."""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path

import httpx
import pytest

from layerswap.lab.assets import shipped
from layerswap.lab.questions import questions
from layerswap.lab.quickstart import lab_plan
from layerswap.play.player import Player
from layerswap.play.serve import Served


class Client:
    """A page as a program sees it: its stream of events, and its requests."""

    def __init__(self, url: str) -> None:
        self.url, self.events = url, queue.Queue()
        self.http = httpx.Client(base_url=url, timeout=60)
        self._open = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        self.facts = self.events.get(timeout=60)
        while self.facts["state"] == "loading":
            event = self.events.get(timeout=60)
            if event["type"] == "status":
                self.facts = {**self.facts, **event}

    def _listen(self) -> None:
        try:
            with self.http.stream("GET", "/api/events", timeout=None) as stream:
                self._stream = stream
                for line in stream.iter_lines():
                    if line.startswith("data: "):
                        self.events.put(json.loads(line[6:]))
        except httpx.HTTPError:
            pass  # the server, or the test, has closed the stream

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(f"/api/{path}", json={"page": self.facts["page"], **body})

    def until(self, *kinds: str) -> list[dict]:
        """The events up to the first of a kind."""
        found = []
        while not found or found[-1]["type"] not in kinds:
            found.append(self.events.get(timeout=60))
        return found

    def run(self, path: str, **body: object) -> list[dict]:
        """The events of a job."""
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        job = answer.json()["job"]
        events = []
        while not events or events[-1]["type"] not in ("done", "failed", "stopped"):
            event = self.events.get(timeout=60)
            if event.get("job") == job:
                events.append(event)
        return events


def lab_player() -> Player:
    """The lab as `layerswap play` opens it, with short answers."""
    prompts = questions("problem", "furo", "development")[:20]
    return Player(lab_plan(shipped(), "furo"), prompts=prompts, device="cpu", length=8)


def serve(folder: Path, monkeypatch: pytest.MonkeyPatch, port: int | None = None) -> Served:
    monkeypatch.chdir(folder)
    return Served(lab_player(), port)
