"""What a GPU's user runs, on a second device: results equal those on the CPU.

`test_second_device.py` starts these in a process of their own, since a registered device stays.
"""

import json
import os

import pytest
import second_device
import torch
from lm_eval_world import make_harness_world
from merging import tensors_of
from small_experts import data_files, train_expert
from tiny_models import grid_of, swap_of
from torch.nn.attention import SDPBackend, sdpa_kernel

import layerswap as ls
from layerswap.checkpoint.loading import in_float64, open_device, pick_device
from layerswap.engine.decoding import Sampling
from layerswap.engine.memory import free_bytes
from layerswap.engine.sweep import Sweep
from layerswap.engine.virtual import VirtualModel
from layerswap.evaluation.harness import evaluate_models
from layerswap.evaluation.settings import EvaluationSettings

DEVICE = second_device.NAME
PROMPTS = [[5, 9, 13], [5, 9, 13, 2, 44, 17, 8], [30, 31], [7] * 20]
HAS_FLOAT64 = os.environ.get("SECOND_DEVICE_FLOAT64") != "0"


@pytest.fixture(autouse=True)
def _alike():
    """The same attention on both devices; the second one runs the operators of the CPU."""
    second_device.allow("float64", HAS_FLOAT64)
    before = second_device.operations()
    with sdpa_kernel(SDPBackend.MATH):
        yield
    assert second_device.operations() > before


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    return grid_of(swap_of(tmp_path_factory.mktemp("plans")))


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return make_harness_world(tmp_path_factory.mktemp("world"))


def test_the_device_is_found():
    assert pick_device(None) == DEVICE
    assert open_device(DEVICE) == torch.device(DEVICE, 0)
    wide = in_float64(torch.ones(2, device=DEVICE))
    assert wide.dtype == torch.float64
    assert wide.device.type == (DEVICE if HAS_FLOAT64 else "cpu")


def test_memory_is_the_devices(plans):
    from layerswap.new.machine import memory_gb

    held = torch.zeros(1 << 22, device=DEVICE)
    free = free_bytes(torch.device(DEVICE))
    assert free == second_device.TOTAL - second_device.used_bytes()
    assert memory_gb(DEVICE) == pytest.approx(free / 1e9, abs=1e-3)
    virtual = VirtualModel(plans, device=DEVICE)
    virtual.switch(1)
    assert second_device.used_bytes() > held.nbytes
    here, there = (Sweep(plans, device=device) for device in ("cpu", DEVICE))
    assert there.memory(4, 10, 5) == here.memory(4, 10, 5)
    assert there.pool.max_made_bytes <= free / 2
    assert there.fit_batch_size(10, budget=here.memory(4, 10).total) == 4


def test_switching(plans):
    here, there = VirtualModel(plans, device="cpu"), VirtualModel(plans, device=DEVICE)
    ids = torch.tensor([[5, 9, 13, 2, 44, 17, 8, 30]])
    for index in (0, len(plans) - 1, 3, 0):
        with torch.no_grad():
            expected = here.switch(index)(input_ids=ids).logits
            found = there.switch(index)(input_ids=ids.to(DEVICE)).logits
        assert found.device.type == DEVICE
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("prefix", [0, 40])
def test_scoring_with_shared_prefixes(plans, prefix, monkeypatch):
    from layerswap.engine import prefix as module

    for name in module.PASS_TOKENS:
        monkeypatch.setitem(module.PASS_TOKENS, name, 8)
    shared = [3 + i % 50 for i in range(prefix)]
    requests = [([*shared, *prompt], [8 + i, 20]) for i, prompt in enumerate(PROMPTS * 2)]
    expected = Sweep(plans, device="cpu").loglikelihood(requests)
    found = Sweep(plans, device=DEVICE).loglikelihood(requests)
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert (found.greedy == expected.greedy).all()


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.8, top_p=0.9, seed=3)])
@pytest.mark.parametrize("batch_size", [1, 16])
def test_generation_in_lanes(plans, sampling, batch_size):
    settings = {"max_new_tokens": 10, "eos": [2], "sampling": sampling, "batch_size": batch_size}
    prompts = [[3, 4, 5, 6, 7, 8, *prompt] for prompt in PROMPTS]
    expected = Sweep(plans, device="cpu").generate(prompts, **settings)
    assert Sweep(plans, device=DEVICE).generate(prompts, **settings) == expected


