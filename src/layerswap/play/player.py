"""The one model in memory: answers, scores and merges of compositions, event by event.

An event is a JSON object with a `type`; docs/play.md lists them. Generators run in one thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from layerswap.checkpoint.loading import pick_device
from layerswap.deltas.atlas import Subjects, measure
from layerswap.engine import Sampling
from layerswap.engine.rows import model_max_length
from layerswap.engine.sweep import Sweep
from layerswap.evaluation.statistics import mean_interval
from layerswap.experiment.compare import Values
from layerswap.experiment.documents import Documents, Prompt, Split
from layerswap.ground.errors import LayerswapError, RecipeError
from layerswap.ground.strict import Strict
from layerswap.merge import Plan
from layerswap.merge.folder import plan_tokenizer
from layerswap.play.desk import Event, Events
from layerswap.play.pair import Pair

SECONDS_BETWEEN_EVENTS = 0.1
"""Seconds between two events of a merge."""
MOST = 200
"""Most entries of the history that the page shows, the newest."""
Key = Annotated[str, Field(min_length=1, max_length=80)]


class PageRequest(Strict):
    """A request of an open page; `job` is the one to stop, all of the page when None."""

    page: Annotated[str, Field(max_length=40)]
    job: int | None = None


class Question(PageRequest):
    """A prompt for some compositions side by side; `length` is the most new tokens."""

    prompt: Annotated[str, Field(min_length=1, max_length=20_000)]
    compositions: Annotated[list[Key], Field(min_length=1, max_length=8)]
    length: Annotated[int, Field(ge=1, le=1024)] = 64
    temperature: Annotated[float, Field(ge=0, le=5, allow_inf_nan=False)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    chat: bool = False


class OfComposition(PageRequest):
    """A request about one composition; `out` is the folder to write it into."""

    composition: Key
    out: Annotated[str, Field(max_length=200, pattern=r"^[^\x00]+$")] = "merged"


class History:
    """A history of entries in a file, or only in memory; `who` names the experts."""

    def __init__(self, path: Path | None, who: Mapping[str, str]) -> None:
        self._path, self._who = path, dict(who)
        self.entries: list[dict[str, Any]] = []
        if path is None:
            return
        try:
            with path.open("a+", encoding="utf-8", newline="\n") as file:
                file.seek(0)
                lines = file.read().split("\n")
        except (OSError, ValueError) as error:
            raise LayerswapError(f"{path}: cannot keep the history ({error})") from None
        for line in lines:
            try:
                entry = json.loads(line or "null")
            except (ValueError, RecursionError):
                continue  # a line that was cut off
            # Entries of other experts stay in the file.
            if isinstance(entry, dict) and entry.get("experts") == self._who:
                self.entries.append(entry)

    def add(self, kind: str, **content: Any) -> dict[str, Any]:
        """Append an entry, and return its event for the pages."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        entry = {"kind": kind, "at": now, "experts": self._who, **content}
        self.entries.append(entry)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        return {"type": "history", "entry": entry}

    def tests(self, documents: str) -> int:
        """Count the tests on the test split of some documents."""
        return sum(e["kind"] == "test" and e.get("documents") == documents for e in self.entries)


