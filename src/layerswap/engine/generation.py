"""Text generation with many compositions at once, or with one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from layerswap.engine.decoding import (
    FAILURES,
    Decoding,
    Generation,
    configured,
    draw_tokens,
    settings_error,
)
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
from layerswap.engine.prefix import PrefixCache, PrefixedStates
from layerswap.engine.rows import pad_with_mask
from layerswap.engine.scoring import why_not_together
from layerswap.engine.split import Entry, one_token, reason_of
from layerswap.engine.trie import CHECKED_ROWS, CHECKED_TOKENS, ROUNDING, Node, Runner

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from layerswap.engine.lanes import Ints

CHECKED_STEPS = 4
"""New tokens that the check of joint decoding writes."""


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
        self._decoding, self._prefix = decoding, prefix
        ids, mask = pad_with_mask(prompts, left=True)
        self._ids, mask = ids.to(self._virtual.device), mask.to(self._virtual.device)
        self._width = ids.shape[1]
        self._lengths = torch.tensor([len(prompt) for prompt in prompts]).to(mask.device)
        # As in transformers: without padding there is no mask, which is faster.
        self._mask = None if bool(mask.all()) else mask
        self._roots = runner.trie(members)
        self._lanes = Lanes(self._roots, len(prompts))
        counts = [level.counts for level in self._lanes.levels[1:-1]]
        self._cache = LaneCache(counts, self._width, decoding.max_new_tokens)
        sampling = decoding.sampling
        self._draws = sampling.draws(numbers, decoding.max_new_tokens) if sampling else None
        self._prompts = [list(prompt) for prompt in prompts]
        # By length of the prompt, on which only the model's own settings depend.
        lengths = {len(prompt) for prompt in prompts} if decoding.own else {1}
        self._processors = {n: decoding.processors(self._virtual.model, n) for n in lengths}
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
        """Yield each new token as `(composition, prompt, token)`; ended texts become results."""
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
        import torch

        inputs = {"input_ids": self._ids}
        if self._mask is not None:
            inputs["attention_mask"] = self._mask
        if self._stack.takes_positions:
            ones = torch.ones_like(self._ids[:1]) if self._mask is None else self._mask
            inputs["position_ids"] = (ones.cumsum(dim=-1) - 1).masked_fill(ones == 0, 0)
        layouts = self._layouts = self._lanes.layout()
        leaves = self._lanes.levels[-1]
        tokens = np.zeros_like(layouts[-1].row)

        def select(node: Node) -> None:
            self._cache.select(node.depth - 1, *self._lanes.start_of(node))

        prefix = None
        if self._prefix:
            padding = None if self._mask is None else self._width - self._lengths
            common = torch.tensor([self._prompts[0][: self._prefix]]).to(self._ids.device)
            prefix = PrefixCache(common, padding, self._cache.store)
        for leaf, hidden in self._runner.states(
            self._roots, inputs, select, cache=self._cache, prefix=prefix
        ):
            segment, lane = self._lanes.start_of(leaf)
            start = int(leaves.starts[segment]) + lane
            lanes = slice(start, start + len(self._prompts))
            last = (hidden.rest if isinstance(hidden, PrefixedStates) else hidden)[:, -1]
            tokens[lanes] = self._choose(last, layouts[-1].row[lanes])
        self._cache.length = self._width
        return tokens[leaves.position]

    def _append(self, tokens: Ints, results: dict[tuple[int, int], Generation]) -> None:
        """Append a token to every row, split lanes, and move rows that end to the results."""
        import numpy as np
        import torch

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
            if 0 < change.depth < len(self._lanes.levels) - 1:  # only layers have caches
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
        entry = self._before_layers(layouts[0])
        hidden, select = entry.hidden, CallSelector(len(entry.hidden))
        for layer, layout in enumerate(layouts[1:-1]):
            outputs = []
            for segment in layout.segments:
                lanes = slice(segment.start, segment.stop)
                self._virtual.use(1 + layer, segment.variant)
                self._cache.select(layer, segment.number)
                entering = select_rows(hidden, layout.parent[lanes])
                call = select(entry.calls[layer], layout.first[lanes])
                outputs.append(call(self._stack.layers[layer], entering))
            hidden = concatenate(outputs)
        self._cache.length += 1
        tokens = np.zeros_like(layouts[-1].row)
        for segment in layouts[-1].segments:
            lanes = slice(segment.start, segment.stop)
            self._virtual.use(len(layouts) - 1, segment.variant)
            states = select_rows(hidden[:, -1], layouts[-1].parent[lanes])
            tokens[lanes] = self._choose(states, layouts[-1].row[lanes])
        return tokens[self._lanes.levels[-1].position]

    def _before_layers(self, layout: LevelLayout) -> Entry:
        """Run the part before the layers on the last token of every lane."""
        import torch

        device = self._virtual.device
        tokens = torch.tensor([self._written[row][-1:] for row in layout.row]).to(device)
        prompts = torch.from_numpy(self._lanes.prompt[layout.row]).to(device)
        inputs: dict[str, Any] = {"input_ids": tokens}
        new = self._cache.length - self._width + 1
        if self._mask is not None:
            inputs["attention_mask"] = torch.nn.functional.pad(
                self._mask[prompts], (0, new), value=1
            )
        if self._stack.takes_positions:
            inputs["position_ids"] = (self._lengths[prompts] + new - 1)[:, None]
        entries = []
        for segment in layout.segments:
            self._virtual.use(0, segment.variant)
            entries.append((segment, self._stack.before(self._cache, **inputs)))
        return merge_entries(entries, len(tokens))

    def _choose(self, hidden: torch.Tensor, rows: Ints) -> Ints:
        """Choose the next token of lanes from their last hidden states, `[lanes, width]`.

        `rows` has one row of each lane.
        """
        import torch

        vocabulary = self._virtual.model.config.get_text_config().vocab_size
        size = max(1, LOGIT_BYTES // (4 * vocabulary))
        tokens, step = [], len(self._written[0])
        for start in range(0, len(hidden), size):
            part = rows[start : start + size]
            logits = self._stack.after(hidden[start : start + size]).float()
            if self._decoding.own:
                logits = self._processed(logits, part)
            else:
                no_ids: Any = None
                logits = self._processors[1](no_ids, logits)
            if self._draws is None:
                tokens.append(logits.argmax(dim=-1))
            else:
                draws = torch.from_numpy(self._draws[self._lanes.prompt[part], step])
                tokens.append(draw_tokens(logits, draws))
        return torch.cat(tokens).cpu().numpy()

    def _processed(self, logits: torch.Tensor, rows: Ints) -> torch.Tensor:
        """Apply the model's own settings, to rows with prompts of one length at a time."""
        import torch

        logits = logits.clone()
        prompts = [self._prompts[prompt] for prompt in self._lanes.prompt[rows]]
        texts = [[*prompt, *self._written[row]] for prompt, row in zip(prompts, rows, strict=True)]
        for length, processors in self._processors.items():
            chosen = [lane for lane, prompt in enumerate(prompts) if len(prompt) == length]
            if chosen:
                ids: Any = torch.tensor([texts[lane] for lane in chosen], device=logits.device)
                try:
                    logits[chosen] = processors(ids, logits[chosen])
                except FAILURES as error:
                    raise settings_error(error) from None
        return logits


