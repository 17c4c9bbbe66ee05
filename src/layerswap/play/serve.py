"""Serves the page: JSON routes, and server-sent events for each page."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.ground.errors import LayerswapError, RecipeError
from layerswap.ground.yaml_file import validate
from layerswap.play.desk import Desk, explain
from layerswap.play.player import PageRequest, Player, Question
from layerswap.play.security import NOTEBOOKS, guard
from layerswap.report.drawing import EXPERTS, variables
from layerswap.versions import need_extras

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware.base import DispatchFunction
    from starlette.requests import Request
    from starlette.responses import Response

    from layerswap.merge import Plan

HERE = "127.0.0.1"
LARGEST_BODY = 1 << 16
"""Bytes of a request's body."""
PATIENCE = 20.0
"""Timeout of a connection's first request and of a request's body, in seconds."""


def make_app(player: Player, desk: Desk, dispatch: DispatchFunction) -> Starlette:
    """Make the web application of a page."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    def refused(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    def style(request: Request) -> Response:
        return Response(colours(), media_type="text/css")

    async def events(request: Request) -> Response:
        return StreamingResponse(desk.stream(player.facts), media_type="text/event-stream")

    def composition(request: Request) -> Response:
        return JSONResponse(player.pair.describe(request.query_params.get("key", "")))

    async def ask(request: Request) -> Response:
        question = await _read(request, Question, desk)
        if player.state == "failed":
            raise HTTPException(409, player.fault)
        return JSONResponse({"job": desk.submit(question.page, player.ask(question))})

    async def stop(request: Request) -> Response:
        body = await _read(request, PageRequest, desk)
        desk.cancel(body.page, body.job)
        return JSONResponse({})

    async def prepare() -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(desk.thread, player.load)
        except Exception as error:
            player.state, player.fault = "failed", explain(error)
        desk.send(player.facts())
        if player.state == "ready":
            await asyncio.to_thread(player.measure)
            desk.send({"type": "change", "change": player.change})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(prepare()), asyncio.create_task(desk.run())]
        yield
        player.closing = True
        for task in tasks:
            task.cancel()
        desk.close()

    routes = [
        Route("/colours.css", style),
        Route("/api/events", events),
        Route("/api/composition", composition),
        Route("/api/ask", ask, methods=["POST"]),
        Route("/api/stop", stop, methods=["POST"]),
        Mount("/", StaticFiles(directory=Path(__file__).parent / "static", html=True)),
    ]
    handlers: Any = {LayerswapError: refused}
    return Starlette(
        routes=routes, lifespan=lifespan, exception_handlers=handlers,
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=dispatch)],
    )  # fmt: skip


async def _read(request: Request, request_type: type[PageRequest], desk: Desk) -> Any:
    """Read and check the body of an open page's request."""
    from starlette.exceptions import HTTPException

    data = await read_body(request, desk)
    body = validate(request_type, data, where="request", expected="a request is an object")
    if body.page not in desk.pages:
        raise HTTPException(409, "this page's stream has ended; reload it")
    return body


async def read_body(request: Request, desk: Desk) -> Any:
    """Read the JSON of a request, up to a size limit."""
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

    content = b""
    try:
        async with asyncio.timeout(PATIENCE) as limit:
            desk.awaited.add(limit)
            async for chunk in request.stream():
                content += chunk
                if len(content) > LARGEST_BODY:
                    raise HTTPException(413, f"the request is larger than {LARGEST_BODY} bytes")
        return json.loads(content)
    except (TimeoutError, ClientDisconnect):
        raise HTTPException(408, f"the request is not whole after {PATIENCE:.0f} s") from None
    except (ValueError, RecursionError):
        raise RecipeError("the request is not JSON") from None
    finally:
        desk.awaited.discard(limit)


def colours() -> str:
    """The colours of the reports, as CSS variables, and a class for each expert's."""
    experts = "".join(f"--e{i}:{colour};" for i, colour in enumerate(EXPERTS))
    dark = f"@media (prefers-color-scheme:dark){{:root{{{variables(dark=True)}}}}}"
    classes = "".join(f".e{i}{{background:var(--e{i})}}" for i in range(len(EXPERTS)))
    return f":root{{{variables(dark=False)}{experts}}}{dark}{classes}"


def open_socket(port: int | None) -> socket.socket:
    """Open a socket on this machine; by default on port 8765, or on a free port."""
    for candidate in [8765, 0] if port is None else [port]:
        try:
            return socket.create_server((HERE, candidate))
        except (OSError, OverflowError) as error:
            why = error
    raise LayerswapError(f"{HERE}:{port or 8765}: cannot be used ({why}); choose --port")


def url_of(opened: socket.socket) -> str:
    """Return the address of a page."""
    return f"http://{HERE}:{opened.getsockname()[1]}/"


def make_server(player: Player, *, frames: str = "'none'") -> uvicorn.Server:
    """Make a page's server, to run on a socket of `open_socket`."""
    need_extras("the page", "play")
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    desk = Desk()
    app = make_app(player, desk, guard(frames))

    class Protocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(PATIENCE, lambda: self.cycle or transport.close())

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            desk.send(None)  # otherwise shutdown waits for open streams
            for limit in desk.awaited:
                limit.reschedule(0)
            await super().shutdown(sockets)

    return Server(
        uvicorn.Config(app, log_level="warning", access_log=False, ws="none", lifespan="on",
                       http=Protocol, timeout_graceful_shutdown=1)
    )  # fmt: skip


class Served:
    """A page that a thread serves at `url`; a notebook shows it."""

    def __init__(self, player: Player, port: int | None = None) -> None:
        # Lazy modules of transformers cannot be imported by two threads at once.
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401

        self._socket = open_socket(0 if port is None else port)
        self.url = url_of(self._socket)
        self._server = make_server(player, frames=NOTEBOOKS)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="layerswap-play", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop serving, and free the model's thread."""
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._socket.close()

    def __repr__(self) -> str:
        return f"layerswap play at {self.url}"

    def _repr_html_(self) -> str:
        size = 'title="layerswap play" width="100%" height="960"'
        return (
            f'<iframe src="{self.url}" {size}></iframe><p><a href="{self.url}">{self.url}</a></p>'
        )


def play(
    plan: Plan,
    *,
    prompts: Sequence[str] = (),
    device: str | None = None,
    port: int | None = None,
) -> Served:
    """Serve a page on this machine to compose a plan's two experts, ask, and compare.

    Args:
        plan: a swap, a partition, or a merge of two experts.
        prompts: prompts to offer.
        device: where the model runs; a GPU if there is one.
        port: of the address; a free one when None.

    Returns:
        The page, which a notebook shows; `stop()` ends it.

    Raises:
        LayerswapError: the plan is not of two experts, or the extra `play` is missing.
    """
    offered = [(prompt, None) for prompt in prompts]
    return Served(Player(plan, prompts=offered, device=device), port)
