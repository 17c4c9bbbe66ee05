"""Recipes: every key, and the exact words of every refusal."""

import pytest
from refusals import refused

from layerswap.checkpoint.places import Pattern, Place
from layerswap.compose.blend import Blend
from layerswap.compose.presets import Zones, partition, soup, swap
from layerswap.compose.recipe import parse_recipe, read_recipe
from layerswap.compose.schema import parse_size
from layerswap.ground.errors import RecipeError

EXPERTS = "experts: {task: a, language: b}\n"
SWAP = EXPERTS + "swap: {}\n"


def refusal(text):
    return refused(RecipeError, parse_recipe, text, where="r.yaml")


def test_every_key(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("""
base: {source: org/base, revision: main}
experts:
  math: {source: ./math}
  sw1: org/one
  sw2: org/two
  swahili: {soup: {sw1: 1, sw2: 3}}
swap:
  task: math
  language: swahili
  bottom: 2
  top: 1
  bottom_transition: 1
  top_transition: 2
  outside: task
weights: {math: 3, swahili: 1}
places:
  - {layers: 3-4, roles: [attention], take: sw1}
  - {layers: outside, take: [sw1, sw2]}
dtype: bfloat16
max_shard_size: 500MB
languages: [sw]
patterns:
  - {match: 'h[.](?P<layer>[0-9]+)[.]x', role: mlp}
""")
    recipe = read_recipe(path)
    assert (recipe.dtype, recipe.max_shard_size, recipe.languages) == ("bfloat16", "500MB", ["sw"])
    assert (recipe.base.source, recipe.base.revision) == ("org/base", "main")
    assert recipe.experts["sw1"].source == "org/one"
    assert recipe.place_patterns == (Pattern("h[.](?P<layer>[0-9]+)[.]x", "mlp"),)
    assert recipe.method.zones(8) == Zones(2, 1, 1, 2)
    plan = recipe.resolve(8)
    assert plan[Place(0, "mlp")] == Blend.of({"sw1": 0.25, "sw2": 0.75})
    assert plan[Place(2, "mlp")] == Blend.of({"math": 12, "sw1": 1, "sw2": 3})
    assert plan[Place(3, "attention")] == Blend.of("sw1")
    assert plan[Place(3, "mlp")] == Blend.of("math")
    assert plan[Place(None, "head")] == Blend.of({"sw1": 1, "sw2": 1})
    assert plan.experts == ("math", "sw1", "sw2")


def test_methods_resolve_to_their_presets():
    assert parse_recipe(SWAP).resolve(16) == swap(16)
    assert parse_recipe(EXPERTS + "partition: {name: A}").resolve(32) == partition("A", 32)
    mean = parse_recipe(EXPERTS + "soup: {experts: [task, language]}").resolve(4)
    assert mean == soup(4, ["task", "language"])


@pytest.mark.parametrize(
    ("weights", "share"),
    [("uniform", 0.5), ("[task, language]", 0.5), ("{task: 3, language: 1}", 0.75)],
)
def test_forms_of_weights(weights, share):
    plan = parse_recipe(f"{SWAP}weights: {weights}\n").resolve(8)
    assert dict(plan[Place(None, "head")].weights)["task"] == share


def test_magnitude_weights_are_given_when_resolving():
    recipe = parse_recipe(SWAP + "base: c\nweights: magnitude\n")
    plan = recipe.resolve(8, {"task": 1.0, "language": 3.0})
    assert plan[Place(None, "head")] == Blend.of({"task": 0.25, "language": 0.75})
    with pytest.raises(RecipeError, match=r"^weights: magnitude weights were not measured$"):
        recipe.resolve(8)


def test_soups_of_soups_flatten():
    text = "experts: {a: 1a, b: 1b, c: 1c, ab: {soup: [a, b]}, abc: {soup: [ab, c]}}\n"
    plan = parse_recipe(text + "soup: {experts: [abc]}").resolve(2)
    assert set(plan.blends.values()) == {Blend.of({"a": 0.25, "b": 0.25, "c": 0.5})}


MLP_OF_LAYER_3 = (Place(3, "mlp"), Place(3, "router"))


def test_later_overrides_win():
    text = SWAP + "places: [{layers: all, take: task}, {layers: 3, roles: [mlp], take: language}]"
    plan = parse_recipe(text).resolve(8)
    assert plan[Place(3, "mlp")] == Blend.of("language")
    assert plan[Place(3, "router")] == Blend.of("language")  # a mixture's router goes with it
    rest = {place: b for place, b in plan.blends.items() if place not in MLP_OF_LAYER_3}
    assert set(rest.values()) == {Blend.of("task")}
    apart = text[:-1] + ", {layers: 3, roles: [router], take: task}]"
    plan = parse_recipe(apart).resolve(8)
    assert plan[Place(3, "mlp")] == Blend.of("language")
    assert plan[Place(3, "router")] == Blend.of("task")
    assert "mlp: language; router: task" in str(plan)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layers: 8", "places[0]: layers: 8 is not inside 0-7"),
        ("layers: 6-8", "places[0]: layers: 6-8 is not inside 0-7"),
        ("layers: 3, roles: [head]", "places[0]: no place in layers 3 has a role of head"),
    ],
)
def test_overrides_outside_the_model(override, message):
    recipe = parse_recipe(f"{SWAP}places: [{{{override}, take: task}}]")
    assert refused(RecipeError, recipe.resolve, 8) == message


