"""The one model in memory: answers of compositions, event by event.

An event is a JSON object with a `type`. Generators run in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from layerswap.checkpoint.loading import pick_device
from layerswap.deltas.atlas import Subjects, measure
from layerswap.engine import Sampling
from layerswap.engine.rows import model_max_length
from layerswap.engine.sweep import Sweep
from layerswap.evaluation.examples import read_examples
from layerswap.ground.errors import LayerswapError, RecipeError
from layerswap.ground.strict import Strict
from layerswap.merge.folder import plan_tokenizer
from layerswap.merge.plan import Plan
from layerswap.play.pair import Pair

Event = dict[str, Any]
Events = Generator[Event, None, None]
Prompt = tuple[str, str | None]
"""A prompt, and its answer if it is known."""
Key = Annotated[str, Field(min_length=1, max_length=80)]


class Question(Strict):
    """A prompt for some compositions side by side; `length` is the most new tokens."""

    prompt: Annotated[str, Field(min_length=1, max_length=20_000)]
    compositions: Annotated[list[Key], Field(min_length=1, max_length=8)]
    length: Annotated[int, Field(ge=1, le=1024)] = 64
    temperature: Annotated[float, Field(ge=0, le=5, allow_inf_nan=False)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    chat: bool = False


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts: plain lines, or JSON Lines with `text`, or with `prompt` and `answer`."""
    return [(example.prompt, example.text) if example.prompt else (example.text, None)
            for example in read_examples(path)]  # fmt: skip


class Player:
    """A plan's two experts in memory, with prompts to offer.

    `length` is the longest answer that the page begins with, in tokens.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        prompts: Sequence[Prompt] = (),
        device: str | None = None,
        length: int = 64,
    ) -> None:
        self.pair = Pair(plan)
        self.change: Mapping[str, Sequence[float]] | None = None
        self.state, self.fault, self.chats, self.closing = "loading", "", False, False
        self._prompts, self._length = prompts, length
        self._device = pick_device(device)
        self._members: dict[str, int] = {}

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
        self.state = "ready"

    def facts(self) -> Event:
        """Initial content of the page."""
        pair = self.pair
        return {
            "state": self.state, "message": self.fault,
            "layers": pair.layers,
            "experts": [{"name": name, "label": label, "source": pair.sources.get(name, "")}
                        for name, label in pair.labels.items()],
            "presets": pair.presets,
            "start": pair.start,
            "prompts": [{"prompt": prompt, "answer": answer} for prompt, answer in self._prompts],
            "chats": self.chats,
            "length": self._length,
            "change": self.change,
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
