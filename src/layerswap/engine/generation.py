"""Text generation with many compositions at once, or with one after the other.

Random draws depend on the seed, the prompt's number and the position in the text alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from layerswap.engine.lanes import (
    CacheChange,
    CallSelector,
    LaneCache,
    Lanes,
    LevelLayout,
    concatenate,
    merge_entries,
    select_rows,
)
from layerswap.engine.memory import LOGIT_BYTES
from layerswap.engine.prefix import Pair, PrefixCache
from layerswap.engine.processors import (
    FAILURES,
    ROW_BY_ROW,
    own_config,
    own_processors,
    settings_error,
)
from layerswap.engine.rows import pad_with_mask
from layerswap.engine.scoring import why_not_together
from layerswap.engine.split import Call, one_token, takes_positions, why_no_kv_cache
from layerswap.engine.trie import ROUNDING, SPLIT_ERRORS, Node, Runner
from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from transformers import LogitsProcessorList, PreTrainedModel

    Ints = npt.NDArray[np.int64]

CHECKED_MEMBERS, CHECKED_PROMPTS, CHECKED_TOKENS, CHECKED_STEPS = 3, 2, 32, 4
"""Size of the check of joint decoding: compositions, prompts, tokens of a prompt, new tokens."""
Reason = Literal["eos", "stop", "length"]
"""Why a text ends: the model ended it, a stop string appeared, or it has the maximum length."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    A draw depends on the seed, the prompt's position and the position in the text alone: every
    composition answers a prompt with the same random numbers, whatever is generated beside it.

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
        if not 1e-6 <= self.temperature < math.inf:  # logits over less are not finite
            raise EvaluationError(
                f"temperature is {self.temperature}; it must be at least 0.000001 and finite"
            )
        if self.top_k < 0:
            raise EvaluationError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise EvaluationError(f"top_p is {self.top_p}; it must be above 0 and at most 1")

    def processors(self) -> LogitsProcessorList:
        """Return transformers' processors, in the order in which transformers applies them."""
        from transformers import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        processors = LogitsProcessorList()
        if self.temperature != 1:
            processors.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            processors.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            processors.append(TopPLogitsWarper(self.top_p))
        return processors

    def draws(self, prompts: Sequence[int], count: int) -> npt.NDArray[np.float64]:
        """Return uniform numbers in [0, 1), `(prompts, count)`, by the prompts' numbers."""
        import numpy as np

        draws = np.empty((len(prompts), count))
        for row, prompt in enumerate(prompts):
            digest = hashlib.sha256(f"{self.seed}/{prompt}".encode()).digest()
            key = np.frombuffer(digest[:16], dtype=np.uint64)
            draws[row] = np.random.Generator(np.random.Philox(key=key)).random(count)
        return draws


