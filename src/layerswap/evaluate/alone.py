"""Generating with one composition after the other, where a model allows nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from layerswap.evaluate.endings import Generation
from layerswap.evaluate.generating import Request
from layerswap.evaluate.limits import left_padded
from layerswap.evaluate.runner import Runner
from layerswap.evaluate.sampling import draw_tokens

if TYPE_CHECKING:
    import torch


def generate_alone(
    runner: Runner,
    members: Sequence[int],
    prompts: Sequence[Sequence[int]],
    streams: Sequence[int],
    request: Request,
) -> dict[tuple[int, int], Generation]:
    """What `generating.Batch.generate` gives, by transformers' `generate`, at full price."""
    import torch
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    # Only greedy decoding is left to it: all else is in the processors and the criteria.
    count = request.endings.max_new_tokens
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    criteria_class, drawing_class = _classes()
    ids, mask = left_padded(prompts, 0, runner.virtual.device)
    found: dict[tuple[int, int], Generation] = {}
    for member in members:
        model = runner.virtual.switch(member)
        criteria = criteria_class(request, ids.shape[1])
        processors = LogitsProcessorList(request.processors or [])
        if request.sampling:
            draws = request.sampling.draws(streams, count)
            processors += request.sampling.processors()
            processors.append(drawing_class(torch.from_numpy(draws), ids.shape[1]))
        # What a configuration does not say, `generate` takes from the model's own.
        own, model.generation_config = model.generation_config, config
        try:
            with torch.inference_mode():
                model.generate(  # type: ignore[operator]
                    ids,
                    attention_mask=mask,
                    logits_processor=processors,
                    stopping_criteria=StoppingCriteriaList([criteria]),
                )
        finally:
            model.generation_config = own
        found |= {(member, row): done for row, done in criteria.done.items()}
    return found


@lru_cache
def _classes() -> tuple[Any, Any]:
    """Made on first use, because transformers is only imported where it is needed."""
    import torch
    from transformers import LogitsProcessor, StoppingCriteria

    class Ends(StoppingCriteria):
        """Ends rows as the engine does, and remembers them as they were then."""

        def __init__(self, request: Request, width: int) -> None:
            self._endings, self._width = request.endings, width
            self.done: dict[int, Generation] = {}

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            written = input_ids[:, self._width :].tolist()
            for row, reason in enumerate(self._endings.reasons(written)):
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
