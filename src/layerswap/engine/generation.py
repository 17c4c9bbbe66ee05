"""Generates text with many compositions at once, or with one after the other.

Tokens are drawn with random numbers that depend on seed, prompt and position alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from layerswap.engine.prefix import Pair, PrefixCache
from layerswap.engine.scoring import LOGIT_BYTES, pad_with_mask
from layerswap.engine.slots import (
    CopyOp,
    RowSelector,
    SlotCache,
    SlotLayout,
    Slots,
    concatenate,
    merge_entries,
    select_rows,
)
from layerswap.engine.split import Call, other_state, takes_positions
from layerswap.engine.trie import CLOSE, NOT_SO_BUILT, Runner
from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from transformers import LogitsProcessorList


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    A draw depends on seed, prompt and position alone: every composition answers a prompt with
    the same random numbers, whatever is generated beside it.

    Attributes:
        temperature: above 0; logits are divided by it.
        top_k: draw among this many most likely tokens; 0 for all.
        top_p: draw among the most likely tokens that together have this probability.
        seed: of the random numbers.

    Raises:
        EvaluationError: a setting out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise EvaluationError(f"temperature is {self.temperature}; it must be above 0")
        if self.top_k < 0:
            raise EvaluationError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise EvaluationError(f"top_p is {self.top_p}; it must be above 0 and at most 1")

    def processors(self) -> LogitsProcessorList:
        """Transformers' own processors, in the order in which it applies them."""
        from transformers import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        found = LogitsProcessorList()
        if self.temperature != 1:
            found.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            found.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            found.append(TopPLogitsWarper(self.top_p))
        return found

    def draws(self, streams: Sequence[int], count: int) -> npt.NDArray[np.float64]:
        """Uniform numbers in [0, 1), `(streams, count)`; a stream's are its own for ever."""
        import numpy as np

        found = np.empty((len(streams), count))
        for row, stream in enumerate(streams):
            digest = hashlib.sha256(f"{self.seed}/{stream}".encode()).digest()
            key = np.frombuffer(digest[:16], dtype=np.uint64)
            found[row] = np.random.Generator(np.random.Philox(key=key)).random(count)
        return found


