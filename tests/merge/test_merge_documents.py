"""The files beside the weights: record, model card, configuration."""

import json
import os

import pytest
import yaml
from huggingface_hub import ModelCard
from merging import (
    change_config,
    change_tensors,
    composed,
    copied,
    recipe_plan,
    swap_of,
    tensors_of,
    weight_bytes,
)

import layerswap as ls
from layerswap.checkpoint import fingerprint, read
from layerswap.compose.presets import partition
from layerswap.compose.recipe import check_recipe
from layerswap.merge.metadata import for_upload

FOLDERS = {"task": "task", "a": "language", "b": "third", "base": "base"}


def recipe_of(experts, **changes):
    given = {name: str(experts[folder]) for name, folder in FOLDERS.items()}
    settings = {
        "base": given.pop("base"), "experts": {**given, "language": {"soup": {"a": 0.3, "b": 0.7}}},
        "swap": {"bottom": 1, "top": 1, "bottom_transition": 1}, "weights": "magnitude",
        "languages": ["sw", "te"], "dtype": "bfloat16",
        "places": [{"layers": "1-2", "roles": ["mlp"], "take": {"a": 1, "task": 2}}],
    }  # fmt: skip
    return check_recipe({**settings, **changes}, where="recipe")


@pytest.fixture(scope="module")
def out(experts, tmp_path_factory):
    plan = ls.make_plan(recipe_of(experts))
    return plan.save(tmp_path_factory.mktemp("documents") / "out")


def record_of(folder):
    return json.loads((folder / "layerswap.json").read_text())


def test_the_record_holds_recipe_composition_and_sources(experts, out):
    record = record_of(out)
    assert record["layerswap_version"] == ls.__version__
    assert check_recipe(record["recipe"], where="r") == recipe_of(experts)
    plan = ls.make_plan(recipe_of(experts))
    assert record["composition"] == plan.composition.to_dict()
    assert record["magnitude_weights"] == plan.magnitude
    assert record["sources"] == {
        name: {"source": str(experts[folder]), "revision": None,
               "fingerprints": {file: fingerprint(experts[folder] / file)}}
        for name, folder in FOLDERS.items() for file in ("model.safetensors",)
    }  # fmt: skip


def test_the_record_alone_makes_the_same_weights(experts, out, tmp_path):
    swap = swap_of(experts, bottom=1, top=1)
    other = composed(swap, partition("Z", 4))
    plans = {"composition": other, "grid": swap.grid(bottom=[0, 2], top=[0])[1]}
    for folder in (out, *(plan.save(tmp_path / name) for name, plan in plans.items())):
        again = recipe_plan(record_of(folder)["recipe"]).save(tmp_path / f"again {folder.name}")
        assert weight_bytes(again) == weight_bytes(folder)
        assert record_of(again) == record_of(folder)
    assert record_of(tmp_path / "grid")["recipe"]["swap"]["bottom"] == 2
    assert weight_bytes(swap.save(tmp_path / "plain")) != weight_bytes(tmp_path / "composition")


