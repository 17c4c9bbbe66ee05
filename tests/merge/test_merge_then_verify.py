"""Every kind of output passes `verify` at once after `merge`, over sources with relative paths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import all_of, write_gguf
from merging import (
    change_config,
    copied,
    recipe_plan,
    save_adapter,
    save_expert,
    save_fisher,
    tiny_llama,
)

import layerswap as ls
from layerswap.checkpoint.loading import load_tokenizer
from layerswap.compose.recipe import parse_recipe
from layerswap.lab.assets import shipped
from layerswap.merge import compare
from layerswap.methods import METHODS
from layerswap.training.expert.trainer import train

NAMES = ("task", "language", "third")
ZONES = {"bottom": 1, "top": 1}


@pytest.fixture(scope="module")
def world(experts, tmp_path_factory) -> Path:
    """A base with experts of every kind; two of them full and two LoRA from `layerswap train`."""
    root = tmp_path_factory.mktemp("world")
    for name, folder in experts.items():
        copied(folder, root / name)
    for seed, name in enumerate(NAMES):
        save_fisher(root / f"fisher-{name}", root / name, seed)
        write_gguf(root / f"{name}.gguf", seed, all_of("Q5_0"), base=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name, base in (("math", "base"), ("sw", "./base")):
            save_adapter(
                Path(f"{name}-lora"), Path(base), 1, r=2, target_modules=["q_proj", "up_proj"]
            )
        here = {"base_model_name_or_path": "./base"}  # PEFT writes `base` for it
        change_config(Path("sw-lora"), file="adapter_config.json", **here)
        tokenizer = load_tokenizer(shipped().base)
        save_expert(Path("smol"), tiny_llama(vocab_size=len(tokenizer)), 0)
        tokenizer.save_pretrained("smol")
        row = json.dumps({"prompt": "2 + 3 =", "completion": " 5"})
        Path("rows.jsonl").write_text(f"{row}\n" * 4)
        for name, more in (("full", {}), ("adapter", {"lora": {"r": 2}})):
            for expert in ("task", "language"):
                spec = {"base": "./smol", "data": {"train": "rows.jsonl"}, **more}
                train(spec, f"trained-{name}-{expert}", seed=len(expert))
    return root


def recipe(**settings) -> Callable[[], ls.Plan]:
    """The plan of a recipe over the experts."""
    return lambda: recipe_plan({"experts": {n: n for n in NAMES}, "base": "base", **settings})


def method(name: str) -> Callable[[], ls.Plan]:
    """A merge method in its own settings, or where it has none with a scale of its own."""
    known = METHODS[name]
    count = min(3, known.experts[1])
    experts = {
        expert: {"source": expert, **({"fisher": f"fisher-{expert}"} if known.fisher else {})}
        for expert in NAMES
    }
    settings = {"keep": 0.5} if name == "revert" else {}
    merge = {"method": name, "experts": list(NAMES[: int(count)]), **settings}
    return recipe(experts=experts, merge=merge)


def pair(kind: str, **settings) -> Callable[[], ls.Plan]:
    return lambda: ls.swap(task=kind.format("task"), language=kind.format("language"), **settings)


MERGEKIT = """
merge_method: passthrough
slices:
  - sources: [{model: task, layer_range: [0, 3]}]
  - sources: [{model: ./language, layer_range: [1, 4]}]
"""
LORA = {"experts": {"task": "math-lora", "language": "sw-lora"}}
CASES: dict[str, Callable[[], ls.Plan]] = {
    **{f"method {name}": method(name) for name in sorted(METHODS)},
    "swap": recipe(swap=ZONES, languages=["sw"]),
    "swap in shards": recipe(swap=ZONES, max_shard_size="20KB"),
    "swap in bfloat16": recipe(swap=ZONES, dtype="bfloat16"),
    "magnitude": recipe(swap=ZONES, weights="magnitude"),
    "partition": recipe(partition={"name": "C"}),
    "soup": lambda: ls.soup(list(NAMES)),
    "moved layers": lambda: ls.make_plan(parse_recipe(MERGEKIT)),
    "revert by size": lambda: ls.revert("base", "task", keep=0.5),
    "revert by place": lambda: ls.revert("./base", "task", layers="0-1"),
    "revert an adapter": lambda: ls.revert("base", "math-lora", layers="0-1"),
    "instruct": lambda: ls.instruct(base="base", instruct="task", language="./language"),
    "adapters": lambda: recipe_plan({**LORA, "base": "./base", "soup": {"experts": ["task"]}}),
    "adapters of one base": lambda: recipe_plan({**LORA, "base": "base", "swap": ZONES}),
    "the base that adapters name": pair("trained-adapter-{}", **ZONES),
    "adapters of two spellings": lambda: recipe_plan({**LORA, "swap": ZONES}),
    "a rank": lambda: recipe_plan({**LORA, "base": "base", "swap": ZONES, "rank": 1}),
    "baked": pair("trained-adapter-{}", bake=True),
    "an adapter and full weights": lambda: ls.swap(
        task="trained-adapter-task", language="trained-full-language"
    ),
    "trained in full": pair("trained-full-{}"),
    "GGUF": pair("./{}.gguf", **ZONES),
    "GGUF of a soup": lambda: ls.soup([f"{name}.gguf" for name in NAMES]),
}


@pytest.mark.parametrize("case", CASES)
def test_an_output_is_verified_at_once(world, tmp_path, monkeypatch, case):
    monkeypatch.chdir(world)
    monkeypatch.setattr(compare, "BLOCK_BYTES", 1000)
    plan = CASES[case]()
    out = plan.save(tmp_path / ("out.gguf" if plan.format.name == "gguf" else "out"))
    report = ls.verify(out, full=True)
    assert report.problems == []
    assert report.computed.compared == report.computed.nbytes
    sample = ls.verify(out, share=0.2)
    assert sample.problems == []
    assert bool(sample.computed.compared) == bool(report.computed.compared)


def test_merged_adapters_are_experts_again(world, tmp_path, monkeypatch):
    monkeypatch.chdir(world)
    out = pair("trained-adapter-{}", **ZONES)().save(Path("merged-adapter"))
    again = ls.swap(task="trained-adapter-task", language=out, **ZONES).save(tmp_path / "again")
    assert ls.verify(again).problems == []
