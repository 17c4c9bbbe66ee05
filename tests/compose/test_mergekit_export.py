"""Recipes as mergekit configurations: the text, and the way back to the same composition."""

from __future__ import annotations

import pytest
import yaml
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from layerswap.checkpoint.places import Place
from layerswap.compose import parse_recipe
from layerswap.compose.mergekit import llama_tensors
from layerswap.compose.mergekit.export import export
from layerswap.compose.recipe import check_recipe
from layerswap.errors import RecipeError

EXPERTS = ("task", "language", "third")
SOURCES = {name: f"/m/{name}" for name in EXPERTS}
HEADER = "experts: {task: /m/task, language: /m/language}\n"


def exported(text, **keys):
    return str(export(parse_recipe(text), **keys))


def test_an_ordinary_swap_passes_layers_through():
    text = HEADER + "swap: {bottom: 2, top: 1, outside: language}\n"
    assert (
        exported(text, layers=8)
        == """\
merge_method: passthrough
slices:
- sources:
  - model: /m/language
    layer_range: [0, 2]
- sources:
  - model: /m/task
    layer_range: [2, 7]
- sources:
  - model: /m/language
    layer_range: [7, 8]
"""
    )


def test_a_blend_outside_is_a_weight_by_name():
    text = HEADER + "swap: {bottom: 1, top: 1}\ndtype: bfloat16"
    assert (
        exported(text, layers=3)
        == """\
merge_method: linear
slices:
- sources:
  - model: /m/task
    layer_range: [0, 1]
    parameters:
      weight:
      - {filter: embed_tokens, value: 0.5}
      - {value: 0.0}
  - model: /m/language
    layer_range: [0, 1]
    parameters:
      weight:
      - {filter: embed_tokens, value: 0.5}
      - {value: 1.0}
- sources:
  - model: /m/task
    layer_range: [1, 2]
    parameters: {weight: 1.0}
- sources:
  - model: /m/task
    layer_range: [2, 3]
    parameters:
      weight:
      - {filter: model.norm, value: 0.5}
      - {filter: lm_head, value: 0.5}
      - {value: 0.0}
  - model: /m/language
    layer_range: [2, 3]
    parameters:
      weight:
      - {filter: model.norm, value: 0.5}
      - {filter: lm_head, value: 0.5}
      - {value: 1.0}
dtype: float32
out_dtype: bfloat16
"""
    )


def test_a_method_everywhere_needs_no_number_of_layers():
    text = HEADER + "base: {source: org/base, revision: v2}\nmerge: {method: dare_ties, "
    text += "experts: {task: 1, language: 0.5}, density: 0.25, scale: 0.7}\ndtype: float32"
    assert (
        exported(text)
        == """\
# mergekit draws other masks: the result is the same only on average
merge_method: dare_ties
base_model: org/base@v2
models:
- {model: org/base@v2}
- model: /m/task
  parameters: {weight: 1.0}
- model: /m/language
  parameters: {weight: 0.5}
parameters: {density: 0.25, lambda: 0.7, normalize: true}
dtype: float32
"""
    )


def test_the_stored_dtype_is_asked_for_where_mergekit_computes():
    text = HEADER + "soup: {experts: [task, language]}"
    assert exported(text).splitlines()[0] == (
        "# mergekit computes in the stored dtype: set dtype: float32, and out_dtype"
    )
    assert yaml.safe_load(exported(text, stored="float16")) == {
        "merge_method": "linear",
        "models": [
            {"model": "/m/task", "parameters": {"weight": 0.5}},
            {"model": "/m/language", "parameters": {"weight": 0.5}},
        ],
        "dtype": "float32",
        "out_dtype": "float16",
    }


def test_a_configuration_that_was_read_is_written_back():
    config = {
        "merge_method": "slerp",
        "base_model": "org/a@v1",
        "slices": [
            {
                "sources": [
                    {"model": "org/a@v1", "layer_range": [0, 4]},
                    {"model": "./b", "layer_range": [0, 4]},
                ]
            }
        ],
        "parameters": {"t": [{"filter": "self_attn", "value": [0, 1]}, {"value": 0.5}]},
        "dtype": "float32",
        "out_dtype": "bfloat16",
    }
    assert yaml.safe_load(exported(yaml.safe_dump(config))) == config


def test_filters_have_the_names_of_the_checkpoint():
    names = {
        "gpt_neox.embed_in.weight": Place(None, "embedding"),
        **{f"gpt_neox.layers.{i}.attention.dense.weight": Place(i, "attention") for i in (0, 1)},
        **{f"gpt_neox.layers.{i}.mlp.dense_h_to_4h.weight": Place(i, "mlp") for i in (0, 1)},
        **{f"gpt_neox.layers.{i}.post_attention_layernorm.bias": Place(i, "norm") for i in (0, 1)},
        "gpt_neox.final_layer_norm.weight": Place(None, "final_norm"),
        "embed_out.weight": Place(None, "head"),
    }
    text = HEADER + "swap: {bottom: 0, top: 0, outside: task}\n"
    text += "places: [{roles: [attention], take: language}, {roles: [head], take: language}]"
    recipe = parse_recipe(text)
    result = export(recipe, layers=2, tensors=names)
    weight = result.config["models"][1]["parameters"]["weight"]
    # Its norms are called after the attention too, so the word alone would say too much.
    assert weight == [
        {"filter": ".attention.", "value": 1.0},
        {"filter": "embed_out", "value": 1.0},
        {"value": 0.0},
    ]
    back = parse_recipe(str(result)).resolve(2, None, names)
    found = recipe.resolve(2)
    assert {place: back[place] for place in names.values()} == {
        place: found[place] for place in names.values()
    }


