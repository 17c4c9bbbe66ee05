"""mergekit configurations as recipes: every key, every method, the words of every refusal."""

import functools

import numpy as np
import pytest
import torch
from refusals import refused

from layerswap.checkpoint.places import Place, place_tensors
from layerswap.compose.blend import Blend, Operation
from layerswap.compose.mergekit import read_setting, value_at
from layerswap.compose.recipe import check_recipe, parse_recipe
from layerswap.ground.errors import RecipeError

BASE = Blend.of("base")


@functools.cache
def llama(layers):
    """The places of a Llama's tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers))
    return place_tensors(model.state_dict(), layers=layers)


def refusal(text, layers=None):
    def read():
        recipe = parse_recipe(text, where="m.yml")
        recipe.resolve(layers, tensors=llama(layers))

    return refused(RecipeError, read)


def resolved(text, layers=4, tensors=None):
    return parse_recipe(text).resolve(layers, tensors=tensors or llama(layers))


def everywhere(text, layers=4):
    """The one blend that is at every place."""
    result = set(resolved(text, layers).blends.values())
    assert len(result) == 1, result
    return result.pop()


def merge(method, **parameters):
    """An operation over experts `a` and `b` on the base."""
    weights = parameters.pop("weights", {"a": 1.0, "b": 1.0})
    inputs = {(Blend.of(m) if isinstance(m, str) else m): w for m, w in weights.items()}
    return Blend.of(Operation.of(method, inputs, base=BASE, parameters=parameters))


TWO = "base_model: ./base\nmodels:\n- {model: ./a, parameters: {weight: 1}}\n"
TWO += "- {model: ./b, parameters: {weight: 0.5}}\n"


@pytest.mark.parametrize("values", [[0.5], [0, 1], [1, 0.7, 0.1], [0, 0.5, 0.3, 0.7, 1]])
def test_gradients_are_interpolated_over_the_layers(values):
    setting = read_setting(values)
    for layers in (2, 3, 7, 32):
        for t in np.linspace(0, 1, layers):
            expected = np.interp(t, np.linspace(0, 1, len(values)), values) if values[1:] else 0.5
            assert value_at(setting, "", float(t)) == pytest.approx(expected, abs=1e-15)


def test_settings_by_name():
    setting = read_setting([{"filter": "mlp", "value": [0, 1]}, {"filter": "*", "value": 3}])
    assert value_at(setting, "model.layers.0.mlp.up_proj.weight", 0.25) == 0.25
    assert value_at(setting, "model.norm.weight", 0.25) == 3
    only = read_setting({"filter": "q_proj", "value": "1e-3"})
    assert value_at(only, "x.q_proj.weight", 0) == 0.001
    assert value_at(only, "x.k_proj.weight", 0) is None


def test_truth_values_jump_where_numbers_are_interpolated():
    setting = read_setting([False, True])
    assert value_at(setting, "", 0.9, discrete=True) is False
    assert value_at(setting, "", 1.0, discrete=True) is True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("merge_method: linear\n" + TWO.split("\n", 1)[1], Blend.of({"a": 2, "b": 1})),
        ("merge_method: linear\nparameters: {normalize: false}\n" + TWO.split("\n", 1)[1],
         merge("linear", weights={"a": 1, "b": 0.5})),
        ("merge_method: linear\n" + TWO.split("\n", 1)[1].replace("0.5", "-0.5"),
         merge("linear", weights={"a": 2, "b": -1})),
        ("merge_method: task_arithmetic\nparameters: {lambda: 0.7}\n" + TWO,
         merge("task_arithmetic", weights={"a": 1, "b": 0.5}, scale=0.7)),
        ("merge_method: task_arithmetic\nparameters: {normalize: true}\n" + TWO,
         merge("task_arithmetic", weights={"a": 1 / 1.5, "b": 0.5 / 1.5})),
        ("merge_method: ties\nparameters: {density: 0.3}\n" + TWO,
         merge("ties", weights={"a": 1, "b": 0.5}, density=0.3, scope="tensor")),
        ("merge_method: ties\n" + TWO,
         merge("ties", weights={"a": 1, "b": 0.5}, density=1.0, scope="tensor")),
        ("merge_method: ties\nparameters: {density: 0.3, normalize: false}\n" + TWO,
         merge("ties", weights={"a": 1, "b": 0.5}, density=0.3, scope="tensor", disjoint="sum")),
        ("merge_method: dare_linear\nparameters: {density: 0.25}\n" + TWO,
         merge("dare_linear", weights={"a": 1, "b": 0.5}, density=0.25)),
        ("merge_method: dare_linear\nparameters: {density: 0.25, rescale: false}\n" + TWO,
         merge("dare_linear", weights={"a": 0.25, "b": 0.125}, density=0.25)),
        ("merge_method: dare_ties\nparameters: {density: 0.25}\n" + TWO,
         merge("dare_ties", weights={"a": 1, "b": 0.5}, density=0.25, disjoint="sum")),
        ("merge_method: dare_ties\nparameters: {density: 0.25, normalize: true}\n" + TWO,
         merge("dare_ties", weights={"a": 1, "b": 0.5}, density=0.25)),
        ("merge_method: dare_ties\n"
         "parameters: {density: 0.25, normalize: true, rescale: false}\n" + TWO,
         merge("dare_ties", weights={"a": 1, "b": 0.5}, density=0.25, scale=0.25)),
        ("merge_method: breadcrumbs\nparameters: {density: 0.8, gamma: 0.05}\n" + TWO,
         merge("breadcrumbs", weights={"a": 1, "b": 0.5}, density=0.8, outliers=0.05)),
        ("merge_method: breadcrumbs\n" + TWO,
         merge("breadcrumbs", weights={"a": 1, "b": 0.5}, density=1.0, outliers=0.01)),
        ("merge_method: breadcrumbs_ties\nparameters: {density: 0.8}\n" + TWO,
         merge("ties", density=1.0, scope="tensor", disjoint="sum", weights={
             merge("breadcrumbs", weights={"a": 1}, density=0.8, outliers=0.01): 1,
             merge("breadcrumbs", weights={"b": 1}, density=0.8, outliers=0.01): 0.5,
         })),
        ("merge_method: model_stock\n" + TWO, merge("model_stock")),
        ("merge_method: model_stock\nparameters: {filter_wise: true}\n" + TWO,
         merge("model_stock", angle="row")),
        ("merge_method: ties\nparameters: {density: 0.3, rescale: true}\n" + TWO,
         merge("ties", weights={"a": 1, "b": 0.5}, density=0.3, scope="tensor", rescale="l1")),
        ("merge_method: breadcrumbs_ties\nparameters: {density: 0.8, rescale: true}\n" + TWO,
         merge("ties", density=1.0, scope="tensor", disjoint="sum", weights={
             merge("breadcrumbs", weights={"a": 1}, density=0.8, outliers=0.01, rescale="l1"): 1,
             merge("breadcrumbs", weights={"b": 1}, density=0.8, outliers=0.01,
                   rescale="l1"): 0.5,
         })),
        ("merge_method: slerp\nbase_model: ./a\nmodels: [{model: ./b}]\nparameters: {t: 0.3}",
         Blend.of(Operation.of("slerp", {Blend.of("a"): 0.7, Blend.of("b"): 0.3}))),
        ("merge_method: slerp\nbase_model: ./a\nmodels: [{model: ./b}]\nparameters: {t: 1}",
         Blend.of("b")),
        ("merge_method: passthrough\nmodels: [{model: ./a, parameters: {scale: 1}}]",
         Blend.of("a")),
        ("merge_method: passthrough\nmodels: [{model: ./a, parameters: {scale: 0.5}}]",
         merge("scale", weights={"a": 1}, scale=0.5)),
        ("merge_method: della\nparameters: {density: 0.5}\n" + TWO,
         merge("della", weights={"a": 1, "b": 0.5}, density=0.5)),
        ("merge_method: della\nparameters: {density: 0.5, rescale: false, epsilon: 0.1}\n" + TWO,
         merge("della", weights={"a": 1, "b": 0.5}, density=0.5, epsilon=0.1, rescale="none")),
        ("merge_method: della_linear\nparameters: {density: 0.5, lambda: 2}\n" + TWO,
         merge("della_linear", weights={"a": 1, "b": 0.5}, density=0.5, scale=2.0)),
        ("merge_method: sce\nparameters: {select_topk: 0.3}\n" + TWO, merge("sce", density=0.3)),
        ("merge_method: ram\n" + TWO, merge("ram", epsilon=1e-5)),
        ("merge_method: ramplus_tl\nparameters: {r: 0.3, epsilon: 1e-4}\n" + TWO,
         merge("ram", epsilon=1e-4, boost=0.3, limit=0.2)),
        ("merge_method: nearswap\nbase_model: ./base\nmodels: [{model: ./a}]\n"
         "parameters: {t: 0.001}", merge("nearswap", weights={"a": 1}, t=0.001)),
        ("merge_method: arcee_fusion\nbase_model: ./base\nmodels: [{model: ./a}]",
         merge("arcee_fusion", weights={"a": 1})),
        ("merge_method: nuslerp\nparameters: {nuslerp_flatten: false}\n" + TWO,
         merge("nuslerp", weights={"a": 1, "b": 0.5}, angle="row", origin="base")),
        ("merge_method: nuslerp\n" + TWO.split("\n", 1)[1],
         merge("nuslerp", weights={"a": 1, "b": 0.5})),
        ("merge_method: multislerp\nparameters: {normalize_weights: false}\n" + TWO,
         merge("multislerp", weights={"a": 1, "b": 0.5}, origin="base", scale=1.5)),
        ("merge_method: karcher\nparameters: {max_iter: 20}\n" + TWO.split("\n", 1)[1],
         merge("karcher", max_iter=20)),
    ],
)  # fmt: skip
def test_methods(text, expected):
    assert everywhere(text) == expected


def test_densities_that_differ_make_an_operation_of_operations():
    text = """
