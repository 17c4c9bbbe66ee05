"""The one model in memory: answers, scores and merges of compositions, event by event.

An event is a JSON object with a `type`; docs/play.md lists them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from layerswap.deltas.atlas import Subjects, measure
from layerswap.engine import Sampling
from layerswap.engine.rows import model_max_length
from layerswap.engine.sweep import Sweep
from layerswap.errors import LayerswapError, RecipeError
from layerswap.evaluation.statistics import mean_interval
from layerswap.merge.folder import plan_tokenizer
from layerswap.play.documents import Documents, Split
from layerswap.play.pair import Pair, read_swap
from layerswap.search.protocol import Values

Event = dict[str, Any]
EVERY = 0.1
"""Seconds between two events of a merge."""


class Running(Protocol):
    """A job as its work sees it."""

    number: int
    cancelled: bool

    def publish(self, event: Event) -> None:
        """Send an event to the job's page."""


class Cancelled(Exception):
    """Ends the work of a job that was cancelled."""


@dataclass(frozen=True)
class Question:
    """A prompt for some compositions, and how tokens are chosen."""

    prompt: str
    compositions: tuple[str, ...]
    length: int  # most new tokens
    temperature: float = 0.0  # 0 for greedy
    seed: int = 0
    chat: bool = False

    def sampling(self) -> Sampling | None:
        """How tokens are drawn; None for greedy."""
        return Sampling(self.temperature, seed=self.seed) if self.temperature else None