MERGES = "base: /m/base\nexperts:\n  task: /m/task\n  language: /m/language\n"
BOTH = "  both: {merge: {method: METHOD, experts: [task, language]}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "swap: {}", "the number of layers is not known; give --layers"),
        ("experts: {a: {source: /m/a, fisher: /f/a}}\nmerge: {method: fisher, experts: [a]}",
         "mergekit has no fisher method"),
        (HEADER + "base: /m/base\nswap: {}\nweights: magnitude",
         "weights: magnitude weights are measured when merging; write the numbers that "
         "layerswap.json holds"),
        ("experts: {a: x+y+w, b: z}\nsoup: {experts: [a, b]}",
         "a: mergekit cannot name it: 'x+y+w' adds two adapters; merge one into the model first"),
        (MERGES + "merge: {method: ties, experts: [task, language]}",
         "embedding: mergekit's ties ranks tensor by tensor; set `scope: tensor`"),
        (MERGES + BOTH.replace("METHOD", "task_arithmetic") + "soup: {experts: [both, task]}",
         "embedding: mergekit cannot express 0.5 task + 0.5 "
         "task_arithmetic(language, task) beside task_arithmetic"),
        (MERGES + BOTH.replace("METHOD", "task_arithmetic")
         + "merge: {method: task_arithmetic, experts: [both, task]}",
         "embedding: mergekit merges models, and task_arithmetic(language, task) is not "
         "one"),
        (MERGES + BOTH.replace("METHOD", "slerp") + BOTH.replace("METHOD", "model_stock").replace(
            "both", "stock") + "soup: {experts: [both, stock]}",
         "mergekit has one merge_method for all layers, and this has model_stock and slerp"),
    ],
)  # fmt: skip
def test_what_mergekit_cannot_express(text, message):
    with pytest.raises(RecipeError) as caught:
        exported(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MERGES + BOTH.replace("METHOD", "task_arithmetic") + "swap: {task: both}",
         "embedding: mergekit cannot express 0.5 language + 0.5 task_arithmetic(language, task) "
         "beside task_arithmetic"),
        (MERGES + BOTH.replace("METHOD", "model_stock") + "swap: {task: both, outside: task}",
         "mergekit cannot put anything beside model_stock in one model"),
        (MERGES + "  third: z\n" + BOTH.replace("METHOD", "slerp")
         + "swap: {task: both, language: third, outside: task}",
         "layer 0 attention: mergekit's slerp is of language and task alone"),
    ],
)  # fmt: skip
def test_what_mergekit_cannot_express_beside_another(text, message):
    with pytest.raises(RecipeError) as caught:
        exported(text, layers=4)
    assert str(caught.value) == message


shares = st.floats(0.01, 4)
zones = st.integers(0, 2)


@st.composite
def merges(draw):
    """A merge method over two experts or three, with parameters."""
    method = draw(
        st.sampled_from(
            ["task_arithmetic", "ties", "dare_linear", "dare_ties", "breadcrumbs", "slerp"]
        )
    )
    if method == "slerp":
        t = draw(st.floats(0.01, 0.99))
        return {"method": method, "experts": {"language": 1 - t, "task": t}}
    names = draw(st.sampled_from([EXPERTS, EXPERTS[:2]]))
    found = {"method": method, "experts": {name: draw(shares) for name in names}}
    found["scale"] = draw(shares)
    if method != "task_arithmetic":
        found["density"] = draw(st.floats(0.01, 1))
    if method == "breadcrumbs":
        found["outliers"] = draw(st.floats(0, 1))
    if method == "ties":
        found["scope"] = "tensor"
    if method in ("ties", "dare_ties"):
        found["disjoint"] = draw(st.sampled_from(["mean", "sum"]))
    return found


@st.composite
def overrides(draw, layers, takes):
    """Overrides of layers, roles, or what is outside."""
    found = []
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            low, high = sorted((draw(st.integers(0, layers - 1)), draw(st.integers(0, layers - 1))))
            where, roles = f"{low}-{high}", ["attention", "mlp", "norm"]
        else:
            where, roles = "outside", ["embedding", "final_norm", "head"]
        chosen = draw(st.lists(st.sampled_from(roles), min_size=1, unique=True))
        found.append({"layers": where, "roles": chosen, "take": draw(takes)})
    return found


