"""The queue of a model: one job at a time, in one thread; answers overtake maps."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from layerswap.errors import EvaluationError, LayerswapError
from layerswap.play.player import Cancelled, Event

MOST_OF_A_PAGE, MOST = 8, 64
"""Most jobs of one page, and of all, that wait or run."""
Publish = Callable[[str, Event], None]


@dataclass(eq=False)
class Job:
    """Work of a page, as a generator of events.

    Attributes:
        background: True if other jobs may run between its events.
        cancelled: set from any thread.
    """

    number: int
    page: str
    work: Callable[[Job], Iterator[Event]]
    send: Publish
    background: bool = False
    cancelled: bool = False
    events: Iterator[Event] | None = field(default=None, repr=False)

    def publish(self, event: Event) -> None:
        """Send an event to the page."""
        self.send(self.page, {**event, "job": self.number})

    def step(self) -> bool:
        """Run until the next event; False at the end."""
        try:
            if self.events is None:
                self.events = self.work(self)
            event = None if self.cancelled else next(self.events, None)
            if event is None:
                self.publish({"type": "stopped" if self.cancelled else "done"})
                return False
            self.publish(event)
            return True
        except Cancelled:
            self.publish({"type": "stopped"})
        except LayerswapError as error:
            self.publish({"type": "failed", "message": str(error)})
        except Exception as error:  # ours; the thread must live on
            traceback.print_exc()
            self.publish({"type": "failed", "message": f"internal error ({type(error).__name__})"})
        return False


class Desk:
    """Runs jobs one after the other, and tells every waiting page its place."""

    def __init__(self, send: Publish) -> None:
        self._send, self._numbers = send, count(1)
        self._waiting: list[Job] = []
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="layerswap-play", daemon=True)
        self._thread.start()

    def submit(
        self, page: str, work: Callable[[Job], Iterator[Event]], *, background: bool = False
    ) -> Job:
        """Add a job of a page; refused if too many wait."""
        with self._changed:
            jobs = [*self._waiting, *filter(None, [self._running])]
            if len(jobs) >= MOST or sum(job.page == page for job in jobs) >= MOST_OF_A_PAGE:
                raise EvaluationError("too many requests wait; stop one, or wait for the answers")
            job = Job(next(self._numbers), page, work, self._send, background)
            self._waiting.append(job)
            self._tell()
            self._changed.notify()
        return job

    def cancel(self, page: str, number: int | None = None) -> None:
        """Cancel a job of a page, or all of them."""
        with self._changed:
            for job in [*self._waiting, *filter(None, [self._running])]:
                if job.page == page and number in (None, job.number):
                    job.cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """Cancel everything, and end the thread."""
        with self._changed:
            self._closed = True
            for job in [*self._waiting, *filter(None, [self._running])]:
                job.cancelled = True
            self._changed.notify()
        self._thread.join(timeout=10)

    @property
    def length(self) -> int:
        """The number of jobs that wait or run."""
        return len(self._waiting) + (self._running is not None)

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            while job.step():
                if job.background and self._put_back(job):
                    break
            else:
                if job.events is not None and hasattr(job.events, "close"):
                    job.events.close()  # frees what an answer that was stopped holds
            with self._changed:
                self._running = None

    def _next(self) -> Job | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            urgent = next((job for job in self._waiting if not job.background), self._waiting[0])
            self._waiting.remove(urgent)
            self._running = urgent
            self._tell()
            return urgent

    def _put_back(self, job: Job) -> bool:
        """Let other jobs go first, if there are any."""
        with self._changed:
            if all(other.background for other in self._waiting):
                return False
            self._waiting.append(job)
            return True

    def _tell(self) -> None:
        """Send every waiting job its place: the number of jobs before it."""
        order = sorted(self._waiting, key=lambda job: job.background)
        for place, job in enumerate(order, start=int(self._running is not None)):
            if place:
                job.publish({"type": "place", "place": place})
