"""What a request must be before the page answers it, and the headers of every answer.

The page is served on this machine alone, where a `Host` of another name is refused: a site whose
name resolves to 127.0.0.1 is no page of ours. On other addresses a token is needed. Requests that
other origins make are refused everywhere.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

LARGEST_BODY = 1 << 16
"""Bytes of a request's body."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
)
NOTEBOOKS = "http://localhost:* http://127.0.0.1:*"
"""Pages that may frame the page, if it is opened in a notebook."""
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def is_local(host: str) -> bool:
    """True for a name or address of this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Refuses requests that may not be answered, and adds the headers of every answer."""

    def __init__(self, app: App, *, host: str, token: str | None, frames: str = "'none'") -> None:
        self._app, self._token = app, token
        self._local = is_local(host)
        self._headers = [
            (b"content-security-policy", POLICY.format(frames=frames).encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"cache-control", b"no-store"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1")
                   for name, value in scope["headers"]}  # fmt: skip
        status, text, more = self._refusal(scope, headers)
        if not status:
            await self._app(scope, receive, guarded)
            return
        more = [*more, (b"content-type", b"text/plain; charset=utf-8")]
        await guarded({"type": "http.response.start", "status": status, "headers": more})
        await guarded({"type": "http.response.body", "body": f"{text}\n".encode()})

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str, list[Any]]:
        """The status, text and headers of a refusal or redirection; status 0 to go on."""
        host = headers.get("host", "")
        if self._local and not is_local(urlsplit(f"//{host}").hostname or ""):
            return 403, "this address is served on this machine alone", []
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        foreign = origin is not None and urlsplit(origin).netloc != host
        if foreign or (scope["path"].startswith("/api/") and site not in ("none", "same-origin")):
            return 403, "requests of other pages are refused", []
        if scope["method"] == "POST":
            if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
                return 415, "send JSON", []
            length = headers.get("content-length", "")
            if length.isdigit() and int(length) > LARGEST_BODY:
                return 413, f"the request is larger than {LARGEST_BODY} bytes", []
        return self._without_token(scope, headers)

    def _without_token(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str, list[Any]]:
        if self._token is None:
            return 0, "", []
        name = f"layerswap-{(scope.get('server') or ('', ''))[1]}"
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(name)
        except CookieError:
            cookie = None
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(bearer) or (cookie is not None and self._is_token(cookie.value)):
            return 0, "", []
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if scope["path"] == "/" and self._is_token(query.pop("token", [""])[-1]):
            rest = urlencode(query, doseq=True)
            kept = f"{name}={self._token}; HttpOnly; SameSite=Lax; Path=/"
            return 303, "", [(b"location", f"/{'?' * bool(rest)}{rest}".encode()),
                             (b"set-cookie", kept.encode())]  # fmt: skip
        return 403, "open the address with its ?token=..., which layerswap play has printed", []

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self._token or "").encode())