@st.composite
def blended(draw):
    """A recipe of blends and copies, and its number of layers."""
    layers = draw(st.integers(2, 8))
    weights = st.dictionaries(st.sampled_from(EXPERTS), shares, min_size=1)
    places = draw(overrides(layers, weights))
    kind = draw(st.sampled_from(["swap", "soup", "partition"]))
    data = {"experts": SOURCES, "places": places}
    if kind == "soup":
        data |= {"soup": {"experts": list(EXPERTS)}, "weights": dict.fromkeys(EXPERTS, 1.0)}
        data["weights"]["third"] = draw(shares)
    elif kind == "partition":
        data |= {"partition": {"name": draw(st.sampled_from("ABCZ"))}}
    else:
        names = ("bottom", "top", "bottom_transition", "top_transition")
        sizes = {name: min(draw(zones), layers // 4) for name in names}
        outside = draw(st.sampled_from(["blend", "task", "language"]))
        data |= {"swap": {**sizes, "outside": outside}}
        data |= {"weights": {"task": draw(shares), "language": draw(shares)}}
    return data, layers


@st.composite
def operated(draw):
    """A recipe of one merge method in some places and copies in the others."""
    layers = draw(st.integers(2, 8))
    merge = draw(merges())
    experts = {**SOURCES, "both": {"merge": merge}}
    copies = ["task", "language", "both"] + (["third"] if merge["method"] != "slerp" else [])
    return {
        "experts": experts,
        "base": "/m/base",
        "swap": {
            "task": "both",
            "bottom": min(draw(zones), layers // 2),
            "top": min(draw(zones), layers // 2),
            "outside": draw(st.sampled_from(["task", "language"])),
        },
        "places": draw(overrides(layers, st.sampled_from(copies))),
    }, layers


@settings(max_examples=examples(120), deadline=None, derandomize=True)
@given(st.one_of(blended(), operated()))
def test_the_way_back_leads_to_the_same_composition(case):
    data, layers = case
    recipe = check_recipe(data, where="drawn")
    result = export(recipe, layers=layers)
    back = parse_recipe(str(result)).resolve(layers)
    expected = recipe.resolve(layers)
    for place in dict.fromkeys(llama_tensors(layers).values()):
        assert back[place] == expected[place], place


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(st.one_of(merges(), st.just({"method": "model_stock", "experts": list(EXPERTS)})))
def test_a_method_everywhere_comes_back(merge):
    recipe = check_recipe({"experts": SOURCES, "base": "/m/base", "merge": merge}, where="drawn")
    result = export(recipe)
    assert "slices" not in result.config
    assert parse_recipe(str(result)).resolve(3) == recipe.resolve(3)


@pytest.mark.parametrize(
    "merge",
    [
        {"method": "della", "density": 0.6, "epsilon": 0.1, "rescale": "none"},
        {"method": "della_linear", "density": 0.5, "scale": 2.0},
        {"method": "sce", "density": 0.3},
        {"method": "ties", "density": 0.3, "scope": "tensor", "rescale": "l1"},
        {"method": "breadcrumbs", "density": 0.3, "rescale": "l1"},
        {"method": "model_stock", "angle": "row"},
        {"method": "ram"},
        {"method": "ram", "epsilon": 1e-4, "boost": 0.1, "limit": 0.3},
        {"method": "nearswap", "t": 0.01, "experts": ["task"]},
        {"method": "arcee_fusion", "experts": ["task"]},
        {"method": "nuslerp", "experts": {"task": 1, "language": 3}},
        {"method": "nuslerp", "angle": "row", "origin": "base", "experts": ["task", "language"]},
        {"method": "nuslerp", "angle": "column", "experts": ["task", "language"]},
        {"method": "multislerp", "experts": {"task": 0.5, "language": 0.25, "third": 0.25}},
        {"method": "multislerp", "origin": "base", "scale": 1.5},
        {"method": "karcher", "max_iter": 20},
        {"method": "scale", "scale": 0.5, "experts": ["task"]},
    ],
)
def test_newer_methods_come_back(merge):
    data = {"experts": SOURCES, "base": "/m/base", "merge": {"experts": list(EXPERTS), **merge}}
    recipe = check_recipe(data, where="drawn")
    (back,), (expected,) = (
        set(r.resolve(2).blends.values()) for r in (parse_recipe(str(export(recipe))), recipe)
    )
    (found,), (wanted,) = back.members, expected.members
    assert (found.method, found.parameters, found.base) == (
        wanted.method, wanted.parameters, wanted.base,
    )  # fmt: skip
    total, scale = sum(w for _, w in found.inputs), sum(w for _, w in wanted.inputs)
    shares = {blend: pytest.approx(w / scale) for blend, w in wanted.inputs}
    assert {blend: w / total for blend, w in found.inputs} == shares


def test_moved_layers_come_back():
    text = HEADER + "stack: [0-2, 1-3]\nswap: {bottom: 1, top: 2, outside: task}\n"
    recipe = parse_recipe(text)
    back = parse_recipe(exported(text, layers=4)).resolve(4)
    expected = recipe.resolve(4)
    assert expected.taken == back.taken == (0, 1, 2, 1, 2, 3)
    for place in dict.fromkeys(llama_tensors(6).values()):
        assert back[place] == expected[place], place
