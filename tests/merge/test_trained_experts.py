"""Records of training: the default partition, bases and contaminated rows."""

import json

import pytest
import torch
from merging import (
    change_config,
    copied,
    refusal,
    save_adapter,
    save_expert,
    save_near,
    save_tokenizer,
    swap_of,
    tiny_llama,
)

import layerswap as ls
from layerswap.checkpoint import fingerprint
from layerswap.checkpoint.hub import TRAINING
from layerswap.compose.composition import all_places
from layerswap.compose.presets import partition
from layerswap.ground.errors import LayerswapError


def write_record(folder, part, *, name="C", outside="task", data=()):
    """What `layerswap train` writes of an expert that trained its part of a partition."""
    composition = partition(name, 4, outside=outside)
    places = [p for p in all_places(4) if part in composition[p].experts]
    record = {
        "key": "k", "finished": True, "data": list(data),
        "spec": {"base": "base", "train": {"partition": name, "part": part, "outside": outside}},
        "places": [[[place.layer, place.role] for place in places]],
    }  # fmt: skip
    (folder / TRAINING).write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A base, and experts that are close to it, as trained ones are."""
    root = tmp_path_factory.mktemp("close")
    base = save_tokenizer(save_expert(root / "base", tiny_llama(), 3))
    near = {n: save_near(root / n, base, i) for i, n in enumerate(("task", "language", "third"))}
    return {"base": base, **near}


@pytest.fixture
def partial(pair):
    task, language = pair
    return write_record(task, "task"), write_record(language, "language")


def test_experts_of_a_partition_are_composed_along_it(partial):
    task, language = partial
    plan = ls.swap(task=task, language=language)
    assert plan.composition == partition("C", 4, outside="task")
    assert plan.notes == ["along partition C, on which the experts were trained"]


def test_a_checkpoint_of_a_training_has_its_record(pair, tmp_path):
    rows = [{"train": 1000}, {"train": 200}]
    task, language = (
        write_record(folder, part, data=rows)
        for folder, part in zip(pair, ("task", "language"), strict=True)
    )
    step = copied(language, language / "checkpoints" / "checkpoint-50")
    (step / TRAINING).unlink()
    plan = ls.swap(task=task, language=step)
    assert plan.composition == partition("C", 4, outside="task")
    card = (plan.save(tmp_path / "out") / "README.md").read_text()
    assert card.count("; trained on 1,200 rows)") == 2


def test_another_composition_than_the_trained_one_is_named(partial):
    task, language = partial
    for plan in (
        ls.swap(task=task, language=language, bottom=0, top=1),
        ls.soup({"task": task, "language": language}),
    ):
        assert plan.notes == [
            "not along partition C, on which the experts were trained "
            "(--partition C --outside task)"
        ]


def test_a_single_expert_is_asked_for_no_partition(partial, experts):
    assert not any(
        "partition" in note for note in ls.revert(experts["base"], partial[0], layers="0").notes
    )


def test_one_partial_expert_or_two_of_different_partitions(pair):
    language = write_record(pair[1], "language", outside=None)
    assert ls.swap(task=pair[0], language=language).composition == partition("C", 4)
    task = write_record(pair[0], "task", name="B")
    assert ls.swap(task=task, language=language).recipe.swap is not None


def test_a_chosen_composition_is_not_replaced(partial):
    task, language = partial
    assert ls.swap(task=task, language=language, outside="blend").recipe.swap is not None
    assert ls.swap(task=task, language=language, weights={"task": 1, "language": 3}).recipe.swap
    recipe = ls.parse_recipe(f"{{experts: {{task: {task}, language: {language}}}, swap: {{}}}}")
    assert ls.make_plan(recipe).composition == ls.compose.presets.swap(4)


def test_adapters_are_composed_along_their_partition(experts, tmp_path):
    kinds = {}
    for kind, layers in (("task", [1, 2]), ("language", [0, 3])):
        folder = save_adapter(
            tmp_path / kind, experts["base"], 1, target_modules=["q_proj", "up_proj"],
            layers_to_transform=layers,
        )  # fmt: skip
        kinds[kind] = write_record(save_tokenizer(folder), kind)
    plan = ls.swap(**kinds, base=experts["base"])
    assert plan.composition == partition("C", 4, outside="task")
    assert plan.notes == ["along partition C, on which the experts were trained"]


def test_evaluation_items_in_the_training_data_are_named(pair):
    data = [{"contaminated": {"mgsm_sw": 12}}]
    write_record(pair[1], "language", data=data)
    assert (
        "language: its training data has 12 rows with an item of mgsm_sw; scores on it are inflated"
    ) in swap_of(pair, bottom=1, top=1, outside="task").notes


def note_base(folder, base, source="base", revision=None):
    """What `layerswap train` records of the base of an expert."""
    record = json.loads((folder / TRAINING).read_text())
    marks = {file.name: fingerprint(file) for file in base.glob("*.safetensors")}
    record["base"] = {"source": source, "revision": revision, "fingerprints": marks}
    (folder / TRAINING).write_text(json.dumps(record))


def test_experts_of_different_bases_are_named(partial, experts, tmp_path):
    task, language = partial
    narrow = save_expert(tmp_path / "narrow", tiny_llama(), 0, torch.bfloat16)
    note_base(task, experts["base"])
    note_base(language, experts["base"])
    zones = {"bottom": 1, "top": 1, "outside": "task"}
    pair = {"task": task, "language": language}
    for base in (None, experts["base"]):
        assert not any("base" in note for note in ls.swap(**pair, base=base, **zones).notes)
    found = ls.swap(**pair, base=narrow, **zones).notes
    assert any(f"the base is {narrow}" in note for note in found)
    note_base(language, narrow, "hub/base", "abc")
    (note,) = [n for n in ls.swap(**pair, **zones).notes if "bases" in n]
    assert note == (
        "the bases are different files, by dtype or revision perhaps: task was trained from base, "
        "language was trained from hub/base@abc"
    )


def test_adapters_of_two_revisions_are_named(experts, tmp_path):
    pair = {}
    for seed, name in enumerate(("task", "language")):
        adapter = save_adapter(tmp_path / name, experts["base"], seed, target_modules=["q_proj"])
        named = {"base_model_name_or_path": "hub/base", "revision": f"v{seed}"}
        pair[name] = change_config(adapter, file="adapter_config.json", **named)
    named = "task adapts hub/base@v0 and language adapts hub/base@v1; if they are the same model"
    assert named in refusal(ls.swap, **pair)
    note = ls.swap(**pair, base=experts["base"]).notes[0]
    assert note == (
        f"task adapts hub/base@v0, language adapts hub/base@v1: all are added to {experts['base']}"
    )


@pytest.mark.parametrize(
    "record",
    [
        {}, {"places": 3, "spec": {}, "data": []}, {"places": [[["x"]]], "spec": {}, "data": []},
        {"places": [[[[], {}]]], "spec": {}, "data": []}, {"places": [], "spec": [], "data": []},
        {"places": [], "spec": {"train": {"partition": ["C"]}}, "data": []},
    ],
)  # fmt: skip
def test_unreadable_records_are_ignored(pair, record):
    (pair[0] / TRAINING).write_text(json.dumps(record))
    assert swap_of(pair).notes == []


def test_a_damaged_record_is_one_line(pair):
    (pair[0] / TRAINING).write_text("{")
    with pytest.raises(LayerswapError, match=f"{TRAINING}: not valid JSON"):
        swap_of(pair)
