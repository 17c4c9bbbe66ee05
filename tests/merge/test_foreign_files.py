"""Checkpoints as other tools write them: names, leftovers, and tensors that only some have."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.merging import (
    change_config,
    change_tensors,
    copied,
    tensors_of,
)
from tests.helpers.plain_checkpoints import WIDTH, write_adapter, write_family

import layerswap as ls


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A base and three experts; read only."""
    return write_family(tmp_path_factory.mktemp("family"), "BF16")


def renamed(source: Path, folder: Path, name) -> Path:
    """A copy in which every tensor has the name that a function gives."""
    copied(source, folder)
    found = tensors_of(source)
    change_tensors(folder, {**dict.fromkeys(found), **{name(n): t for n, t in found.items()}})
    return folder


def with_tensors(source: Path, folder: Path, seed: int, shapes, **config) -> Path:
    draws = torch.Generator().manual_seed(seed)
    new = {n: torch.randn(shape, generator=draws).bfloat16() for n, shape in shapes.items()}
    change_config(copied(source, folder), **config)
    return change_tensors(folder, new)


def plan_of(task: Path, language: Path, **settings):
    return ls.swap(task=task, language=language, bottom=1, top=1, outside="task", **settings)


def merged(plan, out: Path):
    plan.save(out)
    assert ls.verify(out).passed
    return tensors_of(out)


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(tensor, expected[name]) for name, tensor in found.items()
    )


# --- names ---

WRAPPERS = {
    "compiled": lambda n: f"_orig_mod.{n}",
    "parallel": lambda n: f"module.{n}",
    "peft": lambda n: f"base_model.model.{n}",
    "fsdp": lambda n: re.sub(r"(layers\.\d+)", r"\1._fsdp_wrapped_module", n),
}


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("both", [False, True])
def test_words_of_training_wrappers_are_left_out(family, tmp_path, kind, both):
    task = renamed(family["task"], tmp_path / "task", WRAPPERS[kind])
    language = family["language"]
    if both:
        language = renamed(language, tmp_path / "language", WRAPPERS[kind])
    plan = plan_of(task, language)
    assert sum("a training wrapper's words" in note for note in plan.notes) == 1 + both
    expected = merged(plan_of(family["task"], family["language"]), tmp_path / "expected")
    assert same(merged(plan, tmp_path / "out"), expected)


def test_experts_and_base_may_have_other_prefixes(family, tmp_path):
    """As GPT-2's base on the Hub, or Gemma 3 saved by transformers 4.52."""
    bare = renamed(family["base"], tmp_path / "base", lambda n: n.removeprefix("model."))
    new = renamed(
        family["language"],
        tmp_path / "language",
        lambda n: n.replace("model.", "language_model.model."),
    )
    recipe = {
        "experts": {"task": str(family["task"]), "language": str(new)}, "base": str(bare),
        "merge": {"method": "ties", "experts": ["task", "language"]},
    }  # fmt: skip
    plan = ls.make_plan(ls.parse_recipe(json.dumps(recipe)))
    assert sum("as transformers reads them" in note for note in plan.notes) == 2
    recipe["experts"]["language"], recipe["base"] = str(family["language"]), str(family["base"])
    expected = merged(ls.make_plan(ls.parse_recipe(json.dumps(recipe))), tmp_path / "expected")
    assert same(merged(plan, tmp_path / "out"), expected)
    assert ls.delta(bare, new).layers == 3


@pytest.mark.parametrize("bake", [False, True])
def test_an_adapter_has_the_names_in_memory(family, tmp_path, bake):
    def on_disk(name):
        return (
            name
            if name.startswith("lm_head")
            else f"language_{name.replace('model.', 'model.model.', 1)}"
        )

    def in_memory(name):
        return name.replace("base_model.model.model.", "base_model.model.model.language_model.")

    base = renamed(family["base"], tmp_path / "disk", on_disk)
    plain, other = {}, {}
    for seed, name in enumerate(("task", "language")):
        plain[name] = write_adapter(tmp_path / f"plain-{name}", family["base"], seed, 4)
        other[name] = copied(plain[name], tmp_path / name)
        file = other[name] / "adapter_model.safetensors"
        save_file({in_memory(n): t for n, t in load_file(file).items()}, file)
    out, expected = tmp_path / "out", tmp_path / "expected"
    plan_of(other["task"], other["language"], base=base, bake=bake).save(out)
    plan_of(plain["task"], plain["language"], base=family["base"], bake=bake).save(expected)
    found, wanted = tensors_of(out), tensors_of(expected)
    name = on_disk if bake else in_memory
    assert same(found, {name(n): tensor for n, tensor in wanted.items()})


# --- tensors that only some have ---

MTP = {"mtp.fc.weight": (WIDTH, 2 * WIDTH), "mtp.layers.0.mlp.up_proj.weight": (96, WIDTH)}
BEHIND = {
    "model.layers.3.eh_proj.weight": (WIDTH, 2 * WIDTH),
    "model.layers.3.self_attn.q_proj.weight": (WIDTH, WIDTH),
}
BUFFER = {"model.layers.1.self_attn.rotary_emb.inv_freq": (8,)}


@pytest.mark.parametrize("extra", [MTP, BEHIND, BUFFER], ids=["mtp", "layer", "buffer"])
@pytest.mark.parametrize("owner", ["base", "task", "language"])
def test_ignored_tensors_come_from_their_only_owner(family, tmp_path, extra, owner):
    has = with_tensors(family[owner], tmp_path / owner, 1, extra)
    sources = {**{n: family[n] for n in ("base", "task", "language")}, owner: has}
    recipe = {
        "experts": {n: str(sources[n]) for n in ("task", "language")},
        "base": str(sources["base"]), "merge": {"method": "ties", "experts": ["task", "language"]},
    }  # fmt: skip
    plan = ls.make_plan(ls.parse_recipe(json.dumps(recipe)))
    assert f"only {owner} has them" in "\n".join(plan.notes)
    found = merged(plan, tmp_path / "out")
    assert all(torch.equal(found[n], tensors_of(has)[n]) for n in extra)
    assert len(found) == len(tensors_of(family["task"])) + len(extra)
    assert ls.delta(sources["base"], sources["task"], sources["language"]).layers == 3


def test_a_layer_behind_the_last_one_needs_no_pattern(family, tmp_path):
    experts = {n: with_tensors(family[n], tmp_path / n, 1, BEHIND) for n in ("task", "language")}
    found = merged(plan_of(**experts), tmp_path / "out")
    assert all(torch.equal(found[n], tensors_of(experts["task"])[n]) for n in BEHIND)


def test_moved_layers_leave_the_layer_behind_out(family, tmp_path):
    task = with_tensors(family["task"], tmp_path / "task", 1, BEHIND)
    recipe = {
        "experts": {"task": str(task)},
        "stack": ["0-1", "0-1"],
        "soup": {"experts": ["task"]},
    }
    plan = ls.make_plan(ls.parse_recipe(json.dumps(recipe)))
    assert "behind its last layer are left out" in "\n".join(plan.notes)
    found = merged(plan, tmp_path / "out")
    assert not any("eh_proj" in name for name in found)
