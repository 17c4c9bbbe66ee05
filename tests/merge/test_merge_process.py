"""Merges in processes of their own: hash seeds, memory, a Hub cache.

Kills are in tests/ground/test_commit.py, and writes that fail in test_safety.py.
"""

import json
import shutil
import sys

import pytest
from merging import save_expert, swap_of, tiny_llama, weight_bytes
from processes import run

import layerswap as ls

SEEDED = """
import sys, layerswap as ls
task, language, third, out = sys.argv[1:]
ls.soup({"b": task, "a": language, "c": third}, weights={"a": .2, "b": .3, "c": .5},
        max_shard_size="20KB").save(out)
"""


@pytest.mark.slow
def test_the_hash_seed_decides_nothing(experts, tmp_path):
    sources = [experts[name] for name in ("task", "language", "third")]
    for seed in ("1", "2"):
        run(SEEDED, *sources, tmp_path / seed, PYTHONHASHSEED=seed)
    files = [{f.name: f.read_bytes() for f in (tmp_path / s).iterdir()} for s in "12"]
    assert files[0] == files[1]
    assert len(files[0]) > 5


FEW_FILES = """
import resource, sys, layerswap as ls
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (32, hard))
task, language, out = sys.argv[1:]
ls.verify(ls.swap(task=task, language=language, outside="task").save(out))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_more_files_than_a_process_may_open(tmp_path):
    """macOS begins with 256 files, and a large mixture has more."""
    pair = [save_expert(tmp_path / name, tiny_llama(), seed, shard="1KB")
            for seed, name in enumerate(("task", "language"))]  # fmt: skip
    assert len([*pair[0].glob("*.safetensors")]) > 30
    run(FEW_FILES, *pair, tmp_path / "merged")


COPIED = """
import sys
from layerswap.cli import main
task, language, out = sys.argv[1:]
sys.argv[1:] = ["merge", "--task", task, "--language", language, "--outside", "task", "--out", out]
try:
    main()
except SystemExit as stop:
    assert not stop.code
heavy = ("numpy", "torch", "transformers", "huggingface_hub", "httpx", "safetensors", "tokenizers",
         "asyncio", "rich.console", "layerswap.cli.study")
assert not (imported := [name for name in heavy if name in sys.modules]), imported
"""


def test_a_swap_that_only_copies_imports_little(experts, tmp_path):
    run(COPIED, experts["task"], experts["language"], tmp_path / "out")
    assert ls.verify(tmp_path / "out").passed


HEAVY = """
import json, os, resource, sys
from pathlib import Path
import torch, layerswap as ls
from true_shapes import write_model

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

root = Path(sys.argv[1])
names = ["model.embed_tokens.weight", *(f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))]
for name, megabytes in {"small": 150, "large": 600}.items():
    rows = megabytes * 10**6 // 3 // 4096
    config = {"model_type": "llama", "architectures": ["OtherForCausalLM"], "num_hidden_layers": 2,
              "intermediate_size": rows}
    for expert in ("task", "language"):
        write_model(root / name / expert, config, dict.fromkeys(names, ("F32", (rows, 1024))), 0)
start = peak()
grown = []
for name in ("small", "large"):
    plan = ls.swap(task=root / name / "task", language=root / name / "language",
                   bottom=1, top=0, bottom_transition=1)
    plan.save(root / name / "out", threads=2)
    grown.append(peak() - start)
for name in ("small", "large"):
    assert ls.verify(root / name / "out", full=True, threads=2).passed
    grown.append(peak() - start)
print(json.dumps(grown))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    small, large, *verified = json.loads(run(HEAVY, tmp_path))
    try:
        size = sum(f.stat().st_size for f in (tmp_path / "large" / "out").glob("*.safetensors"))
        assert size > 590e6
        # Two workers hold two inputs, a sum and a result of 16 MiB each.
        assert small < 400e6
        assert large < small + 50e6
        assert max(verified) < 400e6
        assert verified[1] < verified[0] + 50e6
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)


FROM_HUB = """
import sys, layerswap as ls
from layerswap.compose.recipe import check_recipe
import json
plan = ls.swap(task="someone/task", language="someone/language@v1", bottom=1, top=1)
out = plan.save(sys.argv[1])
recipe = json.loads((out / "layerswap.json").read_text())["recipe"]
(sys.argv[2] and open(sys.argv[2], "w").write("4" * 40))  # the branch moves on
ls.make_plan(check_recipe(recipe, where="r")).save(sys.argv[1] + "-again")
"""


def cached(cache, name, commit, source, ref):
    repo = cache / f"models--someone--{name}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / ref).write_text(commit)
    (repo / "blobs").mkdir()
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in source.iterdir():
        shutil.copy(file, repo / "blobs" / file.name)
        (snapshot / file.name).symlink_to(repo / "blobs" / file.name)
    return repo / "refs" / ref


@pytest.mark.slow
def test_experts_from_the_hub_are_pinned(experts, tmp_path):
    from huggingface_hub import ModelCard

    cache, commits = tmp_path / "cache", {"task": "1" * 40, "language": "2" * 40}
    main = cached(cache, "task", commits["task"], experts["task"], "main")
    cached(cache, "language", commits["language"], experts["language"], "v1")
    out = tmp_path / "out"
    run(FROM_HUB, out, main, HF_HUB_CACHE=str(cache), HF_HUB_OFFLINE="1")
    assert main.read_text() == "4" * 40
    local = swap_of(experts, bottom=1, top=1)
    expected = weight_bytes(local.save(tmp_path / "local"))
    assert weight_bytes(out) == weight_bytes(tmp_path / "out-again") == expected
    record = json.loads((out / "layerswap.json").read_text())
    for name, commit in commits.items():
        pinned = {"source": f"someone/{name}", "revision": commit}
        assert record["recipe"]["experts"][name] == pinned
        assert {k: record["sources"][name][k] for k in pinned} == pinned
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == ["someone/task", "someone/language"]
