"""Names of arguments in models mean nothing to the engine: renamed, all stays as it was."""

import functools
import inspect
import warnings

import numpy as np
import pytest
from tiny_models import grid_of, swap_of
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

from layerswap.engine import prefix as prefix_module
from layerswap.engine.sweep import Sweep

RNG = np.random.default_rng(5)
BEGINNING, *ENDS = (RNG.integers(3, 60, n).tolist() for n in (33, 3, 6, 4, 5, 2))
PROMPTS = [[*BEGINNING, *end] for end in ENDS]
REQUESTS = [(prompt, [7, 8]) for prompt in PROMPTS]


def renamed(module, old, new):
    """A forward pass that takes an argument by a new name alone."""
    forward = module.forward

    def wrapper(self, *args, **kwargs):
        if old in kwargs:
            raise TypeError(f"forward() got an unexpected keyword argument {old!r}")
        return forward(self, *args, **{old if key == new else key: kwargs[key] for key in kwargs})

    parameters = inspect.signature(forward).parameters.values()
    functools.update_wrapper(wrapper, forward)
    wrapper.__signature__ = inspect.Signature(
        [p.replace(name=new) if p.name == old else p for p in parameters]
    )
    return wrapper


def answers(plans, monkeypatch):
    monkeypatch.setitem(prefix_module.PASS_TOKENS, "cpu", 8)
    sweep = Sweep(plans)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = sweep.loglikelihood(REQUESTS, batch_size=4)
        texts = sweep.generate(PROMPTS, max_new_tokens=5, eos=[])
    assert sweep._shares_prefixes
    assert sweep._decodes_jointly
    return scores.logprob.tolist(), texts


def cache_argument(module):
    names = inspect.signature(module.forward).parameters
    return next(name for name in ("cache", "past_key_values") if name in names)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_that_calls_its_cache_kv(family, tmp_path, monkeypatch):
    """Only from outside: the model inside keeps its names, and so does the output."""
    plans = grid_of(swap_of(tmp_path, family))[::3]
    before = answers(plans, monkeypatch)
    module = {"llama": modeling_llama.LlamaForCausalLM, "gpt2": modeling_gpt2.GPT2LMHeadModel}
    old = cache_argument(module[family])
    monkeypatch.setattr(module[family], "forward", renamed(module[family], old, "kv"))
    assert answers(plans, monkeypatch) == before


def test_layers_that_call_their_arguments_otherwise(tmp_path, monkeypatch):
    """Cache, hidden states and positions of the layers of Llama, all by other names."""
    plans = grid_of(swap_of(tmp_path))[::3]
    before = answers(plans, monkeypatch)
    layer = modeling_llama.LlamaDecoderLayer
    names = {cache_argument(layer): "kv", "position_ids": "places", "hidden_states": "states"}
    for old, new in names.items():
        monkeypatch.setattr(layer, "forward", renamed(layer, old, new))
    inside = layer.__call__

    def call(self, hidden, **kwargs):
        kwargs = {"hidden_states": hidden, **kwargs}
        return inside(self, **{names.get(key, key): value for key, value in kwargs.items()})

    monkeypatch.setattr(layer, "__call__", call)
    assert answers(plans, monkeypatch) == before