merge_method: dare_linear
base_model: ./base
models:
- {model: ./b, parameters: {weight: 0.5, density: 0.25}}
- {model: ./a, parameters: {weight: 1, density: 0.5}}
- {model: ./c, parameters: {weight: 2}}
"""
    # The seeds differ, so that the masks do.
    a = merge("dare_linear", weights={"a": 1}, density=0.5, seed=0)
    b = merge("dare_linear", weights={"b": 1}, density=0.25, seed=1)
    assert everywhere(text) == merge("task_arithmetic", weights={a: 1, b: 0.5, "c": 2})
    text = text.replace("dare_linear", "ties")
    a = merge("ties", weights={"a": 1}, density=0.5, scope="tensor")
    b = merge("ties", weights={"b": 1}, density=0.25, scope="tensor")
    expected = merge("ties", weights={a: 1, b: 0.5, "c": 2}, density=1.0, scope="tensor")
    assert everywhere(text) == expected


def test_a_weight_of_zero_takes_no_part():
    assert everywhere("merge_method: ties\n" + TWO.replace("0.5", "0")) == Blend.of("a")
    assert everywhere("merge_method: dare_ties\nparameters: {lambda: 0}\n" + TWO) == BASE
    blend = everywhere(
        "merge_method: task_arithmetic\n" + TWO.replace("0.5", "0.0").replace("1", "2")
    )
    assert blend == merge("task_arithmetic", weights={"a": 2})


SLERP = """
merge_method: slerp
base_model: org/a@v1
slices:
- sources:
  - {model: org/a@v1, layer_range: [0, 3]}
  - {model: ./b/, layer_range: [0, 3]}
