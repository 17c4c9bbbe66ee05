"""The queue of a model, and the streams of events of the pages that ask it.

A job is a generator of events, and the model's thread runs one step of one job at a time: a
cancelled job ends at its next event. Everything else runs in the event loop.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import traceback
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from layerswap.ground.errors import LayerswapError

Event = dict[str, Any]
Events = Generator[Event, None, None]
MOST_EVENTS = 10_000
"""Most events that wait for a page."""
PING = 15.0
"""Seconds between signs of life on a stream without events."""
ENDS = ("done", "stopped", "failed")
FOR_ALL = ("status", "change")
"""Types of events that every page gets."""


def explain(error: Exception) -> str:
    """Return an error as one line for a page; print the traceback of an internal error."""
    if isinstance(error, LayerswapError):
        return str(error)
    traceback.print_exception(error)
    return f"internal error ({type(error).__name__})"


@dataclass(eq=False)
class Job:
    """Work of a page."""

    number: int
    page: str
    events: Events
    cancelled: bool = False

    def order(self) -> tuple[bool, int]:
        """Sort key of the queue: cancelled jobs first, since they only end."""
        return not self.cancelled, self.number

    def step(self) -> Event:
        """Run until the next event, or to the end."""
        try:
            if self.cancelled:
                self.events.close()  # releases the generator's resources
            end = {"type": "stopped" if self.cancelled else "done"}
            event = next(self.events, end)
        except Exception as error:
            event = {"type": "failed", "message": explain(error)}
        return {**event, "job": self.number}


class Desk:
    """The jobs that wait or run, and the open pages."""

    def __init__(self) -> None:
        self.pages: dict[str, asyncio.Queue[Event | None]] = {}
        self.awaited = set[asyncio.Timeout]()  # of requests whose bodies are not whole
        self.thread = ThreadPoolExecutor(1, "layerswap-play")
        self._jobs: list[Job] = []
        self._numbers, self._added = count(1), asyncio.Event()

    async def run(self) -> None:
        """Run the jobs, one step after the other."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._jobs:
                self._added.clear()
                await self._added.wait()
            job = min(self._jobs, key=Job.order)
            event = await loop.run_in_executor(self.thread, job.step)
            self.send(event, job.page)
            if event["type"] in ENDS:
                self._jobs.remove(job)

    def close(self) -> None:
        """End every job, and wait for the thread."""
        for job in self._jobs:
            self.thread.submit(job.events.close)
        self.thread.shutdown()

    def submit(self, page: str, events: Events) -> int:
        """Add a job of a page, and return its number."""
        job = Job(next(self._numbers), page, events)
        self._jobs.append(job)
        self._added.set()
        return job.number

    def cancel(self, page: str, number: int | None = None) -> None:
        """Cancel a job of a page, or all of them."""
        for job in self._jobs:
            job.cancelled |= job.page == page and number in (None, job.number)

    def send(self, event: Event | None, page: str | None = None) -> None:
        """Send an event to a page or to all of them; None ends streams."""
        for_all = page is None or (event is not None and event["type"] in FOR_ALL)
        for name, queue in self.pages.items():
            if for_all or name == page:
                with suppress(asyncio.QueueFull):
                    queue.put_nowait(event)

    async def stream(self, facts: Callable[[], Event]) -> AsyncIterator[str]:
        """Yield the events of a new page, `facts` first; closing cancels the page's jobs."""
        page = secrets.token_urlsafe(12)
        queue = self.pages[page] = asyncio.Queue(MOST_EVENTS)
        event: Event | None = {**facts(), "page": page}
        try:
            while event is not None:
                yield f"data: {json.dumps(event, allow_nan=False)}\n\n"
                try:
                    event = await asyncio.wait_for(queue.get(), PING)
                except TimeoutError:
                    event = {"type": "alive"}
        finally:
            del self.pages[page]
            self.cancel(page)
