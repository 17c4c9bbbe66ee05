"""The routes and the stream of a page, over a real server on the lab."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress

import httpx
import pytest
import torch

from layerswap.checkpoint.loading import load_tokenizer
from layerswap.compose.recipe import parse_recipe
from layerswap.ground.errors import RecipeError
from layerswap.lab.assets import shipped
from layerswap.lab.quickstart import lab_plan
from layerswap.merge.api import make_plan
from layerswap.play import serve as serving
from layerswap.play.pair import Pair
from layerswap.play.player import Player


def test_answers_are_those_of_the_loaded_plans(client):
    prompt = client.facts["prompts"][0]["prompt"]
    keys = ["task", "language", "swap.2.1.1.0.task", "partition.A", "soup"]
    events = client.ask(prompt=prompt, compositions=keys, length=8)
    streamed = dict.fromkeys(keys, "")
    for event in events:
        streamed |= event.get("texts", {})
    (whole,) = [event["answers"] for event in events if event["type"] == "answered"]
    pair, tokenizer = Pair(lab_plan(shipped(), "furo")), load_tokenizer(shipped().base)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    for key in keys:
        model = pair.plan_of(key).load()  # by transformers alone
        text = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=True)
        assert whole[key]["tokens"] == text[0, ids.shape[1] :].tolist(), key
        assert whole[key]["text"] == streamed[key]
    assert len([event for event in events if event["type"] == "tokens"]) > 1


def test_drawn_answers_depend_on_the_seed_alone(client):
    prompt = client.facts["prompts"][1]["prompt"]

    def ask(seed):
        events = client.ask(prompt=prompt, compositions=["soup"], temperature=3.0, seed=seed)
        return events[-1]["answers"]["soup"]["tokens"]

    assert ask(1) == ask(1) != ask(2)


def test_what_is_wrong_is_one_line(client):
    for changed in ({"prompt": ""}, {"temperature": -1}, {"length": 100_000}, {"more": 1},
                    {"compositions": []}, {"prompt": "x" * 30_000}):  # fmt: skip
        answer = client.post("ask", **{"prompt": "x", "compositions": ["task"], **changed})
        assert answer.status_code == 400, changed
        assert answer.json()["error"].count("\n") == 0, changed
    for key in ("swap.9.9.0.0.blend", "swap.-1.0.0.0.blend", "partition.D", "nothing"):
        failed = client.ask(prompt="x", compositions=[key])[-1]
        assert (failed["type"], failed["message"].count("\n")) == ("failed", 0), key
        assert client.http.get("/api/composition", params={"key": key}).status_code == 400
    events = client.ask(prompt="fesi " * 500, compositions=["task"])
    assert "shorten it" in events[-1]["message"]


def test_a_client_that_leaves_ends_its_answer_and_the_next_one_is_written(client, monkeypatch):
    closed = []

    def endless(self, question):
        try:
            while True:
                time.sleep(0.02)
                yield {"type": "tokens", "texts": {}}
        finally:
            closed.append(question.prompt)

    question = {"prompt": "fesi", "compositions": ["task"]}
    with monkeypatch.context() as patch:
        patch.setattr(Player, "ask", endless)
        with client.http.stream("POST", "/api/ask", json=question) as answer:
            assert "tokens" in next(answer.iter_lines())
    assert client.ask(**question, length=2)[-1]["type"] == "answered"
    assert closed == ["fesi"]


# --- security ---


def test_requests_of_other_pages_are_refused(served, client):
    def status(method="GET", path="/", **headers):
        return httpx.request(method, served.url + path[1:], headers=headers).status_code

    assert status() == 200
    assert status(host="evil.example") == 400
    assert status("POST", "/api/ask", origin="https://evil.example") == 403
    assert status("GET", "/api/status", **{"sec-fetch-site": "cross-site"}) == 403
    assert status("POST", "/api/ask", **{"content-type": "text/plain"}) == 403
    assert client.post("ask", prompt="x" * 70_000, compositions=["task"]).status_code == 413
    body = iter([b"[" * 40_000] * 3)
    chunked = httpx.post(f"{served.url}api/ask", content=body,
                         headers={"content-type": "application/json"})  # fmt: skip
    assert (chunked.status_code, "larger" in chunked.text) == (413, True)
    nested = httpx.post(f"{served.url}api/ask", content=b"[" * 60_000,
                        headers={"content-type": "application/json"})  # fmt: skip
    assert (nested.status_code, nested.json()) == (400, {"error": "the request is not JSON"})
    policy = httpx.get(served.url).headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert policy.endswith("frame-ancestors http://localhost:* http://127.0.0.1:*")


@pytest.mark.parametrize("headers", ["Host: [::1", "Host: {}\r\nOrigin: http://[", "Host: a@{}"])
def test_addresses_that_are_none_are_refused(served, headers):
    here = served.url[7:-1]
    said = raw(served, f"GET / HTTP/1.1\r\n{headers.format(here)}\r\n\r\n")
    assert said.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 403 ")), said
    assert raw(served, f"GET / HTTP/1.1\r\nHost: {here}\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def raw(page, text):
    port = int(page.url.rpartition(":")[2][:-1])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(text.encode())
        return connection.recv(1000)


@pytest.mark.parametrize(("method", "path", "media", "status"), [
    ("POST", "/api/ask", "application/json", 408), ("POST", "/api/ask", "text/plain", 403),
    ("GET", "/", "application/json", 200),
])  # fmt: skip
def test_a_body_that_drips_ends_with_its_answer(served, monkeypatch, method, path, media, status):
    monkeypatch.setattr(serving, "PATIENCE", 0.2)
    port = int(served.url.rpartition(":")[2][:-1])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media}"
                           "\r\nContent-Length: 999\r\n\r\n[".encode())  # fmt: skip
        connection.settimeout(0.25)
        got = b""
        for _ in range(40):
            try:
                data = connection.recv(1 << 16)
            except OSError as error:
                data = None if isinstance(error, TimeoutError) else b""
            if data == b"":
                break
            got += data or b""
            with suppress(ConnectionError):
                connection.sendall(b" ")
        else:
            pytest.fail("the connection is still open")
    assert got.startswith(f"HTTP/1.1 {status} ".encode()), got


# --- compositions as texts ---


@pytest.mark.parametrize("key", ["swap.2.1.1.0.task", "partition.B", "soup", "task", "language"])
def test_the_recipe_of_the_page_makes_the_same_plan(key):
    pair = Pair(lab_plan(shipped(), "furo"))
    shown = pair.describe(key)
    expected = pair.plan_of(key).composition
    assert make_plan(parse_recipe(shown["recipe"])).composition.blends == expected.blends


def test_a_recipe_of_three_experts_is_refused():
    lab = shipped()
    experts = (*lab.task_experts, *(paths[0] for paths in lab.language_experts.values()))
    sources = {f"e{i}": str(path) for i, path in enumerate(experts)}
    plan = make_plan(parse_recipe(f"{{experts: {json.dumps(sources)}, "
                                  f"soup: {{experts: {[*sources]}}}}}"))  # fmt: skip
    with pytest.raises(RecipeError, match="composes two experts"):
        Pair(plan)