def why_not_joint(
    runner: Runner, members: Sequence[int], prompts: Sequence[Sequence[int]]
) -> str | None:
    """Return the obstacle to joint decoding in a model; None if there is none.

    Generates a few tokens, and compares them with each composition's own likeliest tokens.
    """
    import torch

    virtual = runner.virtual
    obstacle = (
        (None if virtual.layers else "its layers are not in one list")
        or runner.stack.why_no_kv_cache
        or why_not_together(runner, members, prompts)
    )
    if obstacle is not None:
        return obstacle
    chosen = sorted({members[0], members[len(members) // 2], members[-1]})
    # Prompts of unequal lengths, to check padding too.
    short = [
        list(prompt[-max(1, CHECKED_TOKENS - 3 * index) :])
        for index, prompt in enumerate(prompts[:CHECKED_ROWS])
    ]

    def differs() -> str | None:
        few = Decoding(CHECKED_STEPS)
        results = JointBatch(runner, chosen, short, range(len(short)), few).generate()
        for (member, prompt), generation in results.items():
            ids = torch.tensor([[*short[prompt], *generation.tokens]]).to(virtual.device)
            inputs = {"input_ids": ids, "use_cache": False}
            logits = runner.logits_alone(inputs, member)[0, len(short[prompt]) - 1 : -1].float()
            written = logits.gather(1, ids[0, len(short[prompt]) :, None])[:, 0]
            gap = float((logits.max(dim=-1).values - written).max())
            if gap > ROUNDING[str(virtual.model.dtype)] * float(logits.abs().max()):
                return f"a token's logit is {gap:.2g} below the largest"
        return None

    return reason_of(differs)


def generate_alone(
    runner: Runner,
    members: Sequence[int],
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    decoding: Decoding,
) -> dict[tuple[int, int], Generation]:
    """Generate as `JointBatch.generate`, with transformers' `generate` for every composition."""
    import torch

    remembers = not runner.virtual.layers or runner.stack.why_no_kv_cache is not None
    results: dict[tuple[int, int], Generation] = {}
    for member in members:
        model = runner.virtual.switch(member)
        for index, prompt in enumerate(prompts):
            # One at a time: in a batch some models write other text.
            ids = torch.tensor([list(prompt)], device=runner.virtual.device)
            with torch.inference_mode():
                if remembers:  # without a cache, modules forget the previous text
                    model(**one_token(runner.virtual.device))
                results[member, index] = _write(model, ids, numbers[index], decoding)
    return results


def _write(
    model: PreTrainedModel, ids: torch.Tensor, number: int, decoding: Decoding
) -> Generation:
    """Write one text; processors draw its tokens, and criteria end it."""
    import torch
    from transformers import GenerationConfig

    width = ids.shape[1]
    processors: Any = decoding.processors(model, width)
    if decoding.sampling:
        draws = torch.from_numpy(decoding.sampling.draws([number], decoding.max_new_tokens))

        def leave_drawn(texts: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            """Mask all tokens but the drawn one, so that greedy decoding selects it."""
            token = draw_tokens(scores.float(), draws[:, texts.shape[1] - width])[:, None]
            return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)

        processors.append(leave_drawn)

    def has_ended(texts: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        reasons = decoding.reasons(texts[:, width:].tolist())
        return torch.tensor([reason is not None for reason in reasons], device=texts.device)

    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=decoding.max_new_tokens, do_sample=False, pad_token_id=0
    )
    with configured(model, config):
        texts = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=processors,
            stopping_criteria=[has_ended],
        )
    tokens = tuple(texts[0, width:].tolist())
    return Generation(tokens, str(decoding.reasons([tokens])[0]))