- sources:
  - {model: ./b/, layer_range: [3, 4]}
  - {model: org/a@v1, layer_range: [3, 4]}
  parameters: {t: [0.1, 0.2]}
parameters:
  t:
  - {filter: self_attn, value: [0, 0.5, 1]}
  - {filter: mlp, value: [1, 0.5, 0]}
  - value: 0.25
dtype: torch.bfloat16
"""


def slerp(t):
    return Blend.of(Operation.of("slerp", {Blend.of("a"): 1 - t, Blend.of("b"): t}))


def test_slices_gradients_and_filters():
    recipe = parse_recipe(SLERP)
    assert {n: (e.source, e.revision) for n, e in recipe.experts.items()} == {
        "a": ("org/a", "v1"),
        "b": ("./b/", None),
    }
    assert (recipe.base, recipe.dtype) == (None, "bfloat16")
    result = recipe.resolve(4, tensors=llama(4))
    for layer, attention, mlp in ((0, "a", "b"), (1, slerp(0.5), slerp(0.5)), (2, "b", "a")):
        expected = [b if isinstance(b, Blend) else Blend.of(b) for b in (attention, mlp)]
        assert [result[Place(layer, role)] for role in ("attention", "mlp")] == expected
        assert result[Place(layer, "norm")] == slerp(0.25)
    # A slice of one layer is at the end of its gradient.
    assert {result[Place(3, role)] for role in ("attention", "mlp", "norm")} == {slerp(0.2)}
    # What is outside is at the start: the embedding of the first slice's, the rest of the last's.
    assert result[Place(None, "embedding")] == slerp(0.25)
    assert result[Place(None, "final_norm")] == result[Place(None, "head")] == slerp(0.1)


def test_models_are_one_slice_of_all_layers():
    text = "merge_method: linear\nmodels:\n- {model: a, parameters: {weight: [0, 1]}}\n"
    text += "- {model: b, parameters: {weight: 1}}\n"
    result = resolved(text, layers=5)
    for layer in range(5):
        assert result[Place(layer, "mlp")] == Blend.of({"a": layer / 4, "b": 1})
    assert result[Place(None, "head")] == Blend.of("b")
    assert resolved(text, layers=1)[Place(0, "mlp")] == Blend.of({"a": 1, "b": 1})


def test_settings_of_a_source_win_over_slice_and_file():
    text = """
