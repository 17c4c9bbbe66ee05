"""Serves the page of questions to speakers; every answer is appended to the folder's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.ground import system
from layerswap.ground.errors import LayerswapError
from layerswap.play.questions import (
    ANSWERS,
    check_answer,
    page_of,
    read_questions,
    static,
)
from layerswap.play.security import guard
from layerswap.play.serve import read_body
from layerswap.reading.files import rows_of
from layerswap.versions import need_extras

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


def make_ask_app(folder: Path, host: str, token: str | None = None) -> Starlette:
    """Make the web application of a folder of questions."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    asked, file = read_questions(folder), folder / ANSWERS

    async def page(request: Request) -> Response:
        return HTMLResponse(page_of(asked, alone=False))

    async def script(request: Request) -> Response:
        return Response(static("ask.js"), media_type="text/javascript")

    async def style(request: Request) -> Response:
        return Response(static("ask.css"), media_type="text/css")

    async def answers(request: Request) -> Response:
        return JSONResponse(list(rows_of(file)) if file.exists() else [])

    async def keep(request: Request) -> Response:
        try:
            line = check_answer(asked, await read_body(request), "answer")
        except LayerswapError as error:
            return PlainTextResponse(str(error), 400)
        _append(file, line)
        return JSONResponse({})

    routes = [Route("/", page), Route("/ask.js", script), Route("/ask.css", style),
              Route("/api/answers", answers),
              Route("/api/answer", keep, methods=["POST"])]  # fmt: skip
    return Starlette(
        routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard(host, token))]
    )


def _append(file: Path, line: dict[str, Any]) -> None:
    """Append a line, and let the disk have it before the page goes on."""
    with file.open("ab") as stream:
        stream.write(f"{json.dumps(line, ensure_ascii=False)}\n".encode())
        stream.flush()
        system.flush_handle(stream.fileno())


def make_ask_server(folder: Path, host: str, token: str | None = None) -> uvicorn.Server:
    """Make the server of a folder of questions; addresses of a network need a token."""
    need_extras("the page", "play")
    import uvicorn

    app = make_ask_app(folder, host, token)
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, ws="none"))
