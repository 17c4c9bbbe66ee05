"""Checks of the page's requests, and the headers of its responses.

On this machine alone a `Host` of another name is refused: a site whose name resolves to 127.0.0.1
is not this page. On other addresses a token is needed. Other origins are refused everywhere.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from layerswap.ground.errors import RecipeError

if TYPE_CHECKING:
    from starlette.middleware.base import DispatchFunction as Dispatch
    from starlette.middleware.base import RequestResponseEndpoint as Next
    from starlette.requests import Request
    from starlette.responses import Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
)
NOTEBOOKS = "http://localhost:* http://127.0.0.1:*"
"""Pages that may frame the page, if it is opened in a notebook."""
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def is_local(host: str) -> bool:
    """True for a name or address of this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def new_token(host: str) -> str | None:
    """Return a random token for an address of a network; None for this machine alone."""
    return None if is_local(host) else secrets.token_urlsafe(24)


def guard(host: str, token: str | None = None, frames: str = "'none'") -> Dispatch:
    """A middleware that refuses requests, and adds the headers of every answer.

    Raises:
        RecipeError: an address of a network has no token.
    """
    if token is None and not is_local(host):
        raise RecipeError(f"{host}: an address that other machines reach needs a token")
    from starlette.responses import PlainTextResponse, RedirectResponse

    def fits(given: str | None) -> bool:
        return token is None or hmac.compare_digest((given or "").encode(), token.encode())

    def refusal(request: Request) -> Response | None:
        headers, path = request.headers, request.url.path
        named, origin = headers.get("host", ""), headers.get("origin")
        foreign = origin is not None and urlsplit(origin).netloc != named
        same_site = headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        media_type = headers.get("content-type", "").partition(";")[0].strip()
        cookie = f"layerswap-{request.url.port}"
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        authorised = fits(bearer) or fits(request.cookies.get(cookie))
        opens = path == "/" and fits(request.query_params.get("token"))
        refusals = {
            "this address is served on this machine alone":
                is_local(host) and not is_local(urlsplit(f"//{named}").hostname or ""),
            "requests of other pages are refused":
                foreign or (path.startswith("/api/") and not same_site),
            # Forms of other sites cannot send this type.
            "send JSON": request.method == "POST" and media_type != "application/json",
            "open the address with its ?token=..., which layerswap play has printed":
                not (authorised or opens),
        }  # fmt: skip
        for line, refused in refusals.items():
            if refused:
                return PlainTextResponse(f"{line}\n", 403)
        if authorised:
            return None
        kept = RedirectResponse("/", 303)
        kept.set_cookie(cookie, str(token), httponly=True, samesite="lax")
        return kept

    async def dispatch(request: Request, call_next: Next) -> Response:
        answer = refusal(request) or await call_next(request)
        answer.headers.update({"content-security-policy": POLICY.format(frames=frames), **HEADERS})
        return answer

    return dispatch