class Player:
    """A pair's model in memory; all but `change` is called from one thread."""

    def __init__(
        self, pair: Pair, documents: Documents | None, *, device: str, dtype: str | None
    ) -> None:
        self.pair, self.documents = pair, documents
        self._device, self._dtype = device, dtype
        self._members: dict[str, int] = {}
        self._scores: dict[tuple[str, Split], Values] = {}

    def load(self) -> None:
        """Load both experts, and read every layer of both once, so that switching is fast."""
        keys = dict.fromkeys(("task", "language", self.pair.start))
        plans = [self.pair.plan_of(key, in_memory=True) for key in keys]
        self.sweep = Sweep(plans, device=self._device, dtype=self._dtype)
        self._members = {key: number for number, key in enumerate(keys)}
        for number in self._members.values():
            self.sweep.switch(number)
        self.tokenizer = plan_tokenizer(plans[-1])
        self.chats = bool(getattr(self.tokenizer, "chat_template", None))
        # Checks once that the engine is exact, which the first answer would otherwise wait for.
        for _ in self.sweep.stream(self._ids("1 2 3", chat=False), max_new_tokens=1):
            pass
        if self.documents is not None:
            self.documents.open(self.sweep, plans[-1], self.tokenizer)

    def member(self, key: str) -> int:
        """The number of a composition in the sweep."""
        if key not in self._members:
            (self._members[key],) = self.sweep.add([self.pair.plan_of(key, in_memory=True)])
        return self._members[key]

    def _ids(self, prompt: str, *, chat: bool) -> list[int]:
        if not chat:
            ids = self.tokenizer(prompt).input_ids
        else:
            message = [{"role": "user", "content": prompt}]
            text = self.tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return list(ids)

    # --- work, as events ---

    def ask(self, question: Question) -> Iterator[Event]:
        """Stream the answers of all compositions side by side, then the whole answers."""
        started = time.perf_counter()
        members = {self.member(key): key for key in question.compositions}
        ids = self._ids(question.prompt, chat=question.chat and self.chats)
        limit = model_max_length(self.sweep.model)
        room = question.length if limit is None else min(question.length, limit - len(ids))
        if room < 1:
            raise RecipeError(
                f"the prompt has {len(ids)} tokens, and the model reads {limit}; shorten it"
            )
        written: dict[str, list[int]] = {key: [] for key in question.compositions}
        texts = dict.fromkeys(written, "")
        first = None
        for newest in self.sweep.stream(
            ids, max_new_tokens=room, members=list(members), sampling=question.sampling()
        ):
            first = first or time.perf_counter() - started
            changes = {}
            for member, token in newest:
                written[members[member]].append(token)
            for key in {members[member] for member, _ in newest}:
                text = self._text(written[key])
                changes[key] = self._change(texts[key], text)
                texts[key] = text
            yield {"type": "tokens", "answers": changes}
        whole = {key: {"text": self._text(tokens, end=True), "tokens": tokens}
                 for key, tokens in written.items()}  # fmt: skip
        yield {"type": "answered", "answers": whole, "first_s": first,
               "seconds": time.perf_counter() - started}  # fmt: skip

    def _text(self, tokens: Sequence[int], *, end: bool = False) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        # The bytes of a letter may be several tokens.
        return text if end else text.rstrip("\ufffd")

    @staticmethod
    def _change(old: str, new: str) -> Event:
        return {"add": new[len(old) :]} if new.startswith(old) else {"text": new}

    def score(self, keys: Sequence[str], split: Split) -> list[Event]:
        """Score compositions on a split: mean, interval and number of documents of each."""
        assert self.documents is not None, "scores need documents"
        if new := [key for key in keys if (key, split) not in self._scores]:
            values = self.documents.score(self.sweep, [self.member(key) for key in new], split)
            for key, scores in zip(new, values, strict=True):
                self._scores[key, split] = scores
        return [
            {"key": key, "zones": self._zones(key), **asdict(mean_interval(scores))}
            for key in keys for scores in [self._scores[key, split]]
        ]  # fmt: skip

    @staticmethod
    def _zones(key: str) -> list[int] | None:
        swap = read_swap(key)
        return None if swap is None else [swap[0].bottom, swap[0].top]

    def fill(self, key: str) -> Iterator[Event]:
        """Score the map around a composition on the development documents, default first."""
        grid = self.pair.grid(key)
        rest: dict[int, list[str]] = {}
        for one in grid[1:]:
            swap = read_swap(one)
            assert swap is not None, "the map is of swaps"
            rest.setdefault(swap[0].bottom, []).append(one)
        for number, part in enumerate([grid[:1], *rest.values()]):
            yield {"type": "cells", "cells": self.score(part, "development"), "of": len(grid),
                   "last": number == len(rest)}  # fmt: skip

    def merge(self, job: Running, key: str, out: Path) -> Iterator[Event]:
        """Write the checkpoint of a composition, and report its cost."""
        plan, started = self.pair.plan_of(key), time.perf_counter()
        done, shown = 0, 0.0

        def progress(count: int) -> None:
            nonlocal done, shown
            if job.cancelled:
                raise Cancelled
            done += count
            if time.perf_counter() - shown > EVERY:
                shown = time.perf_counter()
                job.publish({"type": "written", "bytes": done, "of": plan.nbytes})

        notes: list[str] = []
        written = plan.save(out, progress=progress, log=notes.append)
        yield {"type": "merged", "folder": str(written), "bytes": plan.nbytes, "notes": notes,
               "seconds": time.perf_counter() - started}  # fmt: skip

    def change(self) -> Mapping[str, Sequence[float]] | None:
        """By expert, the share of each layer's rows that fine-tuning changed; None without a base.

        A row counts above the MAV of the expert's top 15%, as on the delta map.
        """
        pair = self.pair
        names = [name for name in (pair.task, pair.language) if name in pair.plan.experts]
        if pair.plan.base is None or len(names) < 2 or pair.plan.recipe.stack:
            return None
        plan = pair.in_memory
        assert plan.base is not None, "the plan in memory has the same base"
        try:
            atlas = measure(Subjects(plan.base, {name: plan.experts[name] for name in names}))
        except (LayerswapError, KeyError, ValueError):  # such as another vocabulary
            return None
        shares: dict[str, list[float]] = {}
        for name in names:
            above, rows = [0] * atlas.layers, [0] * atlas.layers
            threshold = atlas.threshold(name)
            for (layer, _), tensors in atlas.matrices().items():
                for tensor in tensors:
                    changed = atlas.changes[name, tensor].rows
                    above[layer] += int((changed > threshold).sum())
                    rows[layer] += len(changed)
            shares[name] = [a / max(1, n) for a, n in zip(above, rows, strict=True)]
        return shares
