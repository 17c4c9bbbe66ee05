"""lm-eval's model class over a sweep: compositions answer from one shared computation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from layerswap.engine.generation import Sampling
from layerswap.engine.rows import eos_tokens, pad
from layerswap.engine.sweep import Sweep
from layerswap.engine.vllm import VllmSweep
from layerswap.errors import EvaluationError
from layerswap.evaluation.response_cache import ResponseCache

PROMPTS = 256
"""Prompts that lm-eval hands over together; the cache decides how many run together."""


class CachedModel(HFLM):  # type: ignore[misc]
    """One composition after the other.

    Attributes:
        number: position of the composition that answers, among the members of the cache.
    """

    def __init__(self, sweep: Sweep | VllmSweep, tokenizer: Any, cache: ResponseCache) -> None:
        super().__init__(
            pretrained=sweep.switch(cache.members[0]), tokenizer=tokenizer, batch_size=PROMPTS
        )
        if self.model.device.type == "meta":  # vLLM answers; tokens stay on the CPU
            self._device = torch.device("cpu")
        self.number = 0
        self._responses = cache

    # A bar would count the requests of one composition of many.
    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """Answer as lm-eval does, without a progress bar."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """Answer as lm-eval does, without a progress bar."""
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """Answer as lm-eval does, without a progress bar."""
        return super().generate_until(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        asked = [(tuple(context), tuple(rest)) for _, context, rest in requests]
        dtype = str(self.model.dtype).removeprefix("torch.")
        scores = self._responses.scores(self.number, asked, bound=self.max_length, dtype=dtype)
        return [(float(logprob), bool(greedy)) for logprob, greedy in scores]

    def _model_generate(
        self, context: Any, max_length: int, stop: list[str], **settings: Any
    ) -> Any:
        new, mask = max_length - context.shape[1], settings.pop("attention_mask")
        ends = eos_tokens(self.model)
        asked = {"max_new_tokens": new, "stop": list(stop), "sampling": _sampling(settings)}
        prompts = [
            tuple(row[kept.bool()].tolist()) for row, kept in zip(context, mask, strict=True)
        ]
        written = self._responses.texts(self.number, prompts, asked, self.tokenizer)
        # Decoding skips special tokens, but not every token that ends a text is one.
        written = [tokens[:-1] if tokens[-1:] and tokens[-1] in ends else tokens
                   for tokens in written]  # fmt: skip
        texts = pad(written, fill=self.tokenizer.pad_token_id, width=new).to(context.device)
        return torch.cat([context, texts], dim=1)


def _sampling(settings: Mapping[str, Any]) -> Sampling | None:
    """Convert lm-eval's generation settings to the engine's; None means greedy decoding."""
    temperature = settings.get("temperature")
    draws = settings.get("do_sample")
    if draws is None:
        draws = bool(temperature)
    extra = set(settings) - {"temperature", "do_sample", "top_k", "top_p"}
    if extra:
        raise EvaluationError(f"the sweep cannot generate with {', '.join(sorted(extra))}")
    if not draws:
        return None
    return Sampling(
        temperature=temperature or 1.0,
        top_k=settings.get("top_k", 0),
        top_p=settings.get("top_p", 1.0),
    )
