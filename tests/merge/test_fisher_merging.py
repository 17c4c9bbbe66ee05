"""Fisher-weighted averaging end to end, against a few lines of float64."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from merging import (
    check_close,
    copied,
    recipe_plan,
    refusal,
    save_expert,
    save_fisher,
    save_tokenizer,
    tensors_of,
    tiny_llama,
)
from safetensors.torch import load_file, save_file

import layerswap as ls
from layerswap.compose.recipe import check_recipe
from layerswap.ground.errors import LayerswapError, RecipeError

NAMES = ("task", "language", "third")


@pytest.fixture(scope="module")
def fishers(experts, tmp_path_factory):
    root = tmp_path_factory.mktemp("fishers")
    return {n: save_fisher(root / n, experts[n], seed) for seed, n in enumerate(NAMES)}


def recipe(experts, fishers, **keys):
    entries = {n: {"source": str(experts[n]), "fisher": str(fishers[n])} for n in fishers}
    return check_recipe({"experts": entries, **keys}, where="r")


def everywhere(experts, fishers, **settings):
    spec = {"method": "fisher", "experts": {"task": 1, "language": 0.25}, **settings}
    return ls.make_plan(recipe(experts, fishers, merge=spec))


def stored(fishers, name):
    result = load_file(fishers[name] / "fisher.safetensors")
    return {tensor: values.double().numpy() for tensor, values in result.items()}


def weighted(experts, fishers, weights, floor=1e-20, norms=None):
    """The definition: sum_i w_i F_i theta_i / sum_i w_i F_i, in float64."""
    merged = {}
    theta = {n: tensors_of(experts[n]) for n in weights}
    fisher = {n: stored(fishers, n) for n in weights}
    for name in theta["task"]:
        scaled = {n: fisher[n][name] / (norms[n] if norms else 1) for n in weights}
        shares = {n: w * np.maximum(scaled[n], floor) for n, w in weights.items()}
        parts = [shares[n] * theta[n][name].double().numpy() for n in weights]
        merged[name] = sum(parts) / sum(shares.values())
    return merged


close = partial(check_close, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("floor", [{}, {"floor": 1e-7}])
def test_the_average_is_weighted_element_by_element(experts, fishers, tmp_path, floor):
    out = everywhere(experts, fishers, **floor).save(tmp_path / "out")
    expected = weighted(experts, fishers, {"task": 1, "language": 0.25}, **floor)
    close(out, expected)
    name = "model.layers.0.mlp.up_proj.weight"
    task, language = (tensors_of(experts[n])[name].numpy() for n in ("task", "language"))
    assert np.abs((task + 0.25 * language) / 1.25 - expected[name]).max() > 0.01


def test_fishers_of_another_scale_are_normalised(experts, fishers, tmp_path):
    flat = {n: np.concatenate([f.ravel() for f in stored(fishers, n).values()]) for n in NAMES}
    norms = {name: np.linalg.norm(values) for name, values in flat.items()}
    assert norms["task"] > 5 * norms["language"]
    out = everywhere(experts, fishers, normalise="model").save(tmp_path / "out")
    close(out, weighted(experts, fishers, {"task": 1, "language": 0.25}, norms=norms))


def test_the_middle_of_a_swap_and_a_soup_of_experts(experts, fishers, tmp_path):
    entries = {
        **{n: {"source": str(experts[n]), "fisher": str(fishers[n])} for n in NAMES},
        "both": {"merge": {"method": "fisher", "experts": ["task", "third"]}},
    }
    data = {"experts": entries, "swap": {"task": "both", "bottom": 1, "top": 1, "outside": "task"}}
    plan = recipe_plan(data)
    assert set(plan.sources) == {*NAMES, "fisher of task", "fisher of third"}
    result = tensors_of(plan.save(tmp_path / "out"))
    expected = weighted(experts, fishers, {"task": 1, "third": 1})
    language = tensors_of(experts["language"])
    for name, tensor in result.items():
        layer = int(name.split(".")[2]) if ".layers." in name else None
        want = language[name].double() if layer in (0, 3) else expected[name]
        np.testing.assert_allclose(tensor.double(), want, rtol=1e-6, atol=1e-8)


def test_a_soup_may_have_a_fisher_of_its_own(experts, fishers, tmp_path):
    entries = {
        "task": {"source": str(experts["task"]), "fisher": str(fishers["task"])},
        "a": str(experts["language"]),
        "b": str(experts["third"]),
        "language": {"soup": ["a", "b"], "fisher": str(fishers["language"])},
    }
    data = {"experts": entries, "merge": {"method": "fisher", "experts": ["task", "language"]}}
    plan = recipe_plan(data)
    soup = copied(experts["task"], tmp_path / "soup")
    a, b = (tensors_of(experts[n]) for n in ("language", "third"))
    (soup / "model.safetensors").unlink()
    save_file({n: (a[n] + b[n]) / 2 for n in a}, soup / "model.safetensors")
    scales = {"task": 1, "language": 1}
    expected = weighted({"task": experts["task"], "language": soup}, fishers, scales)
    close(plan.save(tmp_path / "out"), expected)


def test_the_record_names_the_fishers_and_the_card_does_not(experts, fishers, tmp_path):
    out = everywhere(experts, fishers, normalise="model").save(tmp_path / "out")
    record = json.loads((out / "layerswap.json").read_text())
    assert record["recipe"]["experts"]["task"]["fisher"] == str(fishers["task"])
    assert set(record["sources"]) == {"task", "language", "fisher of task", "fisher of language"}
    assert str(fishers["task"].parent) not in (out / "README.md").read_text()


def test_verify_reads_the_fishers_too(experts, fishers, tmp_path):
    own = {n: copied(fishers[n], tmp_path / f"{n}-fisher") for n in ("task", "language")}
    out = everywhere(experts, own).save(tmp_path / "out")
    assert ls.verify(out, full=True).passed
    moved = own["task"].rename(tmp_path / "moved")
    assert not ls.verify(out).passed
    assert ls.verify(out, sources={"fisher of task": moved}, full=True).passed
    weights = load_file(moved / "fisher.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, moved / "fisher.safetensors")
    result = ls.verify(out, sources={"fisher of task": moved}, full=True).findings
    assert result[0] == "fisher of task: fisher.safetensors changed since the merge"


# --- refusals ---


def edited(folder, **changes):
    tensors = load_file(folder / "fisher.safetensors") | changes
    kept = {name: t for name, t in tensors.items() if t is not None}
    save_file(kept, folder / "fisher.safetensors")


NORM = "model.norm.weight"


@pytest.mark.parametrize("changes", [{NORM: None}, {"odd": torch.ones(1)}, {NORM: torch.ones(3)}])
def test_a_fisher_of_other_tensors(experts, fishers, tmp_path, changes):
    spoilt = copied(fishers["task"], tmp_path / "spoilt")
    edited(spoilt, **changes)
    said = refusal(everywhere, experts, {**fishers, "task": spoilt})
    path, name = spoilt / "fisher.safetensors", next(iter(changes))
    assert said == f"fisher of task: {path}: {name!r} is not as in {experts['task']}"


def test_the_fisher_of_another_checkpoint(experts, fishers):
    crossed = {**fishers, "task": fishers["language"]}
    assert refusal(everywhere, experts, crossed) == (
        f"fisher of task: {fishers['language']}: is of another version of "
        f"{experts['task']}; estimate it again"
    )


def test_a_missing_fisher_is_refused(experts, fishers, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refusal(everywhere, experts, {**fishers, "task": empty}) == (
        f"fisher of task: {empty}: has no fisher.safetensors; make it with "
        "`layerswap analyse fisher`"
    )
    shutil.copy(fishers["task"] / "fisher.safetensors", empty)
    assert refusal(everywhere, experts, {**fishers, "task": empty}) == (
        f"fisher of task: {empty}/fisher.json: cannot be read (No such file or directory)"
    )


@pytest.mark.parametrize("norm", [0, -1, "1", None, 1e999])
def test_a_norm_is_a_number(experts, fishers, tmp_path, norm):
    spoilt = copied(fishers["task"], tmp_path / "spoilt")
    record = json.loads((spoilt / "fisher.json").read_text())
    (spoilt / "fisher.json").write_text(json.dumps({**record, "norm": norm}))
    message = refusal(everywhere, experts, {**fishers, "task": spoilt})
    assert message.startswith(f"fisher of task: {spoilt}/")


def test_nan_in_a_fisher(experts, fishers, tmp_path):
    spoilt = copied(fishers["task"], tmp_path / "spoilt")
    edited(spoilt, **{NORM: torch.full((24,), float("nan"))})
    plan = everywhere(experts, {**fishers, "task": spoilt})
    assert refusal(plan.save, tmp_path / "out") == (
        f"{spoilt}/fisher.safetensors: tensor {NORM!r} holds NaN or infinity; take an earlier "
        "checkpoint"
    )
    assert not (tmp_path / "out").exists()


def test_a_fisher_that_changed_before_the_merge(experts, fishers, tmp_path):
    own = copied(fishers["task"], tmp_path / "own")
    plan = everywhere(experts, {**fishers, "task": own})
    edited(own, **{NORM: torch.ones(24)})
    with pytest.raises(LayerswapError, match=r"own/fisher.safetensors: changed since the merge"):
        plan.save(tmp_path / "out")
    with pytest.raises(LayerswapError, match=r"would write into the checkpoint of fisher of task$"):
        plan.save(own / "out")


def test_experts_of_two_vocabularies(tmp_path):
    entries = {}
    for seed, (name, words) in enumerate({"task": "a b c", "language": "c b e f"}.items()):
        folder = save_expert(tmp_path / name, tiny_llama(vocab_size=8), seed)
        save_tokenizer(folder, words)
        fisher = save_fisher(tmp_path / f"{name}-fisher", folder)
        entries[name] = {"source": str(folder), "fisher": str(fisher)}
    data = {"experts": entries, "merge": {"method": "fisher", "experts": [*entries]}}
    assert (
        refusal(ls.make_plan, check_recipe({**data, "tokenizer": "task"}, where="r"))
        == "task: a Fisher needs experts of one vocabulary"
    )


def test_one_expert_under_two_names(experts, fishers):
    entries = {n: {"soup": ["x"], "fisher": "f"} for n in ("a", "b")} | {"x": "./x"}
    inner = {"merge": {"method": "fisher", "experts": ["a", "b"]}}
    data = {"experts": {**entries, "both": inner}, "soup": {"experts": ["both"]}}
    with pytest.raises(RecipeError, match=r"^fisher: two of a, b are the same$"):
        check_recipe(data, where="r").resolve(4)
