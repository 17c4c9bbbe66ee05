"""Checks of the page's requests, and the headers of its responses.

The page is served on this machine alone. A `Host` of another name is refused (`HOSTS`): a site
whose name resolves to 127.0.0.1 is not this page. Other origins are refused too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.middleware.base import DispatchFunction as Dispatch
    from starlette.middleware.base import RequestResponseEndpoint as Next
    from starlette.requests import Request
    from starlette.responses import Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
)
HOSTS = ["127.0.0.1", "localhost"]
NOTEBOOKS = "http://localhost:* http://127.0.0.1:*"
"""Pages that may frame the page, if it is opened in a notebook."""
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def guard(frames: str = "'none'") -> Dispatch:
    """A middleware that refuses requests, and adds the headers of every answer."""
    from starlette.responses import PlainTextResponse

    def refusal(request: Request) -> Response | None:
        headers, path = request.headers, request.scope["path"]
        named, origin = headers.get("host", ""), headers.get("origin")
        foreign = origin is not None and origin.partition("://")[2] != named
        same_site = headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        media_type = headers.get("content-type", "").partition(";")[0].strip()
        refusals = {
            "requests of other pages are refused":
                foreign or (path.startswith("/api/") and not same_site),
            # Forms of other sites cannot send this type.
            "send JSON": request.method == "POST" and media_type != "application/json",
        }  # fmt: skip
        for line, refused in refusals.items():
            if refused:
                return PlainTextResponse(f"{line}\n", 403)
        return None

    async def dispatch(request: Request, call_next: Next) -> Response:
        answer = refusal(request) or await call_next(request)
        answer.headers.update({"content-security-policy": POLICY.format(frames=frames), **HEADERS})
        if {"content-length", "transfer-encoding"} & {*request.headers}:
            answer.headers["connection"] = "close"  # nobody reads the rest of a body
        return answer

    return dispatch