@pytest.mark.parametrize("engine", ["sweep", "hf"])
def test_evaluation(experts, engine):
    """The engine of a sweep, and transformers under lm-eval."""
    names = ["maembe_choose", "maembe_generate", "maembe_read"]
    models = {"swap": ls.swap(task=experts["task"], language=experts["language"])}
    found = {}
    for device in ("cpu", DEVICE):
        settings = EvaluationSettings(device=device, engine=engine, dtype="float32")
        result = evaluate_models(models, names, [experts["tasks"]], settings=settings)["swap"]
        found[device] = {
            (task, metric): value for task in names
            for metric, value in result["results"][task].items() if isinstance(value, float)
        }  # fmt: skip
    assert len(found["cpu"]) >= 5
    assert found[DEVICE] == pytest.approx(found["cpu"], rel=1e-3)


@pytest.mark.parametrize("given", [None, DEVICE])
def test_play(given):
    from layerswap.lab.assets import shipped
    from layerswap.lab.quickstart import lab_plan
    from layerswap.play.player import Player, Question

    answers = {}
    for device in ("cpu", given):
        player = Player(lab_plan(shipped(), "furo"), device=device)
        player.load()
        question = Question(
            prompt="Tom pomi fesi 6. deka fesi Tom?",
            compositions=["task", "soup", "swap.1.1.0.0.blend"],
            length=6,
        )
        *_, answered = player.ask(question)
        answers[device] = {name: one["tokens"] for name, one in answered["answers"].items()}
    assert answers["cpu"] == answers[given]


def test_linearity_and_fisher(experts, tmp_path):
    from safetensors.torch import load_file

    from layerswap.evaluation.examples import Tokens
    from layerswap.evaluation.fisher import FISHER_WEIGHTS, estimate_fisher
    from layerswap.evaluation.linearity import additivity

    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"Asha {i}", "completion": " ana"} for i in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    here, there = (
        load_file(
            estimate_fisher(experts["task"], data, tmp_path / device, device=device)
            / FISHER_WEIGHTS
        )
        for device in ("cpu", DEVICE)
    )
    for name in here:
        torch.testing.assert_close(there[name], here[name], rtol=1e-3, atol=1e-7)
    pair = (experts["task"], experts["task"], experts["language"])
    texts = [Tokens((5, 9, 13, 2), range(1, 4)), Tokens((30, 31), range(1, 2))]
    here, there = (additivity(*pair, texts, device=d) for d in ("cpu", DEVICE))
    assert there.logits == pytest.approx(here.logits, rel=1e-3)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    lines = [json.dumps({"prompt": f"Tom pomi fesi {i}.", "completion": f" {i}"}) for i in range(8)]
    for name in ("task", "language"):
        (folder / f"{name}-train.jsonl").write_text("\n".join(lines) + "\n")
    return folder


REGIMES = {
    "full": {},
    "partial": {"train": {"partition": "A", "part": "task"}},
    "lora": {"lora": {"r": 4}},
    "simultaneous": {"train": {"partition": "A"}},
}


@pytest.mark.parametrize("regime", REGIMES)
def test_one_step_of_training(regime, tmp_path, rows, monkeypatch):
    """transformers and accelerate list the devices that they know, without this one."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from transformers import TrainingArguments

    from layerswap.lab.assets import shipped

    sets = {name: data_files(rows, name) for name in ("task", "language")}
    turns, set_up = regime == "simultaneous", TrainingArguments.device.fget
    spec = {**REGIMES[regime], **({"simultaneous": sets} if turns else {"data": sets["task"]})}
    found = {}
    for device in ("cpu", DEVICE):
        AcceleratorState._reset_state(reset_partial_state=True)
        place = property(lambda self, device=device: torch.device(device))
        monkeypatch.setattr(PartialState, "default_device", place)
        chosen = property(lambda self, device=device: set_up(self) and torch.device(device))
        monkeypatch.setattr(TrainingArguments, "device", chosen)
        steps = {"max_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
                 "use_cpu": device == "cpu"}  # fmt: skip
        out = train_expert(tmp_path, shipped().base, name=device, hyperparameters=steps, **spec)
        found[device] = tensors_of(out)
    AcceleratorState._reset_state(reset_partial_state=True)
    for name, expected in found["cpu"].items():
        torch.testing.assert_close(found[DEVICE][name], expected, rtol=1e-3, atol=2e-3)
