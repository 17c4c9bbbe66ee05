"""Regimes of training: what each one changes, and what it leaves bit for bit unchanged."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from effort import sampled
from peft import LoraConfig
from small_experts import changed, data_files, open_adapter, train_expert

from layerswap.checkpoint import open_checkpoint
from layerswap.study.spec import find_study
from layerswap.study.trainings import TrainStep
from layerswap.training.expert.save import read_training
from layerswap.training.expert.spec import check_expert


def test_full_sft_writes_an_ordinary_float32_checkpoint(tmp_path, base, rows):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = data_files(rows, "task", validation=True)
    out = train_expert(tmp_path, base, data=data, save_every=64)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert changed(out, base) == set(open_checkpoint(str(base)).tensors)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / file).read_bytes() == (base / file).read_bytes()
    AutoTokenizer.from_pretrained(out)
    after, before = (json.loads((f / "config.json").read_text()) for f in (out, base))
    assert {key for key in after if after[key] != before[key]} == {"dtype"}
    card = (out / "README.md").read_text()
    assert "128 training rows, 32 validation rows" in card
    assert "base_model" not in card.partition("# An expert")[0]  # a folder is no id of the Hub
    record = read_training(out)
    assert record["finished"]
    assert record["steps"] == 8
    assert record["parameters"]["trained"] == record["parameters"]["all"]
    losses = [entry["loss"] for entry in record["log"] if "loss" in entry]
    assert losses[-1] < losses[0]
    assert len([entry for entry in record["log"] if "eval_loss" in entry]) == 2
    assert [p.name for p in (out / "checkpoints").glob("checkpoint-*")] == ["checkpoint-4"]


@pytest.mark.parametrize("name", sampled("ABCZ", "A"))
@pytest.mark.parametrize("part", ["task", "language"])
def test_partial_sft_changes_its_part_and_nothing_else(tmp_path, base, rows, name, part):
    from layerswap.compose.presets import partition

    train = {"partition": name, "part": part}
    out = train_expert(tmp_path, base, data=data_files(rows, "task"), train=train)
    composition, places = partition(name, 4), open_checkpoint(str(out)).places
    own = {tensor for tensor, place in places.items() if part in composition[place].experts}
    assert changed(out, base) == own
    assert 0 < len(own) < len(places)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "layers", "mlp_only"),
    sampled(
        [
            ({"places": [{"layers": 0, "roles": ["mlp"]}, {"layers": "outside"}]}, {"0"}, True),
            ({"recipe": "swap.yaml", "expert": "task"}, {"1", "2"}, False),
            ({"partition": "C", "part": "task", "places": [{"layers": "0-2", "roles": ["mlp"]}]},
             {"1", "2"}, True),
        ],
        ({"partition": "C", "part": "task", "places": [{"layers": "0-2", "roles": ["mlp"]}]},
         {"1", "2"}, True),
    ),
)  # fmt: skip
def test_places_come_from_a_list_a_recipe_or_a_part_that_a_list_narrows(
    tmp_path, base, rows, train, layers, mlp_only, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    swap = {"bottom": 1, "top": 1, "outside": "language"}
    recipe = {"experts": {"task": "none", "language": "none"}, "swap": swap}
    (tmp_path / "swap.yaml").write_text(yaml.safe_dump(recipe))
    names = changed(train_expert(tmp_path, base, data=data_files(rows, "task"), train=train), base)
    assert {name.split(".")[2] for name in names if "layers" in name} == layers
    assert all("mlp" in name for name in names if "layers" in name) == mlp_only


RSLORA = [
    ({}, None, False),
    ({"use_rslora": True}, None, True),
    ({}, "unreasonable", True),
    ({"use_rslora": False}, "unreasonable-simultaneous", False),
]


@pytest.mark.parametrize(("given", "preset", "rslora"), RSLORA)
def test_rslora_is_pefts_default_or_the_presets(given, preset, rslora):
    spec = {"base": "b", "data": "d", "lora": given, "preset": preset}
    assert check_expert(spec).rslora == rslora
    assert not LoraConfig().use_rslora


@pytest.mark.parametrize("whole", [True, False])
def test_the_second_papers_study_trains_adapters_with_rslora(whole):
    study, _ = find_study("unreasonable")
    lora = study.lora if whole else check_expert({"base": "b", "data": "d", "lora": {}}).lora
    for experts in study.kinds.values():
        for run in experts.runs:
            training = TrainStep(base="b", data=[], **{**dict(run), "lora": lora})
            assert check_expert(training.expert(["d"])).rslora


@pytest.mark.slow
@pytest.mark.parametrize("rslora", sampled([True, None], None))
def test_an_adapter_loads_through_peft_on_attention_and_mlp(tmp_path, base, rows, rslora):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lora, lines = {"r": 4, "lora_alpha": 8, "use_rslora": rslora}, []
    data = data_files(rows, "task")
    out = train_expert(tmp_path, base, data=data, lora=lora, log=lines.append)
    scale = "4 (lora_alpha / sqrt(r), rsLoRA)" if rslora else "2 (lora_alpha / r)"
    assert f"adapters of rank 4 with scale {scale}" in lines
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    scale = {m.scaling["default"] for m in model.modules() if isinstance(
        getattr(m, "scaling", None), dict) and m.scaling}  # fmt: skip
    assert scale == {8 / 2 if rslora else 8 / 4}
    adapter = open_adapter(out, base)
    assert {adapter.places[name].role for name in adapter.low_rank} == {"attention", "mlp"}
    assert len(adapter.low_rank) == 4 * 7
    assert not (out / "config.json").exists()
    modules = json.loads((out / "adapter_config.json").read_text())["target_modules"]
    assert len(modules) == 7
    assert modules == sorted(modules)  # whatever the hash seed


@pytest.mark.slow
def test_partial_lora_has_no_adapter_at_frozen_places(tmp_path, base, rows):
    train = {"partition": "A", "part": "language"}
    lora = {"r": 2, "lora_alpha": 4}
    out = train_expert(tmp_path, base, data=data_files(rows, "task"), lora=lora, train=train)
    adapter = open_adapter(out, base)
    places = {(adapter.places[name].layer, adapter.places[name].role) for name in adapter.low_rank}
    assert places == {(0, "mlp"), (3, "mlp")} | {(layer, "attention") for layer in range(4)}


def test_pefts_keys_restrict_the_matrices_at_the_places_that_train(tmp_path, base, rows):
    out = train_expert(
        tmp_path, base, data=data_files(rows, "task"), limit=16,
        lora={"r": 4, "lora_alpha": 2.5, "target_modules": ["q_proj", "mlp.up_proj"],
              "exclude_modules": r".*layers\.3\..*", "rank_pattern": {"q_proj": 2}},
    )  # fmt: skip
    adapter = open_adapter(out, base)
    assert {".".join(name.split(".")[2:-1]) for name in adapter.low_rank} == {
        f"{i}.{name}" for i in range(3) for name in ("self_attn.q_proj", "mlp.up_proj")
    }
    assert {low.rank for name, low in adapter.low_rank.items() if "q_proj" in name} == {2}


@pytest.mark.slow
def test_joint_sft_reads_all_rows_of_both_sets(tmp_path, base, rows):
    sets = [data_files(rows, name, validation=True) for name in ("task", "language")]
    record = read_training(train_expert(tmp_path, base, mix=sets))
    assert record["steps"] == 2 * 128 / 16
    assert [entry["train"] for entry in record["data"]] == [128, 128]


@pytest.mark.parametrize("kind", sampled(["full", "lora"], "lora"))
@pytest.mark.parametrize("every", sampled([1, 2], 2))
def test_simultaneous_sft_moves_the_part_whose_turn_it_is(
    tmp_path, base, rows, kind, every, monkeypatch
):
    from layerswap.training.expert import sft

    moved, parts = [], []

    class Watching(sft.AlternatingTurns):
        def __init__(self, parameters, every):
            super().__init__(parameters, every)
            parts.extend([module.get_parameter(name) for module, name in part]
                         for part in parameters)  # fmt: skip

        def on_step_begin(self, *args, **kwargs):
            self.before = [[p.detach().clone() for p in part] for part in parts]
            super().on_step_begin(*args, **kwargs)

        def on_step_end(self, args, state, control, optimizer, **kwargs):
            moved.append(tuple(
                any(not torch.equal(a, b) for a, b in zip(part, old, strict=True))
                for part, old in zip(parts, self.before, strict=True)
            ))  # fmt: skip
            steps = [
                {int(optimizer.state[p]["step"]) for p in part if p in optimizer.state}
                for part in parts
            ]
            turns = [state.global_step // (2 * every), state.global_step % (2 * every)]
            task = turns[0] * every + min(turns[1], every)
            expected = [task, state.global_step - task]
            assert steps == [{n} if n else set() for n in expected]

    monkeypatch.setattr(sft, "AlternatingTurns", Watching)
    sets = {name: data_files(rows, name, validation=True) for name in ("task", "language")}
    out = train_expert(
        tmp_path, base, simultaneous={**sets, "every": every}, train={"partition": "C"},
        effective_batch=16, hyperparameters={"per_device_train_batch_size": 8, "weight_decay": 0.1},
        **({"lora": {"r": 2, "lora_alpha": 2}} if kind == "lora" else {}),
    )  # fmt: skip
    assert moved == ([(True, False)] * every + [(False, True)] * every) * (8 // every)
    log = read_training(out)["log"]
    assert len({entry["learning_rate"] for entry in log if "loss" in entry}) == 1
    if kind == "full":
        assert changed(out, base) == set(open_checkpoint(str(base)).tensors)


def test_turns_take_each_batch_from_one_set():
    from layerswap.training.expert.sft import TurnSampler

    sampler = TurnSampler((10, 23), step=2, every=2, seed=1)
    order = list(sampler)
    assert len(order) == len(sampler) == 16
    assert [i >= 10 for i in order] == [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4
    assert len(set(order)) == 16
    assert order == list(TurnSampler((10, 23), step=2, every=2, seed=1))
    sampler.set_epoch(1)
    assert order != list(sampler)
    with pytest.raises(ValueError, match="one turn of 2 steps, 12; they have 10 and 23"):
        TurnSampler((10, 23), step=6, every=2, seed=1)


def test_raw_text_is_packed(tmp_path, base):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(["Ana bufo 7 nida. Ben fapa 5 gufe."] * 64))
    data = {"train": str(text)}
    record = read_training(
        train_expert(tmp_path, base, data=data, hyperparameters={"max_length": 64})
    )
    assert record["hyperparameters"]["packing"]
    assert record["steps"] == 1  # 64 short lines in about a dozen blocks of 64 tokens
