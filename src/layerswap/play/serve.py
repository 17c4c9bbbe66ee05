"""Serves the page: a few JSON routes, one stream of events per page, and one model.

The routes are in docs/play.md. Requests with work answer with the number of a job, whose events
come over the stream of the page; the stream's end cancels the jobs of its page.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from layerswap.checkpoint.loading import pick_device
from layerswap.compose.schema import Strict
from layerswap.compose.yaml_file import validate
from layerswap.errors import LayerswapError, RecipeError
from layerswap.play.desk import Desk, Job
from layerswap.play.documents import Documents, Prompt
from layerswap.play.history import History
from layerswap.play.pair import Pair
from layerswap.play.player import Event, Player, Question
from layerswap.play.security import LARGEST_BODY, NOTEBOOKS, Guard, is_local
from layerswap.report.drawing import EXPERTS, variables
from layerswap.versions import need_extras

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response

    from layerswap.merge import Plan

MOST_PAGES, MOST_EVENTS = 32, 10_000
"""Most open pages, and most events that wait for one of them."""
LONGEST_PROMPT, LONGEST_ANSWER, MOST_ANSWERS = 20_000, 1024, 8
"""Characters of a prompt, tokens of an answer, and answers side by side."""
PING = 15.0
"""Seconds between signs of life on a stream without events."""
HISTORY = "layerswap-play.jsonl"
Key = Annotated[str, Field(min_length=1, max_length=80)]


class Body(Strict):
    """A request of an open page."""

    page: Annotated[str, Field(max_length=40)]


class Ask(Body):
    """Asks some compositions a prompt."""

    prompt: Annotated[str, Field(min_length=1, max_length=LONGEST_PROMPT)]
    compositions: Annotated[list[Key], Field(min_length=1, max_length=MOST_ANSWERS)]
    length: Annotated[int, Field(ge=1, le=LONGEST_ANSWER)] = 64
    temperature: Annotated[float, Field(ge=0, le=5, allow_inf_nan=False)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    chat: bool = False


class OfComposition(Body):
    """A request about one composition."""

    composition: Key


class Merge(OfComposition):
    """Writes a composition into a folder."""

    out: Annotated[str, Field(min_length=1, max_length=200)]


class Stop(Body):
    """Cancels a job of the page."""

    job: int


class Hub:
    """The open pages, and the events that wait for each of them."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._pages: dict[str, asyncio.Queue[Event | None]] = {}

    def open(self) -> tuple[str, asyncio.Queue[Event | None]]:
        """Open a page."""
        if len(self._pages) >= MOST_PAGES:
            raise RecipeError(f"{MOST_PAGES} pages are open; close one")
        page = secrets.token_urlsafe(12)
        self._pages[page] = asyncio.Queue()
        return page, self._pages[page]

    def close(self, page: str) -> None:
        """Forget a page."""
        self._pages.pop(page, None)

    def __contains__(self, page: str) -> bool:
        return page in self._pages

    def send(self, page: str, event: Event | None) -> None:
        """Send an event to a page from any thread; None ends its stream."""
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._put, page, event)

    def broadcast(self, event: Event | None) -> None:
        """Send an event to all pages."""
        for page in list(self._pages):
            self.send(page, event)

    def _put(self, page: str, event: Event | None) -> None:
        queue = self._pages.get(page)
        if queue is not None and queue.qsize() < MOST_EVENTS:
            queue.put_nowait(event)