def draw_tokens(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """One token per row, where the distribution function passes the row's draw.

    Args:
        logits: float32 `[rows, vocabulary]`, minus infinity for what must not be drawn.
        draws: float64 `[rows]`, uniform in [0, 1).

    Returns:
        int64 `[rows]`.
    """
    import torch

    total = logits.double().softmax(dim=-1).cumsum(dim=-1)
    # Scaled by what it really sums to, so that a draw close to 1 still finds a token.
    wanted = (draws * total[:, -1])[:, None]
    return torch.searchsorted(total, wanted, right=True)[:, 0].clamp_max(logits.shape[1] - 1)


CHECKED_MEMBERS, CHECKED_PROMPTS, CHECKED_TOKENS, CHECKED_STEPS = 3, 2, 32, 4
"""How much the check of joint decoding generates: compositions, prompts, tokens of each, steps."""
Reason = Literal["eos", "stop", "length"]
"""The model ended the text; it wrote a stop string; it wrote as much as it may."""


class Generation(NamedTuple):
    """What a composition wrote.

    Attributes:
        tokens: every token, the one that ended it included.
        reason: a `Reason`.
    """

    tokens: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class StoppingCriteria:
    """What ends a row.

    Attributes:
        max_new_tokens: most tokens that are written.
        eos: tokens that end a text.
        stop: strings that end it, wherever they are in what was written.
        tokenizer: decodes for `stop`.

    Raises:
        EvaluationError: no token may be written, or stop strings without a tokenizer.
    """

    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    tokenizer: Any = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise EvaluationError(f"max_new_tokens is {self.max_new_tokens}; at least 1 is needed")
        if self.stop and self.tokenizer is None:
            raise EvaluationError("stop strings need the tokenizer that decodes them")
        if "" in self.stop:
            raise EvaluationError("a stop string is empty, and would stop everything at once")

    def reasons(self, written: Sequence[Sequence[int]]) -> list[Reason | None]:
        """Why each row is done after its last token; None for those that go on."""
        stopped = self._stopped(written)
        found: list[Reason | None] = []
        for tokens, stop in zip(written, stopped, strict=True):
            if tokens[-1] in self.eos:
                found.append("eos")
            elif stop:
                found.append("stop")
            else:
                found.append("length" if len(tokens) >= self.max_new_tokens else None)
        return found

    def _stopped(self, written: Sequence[Sequence[int]]) -> list[bool]:
        if not self.stop:
            return [False] * len(written)
        # A token is at least a byte, but some are decoded differently at the beginning.
        tail = max(len(stop.encode()) for stop in self.stop) + 2
        tails = [tuple(tokens[-tail:]) for tokens in written]
        distinct = list(dict.fromkeys(tails))
        texts = dict(zip(distinct, self.tokenizer.batch_decode(distinct), strict=True))
        return [any(stop in texts[t] for stop in self.stop) for t in tails]


@dataclass(frozen=True)
class Request:
    """What a batch is generated with.

    Attributes:
        stopping: when a row is done.
        sampling: how tokens are drawn; the most likely one is taken when None.
        processors: transformers' logits processors, applied first; or None.
    """

    stopping: StoppingCriteria
    sampling: Sampling | None = None
    processors: Any = None


class Batch:
    """All compositions answering some prompts.

    Args:
        runner: of the compositions.
        members: which of them.
        prompts: token ids, none empty.
        streams: per prompt, the number of its random stream.
        request: how to generate.
        prefix: first tokens, the same in every prompt, that are read once.
    """

    def __init__(
        self,
        runner: Runner,
        members: Sequence[int],
        prompts: Sequence[Sequence[int]],
        streams: Sequence[int],
        request: Request,
        *,
        prefix: int = 0,
    ) -> None:
        import torch

        self._runner, self._virtual, self._stack = runner, runner.virtual, runner.stack
        self._request = request
        self._prompts = [list(prompt) for prompt in prompts]
        self._prefix = prefix
        ids, mask = pad_with_mask(prompts, left=True)
        self._ids, mask = ids.to(self._virtual.device), mask.to(self._virtual.device)
        self._lengths = torch.tensor([len(prompt) for prompt in prompts]).to(mask.device)
        # As transformers does: without padding there is no mask, which is faster.
        self._mask = None if bool(mask.all()) else mask
        self._roots = runner.trie(members)
        self._slots = Slots(self._roots, len(prompts))
        slots = [level.counts for level in self._slots.levels[1:-1]]
        count = request.stopping.max_new_tokens
        self._cache = SlotCache(slots, self._ids.shape[1], count)
        self._for_model = self._cache.for_transformers()
        self._takes_positions = takes_positions(self._virtual.model)
        self._draws = request.sampling.draws(streams, count) if request.sampling else None
        self._processors = self._all_processors()
        self._written: list[list[int]] = [[] for _ in range(len(self._slots))]
        self._layouts: list[SlotLayout] | None = None

    def generate(self) -> dict[tuple[int, int], Generation]:
        """What every composition answers to every prompt, by their positions."""
        import torch

        found: dict[tuple[int, int], Generation] = {}
        with torch.inference_mode():
            chosen = self._read_prompts()
            while True:
                self._note(chosen, found)
                if not len(self._slots):
                    return found
                chosen = self._step()

    def _read_prompts(self) -> npt.NDArray[np.int64]:
        """Send the prompts through the trie; returns the first token of every row."""
        import numpy as np
        import torch

        inputs = {"input_ids": self._ids, "past_key_values": self._for_model, "use_cache": True}
        if self._mask is not None:
            inputs["attention_mask"] = self._mask
        if self._takes_positions:
            inputs["position_ids"] = self._positions(self._ids.shape[1])
        leaves = self._slots.levels[-1]
        chosen = np.zeros(sum(leaves.counts), dtype=np.int64)
        prompts = np.arange(len(self._prompts))

        def point(node: Any) -> None:
            self._cache.select(node.depth - 1, *self._slots.begun[id(node)])

        prefix = None
        if self._prefix:
            common = torch.tensor([self._prompts[0][: self._prefix]], device=self._ids.device)
            prefix = PrefixCache(common, self._cache.store)
        for leaf, hidden in self._runner.states(self._roots, inputs, point, prefix=prefix):
            group, slot = self._slots.begun[id(leaf)]
            start = int(leaves.starts[group]) + slot
            last = (hidden.rest if isinstance(hidden, Pair) else hidden)[:, -1]
            tokens = self._choose(last, prompts, 0, self._ids)
            chosen[start : start + len(prompts)] = tokens
        self._cache.length = self._ids.shape[1]
        return chosen[leaves.position]

    def _note(
        self, chosen: npt.NDArray[np.int64], found: dict[tuple[int, int], Generation]
    ) -> None:
        """Write down a token per row, part the slots, and let go of the rows that are done."""
        import numpy as np

        for tokens, token in zip(self._written, chosen.tolist(), strict=True):
            tokens.append(token)
        reasons = self._request.stopping.reasons(self._written)
        running = np.array([reason is None for reason in reasons])
        for row in np.flatnonzero(~running).tolist():
            where = int(self._slots.member[row]), int(self._slots.prompt[row])
            found[where] = Generation(tuple(self._written[row]), str(reasons[row]))
        if not running.all():
            self._layouts = None
            self._written = [t for t, keep in zip(self._written, running, strict=True) if keep]
            chosen = chosen[running]
            for change in self._slots.keep(running):
                self._apply(change, closing=True)
        if running.any():
            before = [list(level.counts) for level in self._slots.levels]
            for change in self._slots.split(chosen):
                self._layouts = None
                self._apply(change, count=before[change.level][change.group])

    def _apply(self, change: CopyOp, *, closing: bool = False, count: int = 0) -> None:
        import torch

        if not 0 < change.level < len(self._slots.levels) - 1:
            return  # only layers have caches
        group = self._cache.groups[change.level - 1][change.group]
        slots = torch.from_numpy(change.slots).to(self._virtual.device)
        if closing:
            group.keep(slots)
        else:
            group.append(count, slots)

    def _step(self) -> npt.NDArray[np.int64]:
        """The next token of every row."""
        import numpy as np

        # Lanes seldom change once they have parted.
        layouts = self._layouts = self._layouts or self._slots.layout()
        hidden, calls = self._enter(layouts[0])
        narrow = RowSelector(len(hidden))
        for layer, layout in enumerate(layouts[1:-1]):
            parts = []
            for group, key, start, stop in layout.groups:
                self._virtual.use_layer(layer, key)  # type: ignore[arg-type]
                self._cache.select(layer, group)
                rows = select_rows(hidden, layout.parent[start:stop])
                call = narrow(calls[layer], layout.first[start:stop])
                parts.append(call(self._stack.layers[layer], rows))
            hidden = concatenate(parts)
        self._cache.length += 1
        chosen = np.zeros(len(layouts[-1].row), dtype=np.int64)
        step = self._cache.length - self._ids.shape[1]
        for _, key, start, stop in layouts[-1].groups:
            self._virtual.use_outside(key)  # type: ignore[arg-type]
            writers = layouts[-1].row[start:stop]
            read = self._read_so_far(writers) if self._processors else None
            states = select_rows(hidden[:, -1], layouts[-1].parent[start:stop])
            chosen[start:stop] = self._choose(states, self._slots.prompt[writers], step, read)
        return chosen[self._slots.levels[-1].position]

    def _enter(self, layout: SlotLayout) -> tuple[torch.Tensor, Sequence[Call]]:
        """Run what is before the layers on the last token of every slot."""
        import torch

        device = self._virtual.device
        tokens = torch.tensor([self._written[row][-1:] for row in layout.row]).to(device)
        prompts = torch.from_numpy(self._slots.prompt[layout.row]).to(device)
        inputs: dict[str, Any] = {"input_ids": tokens}
        inputs |= {"past_key_values": self._for_model, "use_cache": True}
        new = self._cache.length - self._ids.shape[1] + 1
        if self._mask is not None:
            inputs["attention_mask"] = torch.nn.functional.pad(
                self._mask[prompts], (0, new), value=1
            )
        if self._takes_positions:
            inputs["position_ids"] = (self._lengths[prompts] + new - 1)[:, None]
        entries = []
        for _, key, start, stop in layout.groups:
            self._virtual.use_before(key)  # type: ignore[arg-type]
            entries.append((start, stop, self._stack.before(**inputs)))
        return merge_entries(entries, len(tokens))

    def _choose(
        self,
        hidden: torch.Tensor,
        prompts: npt.NDArray[np.int64],
        step: int,
        read: torch.Tensor | None,
    ) -> npt.NDArray[np.int64]:
        """The next token of slots, from their last hidden states `[slots, width]`."""
        import torch

        vocabulary = self._virtual.model.config.get_text_config().vocab_size
        size = max(1, LOGIT_BYTES // (4 * vocabulary))
        chosen = []
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = self._stack.after(hidden[part]).float()
            if self._processors:
                logits = self._processors(None if read is None else read[part], logits)
            if self._draws is None:
                chosen.append(logits.argmax(dim=-1))
            else:
                draws = torch.from_numpy(self._draws[prompts[part], step]).to(logits.device)
                chosen.append(draw_tokens(logits, draws))
        return torch.cat(chosen).cpu().numpy()

    def _read_so_far(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        import torch

        prompts = self._ids[torch.from_numpy(self._slots.prompt[rows]).to(self._ids.device)]
        written = torch.tensor([self._written[row] for row in rows]).to(prompts.device)
        return torch.cat([prompts, written], dim=1)

    def _positions(self, width: int) -> torch.Tensor:
        import torch

        if self._mask is None:
            return torch.arange(width, device=self._ids.device)[None]
        return (self._mask.cumsum(dim=-1) - 1).masked_fill(self._mask == 0, 0)

    def _all_processors(self) -> Any:
        from transformers import LogitsProcessorList

        found = LogitsProcessorList(self._request.processors or [])
        if self._request.sampling:
            found += self._request.sampling.processors()
        return found


def why_not_together(
    runner: Runner, members: Sequence[int], prompts: Sequence[Sequence[int]]
) -> str | None:
    """Write a few tokens, and see that each composition alone finds them as likely as any.

    Returns:
        Why this model cannot be decoded for several compositions together; None if it can.
    """
    import torch

    obstacle = (
        "its layers are not in one list"
        if not runner.virtual.layers
        else other_state(runner.virtual.model)
    )
    if obstacle is not None:
        return obstacle
    chosen = sorted({members[0], members[len(members) // 2], members[-1]})[:CHECKED_MEMBERS]
    # Of unequal lengths, so that what padding does is checked too.
    short = [
        list(prompt[-max(1, CHECKED_TOKENS - 3 * index) :])
        for index, prompt in enumerate(prompts[:CHECKED_PROMPTS])
    ]
    request = Request(StoppingCriteria(CHECKED_STEPS))
    try:
        found = Batch(runner, chosen, short, range(len(short)), request).generate()
    except torch.OutOfMemoryError:
        raise
    except (*NOT_SO_BUILT, EvaluationError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    for (member, prompt), generation in found.items():
        model = runner.virtual.switch(member)
        ids = torch.tensor([[*short[prompt], *generation.tokens]]).to(runner.virtual.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
        asked = logits[len(short[prompt]) - 1 : -1]
        gaps = asked.max(dim=-1).values - asked.gather(1, ids[0, len(short[prompt]) :, None])[:, 0]
        if float(gaps.max()) > CLOSE[str(model.dtype)] * float(asked.abs().max()):
            return f"a token's logit is {float(gaps.max()):.2g} below the largest"
    return None


def generate_alone(
    runner: Runner,
    members: Sequence[int],
    prompts: Sequence[Sequence[int]],
    streams: Sequence[int],
    request: Request,
) -> dict[tuple[int, int], Generation]:
    """The same as `Batch.generate`, one composition after the other by transformers' `generate`."""
    import torch
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    # Only greedy decoding is left to it: all else is in the processors and the criteria.
    count = request.stopping.max_new_tokens
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    criteria_class, drawing_class = _classes()
    found: dict[tuple[int, int], Generation] = {}
    for member in members:
        model = runner.virtual.switch(member)
        # What a configuration does not say, `generate` takes from the model's own.
        own, model.generation_config = model.generation_config, config
        try:
            for row, prompt in enumerate(prompts):
                # One at a time: not every model writes the same beside others, padded or not.
                ids = torch.tensor([list(prompt)], device=runner.virtual.device)
                criteria = criteria_class(request, len(prompt))
                processors = LogitsProcessorList(request.processors or [])
                if request.sampling:
                    draws = request.sampling.draws([streams[row]], count)
                    processors += request.sampling.processors()
                    processors.append(drawing_class(torch.from_numpy(draws), len(prompt)))
                runner.reset()
                with torch.inference_mode():
                    model.generate(  # type: ignore[operator]
                        ids,
                        attention_mask=torch.ones_like(ids),
                        logits_processor=processors,
                        stopping_criteria=StoppingCriteriaList([criteria]),
                    )
                found[member, row] = criteria.done[0]
        finally:
            model.generation_config = own
    return found


@lru_cache
def _classes() -> tuple[Any, Any]:
    """Made on first use, because transformers is only imported where it is needed."""
    import torch
    from transformers import LogitsProcessor, StoppingCriteria

    class Ends(StoppingCriteria):
        """Ends rows as the engine does, and remembers them as they were then."""

        def __init__(self, request: Request, width: int) -> None:
            self._stopping, self._width = request.stopping, width
            self.done: dict[int, Generation] = {}

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            written = input_ids[:, self._width :].tolist()
            for row, reason in enumerate(self._stopping.reasons(written)):
                if reason is not None and row not in self.done:
                    self.done[row] = Generation(tuple(written[row]), reason)
            ended = [row in self.done for row in range(len(written))]
            return torch.tensor(ended, device=input_ids.device)

    class Draws(LogitsProcessor):
        """Leaves the token that is drawn as the only one, so that greedy decoding takes it."""

        def __init__(self, draws: torch.Tensor, width: int) -> None:
            self._draws, self._width = draws, width

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            step = self._draws[:, input_ids.shape[1] - self._width].to(scores.device)
            chosen = draw_tokens(scores.float(), step)[:, None]
            return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)

    return Ends, Draws