class Player:
    """A plan's two experts in memory, with documents, prompts and a history.

    `length` is the longest answer that the page begins with, in tokens.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        documents: Documents | None = None,
        prompts: Sequence[Prompt] = (),
        history: Path | None = None,
        device: str | None = None,
        length: int = 64,
    ) -> None:
        self.pair, self.documents = Pair(plan), documents
        self.history = History(history, self.pair.sources)
        self.change: Mapping[str, Sequence[float]] | None = None
        self.state, self.fault, self.chats, self.closing = "loading", "", False, False
        self._prompts, self._length, self._root = prompts, length, Path.cwd().resolve()
        self._device = pick_device(device)
        self._members: dict[str, int] = {}
        self._scores: dict[tuple[str, Split], Values] = {}

    def load(self) -> None:
        """Load both experts, and read every layer of both once, so that switching is fast."""
        keys = dict.fromkeys(("task", "language", self.pair.start))
        plans = [self.pair.plan_of(key, in_memory=True) for key in keys]
        self.sweep = Sweep(plans, device=self._device)
        self._members = {key: number for number, key in enumerate(keys)}
        for number in self._members.values():
            self.sweep.switch(number)
        self._tokenizer = plan_tokenizer(plans[-1])
        self.chats = bool(getattr(self._tokenizer, "chat_template", None))
        # Checks once that the engine is exact, which the first answer would otherwise wait for.
        for _ in self.sweep.stream(self._ids("1 2 3", chat=False), max_new_tokens=1):
            pass
        if self.documents is not None:
            self.documents.open(self.sweep, plans[-1], self._tokenizer)
        self.state = "ready"

    def facts(self) -> Event:
        """Initial content of the page."""
        pair, documents = self.pair, self.documents
        prompts = self._prompts or (documents.prompts if documents else ())
        return {
            "type": "status", "state": self.state, "message": self.fault,
            "layers": pair.layers,
            "experts": [{"name": name, "label": label, "source": pair.sources.get(name, "")}
                        for name, label in pair.labels.items()],
            "presets": pair.presets,
            "start": pair.start,
            "prompts": [{"prompt": prompt, "answer": answer} for prompt, answer in prompts],
            "chats": self.chats,
            "length": self._length,
            "documents": documents and {"name": documents.name, "measure": documents.measure,
                                        "tests": self.history.tests(documents.name)},
            "history": self.history.entries[: -MOST - 1 : -1],
            "change": self.change,
            "lost_paths": self.sweep.lost_paths if self.state == "ready" else [],
        }  # fmt: skip

    # --- work, as events ---

    def ask(self, question: Question) -> Events:
        """Stream the answers of all compositions side by side, then the whole answers."""
        started = time.perf_counter()
        members = {self._member(key): key for key in question.compositions}
        ids = self._ids(question.prompt, chat=question.chat and self.chats)
        limit = model_max_length(self.sweep.model)
        room = question.length if limit is None else min(question.length, limit - len(ids))
        if room < 1:
            raise RecipeError(
                f"the prompt has {len(ids)} tokens, and the model reads {limit}; shorten it"
            )
        heat = question.temperature
        sampling = Sampling(heat, seed=question.seed) if heat else None
        written: dict[str, list[int]] = {key: [] for key in members.values()}
        first = None
        for newest in self.sweep.stream(
            ids, max_new_tokens=room, members=list(members), sampling=sampling
        ):
            first = first or time.perf_counter() - started
            for member, token in newest:
                written[members[member]].append(token)
            # The bytes of a letter may be several tokens.
            texts = {members[member]: self._text(written[members[member]]).rstrip("\ufffd")
                     for member, _ in newest}  # fmt: skip
            yield {"type": "tokens", "texts": texts}
        texts = {key: self._text(tokens) for key, tokens in written.items()}
        yield {
            "type": "answered",
            "answers": {key: {"text": texts[key], "tokens": written[key]} for key in texts},
            "first_s": first,
            "seconds": time.perf_counter() - started,
        }
        settings = question.model_dump(exclude={"page", "job", "compositions"})
        yield self.history.add("ask", **settings, answers=texts)

    def map(self, request: OfComposition) -> Events:
        """Score the map around a composition on the development documents, default first."""
        default, *rest = grid = self.pair.grid(request.composition)
        # Compositions with the same bottom share the most layers.
        rows = [list(row) for _, row in groupby(rest, key=lambda key: key.split(".")[1])]
        for row in [[default], *rows]:
            yield {"type": "cells", "cells": self._score(row, "development"), "of": len(grid)}

    def test(self, request: OfComposition) -> Events:
        """Score a composition on the test split; it is a test only the first time."""
        key = request.composition
        (score,) = self._score([key], "test")
        assert self.documents is not None, "documents have scored"
        name = self.documents.name
        about = {"documents": name, "before": self.history.tests(name)}
        yield {"type": "tested", "words": self.pair.words(key), **about, **score}
        numbers = {name: score[name] for name in ("mean", "low", "high", "n")}
        yield self.history.add("test", composition=key, score=numbers, **about)

    def merge(self, request: OfComposition) -> Events:
        """Write a composition below the folder that the page was started in."""
        out = (self._root / request.out).resolve()
        if out == self._root or not out.is_relative_to(self._root):
            raise RecipeError(f"{request.out!r} is not inside {self._root}; name a folder in it")
        if out.exists():
            raise RecipeError(f"{out}: exists already; name another folder")
        plan, started = self.pair.plan_of(request.composition), time.perf_counter()
        done, stopped, notes = 0, False, list[str]()

        def progress(count: int) -> None:
            nonlocal done
            done += count
            if stopped:
                raise LayerswapError("stopped")

        with ThreadPoolExecutor(1) as writer:
            written = writer.submit(plan.save, out, progress=progress, log=notes.append)
            try:
                while wait([written], SECONDS_BETWEEN_EVENTS).not_done:
                    yield {"type": "written", "bytes": done, "of": plan.nbytes}
            finally:
                stopped = True
        cost = {"bytes": plan.nbytes, "seconds": time.perf_counter() - started}
        yield {"type": "merged", "folder": str(written.result()), "notes": notes, **cost}
        yield self.history.add("merge", composition=request.composition, folder=request.out, **cost)

    def _member(self, key: str) -> int:
        """The number of a composition in the sweep."""
        if key not in self._members:
            (self._members[key],) = self.sweep.add([self.pair.plan_of(key, in_memory=True)])
        return self._members[key]

    def _ids(self, prompt: str, *, chat: bool) -> list[int]:
        if chat:
            message = [{"role": "user", "content": prompt}]
            prompt = self._tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
        return list(self._tokenizer(prompt, add_special_tokens=not chat).input_ids)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _score(self, keys: Sequence[str], split: Split) -> list[Event]:
        """Score compositions on a split: mean, interval and number of documents of each."""
        if self.documents is None:
            raise RecipeError("no documents with answers; start with --documents or --tasks")
        if new := [key for key in keys if (key, split) not in self._scores]:
            values = self.documents.score(self.sweep, [self._member(key) for key in new], split)
            self._scores |= {(key, split): scores for key, scores in zip(new, values, strict=True)}
        return [{"key": key, **asdict(mean_interval(self._scores[key, split]))} for key in keys]

    def measure(self) -> None:
        """Measure `change`: by expert, the share of each layer's rows that training changed.

        Runs in any thread. `change` stays None without a base.
        """
        plan = self.pair.in_memory
        experts = {name: plan.experts[name] for name in self.pair.experts.values()
                   if name in plan.experts}  # fmt: skip
        if plan.base is None or len(experts) < 2 or plan.composition.taken:
            return

        def progress(count: int) -> None:
            if self.closing:
                raise LayerswapError("stopped")

        with suppress(LayerswapError, KeyError, ValueError):  # such as another vocabulary
            atlas = measure(Subjects(plan.base, experts), progress=progress)
            self.change = {name: atlas.changed(name) for name in experts}
