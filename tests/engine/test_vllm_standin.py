"""The engine vllm, with a stand-in for the package: swapped weights give our engine's answers."""

from __future__ import annotations

import numpy as np
import pytest
import vllm_standin
from merging import save_adapter
from tiny_models import swap_of

import layerswap as ls
from layerswap.engine import vllm
from layerswap.engine.sweep import Sweep
from layerswap.engine.vllm import VllmServer, VllmSweep, open_engine
from layerswap.ground.errors import EvaluationError

REQUESTS = [([5, 9, 12, 40, 7], [8, 11]), ([50, 51, 4], [9])]
PROMPTS = [[5, 6, 7], [9, 9]]


@pytest.fixture
def engines(monkeypatch):
    return vllm_standin.install(monkeypatch)


@pytest.fixture
def server():
    return VllmServer()


def check_answers(sweep, plans):
    ours = Sweep(plans, dtype="float32")
    scores = list(sweep.iter_loglikelihood(REQUESTS))
    expected = ours.loglikelihood(REQUESTS)
    for member, part in enumerate(scores):
        assert part.members == [member]
        np.testing.assert_allclose(
            part.logprob, expected.logprob[[member]][:, part.requests], atol=1e-4
        )
        assert part.greedy.tolist() == expected.greedy[[member]][:, part.requests].tolist()
    texts = dict(pair for part in sweep.iter_generate(PROMPTS, max_new_tokens=5) for pair in part)
    for member, row in enumerate(ours.generate(PROMPTS, max_new_tokens=5)):
        assert [texts[member, prompt] for prompt in range(len(PROMPTS))] == row
    assert np.abs(np.diff(expected.logprob, axis=0)).max() > 1e-2


@pytest.mark.slow
def test_weights_are_swapped_in_one_engine(engines, server, tmp_path):
    plans = swap_of(tmp_path).grid(bottom=[0, 1, 2], top=[0, 1])
    sweep = VllmSweep(plans[:3], dtype="float32", server=server)
    assert sweep.add(plans[3:]) == [3, 4, 5]
    check_answers(sweep, plans)
    VllmSweep(plans, dtype="float32", server=server)
    assert len(engines.started) == 1
    VllmSweep(plans, dtype="float32", engine={"max_model_len": 64}, server=server)
    assert engines.started[1]["max_model_len"] == 64


@pytest.mark.slow
def test_adapters_are_loaded_as_weights_of_their_base(engines, server, tmp_path):
    swap_of(tmp_path)
    for seed, name in enumerate(("math", "sw")):
        save_adapter(tmp_path / name, tmp_path / "task", seed, r=2, target_modules=["q_proj"])
    plan = ls.swap(
        task=tmp_path / "math", language=tmp_path / "sw", bottom=1, top=1, base=tmp_path / "task"
    )
    plans = [plan, *plan.grid(bottom=[2], top=[0])]
    check_answers(VllmSweep(plans, dtype="float32", server=server), plans)


def test_an_engine_that_cannot_swap_weights_is_refused(engines, server, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "reload_weights", lambda self, weights_iterator: None)
    with pytest.raises(EvaluationError, match="this version cannot swap weights"):
        VllmSweep(swap_of(tmp_path).grid(bottom=[0, 2], top=[1]), dtype="float32", server=server)


def test_an_old_vllm_is_refused_by_its_version(engines, monkeypatch, server, tmp_path):
    monkeypatch.setattr(vllm, "versions", lambda *packages: {packages[-1]: "0.9.2+cpu"})
    with pytest.raises(
        EvaluationError, match=r'in vLLM 0.9.2\+cpu; in a new .* "vllm>=0.32" "layersw'
    ):
        VllmSweep([swap_of(tmp_path)], dtype="float32", server=server)


def test_other_shapes_and_arguments_are_refused(engines, server, tmp_path):
    plans = [swap_of(tmp_path / "a"), swap_of(tmp_path / "b", num_hidden_layers=4)]
    with pytest.raises(EvaluationError, match="differ in name or shape"):
        VllmSweep(plans, dtype="float32", server=server)
    with pytest.raises(EvaluationError, match="needs the engine vllm"):
        open_engine(plans[:1], engine_args={"max_model_len": 64})
