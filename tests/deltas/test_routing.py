"""Routing divergence against transformers' own routers, SciPy, and cases with known answers."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

import layerswap as ls
from layerswap.checkpoint import open_checkpoint
from layerswap.deltas.routing import INPUTS, jensen_shannon, routers, routing_divergence

TEXT = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS = {
    "mixtral": {**TEXT, "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **TEXT, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def models(request, tmp_path_factory):
    from transformers import AutoConfig, AutoModelForCausalLM

    root, found = tmp_path_factory.mktemp(request.param), {}
    config = AutoConfig.for_model(request.param, **KINDS[request.param])
    for seed, name in enumerate(("base", "one", "two")):
        torch.manual_seed(seed)
        model = found[name] = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.2)
            for key, buffer in model.named_buffers():
                if "e_score_correction_bias" in key:
                    buffer.copy_(torch.randn(buffer.shape) * 0.3)
        model.save_pretrained(root / name)
    return root, found, config


def routed(model, config, layer):
    """The experts that transformers' own modules choose, and the weights of all, in float64."""
    block = model.double().model.layers[layer]
    inputs = np.random.default_rng([0, layer]).standard_normal((INPUTS, config.hidden_size))
    inputs /= np.sqrt((inputs**2).mean(axis=1, keepdims=True))
    with torch.no_grad():
        seen = torch.tensor(inputs) * block.post_attention_layernorm.weight
        logits = torch.nn.functional.linear(seen, block.mlp.gate.weight)
        if config.model_type == "mixtral":
            weights = logits.softmax(-1)
            chosen = weights.topk(config.num_experts_per_tok).indices
        else:
            weights = logits.sigmoid()
            weights = weights / weights.sum(-1, keepdim=True)
            found = block.mlp.gate(seen[None])
            chosen = next(out for out in found if not out.is_floating_point())
    return weights.numpy(), chosen.numpy()


def test_layers_are_compared_as_the_models_route(models):
    root, found, config = models
    one, two = (open_checkpoint(root / name) for name in ("one", "two"))
    rows = list(routing_divergence(("one", one), ("two", two)))
    layers = [0, 1] if config.model_type == "mixtral" else [1]
    assert [row.layer for row in rows] == layers
    for row in rows:
        (p, chosen), (q, others) = (routed(found[n], config, row.layer) for n in ("one", "two"))
        expected = np.mean([jensenshannon(a, b, base=2) ** 2 for a, b in zip(p, q, strict=True)])
        assert row.jensen_shannon_bits == pytest.approx(expected, abs=1e-8)
        common = [len({*a} & {*b}) / len(a) for a, b in zip(chosen, others, strict=True)]
        assert row.top_in_common_share == pytest.approx(np.mean(common), abs=1e-12)
        assert (row.experts, row.top) == (8, config.num_experts_per_tok)
        # Routers that have nothing to do with each other agree by chance.
        assert abs(row.top_in_common_share - row.top / 8) < 0.1


def test_an_atlas_keeps_the_routing(models, tmp_path):
    root, _, _ = models
    atlas = ls.delta(root / "base", root / "one", {"same": root / "one"})
    pairs = {(row.expert, row.other) for row in atlas.routing}
    assert pairs == {("base", "one"), ("base", "same"), ("one", "same")}
    same = [row for row in atlas.routing if row.expert == "one"]
    assert {(row.jensen_shannon_bits, row.top_in_common_share) for row in same} == {(0.0, 1.0)}
    assert all(row.jensen_shannon_bits > 0.01 for row in atlas.routing if row.expert == "base")
    atlas.save(tmp_path / "atlas")
    assert ls.Atlas.load(tmp_path / "atlas").routing == atlas.routing
    json.dumps([vars(row) for row in atlas.routing])


def test_divergence_of_certain_and_of_equal_routers():
    certain = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert jensen_shannon(certain, certain[::-1]) == 1.0
    assert jensen_shannon(certain, certain) == 0.0
    half = np.full((1, 2), 0.5)
    by_hand = (math.log2(4 / 3) + 0.5 * math.log2(2 / 3) + 0.5 * math.log2(2)) / 2
    assert jensen_shannon(certain[:1], half) == pytest.approx(by_hand)


def test_a_dense_model_has_no_routers(tmp_path):
    from merging import save_expert, tiny_llama

    dense = open_checkpoint(save_expert(tmp_path / "dense", tiny_llama(), 0))
    assert routers(dense) == {}
    assert list(routing_divergence(("a", dense), ("b", dense))) == []
