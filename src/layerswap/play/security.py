"""What a request must be before the page answers it, and the headers of every answer.

The page is served on this machine alone, where a `Host` of another name is refused: a site whose
name resolves to 127.0.0.1 is no page of ours. On other addresses a token is needed. Requests that
other origins make are refused everywhere.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
)
NOTEBOOKS = "http://localhost:* http://127.0.0.1:*"
"""Pages that may frame the page, if it is opened in a notebook."""


def is_local(host: str) -> bool:
    """True for a name or address of this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Refuses requests that may not be answered, and adds the headers of every answer."""

    def __init__(
        self, app: ASGIApp, *, host: str, token: str | None = None, frames: str = "'none'"
    ) -> None:
        self._app, self._token, self._local = app, token, is_local(host)
        self._headers = {
            "content-security-policy": POLICY.format(frames=frames),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-store",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        from starlette.datastructures import MutableHeaders
        from starlette.requests import Request

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, guarded)

    def _refusal(self, request: Request) -> Response | None:
        """The refusal or redirection of a request; None to go on."""
        from starlette.responses import PlainTextResponse, RedirectResponse

        def refused(status: int, text: str) -> Response:
            return PlainTextResponse(f"{text}\n", status)

        headers, path = request.headers, request.url.path
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._local and not is_local(urlsplit(f"//{host}").hostname or ""):
            return refused(403, "this address is served on this machine alone")
        foreign = origin is not None and urlsplit(origin).netloc != host
        site = headers.get("sec-fetch-site", "none")
        if foreign or (path.startswith("/api/") and site not in ("none", "same-origin")):
            return refused(403, "requests of other pages are refused")
        kind = headers.get("content-type", "").partition(";")[0].strip()
        if request.method == "POST" and kind != "application/json":
            return refused(415, "send JSON")
        if self._token is None:
            return None
        name = f"layerswap-{request.url.port}"
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(bearer) or self._is_token(request.cookies.get(name)):
            return None
        if path == "/" and self._is_token(request.query_params.get("token")):
            kept = RedirectResponse("/", 303)
            kept.set_cookie(name, self._token, httponly=True, samesite="lax")
            return kept
        return refused(403, "open the address with its ?token=..., which layerswap play printed")

    def _is_token(self, given: Any) -> bool:
        return hmac.compare_digest(str(given).encode(), str(self._token).encode())