ONE = "give exactly one of swap, soup, partition, merge, instruct; found "
NUMBER = "; a weight is a number from 0"
FORM = "write a list of experts, or a weight per expert; found "
LAYERS = " is not a number, a range like 3-7, all or outside"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("experts: [a]\nswap: {}", [", line 1: experts: write a mapping; found ['a']"]),
        ("experts:\nswap: {}", [", line 1: experts: write a mapping; found None"]),
        ("{}", [": experts: is missing"]),
        (EXPERTS + "swap:", [f": {ONE}none; for the defaults write `swap: {{}}`"]),
        (SWAP + "soup: {experts: [task]}", [f": {ONE}swap and soup"]),
        (EXPERTS + "swap: []", [", line 2: swap: write a mapping; found []"]),
        (SWAP + "places: [{layers: 5-3, take: task}, {layers: 7-6, take: task}]",
         [", line 3: places[0].layers: 5-3 runs backwards; write 3-5",
          ", line 3: places[1].layers: 7-6 runs backwards; write 6-7"]),
        (SWAP + "1: 2", [": [1]: a key is a text; write it in quotes: '1'"]),
        (SWAP + "no: 2", [": [0]: a key is a text; write it in quotes: 'no'"]),
        ("experts: {str: a, b: 3}\nsoup: {experts: [str]}",
         [", line 1: experts.b: write a mapping; found 3"]),
        ("experts: {task: '', language: b}\nswap: {}",
         [", line 1: experts.task.source: write a text that is not empty; found ''"]),
        ("experts: {task: {}, language: b}\nswap: {}",
         [", line 1: experts.task: give exactly one of source, soup and merge"]),
        ("experts: {task: {soup: [task]}, language: b}\nswap: {}",
         [", line 1: experts.task: is made of itself"]),
        (SWAP + "base: {soup: [task]}",
         [", line 3: base.soup: the base is one checkpoint, never a soup"]),
        (EXPERTS + "swap: {bottom: -1}",
         [", line 2: swap.bottom: write a number from 0; found -1"]),
        (EXPERTS + "swap: {bottom: 1.5}",
         [", line 2: swap.bottom: write a whole number; found 1.5"]),
        (EXPERTS + "swap: {botom: 1}",
         [", line 2: swap.botom: unknown key; did you mean 'bottom'?"]),
        (EXPERTS + "swap: {outside: x}",
         [", line 2: swap.outside: 'x' is not allowed; there are blend, language, task"]),
        (EXPERTS + "swap: {task: tsk}",
         [", line 2: swap.task: no expert 'tsk'; did you mean 'task'?"]),
        (EXPERTS + "swap: {task: language}",
         [", line 2: swap: the task and the language expert are both 'language'"]),
        (EXPERTS + "partition: {name: A, task: language}",
         [", line 2: partition: the task and the language expert are both 'language'"]),
        (EXPERTS + "partition: {}", [", line 2: partition.name: is missing"]),
        (EXPERTS + "soup: {experts: []}",
         [", line 2: soup.experts: write at least one; found []"]),
        (EXPERTS + "soup: {experts: [task, task]}",
         [", line 2: soup.experts: 'task' is given twice"]),
        (SWAP + "weights: unifrm",
         [", line 3: weights: no rule 'unifrm'; did you mean 'uniform'?"]),
        (SWAP + "weights: magnitude",
         [", line 3: weights: magnitude weights need the base; give `base`"]),
        (SWAP + "weights: 3", [f", line 3: weights: {FORM}3"]),
        (SWAP + "weights: {task: 1}", [", line 3: weights: no weight for 'language'"]),
        (SWAP + "weights: {task: -1, language: 1}",
         [f", line 3: weights: the weight of 'task' is -1{NUMBER}"]),
        (SWAP + f"weights: {{task: {'9' * 400}, language: 1}}",
         [f", line 3: weights: the weight of 'task' is {'9' * 40}{NUMBER}"]),
        (SWAP + "weights: {task: 0, language: 0}", [", line 3: weights: every weight is 0"]),
        (SWAP + "weights: {task: 1, language: 1, zz: 1}",
         [", line 3: weights.zz: no expert 'zz'; there are language, task"]),
        ("experts: {task: a, language: b, c: d}\nswap: {}\nweights: {task: 1, language: 1, c: 1}",
         [", line 3: weights.c: the method does not blend this expert"]),
        (EXPERTS + "partition: {name: A}\nweights: uniform",
         [", line 3: weights: a partition blends nothing; remove `weights`"]),
        (SWAP + "places: [{layers: -1, take: task}]", [f", line 3: places[0].layers: -1{LAYERS}"]),
        (SWAP + "places: [{layers: foo, take: task}]",
         [f", line 3: places[0].layers: 'foo'{LAYERS}"]),
        (SWAP + "places: [{roles: [mpl], take: task}]",
         [", line 3: places[0].roles[0]: 'mpl' is not allowed; did you mean 'mlp'?"]),
        (SWAP + "places: [{take: x}]",
         [", line 3: places[0].take.x: no expert 'x'; there are language, task"]),
        (SWAP + "dtype: bflot16",
         [", line 3: dtype: 'bflot16' is not allowed; did you mean 'bfloat16'?"]),
        (SWAP + "languages: [no]", [", line 3: languages[0]: write a text in quotes; found False"]),
        (SWAP + "languages: [sw en]",
         [", line 3: languages[0]: 'sw en' is not a language code such as sw"]),
        (SWAP + "max_shard_size: big",
         [", line 3: max_shard_size: 'big' is not a size; write for example 5GB or 500MB"]),
        (SWAP + "patterns: [{match: x, role: mlp}]",
         [r", line 3: patterns[0]: pattern 'x': role 'mlp' needs a group (?P<layer>\d+)"]),
    ],
)  # fmt: skip
def test_refusals(text, messages):
    assert refusal(text).split("\n") == ["r.yaml" + message for message in messages]


