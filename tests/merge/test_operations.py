"""Merge methods end to end: recipes in, checkpoints out."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from effort import sampled
from merging import (
    arrays,
    change_tensors,
    check_close,
    copied,
    elect_and_average,
    keep_largest,
    recipe_plan,
    refusal,
    save_fisher,
    weight_bytes,
)
from refusals import refused
from safetensors.torch import load_file

from layerswap.compose.recipe import parse_recipe
from layerswap.ground.errors import MergeError, RecipeError
from layerswap.merge import terms
from layerswap.merge import writer as engine
from layerswap.merge.terms import TermEvaluator, merged_tensors
from layerswap.methods import METHODS

QUICK = ("della", "fisher", "ram", "revert", "revert by model", "slerp", "ties")
BY_MODEL = {"revert by model": ("revert", {"scope": "model", "keep": 0.4})}
"""Settings under which a method reads the whole model before it writes."""


def sources(experts, **made):
    """The base of a recipe and its experts, with those that it makes."""
    own = {name: experts[name] for name in ("task", "language", "third")}
    return {"base": experts["base"], "experts": {**own, **made}}


def merge_everywhere(experts, method, names=("task", "language"), **settings):
    most = METHODS[method].experts[1]
    spec = {
        "method": method,
        "experts": list(names)[: None if most > len(names) else int(most)],
        **settings,
    }
    fishers = with_fishers(experts) if METHODS[method].fisher else {}
    return recipe_plan(sources(experts, **fishers), merge=spec)


def with_fishers(experts):
    """The experts of a recipe, each with a Fisher beside its folder."""
    entries = {}
    for seed, name in enumerate(("task", "language", "third")):
        folder = experts[name]
        fisher = save_fisher(folder.with_name(f"{folder.name}-fisher"), folder, seed)
        entries[name] = {"source": folder, "fisher": fisher}
    return entries


def deltas(experts, names):
    base = arrays(experts["base"])
    return base, [{n: x - base[n] for n, x in arrays(experts[e]).items()} for e in names]


close = partial(check_close, rtol=1e-5, atol=2e-7)


def test_ties_ranks_the_whole_model_as_the_paper_does(experts, tmp_path):
    names = ("task", "language")
    base, taus = deltas(experts, names)
    order = sorted(base)
    flat = [np.concatenate([tau[n].ravel() for n in order]) for tau in taus]
    # The engine ranks float32 deltas; the reference must not break ties the other way.
    trimmed = [keep_largest(x.astype(np.float32).astype(float), 0.1) for x in flat]
    merged = elect_and_average(trimmed, [1.0, 1.0])
    expected, start = {}, 0
    for n in order:
        stop = start + base[n].size
        expected[n] = base[n] + merged[start:stop].reshape(base[n].shape)
        start = stop
    plan = merge_everywhere(experts, "ties", names, density=0.1)
    close(plan.save(tmp_path / "out"), expected)


def test_methods_nest_in_methods_and_soups(experts, tmp_path):
    base, (task, language, third) = deltas(experts, ("task", "language", "third"))
    made = {
        "soup": {"soup": ["language", "third"]},
        "sum": {"merge": {"method": "task_arithmetic", "experts": ["task", "soup"]}},
        "again": {"merge": {"method": "task_arithmetic", "experts": ["sum"], "scale": 0.5}},
    }
    expected = {
        n: 0.5 * (x + 0.5 * (task[n] + 0.5 * language[n] + 0.5 * third[n])) + 0.5 * (x + third[n])
        for n, x in base.items()
    }
    plan = recipe_plan(sources(experts, **made), soup={"experts": ["again", "third"]})
    close(plan.save(tmp_path / "out"), expected)


@pytest.mark.parametrize("case", sampled(sorted([*METHODS, *BY_MODEL]), *QUICK))
def test_in_memory_as_on_disk_and_again_in_other_steps(experts, tmp_path, monkeypatch, case):
    method, settings = BY_MODEL.get(case, (case, {}))
    plan = merge_everywhere(experts, method, **settings)
    out = plan.save(tmp_path / "out", threads=1)
    loaded = plan.load().state_dict()
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(loaded[name], tensor), name
    record = json.loads((out / "layerswap.json").read_text())
    assert record["composition"] == plan.composition.to_dict()
    monkeypatch.setattr(engine, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(engine, "PIECE_BYTES", 3 * 1000)
    monkeypatch.setattr(terms, "CHUNK_ELEMENTS", 53)
    again = recipe_plan(record["recipe"])
    assert weight_bytes(again.save(tmp_path / "again", threads=3)) == weight_bytes(out)


@pytest.mark.parametrize(
    ("method", "who", "settings"),
    [
        *((n, "language" if METHODS[n].experts[1] > 1 else "task", {}) for n in sorted(METHODS)),
        *(("revert", "base", {"scope": scope}) for scope in ("tensor", "model")),
    ],
)
def test_nan_in_a_source_stops_the_merge(experts, tmp_path, method, who, settings):
    spoilt = copied(experts[who], tmp_path / "spoilt")
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = load_file(spoilt / "model.safetensors")[name]
    tensor[3, 4] = float("nan")
    change_tensors(spoilt, {name: tensor})
    plan = merge_everywhere({**experts, who: spoilt}, method, **settings)
    assert refused(MergeError, plan.save, tmp_path / "out") == (
        f"{spoilt / 'model.safetensors'}: tensor {name!r} holds NaN or infinity; take an earlier "
        "checkpoint"
    )
    assert not (tmp_path / "out").exists()


HEAD = "base: ./b\nexperts: {task: ./t, language: ./l}\n"
REFUSED = {
    "unknown method": (
        HEAD + "merge: {method: tiess, experts: [task]}",
        "r, line 3: merge: no method 'tiess'; did you mean 'ties'?",
    ),
    "method unlike any": (
        HEAD + "merge: {method: sum, experts: [task]}",
        "r, line 3: merge: no method 'sum'; there are arcee_fusion, breadcrumbs, "
        "dare_linear, dare_ties, della, della_linear, fisher, karcher, linear, model_stock, "
        "multislerp, nearswap, nuslerp, ram, revert, scale, sce, slerp, task_arithmetic, ties",
    ),
    "unknown parameter": (
        HEAD + "merge: {method: ties, experts: [task], densty: 0.2}",
        "r, line 3: merge: ties has no parameter 'densty'; did you mean 'density'?",
    ),
    "value": (
        HEAD + "merge: {method: ties, experts: [task], density: 1.5}",
        "r, line 3: merge: density: 1.5 is not a number above 0 to 1",
    ),
    "choice": (
        HEAD + "merge: {method: ties, experts: [task], scope: layer}",
        "r, line 3: merge: scope: 'layer' is not one of model, tensor",
    ),
    "too many experts": (
        HEAD + "merge: {method: slerp, experts: [task, language, task2]}",
        "r, line 3: merge: slerp takes exactly 2 experts, not 3",
    ),
    "no base": (
        "experts: {task: ./t, language: ./l}\nmerge: {method: ties, experts: [task]}",
        "r, line 2: merge: ties takes deltas from the base; give `base`",
    ),
    "expert called base": (
        "base: ./b\nexperts: {base: ./t}\nmerge: {method: ties, experts: [base]}",
        "r, line 3: merge: with deltas no expert can be called 'base'; give it another name",
    ),
    "no fisher": (
        "experts: {a: ./a, b: {source: ./b, fisher: ./f}}\n"
        "merge: {method: fisher, experts: [a, b]}",
        "r, line 1: experts.a: fisher needs its Fisher; give `fisher`",
    ),
    "name of a Fisher": (
        "experts: {a: {source: ./a, fisher: ./f}, fisher of a: ./b}\n"
        "merge: {method: fisher, experts: [a]}",
        "r, line 1: experts.fisher of a: is the name of a Fisher; choose another name",
    ),
    "weights twice": (
        HEAD + "merge: {method: ties, experts: [task]}\nweights: uniform",
        "r, line 4: weights: weights of a merge belong in `merge.experts`; remove `weights`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_line(case):
    text, message = REFUSED[case]
    assert refused(RecipeError, parse_recipe, text, where="r") == message


def test_magnitude_weights_of_a_merge_are_refused(experts):
    made = {"language": experts["language"],
            "task": {"merge": {"method": "ties", "experts": ["language"]}}}  # fmt: skip
    with pytest.raises(RecipeError, match=r"^weights: the magnitude of ties.*; give numbers$"):
        recipe_plan(base=experts["base"], experts=made, swap={}, weights="magnitude")


def test_the_base_has_no_magnitude(experts):
    soup = {"experts": ["task", "base"]}
    with pytest.raises(RecipeError, match=r"^weights: the magnitude of base cannot be measured"):
        recipe_plan(sources(experts), soup=soup, weights="magnitude")


def nested(experts, levels, method="ties"):
    """Two merges of the two below them, `levels` times."""
    made = {"a0": experts["task"], "b0": experts["language"]}
    for level in range(1, levels + 1):
        below = [f"a{level - 1}", f"b{level - 1}"]
        for side, scale in (("a", 1.0), ("b", 0.5)):
            merge = {"method": method, "experts": below, "scale": scale}
            made[f"{side}{level}"] = {"merge": merge}
    names = [f"a{levels}", f"b{levels}"]
    return {"base": experts["base"], "experts": made, "soup": {"experts": names}}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "most"), [("task_arithmetic", 6 / 2), ("ties", (6 / 2) ** 2)])
def test_work_does_not_double_with_every_level_of_nesting(
    experts, tmp_path, monkeypatch, method, most
):
    chunk, calls = TermEvaluator.chunk, []
    monkeypatch.setattr(TermEvaluator, "chunk", lambda *given: calls.append(1) or chunk(*given))
    counts = {}
    for levels in (2, 6):
        calls.clear()
        plan = recipe_plan(nested(experts, levels, method))
        plan.save(tmp_path / str(levels))
        counts[levels] = len(calls)
        assert len(list(merged_tensors(plan.tensors[0].inputs))) == 2 * levels
    assert counts[6] <= most * counts[2]


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "slerp"])
def test_a_merge_that_is_read_twice_gives_the_bytes_of_two(experts, tmp_path, method):
    outputs = []
    for second in ("task", "twin"):
        twin = copied(experts["task"], tmp_path / second / "twin")
        merges = {
            "x": {"method": method, "experts": ["task", "language"]},
            "y": {"method": method, "experts": [second, "language"]},
            "z": {"method": "ties", "experts": ["y", "third"]},
        }
        made = {name: {"merge": merge} for name, merge in merges.items()}
        top = {"method": "task_arithmetic", "experts": {"x": 1, "z": 0.5}}
        plan = recipe_plan(sources(experts, twin=twin, **made), merge=top)
        outputs.append(plan.save(tmp_path / second / "out"))
    assert weight_bytes(outputs[0]) == weight_bytes(outputs[1])


def test_merges_written_out_have_a_bound(experts):
    message = refusal(recipe_plan, nested(experts, 9))
    assert message == "test: experts.a9: is made of 511 merges written out; the most is 256"