merge_method: linear
parameters: {weight: 1}
slices:
- sources:
  - {model: a, layer_range: [0, 1], parameters: {weight: [{filter: norm, value: 4}]}}
  - {model: b, layer_range: [0, 1]}
  parameters: {weight: [{filter: lm_head, value: 3}]}
- sources: [{model: a, layer_range: [1, 2]}, {model: b, layer_range: [1, 2]}]
"""
    result = resolved(text, layers=2)
    half = Blend.of({"a": 1, "b": 1})
    assert result[Place(0, "attention")] == result[Place(0, "mlp")] == half
    assert result[Place(0, "norm")] == Blend.of({"a": 4, "b": 1})
    assert result[Place(None, "head")] == half
    assert result[Place(1, "norm")] == half


def test_the_last_slice_has_as_many_sources_as_the_first():
    text = """
merge_method: linear
parameters: {weight: 1}
slices:
- sources: [{model: a, layer_range: [0, 1]}]
- sources: [{model: b, layer_range: [1, 2]}, {model: c, layer_range: [1, 2]}]
"""
    result = resolved(text, layers=2)
    assert result[Place(1, "mlp")] == Blend.of({"b": 1, "c": 1})
    assert result[Place(None, "final_norm")] == Blend.of("b")
    short = text.replace("linear\n", "ties\nbase_model: a\n").replace("{model: b", "{model: d")
    short = short.replace("{model: c", "{model: a").replace("layer_range: [1, 2]}]", "X", 0)
    assert refusal(short, 2) == (
        "model.norm.weight: the first slice has fewer sources than the last, so mergekit "
        "ignores the base model 'base' there; list it first"
    )


def test_a_merged_base_is_an_expert_and_gives_the_config():
    text = "merge_method: linear\nbase_model: x/base\nparameters: {weight: 1}\nmodels: "
    for models in ("[{model: b}]", "[{model: b}, {model: x/base}]"):
        recipe = parse_recipe(text + models)
        assert recipe.base is None
        assert [*dict.fromkeys(recipe.method.references.values())] == ["base", "b"]
    assert set(recipe.resolve(2, tensors=llama(2)).blends.values()) == {
        Blend.of({"base": 1, "b": 1})
    }


def test_a_base_that_nothing_is_taken_from_is_the_recipe_s_base():
    text = "merge_method: passthrough\nbase_model: ./c\n"
    recipe = parse_recipe(text + "slices: [{sources: [{model: ./base, layer_range: [0, 2]}]}]")
    assert recipe.base.source == "./c"
    # The expert in a folder called base keeps apart from the recipe's base.
    assert list(recipe.experts) == ["base-2"]


def test_models_of_one_name_are_numbered():
    text = "merge_method: linear\nparameters: {weight: 1}\n"
    text += "models: [{model: x/m}, {model: y/m@1}, {model: {model: {path: y/m, revision: '2'}}}]"
    recipe = parse_recipe(text)
    assert {n: (e.source, e.revision) for n, e in recipe.experts.items()} == {
        "m": ("x/m", None),
        "m-2": ("y/m", "1"),
        "m-3": ("y/m", "2"),
    }


def test_a_slice_with_a_base_of_its_own():
    text = """