def test_all_mistakes_of_single_keys_then_all_over_several():
    text = """experts: {task: a, language: b}
swap: {botom: 1, language: langage}
dtype: int8
max_shard_size: 5 pounds
places:
  - take: task
  - {layers: 3, take: tusk}
"""
    assert refusal(text).split("\n") == [
        "r.yaml, line 2: swap.botom: unknown key; did you mean 'bottom'?",
        "r.yaml, line 3: dtype: 'int8' is not allowed; there are bfloat16, float16, float32",
    ]
    assert refusal(text.replace("botom", "bottom").replace("int8", "float32")).split("\n") == [
        "r.yaml, line 2: swap.language: no expert 'langage'; did you mean 'language'?",
        "r.yaml, line 7: places[1].take.tusk: no expert 'tusk'; did you mean 'task'?",
        "r.yaml, line 4: max_shard_size: '5 pounds' is not a size; write for example 5GB or 500MB",
    ]


def test_a_cycle_through_others_is_found():
    text = "experts:\n  a: {soup: [b]}\n  b: {soup: [a]}\n  c: x\nsoup: {experts: [a, c]}"
    assert refusal(text).split("\n") == [
        "r.yaml, line 2: experts.a: is made of itself",
        "r.yaml, line 3: experts.b: is made of itself",
    ]


def test_experts_nested_thousands_deep_are_one_line():
    nested = "\n".join(f"  e{i + 1}: {{soup: [e{i}, x]}}" for i in range(3000))
    text = f"experts:\n  e0: a\n  x: b\n{nested}\nsoup: {{experts: [e3000, x]}}"
    assert refusal(text) == (
        "r.yaml, line 19: experts.e16: is made of experts that are made of others, more than 16 "
        "levels deep"
    )


@pytest.mark.parametrize("text", ["", "3", "- a", "just words"])
def test_not_a_mapping(text):
    wanted = "r.yaml: a recipe is a mapping with `experts` and one of swap, soup, partition, merge"
    assert refusal(text) == wanted


def test_unreadable_files_are_refused(tmp_path):
    path = tmp_path / "r.yaml"
    missing = f"{path}: cannot be read (No such file or directory)"
    assert refused(RecipeError, read_recipe, path) == missing
    path.write_bytes(b"\xff\xfe\xff")
    assert refused(RecipeError, read_recipe, path) == f"{path}: cannot be read (not UTF-8 text)"
    with pytest.raises(RecipeError, match=r"^/dev/zero: longer than 10,000,000 characters$"):
        read_recipe("/dev/zero")


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("2KB", 2000), (" 7B ", 7)],
)
def test_parse_size(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "7", "-1GB", "0.1B", "5TB", "GB", "9" * 400 + "GB"])
def test_parse_size_refuses(text):
    message = f"{text!r:.40} is not a size; write for example 5GB or 500MB"
    assert refused(RecipeError, parse_size, text) == message