class Page:
    """What is served: a pair of experts, documents, prompts and a history."""

    def __init__(
        self,
        plan: Plan,
        *,
        documents: Documents | None = None,
        prompts: Sequence[Prompt] = (),
        history: Path | None = None,
        device: str | None = None,
        dtype: str | None = None,
        length: int = 64,
    ) -> None:
        self.pair = Pair.of(plan)
        self.documents, self.prompts, self._length = documents, prompts, length
        self.history = History(history, self.pair.sources)
        self.player = Player(self.pair, documents, device=pick_device(device), dtype=dtype)
        self.hub = Hub()
        self.root = Path.cwd().resolve()
        self.status: Event = {"type": "status", "state": "loading"}
        self.change: Any = None
        self.desk: Desk | None = None

    def open(self) -> None:
        """Start the thread of the model, and load it."""
        self.desk = Desk(self.hub.send)
        self.desk.submit("", self._load)

    def close(self) -> None:
        """End every stream and the thread of the model."""
        self.hub.broadcast(None)
        if self.desk is not None:
            self.desk.close()

    def _load(self, job: Job) -> Iterator[Event]:
        try:
            self.player.load()
            self.status = {"type": "status", "state": "ready"}
            threading.Thread(target=self._measure, daemon=True).start()
        except LayerswapError as error:
            self.status = {"type": "status", "state": "failed", "message": str(error)}
        except Exception:
            self.status = {"type": "status", "state": "failed", "message": "internal error"}
            raise
        finally:
            self.hub.broadcast(self.facts())
        yield from ()

    def _measure(self) -> None:
        self.change = self.player.change()
        if self.change is not None:
            self.hub.broadcast({"type": "change", "change": self.change})

    def facts(self) -> Event:
        """What the page shows before anything is asked."""
        pair, documents, ready = self.pair, self.documents, self.status["state"] == "ready"
        prompts = self.prompts or (documents.prompts if documents and ready else ())
        return {
            **self.status,
            "layers": pair.layers,
            "experts": [{"name": name, "label": label, "source": pair.sources.get(name, "")}
                        for name, label in pair.labels.items()],
            "base": pair.plan.base is not None,
            "presets": pair.presets,
            "start": pair.start,
            "prompts": [one._asdict() for one in prompts],
            "chats": ready and self.player.chats,
            "length": self._length,
            "documents": documents and {"name": documents.name, "measure": documents.measure,
                                        "tests": self.history.tests(documents.name)},
            "history": self.history.newest,
            "change": self.change,
        }  # fmt: skip

    # --- work ---

    def ask(self, body: Ask) -> Callable[[Job], Iterator[Event]]:
        """The work of a question."""
        keys = tuple(dict.fromkeys(body.compositions))
        for key in keys:
            self.pair.plan_of(key)
        settings = body.model_dump(exclude={"page", "compositions"})
        question = Question(compositions=keys, **settings)

        def work(job: Job) -> Iterator[Event]:
            for event in self.player.ask(question):
                yield event
                if event["type"] == "answered":
                    texts = {key: one["text"] for key, one in event["answers"].items()}
                    self._keep("ask", **settings, answers=texts)

        return work

    def map(self, body: OfComposition) -> Callable[[Job], Iterator[Event]]:
        """The work of a map."""
        self._need_documents()
        self.pair.plan_of(body.composition)
        return lambda job: self.player.fill(body.composition)

    def test(self, body: OfComposition) -> Callable[[Job], Iterator[Event]]:
        """The work of a test; it is one only the first time."""
        documents, key = self._need_documents(), body.composition
        self.pair.plan_of(key)

        def work(job: Job) -> Iterator[Event]:
            (score,) = self.player.score([key], "test")
            before = self.history.tests(documents.name)
            yield {"type": "tested", "before": before, **score, "words": self.pair.words(key)}
            numbers = {name: score[name] for name in ("mean", "low", "high", "n")}
            self._keep("test", documents=documents.name, composition=key, before=before,
                       score=numbers)  # fmt: skip

        return work

    def merge(self, body: Merge) -> Callable[[Job], Iterator[Event]]:
        """The work of a merge, into a new folder below the one that the page was started in."""
        out = (self.root / body.out).resolve()
        if out == self.root or not out.is_relative_to(self.root) or "\0" in body.out:
            raise RecipeError(f"{body.out!r} is not inside {self.root}; name a folder in it")
        self.pair.plan_of(body.composition)

        def work(job: Job) -> Iterator[Event]:
            for event in self.player.merge(job, body.composition, out):
                yield event
                self._keep("merge", composition=body.composition, folder=body.out,
                           bytes=event["bytes"], seconds=event["seconds"])  # fmt: skip

        return work

    def _need_documents(self) -> Documents:
        if self.documents is None:
            raise RecipeError("no documents with answers; start with --documents or --tasks")
        return self.documents

    def _keep(self, kind: str, **content: Any) -> None:
        self.hub.broadcast({"type": "history", "entry": self.history.add(kind, **content)})