def draw_tokens(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Draw one token per row, int64 `[rows]`, by the inverse of the distribution function.

    `logits` is float32 `[rows, vocabulary]`, minus infinity for excluded tokens. `draws` is float64
    `[rows]`, uniform in [0, 1).
    """
    import torch

    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    # Scaled by the real sum, so that a draw close to 1 still finds a token.
    thresholds = (draws * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, thresholds, right=True)[:, 0]
    return tokens.clamp_max(logits.shape[1] - 1)


class Generation(NamedTuple):
    """A generated text."""

    tokens: tuple[int, ...]  # all of them, with the token that ended the text
    reason: str  # a `Reason`


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen, and when a text ends."""

    max_new_tokens: int
    eos: frozenset[int] = frozenset()  # tokens that end a text
    stop: tuple[str, ...] = ()  # strings that end a text, anywhere in the new tokens
    tokenizer: Any = None  # decodes tokens for `stop`
    sampling: Sampling | None = None  # greedy when None
    own: frozenset[str] = frozenset()  # settings of the generation configuration that act

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise EvaluationError(f"max_new_tokens is {self.max_new_tokens}; at least 1 is needed")
        if self.stop and self.tokenizer is None:
            raise EvaluationError("stop strings need the tokenizer that decodes them")
        if "" in self.stop:
            raise EvaluationError("a stop string is empty, and would stop everything at once")

    @property
    def not_row_by_row(self) -> str:
        """The settings that need all of a text's beams or another pass; empty if there are none."""
        return ", ".join(sorted(self.own - ROW_BY_ROW))

    def processors(self, model: PreTrainedModel, length: int) -> LogitsProcessorList:
        """Return transformers' processors for prompts of a length, with the model's own settings.

        They read rows without padding.
        """
        drawing: dict[str, Any] = {"do_sample": False}
        if (sampling := self.sampling) is not None:
            drawing = {
                "do_sample": True, "temperature": float(sampling.temperature),
                "top_k": sampling.top_k, "top_p": sampling.top_p,
            }  # fmt: skip
        ends = sorted(self.eos) or None
        return own_processors(
            model, length, max_new_tokens=self.max_new_tokens, eos_token_id=ends, **drawing
        )

    def reasons(self, written: Sequence[Sequence[int]]) -> list[Reason | None]:
        """Return why each text ends after its last token; None for texts that continue."""
        reasons: list[Reason | None] = []
        for tokens, stopped in zip(written, self._stopped(written), strict=True):
            if tokens[-1] in self.eos:
                reasons.append("eos")
            elif stopped:
                reasons.append("stop")
            else:
                reasons.append("length" if len(tokens) >= self.max_new_tokens else None)
        return reasons

    def _stopped(self, written: Sequence[Sequence[int]]) -> list[bool]:
        if not self.stop:
            return [False] * len(written)
        # A token is at least a byte; two more, since some decode differently at the beginning.
        longest = max(len(stop.encode()) for stop in self.stop) + 2
        tails = [tuple(tokens[-longest:]) for tokens in written]
        distinct = list(dict.fromkeys(tails))
        texts = dict(zip(distinct, self.tokenizer.batch_decode(distinct), strict=True))
        return [any(stop in texts[tail] for stop in self.stop) for tail in tails]


class JointBatch:
    """A batch in which all compositions answer all prompts together.

    A prompt's number decides its random draws. A common prefix of all prompts is read once.
    """

    def __init__(
        self,
        runner: Runner,
        members: Sequence[int],
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        decoding: Decoding,
        *,
        prefix: int = 0,
    ) -> None:
        import torch

        self._runner, self._virtual, self._stack = runner, runner.virtual, runner.stack
        self._decoding = decoding
        ids, mask = pad_with_mask(prompts, left=True)
        self._ids, mask = ids.to(self._virtual.device), mask.to(self._virtual.device)
        self._width = ids.shape[1]
        common = [list(prompts[0][:prefix])]
        self._prefix = torch.tensor(common).to(mask.device) if prefix else None
        self._lengths = torch.tensor([len(prompt) for prompt in prompts]).to(mask.device)
        # As in transformers: without padding there is no mask, which is faster.
        self._mask = None if bool(mask.all()) else mask
        self._roots = runner.trie(members)
        self._lanes = Lanes(self._roots, len(prompts))
        counts = [level.counts for level in self._lanes.levels[1:-1]]
        self._cache = LaneCache(counts, self._width, decoding.max_new_tokens)
        self._model_cache = self._cache.for_transformers()
        self._takes_positions = takes_positions(self._virtual.model)
        sampling = decoding.sampling
        self._draws = sampling.draws(numbers, decoding.max_new_tokens) if sampling else None
        self._processors = sampling.processors() if sampling and not decoding.own else ()
        self._prompts = [list(prompt) for prompt in prompts]
        self._own: dict[int, LogitsProcessorList] = {}  # by length of the prompt
        if decoding.own:
            lengths = {len(prompt) for prompt in prompts}
            self._own = {n: decoding.processors(self._virtual.model, n) for n in lengths}
        self._written: list[list[int]] = [[] for _ in range(len(self._lanes))]  # per row
        self._layouts: list[LevelLayout] | None = None

    def generate(self) -> dict[tuple[int, int], Generation]:
        """Return every composition's answer to every prompt, by `(composition, prompt)`."""
        results: dict[tuple[int, int], Generation] = {}
        for _ in self.steps(results):
            pass
        return results

    def steps(
        self, results: dict[tuple[int, int], Generation]
    ) -> Iterator[list[tuple[int, int, int]]]:
        """Yield `(composition, prompt, token)` of every text that grows; ended ones are results."""
        import torch

        tokens: Ints | None = None
        while tokens is None or len(self._lanes):
            # Not around the loop: between two steps the caller's code runs.
            with torch.inference_mode():
                tokens = self._read_prompts() if tokens is None else self._step()
                rows = (self._lanes.member, self._lanes.prompt, tokens)
                newest = [*zip(*(row.tolist() for row in rows), strict=True)]
                self._append(tokens, results)
            yield newest

    def _read_prompts(self) -> Ints:
        """Send the prompts through the trie; return the first new token of every row."""
        import numpy as np

        inputs = {"input_ids": self._ids, "past_key_values": self._model_cache, "use_cache": True}
        if self._mask is not None:
            inputs["attention_mask"] = self._mask
        if self._takes_positions:
            inputs["position_ids"] = self._prompt_positions()
        leaves = self._lanes.levels[-1]
        tokens = np.zeros(sum(leaves.counts), dtype=np.int64)
        prompts = np.arange(len(self._lengths))

        def select(node: Node) -> None:
            self._cache.select(node.depth - 1, *self._lanes.starts[id(node)])

        prefix = None if self._prefix is None else PrefixCache(self._prefix, self._cache.store)
        for leaf, hidden in self._runner.states(self._roots, inputs, select, prefix=prefix):
            segment, lane = self._lanes.starts[id(leaf)]
            start = int(leaves.starts[segment]) + lane
            last = (hidden.rest if isinstance(hidden, Pair) else hidden)[:, -1]
            tokens[start : start + len(prompts)] = self._choose(last, prompts)
        self._cache.length = self._width
        return tokens[leaves.position]

    def _append(self, tokens: Ints, results: dict[tuple[int, int], Generation]) -> None:
        """Append a token to every row, split lanes, and move rows that end to the results."""
        import numpy as np

        for text, token in zip(self._written, tokens.tolist(), strict=True):
            text.append(token)
        reasons = self._decoding.reasons(self._written)
        running = np.array([reason is None for reason in reasons])
        for row in np.flatnonzero(~running).tolist():
            key = int(self._lanes.member[row]), int(self._lanes.prompt[row])
            results[key] = Generation(tuple(self._written[row]), str(reasons[row]))
        changes: list[CacheChange] = []
        if not running.all():
            self._layouts = None
            self._written = [t for t, keep in zip(self._written, running, strict=True) if keep]
            changes += self._lanes.keep(running)
        if running.any():
            changes += self._lanes.split(tokens[running])
        for change in changes:
            self._layouts = None
            self._change_cache(change)

    def _change_cache(self, change: CacheChange) -> None:
        import torch

        if not 0 < change.depth < len(self._lanes.levels) - 1:
            return  # only layers have caches
        cache = self._cache.layers[change.depth - 1][change.segment]
        lanes = torch.from_numpy(change.lanes).to(self._virtual.device)
        if change.append_at is None:
            cache.keep(lanes)
        else:
            cache.append(change.append_at, lanes)

    def _step(self) -> Ints:
        """Return the next token of every row."""
        import numpy as np

        # Lanes seldom change once they have been split.
        layouts = self._layouts = self._layouts or self._lanes.layout()
        hidden, calls = self._before_layers(layouts[0])
        select = CallSelector(len(hidden))
        for layer, layout in enumerate(layouts[1:-1]):
            outputs = []
            for segment in layout.segments:
                lanes = slice(segment.start, segment.stop)
                self._virtual.use_layer(layer, segment.variant)
                self._cache.select(layer, segment.number)
                entering = select_rows(hidden, layout.parent[lanes])
                call = select(calls[layer], layout.first[lanes])
                outputs.append(call(self._stack.layers[layer], entering))
            hidden = concatenate(outputs)
        self._cache.length += 1
        tokens = np.zeros(len(layouts[-1].row), dtype=np.int64)
        for segment in layouts[-1].segments:
            lanes = slice(segment.start, segment.stop)
            self._virtual.use_outside(segment.variant)
            states = select_rows(hidden[:, -1], layouts[-1].parent[lanes])
            rows = layouts[-1].row[lanes]
            tokens[lanes] = self._choose(states, self._lanes.prompt[rows], rows)
        return tokens[self._lanes.levels[-1].position]

    def _before_layers(self, layout: LevelLayout) -> tuple[torch.Tensor, Sequence[Call]]:
        """Run the part before the layers on the last token of every lane."""
        import torch

        device = self._virtual.device
        tokens = torch.tensor([self._written[row][-1:] for row in layout.row]).to(device)
        prompts = torch.from_numpy(self._lanes.prompt[layout.row]).to(device)
        inputs: dict[str, Any] = {"input_ids": tokens}
        inputs |= {"past_key_values": self._model_cache, "use_cache": True}
        new = self._cache.length - self._width + 1
        if self._mask is not None:
            inputs["attention_mask"] = torch.nn.functional.pad(
                self._mask[prompts], (0, new), value=1
            )
        if self._takes_positions:
            inputs["position_ids"] = (self._lengths[prompts] + new - 1)[:, None]
        entries = []
        for segment in layout.segments:
            self._virtual.use_before(segment.variant)
            entries.append((segment, self._stack.before(**inputs)))
        return merge_entries(entries, len(tokens))

    def _choose(self, hidden: torch.Tensor, prompts: Ints, rows: Ints | None = None) -> Ints:
        """Choose the next token of lanes from their last hidden states, `[lanes, width]`.

        `rows` has one row of each lane; None before the first token.
        """
        import torch

        vocabulary = self._virtual.model.config.get_text_config().vocab_size
        size = max(1, LOGIT_BYTES // (4 * vocabulary))
        tokens = []
        step = 0 if rows is None else len(self._written[0])
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = self._stack.after(hidden[part]).float()
            for process in self._processors:
                logits = process(None, logits)
            if self._own:
                texts = self._texts(prompts[part], None if rows is None else rows[part])
                logits = self._processed(logits, texts, step)
            if self._draws is None:
                tokens.append(logits.argmax(dim=-1))
            else:
                draws = torch.from_numpy(self._draws[prompts[part], step]).to(logits.device)
                tokens.append(draw_tokens(logits, draws))
        return torch.cat(tokens).cpu().numpy()

    def _texts(self, prompts: Ints, rows: Ints | None) -> list[list[int]]:
        """Return the texts of lanes so far, without padding."""
        if rows is None:
            return [self._prompts[prompt] for prompt in prompts]
        pairs = zip(prompts, rows, strict=True)
        return [self._prompts[prompt] + self._written[row] for prompt, row in pairs]

    def _processed(
        self, logits: torch.Tensor, texts: Sequence[Sequence[int]], step: int
    ) -> torch.Tensor:
        """Apply the model's own settings, to texts of one length at a time."""
        import torch

        logits = logits.clone()
        for length, processors in self._own.items():
            chosen = [row for row, text in enumerate(texts) if len(text) == length + step]
            if chosen:
                ids: Any = torch.tensor([texts[row] for row in chosen], device=logits.device)
                try:
                    logits[chosen] = processors(ids, logits[chosen])
                except FAILURES as error:
                    raise settings_error(error) from None
        return logits

    def _prompt_positions(self) -> torch.Tensor:
        import torch

        if self._mask is None:
            return torch.arange(self._width, device=self._ids.device)[None]
        return (self._mask.cumsum(dim=-1) - 1).masked_fill(self._mask == 0, 0)


def why_not_joint(
    runner: Runner, members: Sequence[int], prompts: Sequence[Sequence[int]], decoding: Decoding
) -> str | None:
    """Return why a model cannot decode compositions jointly; None if it can.

    Generates a few tokens, and compares them with each composition's own likeliest tokens.
    """
    import torch

    virtual = runner.virtual
    beams = decoding.not_row_by_row
    obstacle = (
        (None if virtual.layers else "its layers are not in one list")
        or (f"generation_config.json sets {beams}, not applied row by row" if beams else None)
        or why_no_kv_cache(virtual.model)
        or why_not_together(runner, members, prompts)
    )
    if obstacle is not None:
        return obstacle
    chosen = sorted({members[0], members[len(members) // 2], members[-1]})[:CHECKED_MEMBERS]
    # Prompts of unequal lengths, to check padding too.
    short = [
        list(prompt[-max(1, CHECKED_TOKENS - 3 * index) :])
        for index, prompt in enumerate(prompts[:CHECKED_PROMPTS])
    ]
    few = Decoding(CHECKED_STEPS)
    try:
        results = JointBatch(runner, chosen, short, range(len(short)), few).generate()
    except torch.OutOfMemoryError:
        raise
    except (*SPLIT_ERRORS, EvaluationError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    for (member, prompt), generation in results.items():
        model, length = virtual.switch(member), len(short[prompt])
        ids = torch.tensor([[*short[prompt], *generation.tokens]]).to(virtual.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
        own = logits[length - 1 : -1]
        chosen_logits = own.gather(1, ids[0, length:, None])[:, 0]
        gap = float((own.max(dim=-1).values - chosen_logits).max())
        if gap > ROUNDING[str(model.dtype)] * float(own.abs().max()):
            return f"a token's logit is {gap:.2g} below the largest"
    return None


def generate_alone(
    runner: Runner,
    members: Sequence[int],
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    decoding: Decoding,
) -> dict[tuple[int, int], Generation]:
    """Generate as `JointBatch.generate`, with transformers' `generate` for every composition."""
    import torch

    write = _write_with_beams if decoding.not_row_by_row else _write
    stateful = getattr(runner.virtual.model, "_is_stateful", False)
    results: dict[tuple[int, int], Generation] = {}
    for member in members:
        model = runner.virtual.switch(member)
        for index, prompt in enumerate(prompts):
            # One at a time: some models write something else beside other prompts.
            ids = torch.tensor([list(prompt)], device=runner.virtual.device)
            runner.reset_rotary()
            with torch.inference_mode():
                if stateful:  # without a cache, modules forget the previous text
                    model(**one_token(runner.virtual.device))
                results[member, index] = write(model, ids, numbers[index], decoding)
    return results


def _write(
    model: PreTrainedModel, ids: torch.Tensor, number: int, decoding: Decoding
) -> Generation:
    """Write one text; processors draw its tokens, and criteria end it."""
    import torch
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    width, sampling = ids.shape[1], decoding.sampling
    processors = LogitsProcessorList()
    if decoding.own:
        processors += decoding.processors(model, width)
    elif sampling:
        processors += sampling.processors()
    criteria_class, draw_class = _transformers_classes()
    if sampling:
        draws = torch.from_numpy(sampling.draws([number], decoding.max_new_tokens))
        processors.append(draw_class(draws, width))
    criteria = criteria_class(decoding, width)
    config: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=decoding.max_new_tokens, do_sample=False, pad_token_id=0
    )
    # `generate` takes missing settings from the model's own configuration.
    own: Any = model.generation_config
    model.generation_config = config
    try:
        model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList([criteria]),
        )
    finally:
        model.generation_config = own
    found: Generation = criteria.generation
    return found


def _write_with_beams(
    model: PreTrainedModel, ids: torch.Tensor, number: int, decoding: Decoding
) -> Generation:
    """Write one text with all of the model's own settings, such as beams."""
    import torch

    del number
    if decoding.sampling is not None:
        raise EvaluationError(
            f"tokens cannot be drawn with {decoding.not_row_by_row} of generation_config.json; "
            "remove it there, or decode greedily"
        )
    stop = [*decoding.stop, *(getattr(model.generation_config, "stop_strings", None) or ())]
    with own_config(
        model, do_sample=False, max_new_tokens=decoding.max_new_tokens, stop_strings=stop or None,
        eos_token_id=sorted(decoding.eos) or None, return_dict_in_generate=False,
    ) as config:  # fmt: skip
        texts: Any = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), generation_config=config,
            tokenizer=decoding.tokenizer, trust_remote_code=False,
        )  # fmt: skip
    tokens = tuple(texts[0, ids.shape[1] :].tolist())
    for length in range(1, len(tokens) + 1):
        (reason,) = decoding.reasons([tokens[:length]])
        if reason is not None:
            return Generation(tokens[:length], reason)
    return Generation(tokens, "stop")


@lru_cache
def _transformers_classes() -> tuple[Any, Any]:
    """Define the classes on first use, since transformers is imported only where it is needed."""
    import torch
    from transformers import LogitsProcessor, StoppingCriteria

    class Ending(StoppingCriteria):
        """Ends one text as `Decoding` says, and keeps it."""

        def __init__(self, decoding: Decoding, width: int) -> None:
            self._decoding, self._width = decoding, width
            self.generation: Generation | None = None

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            (tokens,) = input_ids[:, self._width :].tolist()
            (reason,) = self._decoding.reasons([tokens])
            if reason is not None:
                self.generation = Generation(tuple(tokens), reason)
            return torch.tensor([reason is not None], device=input_ids.device)

    class Drawing(LogitsProcessor):
        """Leaves only the drawn token, so that greedy decoding takes it."""

        def __init__(self, draws: torch.Tensor, width: int) -> None:
            self._draws, self._width = draws, width

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            draws = self._draws[:, input_ids.shape[1] - self._width].to(scores.device)
            token = draw_tokens(scores.float(), draws)[:, None]
            return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)

    return Ending, Drawing