merge_method: task_arithmetic
base_model: ./base
parameters: {weight: 0.5}
slices:
- sources: [{model: ./base, layer_range: [0, 1]}, {model: a, layer_range: [0, 1]}]
- base_model: other
  sources: [{model: other, layer_range: [1, 2]}, {model: a, layer_range: [1, 2]}]
"""
    result = resolved(text, layers=2)
    assert result[Place(0, "mlp")] == merge("task_arithmetic", weights={"a": 0.5})
    expected = Operation.of("task_arithmetic", {Blend.of("a"): 0.5}, base=Blend.of("other"))
    assert result[Place(1, "mlp")] == Blend.of(expected)


@pytest.mark.parametrize("text", [SLERP, "merge_method: dare_ties\n" + TWO])
def test_the_recipe_can_be_written_and_read_again(text):
    recipe = parse_recipe(text)
    data = recipe.model_dump(mode="json", exclude_defaults=True)
    again = check_recipe(data, where="again")
    assert again.resolve(4, tensors=llama(4)) == recipe.resolve(4, tensors=llama(4))
    assert again.model_dump(mode="json", exclude_defaults=True) == data


def test_slices_may_repeat_drop_and_move_layers():
    result = resolved("""
merge_method: passthrough
slices:
- sources: [{model: a, layer_range: [0, 3]}]
- sources: [{model: b, layer_range: [1, 4]}]
""")
    assert (result.layers, result.taken) == (6, (0, 1, 2, 1, 2, 3))
    assert [str(result[Place(layer, "mlp")]) for layer in range(6)] == [*"aaabbb"]
    assert str(result[Place(None, "embedding")]) == "a"
    assert str(result[Place(None, "head")]) == "b"
    assert " 3 = 1 " in str(result)
    shorter = resolved("merge_method: passthrough\nslices: [{sources: [{model: a, "
                       "layer_range: [0, 3]}]}]")  # fmt: skip
    assert (shorter.layers, shorter.taken) == (3, (0, 1, 2))


def test_a_model_with_an_adapter():
    text = "models: [{model: ./a@x+org/l@y}, {model: {model: {path: b}, lora: {path: ./l}}}]"
    recipe = parse_recipe(LINEAR + text)
    experts = {
        name: expert.model_dump(exclude_none=True) for name, expert in recipe.experts.items()
    }
    assert experts == {
        "l": {"source": "./a", "revision": "x", "adapter": "org/l@y"},
        "l-2": {"source": "b", "adapter": "./l"},
    }


def test_filters_are_read_by_the_names_of_the_checkpoint():
    text = "merge_method: slerp\nbase_model: a\nmodels: [{model: b}]\n"
    text += "parameters: {t: [{filter: attn, value: 0}, {value: 1}]}"
    names = {
        "wte.weight": Place(None, "embedding"),
        "h.0.attn.c_attn.weight": Place(0, "attention"),
        "h.0.mlp.c_fc.weight": Place(0, "mlp"),
    }
    result = resolved(text, layers=1, tensors=names)
    assert result[Place(0, "attention")] == Blend.of("a")
    assert result[Place(0, "mlp")] == Blend.of("b")
    # No head is stored: it is the embedding.
    assert result[Place(None, "head")] == result[Place(None, "embedding")] == Blend.of("b")


def test_a_filter_inside_a_place():
    text = "merge_method: slerp\nbase_model: a\nmodels: [{model: b}]\n"
    text += "parameters: {t: [{filter: q_proj, value: 0}, {value: 1}]}"
    assert refusal(text, 2) == (
        "layer 0 attention: model.layers.0.self_attn.q_proj.weight would be a and "
        "model.layers.0.self_attn.k_proj.weight b; layerswap merges a place as a whole, so filters "
        "can separate self_attn, mlp and norms, but not parts of them"
    )


@pytest.mark.parametrize(
    ("text", "layers", "message"),
    [
        ("merge_method: linear\nparameters: {weight: 0}\nmodels: [{model: a}]", 1,
         "model.embed_tokens.weight: every weight is 0"),
        ("merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}},"
         "{model: b, parameters: {weight: -1}}]", 1,
         "model.embed_tokens.weight: the weights sum to 0"),
        ("merge_method: linear\nparameters: {weight: {filter: mlp, value: 1}}\n"
         "models: [{model: a}]", 1,
         "model.embed_tokens.weight: no weight for 'a': no filter matches, and there is no "
         "default"),
        ("merge_method: slerp\nparameters: {t: {filter: mlp, value: 1}}\nbase_model: b\n"
         "models: [{model: a}]", 1,
         "model.embed_tokens.weight: no t: no filter matches, and there is no default"),
        ("merge_method: passthrough\nslices: [{sources: [{model: a, layer_range: [2, 5]}]}]", 4,
         "m.yml, line 2: slices.0: layer_range ends at 5, but a has 4 layers"),
    ],
)  # fmt: skip
def test_refusals_when_the_models_are_known(text, layers, message):
    assert refusal(text, layers) == message


LINEAR = "merge_method: linear\nparameters: {weight: 1}\n"
BOTH = "models: [{model: a}, {model: b}]\n"
KNOWN = (
    "arcee_fusion, breadcrumbs, breadcrumbs_ties, dare_linear, dare_ties, della, della_linear, "
    "karcher, linear, model_stock, multislerp, nearswap, nuslerp, passthrough, ram, ramplus_tl, "
    "sce, slerp, task_arithmetic, ties"
)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("merge_method: quux\n" + BOTH,
         [f", line 1: merge_method: no method 'quux'; there are {KNOWN}"]),
        ("merge_method: tise\n" + BOTH,
         [", line 1: merge_method: no method 'tise'; did you mean 'ties'?"]),
        ("models: [{model: a}]", [": merge_method: is missing"]),
        (LINEAR, [": give exactly one of models and slices; found none"]),
        (LINEAR + BOTH + "slices: [{sources: [{model: a, layer_range: [0, 1]}]}]",
         [": give exactly one of models and slices; found both"]),
        (LINEAR + BOTH + "name: x", [
            ", line 4: name: unknown key; there are base_model, chat_template, dtype, "
            "merge_method, models, out_dtype, parameters, slices, tokenizer, "
            "tokenizer_source"]),
        (LINEAR + "models: [{modell: a}]",
         [", line 3: models[0].model: is missing",
          ", line 3: models[0].modell: unknown key; did you mean 'model'?"]),
        (LINEAR + "models: [{model: a}, {model: a}]",
         [", line 3: models[1]: 'a' is given twice"]),
        (LINEAR + "models: [{model: a+b+c}, {model: {model: c, tokenizer: d}}]",
         [", line 3: models[0].model: 'a+b+c' adds two adapters; merge one into the model first",
          ", line 3: models[1].model: 'tokenizer' of a model is not supported; write the model "
          "alone"]),
        ("merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}, {model: b}]",
         [", line 2: models[1]: linear needs a weight for 'b'"]),
        ("merge_method: linear\nbase_model: c\nmodels: [{model: a, parameters: {weight: 1}}]",
         [", line 2: base_model: linear needs a weight for 'c'"]),
        (LINEAR.replace("1", "[1, -2e6]") + BOTH,
         [", line 2: parameters.weight: -2000000.0 is not a number from -1e+06 to 1e+06"]),
        (LINEAR.replace("1", "[]") + BOTH,
         [", line 2: parameters.weight: an empty list; write at least one number"]),
        (LINEAR.replace("1", "{filter: mlp}") + BOTH,
         [", line 2: parameters.weight: write a number, a list of numbers, or {filter: ..., "
          "value: ...}; found {'filter': 'mlp'}"]),
        (LINEAR.replace("1", "much") + BOTH,
         [", line 2: parameters.weight: 'much' is not a number"]),
        (LINEAR.replace("weight", "wieght") + BOTH,
         [", line 2: parameters.wieght: mergekit has no parameter 'wieght'; did you mean "
          "'weight'?",
          ", line 3: models[0]: linear needs a weight for 'a'",
          ", line 3: models[1]: linear needs a weight for 'b'"]),
        ("merge_method: ties\nparameters: {weight: 1}\n" + BOTH,
         [": ties works on deltas and needs a base model; give `base_model`"]),
        ("merge_method: ties\nparameters: {weight: 1}\nbase_model: a\nmodels: [{model: a}]",
         [": there is no model beside the base model"]),
        ("merge_method: ties\nparameters: {weight: 1, density: 0, rescale: true}\n"
         "base_model: c\n" + BOTH,
         [", line 2: parameters.density: 0 is not a number above 0 to 1"]),
        ("merge_method: ties\nparameters: {weight: -1}\nbase_model: c\n" + BOTH,
         [", line 2: parameters.weight: -1 is not a number from 0 to 1e+06"]),
        ("merge_method: ties\nparameters: {weight: 1}\nbase_model: c\n"
         "slices: [{sources: [{model: a, layer_range: [0, 1]}]}]",
         [", line 4: slices[0]: 'c' is the base model and must be among the sources"]),
        ("merge_method: model_stock\nbase_model: c\nmodels: [{model: a}]\n"
         "parameters: {filter_wise: true}",
         [", line 3: models: model_stock takes at least 3 models, the base model included; "
          "found 2"]),
        ("merge_method: slerp\n" + BOTH,
         [": slerp starts from a base model; give `base_model`",
          ": parameters.t: slerp needs t, from 0 (the base model) to 1"]),
        ("merge_method: slerp\nbase_model: c\n" + BOTH + "parameters: {t: [0, 2]}",
         [", line 3: models: slerp takes exactly 2 models, the base model included; found 3",
          ", line 4: parameters.t: 2 is not a number from 0 to 1"]),
        ("merge_method: passthrough\n" + BOTH + "parameters: {scale: 0.5}",
         [", line 2: models: passthrough takes exactly 1 model; found 2"]),
        ("merge_method: nuslerp\nbase_model: b\nparameters: {weight: 1}\n" + BOTH,
         [", line 4: models: nuslerp takes exactly 2 models beside the base model; found 1"]),
        ("merge_method: nearswap\nbase_model: b\nparameters: {tt: 1}\n" + BOTH,
         [", line 3: parameters.tt: mergekit has no parameter 'tt'; did you mean 't'?",
          ", line 3: parameters.t: nearswap needs t, the largest change"]),
        ("merge_method: della\nbase_model: c\nparameters: {weight: 1, epsilon: 0.6}\n" + BOTH,
         [", line 3: parameters.epsilon: 0.6 is not a number from 0 to 0.5"]),
        ("merge_method: passthrough\nslices:\n- sources: [{model: a, layer_range: [3, 3]}]",
         [", line 3: slices[0].sources[0].layer_range: [3, 3] holds no layer"]),
        ("merge_method: passthrough\nslices:\n- sources: [{model: b, layer_range: [3]}]",
         [", line 3: slices[0].sources[0].layer_range[1]: is missing"]),
        (LINEAR + "slices:\n"
         "- sources: [{model: a, layer_range: [0, 3]}, {model: b, layer_range: [0, 2]}]",
         [", line 4: slices[0]: the sources have different layers; layerswap takes the same layers "
          "of each"]),
        (LINEAR + BOTH + "dtype: int64\nout_dtype: bfloat",
         [", line 4: dtype: 'int64' is not allowed; there are bfloat16, float16, float32",
          ", line 5: out_dtype: 'bfloat' is not allowed; did you mean 'bfloat16'?"]),
        (LINEAR + BOTH + "tokenizer_source: union\nchat_template: auto\n"
         "tokenizer: {source: base, tokens: {x: {source: a}}, pad_to_multiple_of: 8}",
         [", line 5: chat_template: layerswap copies the tokenizer with its template; remove "
          "`chat_template`",
          ", line 6: tokenizer: give tokenizer or tokenizer_source, not both",
          ", line 6: tokenizer.tokens: not supported; embedding rows are merged as they are",
          ", line 6: tokenizer.pad_to_multiple_of: not supported; embedding rows are merged as "
          "they are"]),
    ],
)  # fmt: skip
def test_refusals(text, messages):
    assert sorted(refusal(text).split("\n")) == sorted("m.yml" + message for message in messages)


def test_a_recipe_s_own_mergekit_part_is_checked():
    text = "experts: {a: x, b: y}\nmergekit:\n  merge_method: linear\n  parameters: {wight: 1}\n"
    text += "  models: [{model: a}, {model: c}, {model: base}]\nweights: uniform"
    assert sorted(refusal(text).split("\n")) == [
        "m.yml, line 4: mergekit.parameters.wight: mergekit has no parameter 'wight'; did you "
        "mean 'weight'?",
        "m.yml, line 5: mergekit.models[0]: linear needs a weight for 'a'",
        "m.yml, line 5: mergekit.models[1].model: no expert 'c'; there are a, b",
        "m.yml, line 5: mergekit.models[1]: linear needs a weight for 'c'",
        "m.yml, line 5: mergekit.models[2].model: no expert 'base'; there are a, b",
        "m.yml, line 5: mergekit.models[2]: linear needs a weight for 'base'",
        "m.yml, line 6: weights: weights belong in `mergekit`; remove `weights`",
    ]
    text = "experts: {base: x}\nbase: y\n"
    text += "mergekit: {merge_method: passthrough, models: [{model: base}]}"
    assert refusal(text) == (
        "m.yml, line 3: mergekit: beside the base no expert can be called 'base'; give it another "
        "name"
    )


MOE = "experts: [{source_model: ./a, positive_prompts: [sums]}]\n"


@pytest.mark.parametrize("text", ["base_model: ./a\n" + MOE, "gate_mode: hidden\n" + MOE])
def test_a_mixture_of_experts_is_refused_by_name(text):
    assert refusal(text) == (
        "m.yml: a mergekit-moe configuration; layerswap builds no mixtures of experts, so give it "
        "to mergekit-moe"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tokenizer_source: union", "union"),
        ("tokenizer: {source: org/two}", "two"),
        ("tokenizer_source: base", None),
        ("dtype: float32", None),
    ],
)
def test_the_owner_of_the_output_s_tokenizer(line, expected):
    text = (
        "merge_method: linear\nmodels:\n- {model: org/one, parameters: {weight: 1}}\n"
        f"- {{model: org/two, parameters: {{weight: 1}}}}\n{line}\n"
    )
    assert parse_recipe(text).tokenizer == expected