def make_app(
    page: Page, *, host: str = "127.0.0.1", token: str | None = None, frames: str = "'none'"
) -> Guard:
    """The web application of a page."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    def refused(error: LayerswapError, status: int = 400) -> Response:
        return JSONResponse({"error": str(error)}, status)

    def file(name: str, kind: str) -> Route:
        return Route(f"/{name}", lambda request: Response(_rendered(name), media_type=kind))

    def index(request: Request) -> Response:
        return Response(_rendered("play.html"), media_type="text/html")

    async def events(request: Request) -> Response:
        try:
            number, queue = page.hub.open()
        except RecipeError as error:
            return refused(error, 503)
        return StreamingResponse(_stream(page, number, queue), media_type="text/event-stream")

    def composition(request: Request) -> Response:
        try:
            return JSONResponse(page.pair.describe(request.query_params.get("key", "")))
        except LayerswapError as error:
            return refused(error)

    def post(
        path: str, kind: type[Body], work: Callable[[Any], Callable[[Job], Iterator[Event]]] | None,
        background: bool = False,
    ) -> Route:  # fmt: skip
        async def answer(request: Request) -> Response:
            try:
                body = await _read(request, kind)
                if body.page not in page.hub:
                    return refused(RecipeError("this page's stream has ended; reload it"), 409)
                assert page.desk is not None, "the page is open while it is served"
                if work is None:
                    page.desk.cancel(body.page, body.job)
                    return JSONResponse({})
                if page.status["state"] == "failed":
                    return refused(RecipeError(page.status["message"]), 409)
                asked = await asyncio.to_thread(work, body)
                job = page.desk.submit(body.page, asked, background=background)
                return JSONResponse({"job": job.number})
            except LayerswapError as error:
                return refused(error)

        return Route(path, answer, methods=["POST"])

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        page.hub.loop = asyncio.get_running_loop()
        page.open()
        yield
        await asyncio.to_thread(page.close)

    routes = [
        Route("/", index),
        file("play.css", "text/css"),
        file("play.js", "text/javascript"),
        Route("/api/events", events),
        Route("/api/composition", composition),
        post("/api/ask", Ask, page.ask),
        post("/api/map", OfComposition, page.map, background=True),
        post("/api/test", OfComposition, page.test),
        post("/api/merge", Merge, page.merge),
        post("/api/stop", Stop, None),
    ]
    app: Any = Starlette(routes=routes, lifespan=lifespan)
    return Guard(app, host=host, token=token, frames=frames)


async def _read(request: Request, kind: type[Body]) -> Any:
    """The checked body of a request, within its bound."""
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > LARGEST_BODY:
            raise RecipeError(f"the request is larger than {LARGEST_BODY} bytes")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise RecipeError("the request is not JSON") from None
    return validate(kind, data, where="request", expected="a request is an object")


async def _stream(
    page: Page, number: str, queue: asyncio.Queue[Event | None]
) -> AsyncIterator[str]:
    """The events of a page; its end cancels the page's jobs."""
    try:
        yield _event({**page.facts(), "page": number})
        while True:
            try:
                event = await asyncio.wait_for(queue.get(), PING)
            except TimeoutError:
                yield ": still here\n\n"
                continue
            if event is None:
                return
            yield _event(event)
    finally:
        page.hub.close(number)
        if page.desk is not None:
            page.desk.cancel(number)


def _event(event: Event) -> str:
    return f"data: {json.dumps(event, ensure_ascii=True, allow_nan=False)}\n\n"


@cache
def _rendered(name: str) -> str:
    """A file of the page, with the colours of the reports."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("layerswap.play"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.globals.update(variables=variables, experts=EXPERTS)
    return environment.get_template(f"{name}.j2" if name.endswith("css") else name).render()


# --- servers ---


def open_socket(host: str, port: int | None) -> socket.socket:
    """A socket that listens on an address; on the next free port if none is given.

    Raises:
        LayerswapError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for one in [DEFAULT_PORT, 0] if port is None else [port]:
        opened = socket.socket(family)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((host, one))
            return opened
        except (OSError, OverflowError) as error:
            opened.close()
            why = error
    raise LayerswapError(f"{host}:{port or DEFAULT_PORT}: cannot be used ({why}); choose --port")


DEFAULT_PORT = 8765


def make_server(
    page: Page, host: str, *, token: str | None = None, frames: str = "'none'"
) -> uvicorn.Server:
    """A server of a page, to run on a socket of `open_socket`; other hosts need a token."""
    need_extras("the page", "play")
    import uvicorn

    if token is None and not is_local(host):
        raise RecipeError(f"{host}: an address that other machines reach needs a token")
    app: Any = make_app(page, host=host, token=token, frames=frames)
    return uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, ws="none", lifespan="on",
                       limit_concurrency=4 * MOST_PAGES, timeout_graceful_shutdown=1)
    )  # fmt: skip


class Served:
    """A page that a thread serves; a notebook shows it.

    Attributes:
        url: its address.
    """

    def __init__(self, page: Page, port: int | None = None) -> None:
        self._socket = open_socket("127.0.0.1", 0 if port is None else port)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        self._server = make_server(page, "127.0.0.1", frames=NOTEBOOKS)
        run = lambda: self._server.run(sockets=[self._socket])  # noqa: E731
        self._thread = threading.Thread(target=run, name="layerswap-play-server", daemon=True)
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
    documents: Documents | None = None,
    prompts: Sequence[str] = (),
    history: Path | str | None = HISTORY,
    device: str | None = None,
    dtype: str | None = None,
    port: int | None = None,
) -> Served:
    """Serve a page on this machine to compose a plan's two experts, ask, and compare.

    Args:
        plan: a swap, a partition, or a merge of two experts.
        documents: documents with answers, for the map.
        prompts: prompts to offer.
        history: file that keeps what was tried; None for none.
        device: where the model runs; a GPU if there is one.
        dtype: of the model; as stored when None.
        port: of the address; a free one when None.

    Returns:
        The page, which a notebook shows; `stop()` ends it.

    Raises:
        LayerswapError: the plan is not of two experts, or the extra `play` is missing.
    """
    need_extras("the page", "play")
    kept = None if history is None else Path(history)
    offered = [Prompt(one) for one in prompts]
    page = Page(
        plan, documents=documents, prompts=offered, history=kept, device=device, dtype=dtype
    )
    return Served(page, port)
