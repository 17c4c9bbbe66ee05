"""A Hugging Face Hub of one process: creates repositories, commits, and serves checkpoints.

Weights are served as the Hub serves large files: the address of a revision sends the client on to
a storage, which answers ranged requests. Faults can be switched in, one per request to the storage.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Hub:
    """What the server was told.

    Attributes:
        created: the bodies of the requests that created repositories.
        files: every file committed, by path.
        refuse: answer 403 to everything.
        repositories: the folders that are served, by `owner/name`.
        faults: what goes wrong with the next requests for weights of more than 8 bytes, in order:
            `drop`, `short`, `wrong`, `429`, `503`, `whole`, `changed` or nothing.
        sent: bytes of weights sent, by `owner/name`.
        unmarked: whether plain files are served without an ETag, as by a simple server.
        asked: first and last byte of every request for weights, by `owner/name`.
    """

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.refuse = False
        self.unmarked = False
        self.address = ""
        self.repositories: dict[str, Path] = {}
        self.faults: list[str] = []
        self.sent: dict[str, int] = {}
        self.asked: dict[str, list[tuple[int, int]]] = {}
        self.lock = threading.Lock()

    def commit(self, name: str) -> str:
        """The commit that a repository is at: another one when a file changes."""
        digest = hashlib.sha1()
        for file in sorted(self.repositories[name].iterdir()):
            digest.update(file.name.encode() + file.read_bytes())
        return digest.hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that listens on a free local port."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def answer(self, data: object, status: int = 200) -> None:
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            if hub.refuse:
                self.answer({"error": "you may not"}, 403)
            elif self.path.startswith("/api/repos/create"):
                hub.created.append(json.loads(body))
                self.answer({"url": f"{hub.address}/me/merged", "name": "me/merged"})
            elif "/preupload/" in self.path:
                asked = json.loads(body)["files"]
                files = [{"path": f["path"], "uploadMode": "regular"} for f in asked]
                self.answer({"files": [{**f, "shouldIgnore": False} for f in files]})
            elif "/commit/" in self.path:
                for line in body.splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "file":
                        value = entry["value"]
                        hub.files[value["path"]] = base64.b64decode(value["content"])
                self.answer(
                    {"commitUrl": f"{hub.address}/me/merged/commit/abc", "commitOid": "a" * 40}
                )
            else:
                self.answer({})

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            known = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path)
            listed = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            stored = re.fullmatch(r"/storage/([^/]+/[^/]+)/(.+)", path)
            plain = re.fullmatch(r"/plain/([^/]+/[^/]+)/(.+)", path)
            if match := known or listed or file or stored or plain:
                name = match[1]
                if name not in hub.repositories:
                    if known and name == "me/merged":
                        return self.answer({"id": name, "sha": "a" * 40, "siblings": []})
                    self.send_response(404)
                    self.send_header("X-Error-Code", "RepoNotFound")
                    self.send_header("Content-Length", "0")
                    return self.end_headers()
                folder = hub.repositories[name]
            if known:
                files = [{"rfilename": f.name} for f in sorted(folder.iterdir())]
                return self.answer({"id": name, "sha": hub.commit(name), "siblings": files})
            if listed:
                return self.answer(
                    [
                        {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40}
                        for f in sorted(folder.iterdir())
                    ]
                )
            if file:
                return self.resolve(name, folder / file[3])
            if stored:
                return self.store(name, folder / stored[2])
            if plain:
                return self.store(name, folder / plain[2])
            return self.answer({"id": "me/merged", "sha": "a" * 40, "siblings": []})

        def resolve(self, name: str, path: Path) -> None:
            if not path.is_file():
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            data = path.read_bytes()
            etag = hashlib.sha256(data).hexdigest()
            large = path.suffix == ".safetensors"
            self.send_response(302 if large else 200)
            self.send_header("X-Repo-Commit", hub.commit(name))
            self.send_header("ETag", f'"{etag}"')
            if large:
                self.send_header("X-Linked-Etag", f'"{etag}"')
                self.send_header("X-Linked-Size", str(len(data)))
                # The same server under another name: of another host the client sends no token.
                elsewhere = hub.address.replace("127.0.0.1", "localhost")
                self.send_header("Location", f"{elsewhere}/storage/{name}/{path.name}")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def store(self, name: str, path: Path) -> None:
            if not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                return self.end_headers()
            data, etag = path.read_bytes(), hashlib.md5(path.read_bytes()).hexdigest()
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            first = int(asked[1]) if asked else 0
            last = min(int(asked[2]), len(data) - 1) if asked and asked[2] else len(data) - 1
            fault = ""
            weights = path.suffix == ".safetensors"
            with hub.lock:
                if weights:
                    hub.asked.setdefault(name, []).append((first, last))
                if weights and last - first >= 8 and hub.faults:
                    fault = hub.faults.pop(0)
            if fault in ("429", "503"):
                self.send_response(int(fault))
                self.send_header("Retry-After", "0")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            if fault == "wrong":
                first = max(0, first - 5)
            body = data[first : last + 1] if fault != "whole" else data
            self.send_response(206 if asked and fault != "whole" else 200)
            if not hub.unmarked:
                self.send_header("ETag", '"another"' if fault == "changed" else f'"{etag}"')
            if asked and fault != "whole":
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            part = body[: len(body) // 2] if fault in ("drop", "short") else body
            self.send_header("Content-Length", str(len(part if fault == "short" else body)))
            self.end_headers()
            if self.command == "GET":
                if weights:  # before the client can have the last byte
                    with hub.lock:
                        hub.sent[name] = hub.sent.get(name, 0) + len(part)
                self.wfile.write(part)
            if fault == "drop":
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
