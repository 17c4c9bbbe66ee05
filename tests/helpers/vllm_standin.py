"""A stand-in for the package vllm, made of transformers: enough of it for `engine/vllm.py`."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import torch


class SamplingParams(SimpleNamespace):
    """The settings of a call of `generate`."""


class LLM:
    """One model, whose weights can be replaced."""

    started: list[dict] = []  # the arguments of every start

    def __init__(self, model: str, dtype: str, **settings) -> None:
        from transformers import AutoModelForCausalLM

        self.started.append(settings)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    def collective_rpc(self, function, args) -> None:
        function(self, *args)

    def reload_weights(self, weights_iterator) -> None:
        state = self.model.state_dict()
        for name, tensor in weights_iterator:
            state[name].copy_(tensor)

    def reset_prefix_cache(self) -> None: ...

    @torch.no_grad()
    def generate(self, texts, parameters, *, use_tqdm) -> list:
        return [self._answer(list(text["prompt_token_ids"]), parameters) for text in texts]

    def _answer(self, prompt: list[int], parameters) -> SimpleNamespace:
        ends, tokens, places = getattr(parameters, "stop_token_ids", []), [], []
        for _ in range(parameters.max_tokens):
            logprobs = self.model(torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)
            tokens.append(int(logprobs[-1].argmax()))
            places.append(_candidates(logprobs[-1], tokens[-1]))
            if tokens[-1] in ends:
                break
        pairs = zip(logprobs, prompt[1:], strict=False)
        prompt_logprobs = [None, *(_candidates(row, token) for row, token in pairs)]
        reason = "stop" if tokens[-1] in ends else "length"
        written = SimpleNamespace(token_ids=tokens, logprobs=places, finish_reason=reason)
        return SimpleNamespace(prompt_logprobs=prompt_logprobs, outputs=[written])


def _candidates(logprobs: torch.Tensor, token: int) -> dict:
    rank = 1 + int((logprobs > logprobs[token]).sum())
    return {token: SimpleNamespace(logprob=float(logprobs[token]), rank=rank)}


def install(monkeypatch) -> type[LLM]:
    """Let `import vllm` find the stand-in; return its class of engines."""
    module = ModuleType("vllm")
    vars(module).update(LLM=LLM, SamplingParams=SamplingParams)
    monkeypatch.setitem(sys.modules, "vllm", module)
    LLM.started = []
    return LLM
