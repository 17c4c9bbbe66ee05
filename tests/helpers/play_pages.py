"""Pages that threads serve, and clients of their routes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from layerswap.lab.assets import shipped
from layerswap.lab.questions import questions
from layerswap.lab.quickstart import lab_plan
from layerswap.play.player import Player
from layerswap.play.serve import Served


class Client:
    """A page as a program sees it: its facts, and its requests."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)
        while (facts := self.http.get("/api/status").json())["state"] == "loading":
            time.sleep(0.1)
        self.facts = facts

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(f"/api/{path}", json=body)

    def ask(self, **question: object) -> list[dict]:
        """The events of an answer."""
        answer = self.post("ask", **question)
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]


def serve(folder: Path, monkeypatch: pytest.MonkeyPatch, port: int | None = None) -> Served:
    """The lab as `layerswap play` opens it, with short answers."""
    monkeypatch.chdir(folder)
    prompts = questions("problem", "furo", "development")[:20]
    player = Player(lab_plan(shipped(), "furo"), prompts=prompts, device="cpu", length=8)
    return Served(player, port)
