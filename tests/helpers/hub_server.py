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
    """The state of the server, which tests read and change."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []  # bodies of requests that created repositories
        self.files: dict[str, bytes] = {}  # every file committed, by path
        self.refuse = False  # answer 403 to everything
        self.address = ""
        self.repositories: dict[str, Path] = {}  # folders that are served, by `owner/name`
        # Faults of the next requests for weights of more than 8 bytes, in order: `drop`, `whole`,
        # `503` or nothing.
        self.faults: list[str] = []
        self.sent: dict[str, int] = {}  # bytes of weights, by `owner/name`
        self.asked: dict[str, list[tuple[int, int]]] = {}  # first and last byte of every request
        self.requests: list[str] = []  # every method and path
        self.large = False  # whether weights are sent as large files, and not in the commit
        self.objects: dict[str, bytes] = {}  # large files that arrived, by SHA-256
        self.accepted = 10**9  # number of further large files that are accepted
        self.commits: list[set[str]] = []  # all paths after each commit
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

        def head(self, status: int, length: int = 0, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(length))
            self.end_headers()

        def answer(self, data: object, status: int = 200) -> None:
            body = json.dumps(data).encode()
            self.head(status, len(body), Content_Type="application/json")
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
            hub.requests.append(f"POST {self.path}")
            if hub.refuse:
                self.answer({"error": "you may not"}, 403)
            elif self.path.endswith("/info/lfs/objects/batch"):
                self.answer({"objects": [self.action(o) for o in json.loads(body)["objects"]]})
            elif self.path.startswith("/api/repos/create"):
                hub.created.append(json.loads(body))
                self.answer({"url": f"{hub.address}/me/merged", "name": "me/merged"})
            elif "/preupload/" in self.path:
                asked = json.loads(body)["files"]
                modes = {True: "lfs", False: "regular"}
                files = [
                    {
                        "path": f["path"], "shouldIgnore": False,
                        "uploadMode": modes[hub.large and f["path"].endswith(".safetensors")],
                    }
                    for f in asked
                ]  # fmt: skip
                self.answer({"files": files})
            elif "/commit/" in self.path:
                for line in body.splitlines():
                    entry = json.loads(line)
                    value = entry["value"]
                    if entry["key"] == "file":
                        hub.files[value["path"]] = base64.b64decode(value["content"])
                    elif entry["key"] == "lfsFile":
                        hub.files[value["path"]] = hub.objects[value["oid"]]
                    elif entry["key"] == "deletedFile":
                        del hub.files[value["path"]]
                hub.commits.append(set(hub.files))
                self.answer(
                    {"commitUrl": f"{hub.address}/me/merged/commit/abc", "commitOid": "a" * 40}
                )
            else:
                self.answer({})

        def action(self, asked: dict[str, Any]) -> dict[str, Any]:
            """The answer on one large file: where it is sent to, or nothing if it is there."""
            upload = {"upload": {"href": f"{hub.address}/upload/{asked['oid']}"}}
            return {**asked, **({} if asked["oid"] in hub.objects else {"actions": upload})}

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with hub.lock:
                hub.requests.append(f"PUT {self.path}")
                hub.accepted -= 1
                if hub.accepted < 0:
                    return self.head(403)
                hub.objects[hashlib.sha256(body).hexdigest()] = body
            self.head(200)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            known = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path)
            listed = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            stored = re.fullmatch(r"/storage/([^/]+/[^/]+)/(.+)", path)
            match = known or listed or file or stored
            if match is None or (known and known[1] == "me/merged"):
                return self.answer({"id": "me/merged", "sha": "a" * 40, "siblings": []})
            name = match[1]
            if name == "me/merged":
                listing = [{"type": "file", "path": p, "size": 1, "oid": "0"} for p in hub.files]
                return self.answer(listing)
            if name not in hub.repositories:
                return self.head(404, X_Error_Code="RepoNotFound")
            folder = hub.repositories[name]
            if known:
                files = [{"rfilename": f.name} for f in sorted(folder.iterdir())]
                return self.answer({"id": name, "sha": hub.commit(name), "siblings": files})
            if listed:
                return self.answer([
                    {
                        "type": "file", "path": f.name,
                        "size": f.stat().st_size, "oid": "0" * 40,
                        "lfs": {
                            "oid": hashlib.sha256(f.read_bytes()).hexdigest(),
                            "size": f.stat().st_size, "pointerSize": 1,
                        },
                    }
                    for f in sorted(folder.iterdir())
                ])  # fmt: skip
            if file:
                return self.resolve(name, folder / file[3])
            return self.store(name, folder / match[2])

        def resolve(self, name: str, path: Path) -> None:
            if not path.is_file():
                return self.head(404, X_Error_Code="EntryNotFound")
            data = path.read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            common = {"X_Repo_Commit": hub.commit(name), "ETag": etag}
            if path.suffix in (".safetensors", ".gguf"):
                # The same server under another name: the client sends other hosts no token.
                elsewhere = hub.address.replace("127.0.0.1", "localhost")
                return self.head(
                    302, **common, X_Linked_Etag=etag, X_Linked_Size=str(len(data)),
                    Location=f"{elsewhere}/storage/{name}/{path.name}",
                )  # fmt: skip
            self.head(200, len(data), **common)
            if self.command == "GET":
                self.wfile.write(data)

        def store(self, name: str, path: Path) -> None:
            if not path.is_file():
                return self.head(404)
            data = path.read_bytes()
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            first = int(asked[1]) if asked else 0
            last = min(int(asked[2]), len(data) - 1) if asked and asked[2] else len(data) - 1
            fault = ""
            weights = path.suffix in (".safetensors", ".gguf")
            with hub.lock:
                if weights:
                    hub.asked.setdefault(name, []).append((first, last))
                if weights and last - first >= 8 and hub.faults:
                    fault = hub.faults.pop(0)
            if fault == "503":
                return self.head(503, Retry_After="0")
            body = data[first : last + 1] if fault != "whole" else data
            headers = {}
            if asked and fault != "whole":
                headers["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
            self.head(206 if headers else 200, len(body), **headers)
            part = body[: len(body) // 2] if fault == "drop" else body
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
