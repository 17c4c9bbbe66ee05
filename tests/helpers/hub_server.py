"""A Hugging Face Hub of one process: enough of its protocol to create a repository and commit."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """What the server was told.

    Attributes:
        created: the bodies of the requests that created repositories.
        files: every file committed, by path.
        refuse: answer 403 to everything.
    """

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.refuse = False
        self.address = ""


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

        def do_GET(self) -> None:
            self.answer({"id": "me/merged", "sha": "a" * 40, "siblings": []})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
