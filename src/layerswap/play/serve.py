"""Serves the page: JSON routes, and answers as a stream of JSON lines."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import traceback
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.ground.errors import LayerswapError, RecipeError
from layerswap.ground.yaml_file import validate
from layerswap.play.player import Events, Player, Question
from layerswap.play.security import HOSTS, NOTEBOOKS, guard
from layerswap.report.drawing import EXPERTS, variables
from layerswap.versions import need_extras

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware.base import DispatchFunction
    from starlette.requests import Request
    from starlette.responses import Response

    from layerswap.merge.plan import Plan

HERE = "127.0.0.1"
LARGEST_BODY = 1 << 16
"""Bytes of a request's body."""
PATIENCE = 20.0
"""Timeout of a request's body, in seconds."""
Timeouts = set[asyncio.Timeout]
"""Timeouts of the bodies that are read."""


def make_app(player: Player, dispatch: DispatchFunction, timeouts: Timeouts) -> Starlette:
    """Make the web application of a page.

    One thread has the model, and one answer is written at a time. A client that leaves ends its
    answer. `timeouts` holds those of the bodies that are read, for the end of the server.
    """
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    def refused(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    def style(request: Request) -> Response:
        return Response(colours(), media_type="text/css")

    thread, turn = ThreadPoolExecutor(1, "layerswap-play"), asyncio.Lock()

    async def status(request: Request) -> Response:
        return JSONResponse(player.facts())

    def composition(request: Request) -> Response:
        return JSONResponse(player.pair.describe(request.query_params.get("key", "")))

    async def ask(request: Request) -> Response:
        data = await read_body(request, timeouts)
        question = validate(Question, data, where="request", expected="a request is an object")
        if player.state == "failed":
            raise HTTPException(409, player.fault)
        return StreamingResponse(lines(player.ask(question)), media_type="application/jsonl")

    async def lines(events: Events) -> AsyncIterator[str]:
        run = asyncio.get_running_loop().run_in_executor
        async with turn:
            try:
                while not player.closing and (event := await run(thread, next, events, None)):
                    yield json.dumps(event, allow_nan=False) + "\n"
            except Exception as error:
                yield json.dumps({"type": "failed", "message": explain(error)}) + "\n"
            finally:
                thread.submit(events.close)  # releases the generator's resources

    async def prepare() -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(thread, player.load)
        except Exception as error:
            player.state, player.fault = "failed", explain(error)
        if player.state == "ready":
            await asyncio.to_thread(player.measure)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(prepare())
        yield
        task.cancel()
        thread.shutdown()

    routes = [
        Route("/colours.css", style),
        Route("/api/status", status),
        Route("/api/composition", composition),
        Route("/api/ask", ask, methods=["POST"]),
        Mount("/", StaticFiles(directory=Path(__file__).parent / "static", html=True)),
    ]
    handlers: Any = {LayerswapError: refused}
    return Starlette(
        routes=routes, lifespan=lifespan, exception_handlers=handlers,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS),
                    Middleware(BaseHTTPMiddleware, dispatch=dispatch)],
    )  # fmt: skip


async def read_body(request: Request, timeouts: Timeouts) -> Any:
    """Read the JSON of a request, up to a size and a time."""
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

    content = b""
    try:
        async with asyncio.timeout(PATIENCE) as limit:
            timeouts.add(limit)
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
        timeouts.discard(limit)


def explain(error: Exception) -> str:
    """Return an error as one line for a page; print the traceback of an internal error."""
    if isinstance(error, LayerswapError):
        return str(error)
    traceback.print_exception(error)
    return f"internal error ({type(error).__name__})"


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

    timeouts = Timeouts()

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            player.closing = True  # ends the answer that is written
            for limit in timeouts:
                limit.reschedule(0)
            await super().shutdown(sockets)

    return Server(
        uvicorn.Config(make_app(player, guard(frames), timeouts), log_level="warning",
                       access_log=False, ws="none", lifespan="on", timeout_graceful_shutdown=1)
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