def test_a_fingerprint_sees_every_block_it_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "SAMPLE_BYTES", 16)
    file = tmp_path / "weights"
    data = bytes(range(256)) * 40
    file.write_bytes(data)
    seen, last = {fingerprint(file)}, len(data) - 16
    starts = [last * i // 63 for i in range(64)]
    positions = [start + at for start in starts for at in (0, 15)]
    for position in positions:
        changed = bytearray(data)
        changed[position] ^= 1
        file.write_bytes(changed)
        seen.add(fingerprint(file))
    file.write_bytes(data + b"\0")
    seen.add(fingerprint(file))
    assert len(seen) == len(set(positions)) + 2


@pytest.mark.parametrize("size", [0, 1, 17, 65536, 65537])
def test_a_small_file_is_fingerprinted_whole(tmp_path, size):
    file = tmp_path / "weights"
    file.write_bytes(bytes(size))
    before = fingerprint(file)
    for position in {0, size // 2, size - 1} if size else ():
        data = bytearray(size)
        data[position] = 1
        file.write_bytes(data)
        assert fingerprint(file) != before


def test_the_card_is_one_the_hub_reads(out):
    card = ModelCard.load(out / "README.md")
    assert card.data.to_dict() == {  # a folder's name is no id of the Hub, so there is no base
        "tags": ["merge", "layerswap"], "language": ["sw", "te"], "library_name": "transformers",
        "pipeline_tag": "text-generation",
    }  # fmt: skip
    snippet = card.content.split("```python\n")[1].split("```")[0]
    compile(snippet, "card", "exec")


LICENCES = [
    (("apache-2.0", "apache-2.0"), "apache-2.0", None),
    (("apache-2.0", "llama3.1"), "other", "mixed"),
    (("apache-2.0", None), None, None),
    (("apache-2.0", "no licence [at] all"), None, None),
    (("apache-2.0", "!!bool x"), None, None),
    (("apache-2.0", "!!timestamp x"), None, None),
]


@pytest.mark.parametrize(("licences", "expected", "name"), LICENCES)
def test_the_licence_is_that_of_the_experts(pair, tmp_path, licences, expected, name):
    for folder, licence in zip(pair, licences, strict=True):
        if licence:
            (folder / "README.md").write_text(f"---\nlicense: {licence}\n---\n\n# One\n")
    plan = swap_of(pair)
    card = ModelCard.load(plan.save(tmp_path / "out") / "README.md")
    assert (card.data.license, card.data.to_dict().get("license_name")) == (expected, name)
    shown = "not given" if name is None and expected is None else licences[1]
    assert f"- `language`: language (licence: {shown})" in card.content


def test_copies_among_the_sources_are_named(experts, pair, tmp_path):
    def notes(**sources):
        return [note for note in ls.swap(**sources).notes if "weights" in note]

    task, language = experts["task"], experts["language"]
    assert notes(task=task, language=language, base=experts["base"]) == []
    same = "task and language have the same weights: no composition of them changes anything"
    assert notes(task=task, language=pair[0]) == [same]
    untrained = "task has the weights of its base: its training changed nothing"
    assert notes(task=task, language=language, base=pair[0]) == [untrained]
    assert notes(task=task, language=pair[0], base=task)[-1] == same
    change_tensors(pair[0], {"model.norm.weight": tensors_of(task)["model.norm.weight"] + 1})
    assert notes(task=task, language=pair[0]) == []


def test_the_card_names_no_local_path(experts, out):
    text = (out / "README.md").read_text()
    assert "/" + experts["task"].parent.name not in text
    assert os.sep + "tmp" not in text
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    names = {name: entry.get("source") for name, entry in recipe["experts"].items()}
    assert names == {"task": "task", "a": "language", "b": "third", "language": None}
    assert recipe["base"] == {"source": "base"}
    assert check_recipe(recipe, where="card").swap == recipe_of(experts).swap


def test_no_name_adds_a_line_or_markup_to_the_card(experts, tmp_path):
    name = "a`\n```\n# Forged\n[b](http://x) <img src=x>"
    odd = copied(experts["task"], tmp_path / "x\n```\n# Forged <img src=y> [c](d)")
    recipe = {"experts": {name: str(odd)}, "soup": {"experts": [name]}}
    text = ls.make_plan(check_recipe(recipe, where="r")).save(tmp_path / "out") / "README.md"
    lines = text.read_text().splitlines()
    fences = [line for line in lines if line.startswith("```")]
    assert fences == ["```python", "```", "````", "````", "````yaml", "````"]
    outside = "\n".join(lines[: lines.index("````yaml")])
    assert "\n# Forged" not in outside
    (line,) = [line for line in lines if line.startswith("- `a")]
    assert line == (
        r"- `a'\n'''\n# Forged\n[b](http://x) <img src=x>`: x\\n\`\`\`\\n# Forged "
        r"\<img src=y\> \[c\](d) (licence: not given)"
    )


def test_config_and_tokenizer_are_the_task_experts_without_code(pair, tmp_path):
    for name in ("modeling_odd.py", "sparse_linear.pt", "optimizer.pt", "LICENSE.txt"):
        (pair[0] / name).write_text("raise SystemExit")
    expected = {}
    for name, settings in (("config.json", {"task_marker": 1}), ("tokenizer_config.json", {})):
        file = pair[0] / name
        expected[name] = {**(json.loads(file.read_text()) if file.is_file() else {}), **settings}
        file.write_text(json.dumps({**expected[name], "auto_map": {"Auto": "modeling_odd.Odd"}}))
    code, left = swap_of(pair).notes[-2:]
    assert code.startswith(f"{pair[0]}'s own code is left out, as no code is copied; ")
    assert "(auto_map of its config.json, auto_map of its tokenizer_config.json, model" in code
    assert left == f"left out of the output: sparse_linear.pt of {pair[0]}; add what it needs"
    out = swap_of(pair).save(tmp_path / "out")
    assert {name: json.loads((out / name).read_text()) for name in expected} == expected
    assert not list(out.glob("*.py"))
    assert ls.verify(out).passed


def test_an_upload_names_no_folder_of_the_machine_and_can_be_verified(pair, tmp_path):
    change_config(pair[0], _name_or_path=str(tmp_path / "base"), text_config={"name_or_path": "/x"})
    (pair[0] / "tokenizer_config.json").write_text(json.dumps({"name_or_path": "/x", "a": 1}))
    out = swap_of(pair).save(tmp_path / "out")
    assert ls.verify(out).passed
    there = tmp_path / "there"
    there.mkdir()
    texts = for_upload(out)
    for file in out.iterdir():
        content = texts[file.name].encode() if file.name in texts else file.read_bytes()
        assert str(tmp_path).encode() not in content, file.name
        assert b'"/x"' not in content, file.name
        (there / file.name).write_bytes(content)
    assert json.loads(texts["layerswap.json"])["sources"]["task"]["source"] == f"./{pair[0].name}"
    moved = {"task": str(pair[0]), "language": str(pair[1])}
    assert ls.verify(there, sources=moved).passed


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_is_written_under_the_key_that_the_config_has(pair, tmp_path, key):
    change_config(pair[0], drop="dtype")
    change_config(pair[0], **{key: "float32"})
    plan = swap_of(pair, dtype="bfloat16")
    config = json.loads((plan.save(tmp_path / "out") / "config.json").read_text())
    assert {k: v for k, v in config.items() if k.endswith("dtype")} == {key: "bfloat16"}


def test_the_summary_counts_bytes(experts, tmp_path):
    plan = swap_of(experts, bottom=1, top=1)
    summary = plan.to_dict()
    out = plan.save(tmp_path / "out")
    assert json.loads(json.dumps(summary)) == summary
    assert summary["tensors"] == len(plan.tensors) == 39
    assert summary["shards"] == len(list(out.glob("*.safetensors"))) == 1
    blended = (2 * 50 * 24 + 24) * 4
    weights = sum(tensor.nbytes for tensor in plan.tensors)
    assert summary["copied_bytes"] == weights - blended
    assert weights < summary["output_bytes"] <= (out / "model.safetensors").stat().st_size
