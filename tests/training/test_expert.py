"""Training: what each regime changes, and what it leaves bit for bit as it was."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from effort import mostly_slow

from layerswap.checkpoint import open_checkpoint
from layerswap.errors import LayerswapError
from layerswap.training.expert.save import read_training
from layerswap.training.expert.spec import check_expert
from layerswap.training.expert.trainer import train

FAST = {"learning_rate": 1e-2, "per_device_train_batch_size": 16, "logging_steps": 1}


def files(rows, name, *, validation=False):
    found = {"train": str(rows / f"{name}-train.jsonl")}
    return found | ({"validation": str(rows / f"{name}-validation.jsonl")} if validation else {})


def trained(tmp_path, base, *, hyperparameters=None, name="out", **spec):
    spec = {"base": str(base), "hyperparameters": {**FAST, **(hyperparameters or {})}, **spec}
    return train(check_expert(spec), tmp_path / name)


def tensors(folder):
    opened = open_checkpoint(str(folder))
    return {name: opened.read(name) for name in opened.tensors}, opened.places


def changed(folder, base):
    """Names of the tensors that are not the base's."""
    after, _ = tensors(folder)
    before, _ = tensors(base)
    return {name for name in before if not torch.equal(after[name], before[name].float())}


def test_full_sft_leaves_an_ordinary_float32_checkpoint(tmp_path, base, rows):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = trained(tmp_path, base, data=files(rows, "task", validation=True), save_every=64)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert changed(out, base) == set(open_checkpoint(str(base)).tensors)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / file).read_bytes() == (base / file).read_bytes()
    AutoTokenizer.from_pretrained(out)
    mine, theirs = (json.loads((f / "config.json").read_text()) for f in (out, base))
    assert {k for k in mine if mine[k] != theirs[k]} == {"dtype"}
    record = read_training(out)
    assert record["finished"]
    assert record["steps"] == 8
    assert record["parameters"]["trained"] == record["parameters"]["all"]
    losses = [entry["loss"] for entry in record["log"] if "loss" in entry]
    assert losses[-1] < losses[0]
    assert len([entry for entry in record["log"] if "eval_loss" in entry]) == 2
    assert [p.name for p in (out / "checkpoints").glob("checkpoint-*")] == ["checkpoint-4"]
    card = (out / "README.md").read_text()
    assert "128 rows, 32 to validate on" in card
    assert "base_model" not in card.partition("# An expert")[0]  # a folder is no id of the Hub


@pytest.mark.parametrize("name", mostly_slow("ABCZ", "A"))
@pytest.mark.parametrize("part", ["task", "language"])
def test_partial_sft_changes_its_part_and_nothing_else(tmp_path, base, rows, name, part):
    from layerswap.compose import partition

    out = trained(tmp_path, base, data=files(rows, "task"), train={"partition": name, "part": part})
    composition, (_, places) = partition(name, 4), tensors(base)
    mine = {t for t, place in places.items() if part in composition[place].experts}
    assert changed(out, base) == mine
    assert 0 < len(mine) < len(places)


@pytest.mark.slow
def test_places_can_be_chosen_one_by_one_or_by_a_recipe(tmp_path, base, rows):
    out = trained(
        tmp_path, base, data=files(rows, "task"),
        train={"places": [{"layers": 0, "roles": ["mlp"]}, {"layers": "outside"}]},
    )  # fmt: skip
    assert {n.split(".")[2] for n in changed(out, base) if "layers" in n} == {"0"}
    assert all("mlp" in n for n in changed(out, base) if "layers" in n)
    recipe = tmp_path / "swap.yaml"
    recipe.write_text(yaml.safe_dump({
        "experts": {"task": "none", "language": "none"},
        "swap": {"bottom": 1, "top": 1, "outside": "language"},
    }))  # fmt: skip
    out = trained(
        tmp_path, base, name="by-recipe", data=files(rows, "task"),
        train={"recipe": str(recipe), "expert": "task"},
    )  # fmt: skip
    assert {n.split(".")[2] for n in changed(out, base)} == {"1", "2"}


def test_of_a_part_only_the_places_that_are_asked_for_train(tmp_path, base, rows):
    train = {"partition": "C", "part": "task", "places": [{"layers": "0-2", "roles": ["mlp"]}]}
    out = trained(tmp_path, base, data=files(rows, "task"), train=train)
    names = changed(out, base)
    assert {n.split(".")[2] for n in names} == {"1", "2"}
    assert all("mlp" in n for n in names)


@pytest.mark.parametrize("lora", mostly_slow([None, {"r": 4}], None))
def test_places_can_learn_at_rates_of_their_own(tmp_path, base, rows, lora):
    # The first step of Adam moves every weight by the learning rate, whatever its gradient.
    one = {"max_steps": 1, "weight_decay": 0.0, "adam_epsilon": 1e-30, "learning_rate": 1e-3,
           "lr_scheduler_type": "constant"}  # fmt: skip
    rates = [{"layers": "0-1", "scale": 0.1}, {"layers": "outside", "scale": 0.5},
             {"layers": 1, "roles": ["mlp"], "scale": 2}]  # fmt: skip
    spec = {"data": files(rows, "task"), "rates": rates} | ({"lora": lora} if lora else {})
    out = trained(tmp_path, base, hyperparameters=one, **spec)
    if lora:
        from safetensors.torch import load_file

        adapter = load_file(out / "adapter_model.safetensors")
        # B begins at zero, so it is what the first step has moved it to.
        steps = {name: t.abs().max() for name, t in adapter.items() if "lora_B" in name}
        wanted = {"layers.0.": 1e-4, "layers.1.self_attn": 1e-4, "layers.1.mlp": 2e-3,
                  "layers.2.": 1e-3}  # fmt: skip
    else:
        after, _ = tensors(out)
        before, _ = tensors(base)
        steps = {name: (after[name] - before[name].float()).abs().max() for name in after}
        wanted = {"layers.0.": 1e-4, "layers.1.self_attn": 1e-4, "layers.1.mlp": 2e-3,
                  "layers.2.": 1e-3, "lm_head": 5e-4}  # fmt: skip
    for where, step in wanted.items():
        found = [moved for name, moved in steps.items() if where in name]
        assert found
        assert all(abs(float(moved) / step - 1) < 0.02 for moved in found), where


@pytest.mark.parametrize("rslora", mostly_slow([True, False], True))
def test_an_adapter_loads_through_peft_on_attention_and_mlp(tmp_path, base, rows, rslora):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out = trained(
        tmp_path,
        base,
        data=files(rows, "task"),
        lora={"r": 4, "lora_alpha": 8, "use_rslora": rslora},
    )
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    scale = {m.scaling["default"] for m in model.modules() if isinstance(
        getattr(m, "scaling", None), dict) and m.scaling}  # fmt: skip
    assert scale == {8 / 2 if rslora else 8 / 4}
    adapter = open_expert(out, base)
    assert {adapter.places[name].role for name in adapter.low_rank} == {"attention", "mlp"}
    assert len(adapter.low_rank) == 4 * 7
    assert not (out / "config.json").exists()


def open_expert(folder, base):
    from layerswap.checkpoint import adapt, read_adapter

    return adapt(open_checkpoint(str(base)), read_adapter(folder), source=str(folder))


@pytest.mark.slow
def test_partial_lora_has_no_adapter_at_frozen_places(tmp_path, base, rows):
    out = trained(
        tmp_path, base, data=files(rows, "task"), lora={"r": 2, "lora_alpha": 4},
        train={"partition": "A", "part": "language"},
    )  # fmt: skip
    adapter = open_expert(out, base)
    found = {(adapter.places[name].layer, adapter.places[name].role) for name in adapter.low_rank}
    assert found == {(0, "mlp"), (3, "mlp")} | {(layer, "attention") for layer in range(4)}


@pytest.mark.slow
def test_joint_sft_reads_all_rows_of_both_sets(tmp_path, base, rows):
    sets = [files(rows, "task", validation=True), files(rows, "language", validation=True)]
    out = trained(tmp_path, base, mix=sets)
    record = read_training(out)
    assert record["steps"] == 2 * 128 / 16
    assert [entry["train"] for entry in record["data"]] == [128, 128]


@pytest.mark.parametrize("kind", mostly_slow(["full", "lora"], "lora"))
@pytest.mark.parametrize("every", mostly_slow([1, 2], 2))
def test_simultaneous_sft_moves_the_part_whose_turn_it_is(
    tmp_path, base, rows, kind, every, monkeypatch
):
    from layerswap.training.expert import sft

    moved, parts = [], []

    class Watching(sft.AlternatingTurns):
        def __init__(self, parameters, every):
            super().__init__(parameters, every)
            parts.extend(parameters)

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
    out = trained(
        tmp_path, base,
        simultaneous={
            "task": files(rows, "task", validation=True),
            "language": files(rows, "language", validation=True), "every": every,
        },
        train={"partition": "C"}, effective_batch=16,
        hyperparameters={"per_device_train_batch_size": 8, "weight_decay": 0.1},
        **({"lora": {"r": 2, "lora_alpha": 2}} if kind == "lora" else {}),
    )  # fmt: skip
    assert moved == ([(True, False)] * every + [(False, True)] * every) * (8 // every)
    log = read_training(out)["log"]
    assert len({entry["learning_rate"] for entry in log if "loss" in entry}) == 1
    if kind == "full":
        assert changed(out, base) == set(open_checkpoint(str(base)).tensors)


def test_simultaneous_sft_takes_each_batch_from_one_set(rows):
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


@pytest.mark.parametrize("decay", mostly_slow([0.0, 0.1], 0.1))
def test_sparse_sft_changes_the_share_that_changed_most(tmp_path, base, rows, decay):
    out = trained(
        tmp_path, base, data=files(rows, "task"), sparse={"keep": 0.05},
        hyperparameters={"weight_decay": decay},
    )  # fmt: skip
    after, _ = tensors(out)
    before, _ = tensors(base)
    masks = load_masks(out)
    total = sum(t.numel() for t in before.values())
    kept = sum(int(mask.sum()) for mask in masks.values())
    assert kept == pytest.approx(0.05 * total, rel=0.01)
    for name, mask in masks.items():
        moved = after[name] != before[name].float()
        assert not (moved & ~mask).any()
    assert sum(int((after[n] != before[n].float()).sum()) for n in masks) > 0.9 * kept


def load_masks(out):
    from layerswap.training.expert.sft import load_masks as load

    return load(out / "checkpoints" / "mask.safetensors")


def test_most_changed_finds_the_largest_deltas_over_all_tensors():
    from layerswap.training.expert.sft import most_changed

    before = {"a": torch.zeros(4), "b": torch.zeros(2, 2)}
    after = {"a": torch.tensor([0.1, -5.0, 0, 2]), "b": torch.tensor([[3.0, 0], [0, -0.2]])}
    masks = most_changed(before, after, 3 / 8)
    assert masks["a"].tolist() == [False, True, False, True]
    assert masks["b"].tolist() == [[True, False], [False, False]]
    assert sum(int(m.sum()) for m in most_changed(before, after, 0.99).values()) == 5


def test_raw_text_is_packed(tmp_path, base):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(["Ana bufo 7 nida. Ben fapa 5 gufe."] * 64))
    out = trained(tmp_path, base, data={"train": str(text)}, hyperparameters={"max_length": 64})
    record = read_training(out)
    assert record["hyperparameters"]["packing"]
    assert record["steps"] == 1  # 64 short lines in about a dozen blocks of 64 tokens


@pytest.mark.slow
def test_float32_keeps_the_papers_rates_and_bfloat16_loses_them(tmp_path, base, rows):
    kept = {}
    for dtype in ("float32", "bfloat16"):
        out = trained(
            tmp_path, base, name=dtype, dtype=dtype, data=files(rows, "task"),
            hyperparameters={"learning_rate": "1e-7", "bf16": dtype == "float32"},
        )  # fmt: skip
        after, _ = tensors(out)
        before, _ = tensors(base)
        moved = [(after[n].float() != before[n].float()).float().mean() for n in before
                 if "layernorm" not in n and "norm.weight" not in n]  # fmt: skip
        kept[dtype] = float(torch.stack(moved).mean())
    assert kept["float32"] > 0.8
    assert kept["bfloat16"] < 0.01


@pytest.mark.slow
def test_killed_and_resumed_is_as_if_never_killed(tmp_path, base, rows):
    spec = tmp_path / "expert.yaml"
    spec.write_text(yaml.safe_dump({
        "base": str(base), "save_every": 64, "seed": 4,
        "simultaneous": {"task": files(rows, "task"), "language": files(rows, "language")},
        "train": {"partition": "C"},
        "hyperparameters": {**FAST, "num_train_epochs": 40},
    }))  # fmt: skip
    command = [sys.executable, "-m", "layerswap", "train", str(spec), "--out"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    whole = tmp_path / "whole"
    subprocess.run([*command, str(whole)], check=True, capture_output=True, env=environment)
    cut = tmp_path / "cut"
    process = subprocess.Popen(
        [*command, str(cut)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    while not (cut / "checkpoints" / "checkpoint-100" / "trainer_state.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (cut / "config.json").exists()
    refused = subprocess.run(
        [*command, str(cut)], check=False, capture_output=True, text=True, env=environment
    )
    assert refused.returncode == 2
    assert "unfinished training; pass --resume" in refused.stderr
    spec.with_name("other.yaml").write_text(spec.read_text().replace("seed: 4", "seed: 5"))
    refused = subprocess.run(
        [*command[:-2], str(spec.with_name("other.yaml")), "--out", str(cut), "--resume"],
        check=False, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "holds another training" in refused.stderr
    subprocess.run(
        [*command, str(cut), "--resume"], check=True, capture_output=True, env=environment
    )
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    losses = [
        [(e["step"], e["loss"]) for e in read_training(folder)["log"] if "loss" in e]
        for folder in (whole, cut)
    ]
    assert losses[0] == losses[1]
    with_state = [p for p in (cut / "checkpoints").iterdir() if (p / "optimizer.pt").exists()]
    assert [p.name for p in with_state] == ["checkpoint-636"]


@pytest.mark.slow
def test_two_processes_train_as_one_with_twice_the_batch(tmp_path, base, rows):
    def run(name, processes, batch, accumulate):
        spec = tmp_path / f"{name}.yaml"
        spec.write_text(yaml.safe_dump({
            "base": str(base),
            "simultaneous": {"task": files(rows, "task"), "language": files(rows, "language")},
            "train": {"partition": "B"}, "save_every": 64,
            "hyperparameters": {
                **FAST, "per_device_train_batch_size": batch,
                "gradient_accumulation_steps": accumulate,
            },
        }))  # fmt: skip
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes),
                    "--master_port", "0", "--standalone"] if processes > 1 else []  # fmt: skip
        command = [sys.executable, *launcher, "-m", "layerswap", "train", str(spec)]
        out = tmp_path / name
        done = subprocess.run(
            [*command, "--out", str(out)], check=False, capture_output=True, text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return out, [e["loss"] for e in read_training(out)["log"] if "loss" in e]

    one, losses = run("one", 1, 8, 2)
    two, same = run("two", 2, 8, 1)
    assert len(losses) == 16
    assert same == pytest.approx(losses, rel=1e-4)
    first, second = tensors(one)[0], tensors(two)[0]
    for name in first:
        assert torch.allclose(first[name], second[name], atol=2e-3)


@pytest.mark.slow
def test_experts_of_one_base_swap(tmp_path, base, rows):
    import layerswap as ls

    task = trained(tmp_path, base, name="task", data=files(rows, "task"))
    language = trained(tmp_path, base, name="language", data=files(rows, "language"))
    merged = ls.swap(task=task, language=language, base=base).save(tmp_path / "merged")
    assert open_checkpoint(str(merged)).layers == 4


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "give one of data, mix and simultaneous"),
        ({"data": "swahili"}, "swahili is a ready recipe; build it first"),
        ({"data": "nowhere"}, "no such folder"),
        ({"data": {"train": "nowhere.jsonl"}}, "nowhere.jsonl: no such file"),
        ({"data": "D", "preset": "math-9"}, "no preset 'math-9'"),
        ({"data": "D", "hyperparameters": {"learning_rat": 1}}, "has no such name.*learning_rate"),
        ({"data": "D", "hyperparameters": {"learning_rate": "fast"}}, "'fast' is not a number"),
        ({"data": "D", "hyperparameters": {"per_device_train_batch_size": 0}}, "not at least 1"),
        ({"data": "D", "hyperparameters": {"save_steps": 5}}, "is decided by `save_every`"),
        ({"data": "D", "hyperparameters": {"lr_scheduler_type": "x"}}, "hyperparameters: x is not"),
        ({"data": "D", "train": {"partition": "A"}}, "say whose part"),
        ({"data": "D", "train": {"places": [{"layers": "0-9"}]}}, "not inside 0-3"),
        ({"data": "D", "train": {"partition": "A", "recipe": "swap.yaml"}}, "not both"),
        ({"data": "D", "train": {}}, "say what trains"),
        ({"data": "D", "train": {"partition": "C", "part": "language",
                                 "places": [{"layers": "1-2"}]}}, "none belongs to 'language'"),
        ({"data": "D", "rates": [{"layers": "0-9", "scale": 0.1}]}, "rates.*not inside 0-3"),
        ({"data": "D", "rates": [{"layers": 0, "scale": 0}]}, "rates.*greater than 0"),
        ({"data": "D", "lora": {}, "sparse": {"keep": 0.1}}, "sparse is for whole weights"),
        ({"data": "D", "effective_batch": 30,
          "hyperparameters": {"per_device_train_batch_size": 16}}, "no multiple of"),
        ({"simultaneous": {"task": "D", "language": "D"}}, "simultaneous needs train.partition"),
        ({"simultaneous": {"task": "D", "language": "D"},
          "train": {"partition": "A", "part": "task"}}, "leave train.part"),
        ({"data": "D", "lora": {}, "train": {"places": [{"layers": "outside"}]}},
         "no attention or mlp matrix"),
        ({"data": "D", "hyperparameters": {"max_length": 2}}, "no row has anything to learn"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_one_line(tmp_path, base, rows, spec, said):
    text = json.dumps(spec).replace('"D"', json.dumps(files(rows, "task")))
    with pytest.raises(LayerswapError, match=said) as caught:
        train(check_expert({"base": str(base), **json.loads(text)}), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": 1, "completion": 2}, "row 1: prompt is not a text"),
        ({"prompt": "a", "completion": None}, "row 1: completion is not a text"),
        ({"prompt": "a", "completion": ""}, "row 1: completion is not a text .*or is empty"),
        ({"text": ""}, "row 1: text is not a text, or is empty"),
        ({"messages": [{"role": "user"}]}, "row 1: messages is not a list of messages"),
        ({"question": "a"}, "has columns question; a trainer takes prompt and completion"),
    ],
)
def test_rows_that_are_none_are_one_line(tmp_path, base, row, said):
    (tmp_path / "bad.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(LayerswapError, match=said):
        trained(tmp_path, base, data={"train": str(tmp_path / "bad.jsonl")})
    assert not (tmp_path / "out").exists()


def test_a_tracker_that_is_not_installed_leaves_nothing_behind(tmp_path, base, rows):
    with pytest.raises(LayerswapError, match="wandb"):
        trained(tmp_path, base, data=files(rows, "task"), hyperparameters={"report_to": "wandb"})
    assert not (tmp_path / "out").exists()


def test_weights_that_are_no_numbers_are_never_written(tmp_path, base, rows):
    with pytest.raises(LayerswapError, match="try a lower learning rate"):
        trained(tmp_path, base, data=files(rows, "task"), hyperparameters={"learning_rate": 1e30})
    assert not (tmp_path / "out").exists()


def test_messages_need_a_chat_template(tmp_path, base):
    chat = tmp_path / "chat.jsonl"
    turn = [{"role": "user", "content": "Ana"}, {"role": "assistant", "content": "Ben"}]
    chat.write_text(json.dumps({"messages": turn}) + "\n")
    with pytest.raises(LayerswapError, match="no chat template, and chat is made of messages"):
        trained(tmp_path, base, data={"train": str(chat)})


def test_a_folder_that_is_no_training_is_never_replaced(tmp_path, base, rows):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    spec = check_expert({"base": str(base), "data": files(rows, "task")})
    for overwrite in (False, True):
        with pytest.raises(LayerswapError):
            train(spec, out, overwrite=overwrite)
    with pytest.raises(LayerswapError, match="did not write it"):
        train(spec, out, resume=True)
    assert (out / "thesis.txt").exists()


def test_the_example_of_the_public_function_runs(tmp_path, base, rows, monkeypatch):
    import doctest

    import layerswap as ls

    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").symlink_to(base)
    lines = (rows / "task-train.jsonl").read_text().splitlines()[:8]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder(recurse=False).find(ls.train, globs={}):
        runner.run(example)
    assert runner.summarize().attempted == 3
    assert runner.failures == 0
    assert (tmp_path / "copy" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_file_a_mapping_and_a_specification_train_the_same(tmp_path, base, rows):
    import layerswap as ls

    spec = {"base": str(base), "data": files(rows, "task"), "limit": 16, "hyperparameters": FAST}
    (tmp_path / "expert.yaml").write_text(yaml.safe_dump(spec))
    given = (tmp_path / "expert.yaml", str(tmp_path / "expert.yaml"), spec, check_expert(spec))
    outs = [ls.train(one, tmp_path / f"{i}", seed=2) for i, one in enumerate(given)]
    records = [read_training(out) for out in outs]
    assert len({record["key"] for record in records}) == 1
    assert records[0]["spec"]["seed"] == 2
    with pytest.raises(LayerswapError, match=r"seeds: unknown key; did you mean 'seed'"):
        ls.train(spec, tmp_path / "none", seeds=2)


def test_a_training_saves_by_time_and_says_how_far_it_is(tmp_path, base, rows, capfd, monkeypatch):
    from layerswap.training.expert import sft, trainer

    lines, found = [], []
    real = sft.Checkpointing.on_save

    def watched(self, args, state, *rest, **kwargs):
        real(self, args, state, *rest, **kwargs)
        found.append(sorted(int(p.name[11:]) for p in (out / "checkpoints").glob("checkpoint-*")))

    monkeypatch.setattr(sft.Checkpointing, "on_save", watched)
    monkeypatch.setattr(sft.ProgressLines.__init__, "__defaults__", (0.0,))
    out = tmp_path / "out"
    trainer.train({
        "base": str(base), "data": files(rows, "task"), "limit": 96, "save_minutes": 1e-9,
        "save_every": 48, "hyperparameters": FAST,
    }, out, log=lines.append)  # fmt: skip
    # By samples after steps 3 and 6 (the output itself); by time after every other one.
    assert found == [[1], [2], [3], [3, 4], [3, 5]]
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["checkpoint-3"]
    shown = [line for line in lines if line.startswith("step")]
    assert len(shown) == 6
    assert re.fullmatch(r"step 2 of 6, loss \d+\.\d{3}, [\d,]+ tokens/s, \d+ s left", shown[1])
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "model shards" not in printed.err
    assert "FutureWarning" not in printed.err


@pytest.mark.slow
def test_a_training_that_was_saved_by_time_is_resumed_from_there(tmp_path, base, rows):
    from layerswap.training.expert import sft, trainer

    spec = {"base": str(base), "data": files(rows, "task"), "limit": 96, "save_minutes": 1e-9,
            "hyperparameters": FAST}  # fmt: skip
    whole = trainer.train(spec, tmp_path / "whole")

    class Killed(Exception):
        pass

    def stop(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft.ProgressLines, "on_step_begin", stop, raising=False)
        with pytest.raises(Killed):
            trainer.train(spec, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out/checkpoints").iterdir()] == ["checkpoint-4"]
    out = trainer.train(spec, tmp_path / "out", resume=True)
    one, other = tensors(whole)[0], tensors(out)[0]
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_peft_names_choose_among_the_matrices_at_the_places_that_train(tmp_path, base, rows):
    out = trained(
        tmp_path, base, data=files(rows, "task"), limit=16,
        lora={"r": 4, "lora_alpha": 2.5, "target_modules": ["q_proj", "mlp.up_proj"],
              "exclude_modules": r".*layers\.3\..*", "rank_pattern": {"q_proj": 2}},
    )  # fmt: skip
    adapter = open_expert(out, base)
    assert {".".join(n.split(".")[2:-1]) for n in adapter.low_rank} == {
        f"{i}.{n}" for i in range(3) for n in ("self_attn.q_proj", "mlp.up_proj")
    }
    assert {one.rank for name, one in adapter.low_rank.items() if "q_proj" in name} == {2}
    with pytest.raises(LayerswapError, match="and in target_modules"):
        trained(tmp_path, base, data=files(rows, "task"), lora={"target_modules": ["no"]}, name="x")
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
@pytest.mark.parametrize("dora", [True, False])
def test_an_adapter_can_be_baked_and_then_composed(tmp_path, base, rows, dora):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    import layerswap as ls

    lora = {"r": 4, "use_dora": dora}
    spec = {"data": files(rows, "task"), "limit": 32, "lora": lora}
    adapter = trained(tmp_path, base, **spec)
    baked = trained(tmp_path, base, name="baked", bake=True, **spec)
    start = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(start, adapter).merge_and_unload().state_dict()
    after, _ = tensors(baked)
    assert all(torch.equal(after[name], merged[name]) for name in after)
    assert not (baked / "adapter_config.json").exists()
    assert changed(baked, base) == {n for n in after if "_proj" in n}
    ls.soup([base, baked]).save(tmp_path / "soup")
    if dora:
        with pytest.raises(LayerswapError, match="DoRA"):
            ls.soup([adapter])


def test_four_bits_need_lora_and_bitsandbytes(tmp_path, base, rows, monkeypatch):
    from layerswap.training.expert import trainer

    with pytest.raises(LayerswapError, match="load_in_4bit belongs to lora"):
        trained(tmp_path, base, data=files(rows, "task"), load_in_4bit=True)
    monkeypatch.setattr(trainer, "find_spec", lambda name: None)
    with pytest.raises(LayerswapError, match="pip install bitsandbytes"):
        trained(tmp_path, base, data=files(rows, "task"), load_in_4bit=True, lora={})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{% for m in messages %}{{ m.content", "unexpected end"),
        ("{{ messages[9].content.x }}", "chat template fails on row 1 of rows"),
    ],
)
def test_a_chat_template_that_fails_is_one_line(tmp_path, base, template, said):
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text(template)
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},
             {"role": "assistant", "content": "b"}]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    with pytest.raises(LayerswapError, match=said) as error:
        trained(tmp_path, tmp_path / "base", data={"train": str(tmp_path / "rows.jsonl")})
    assert "row 1 of rows, with the roles system, user, assistant (" in str(error.value)
    assert not (tmp_path / "out").exists()


SPEAKER = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("part", ["train", "validation"])
@pytest.mark.parametrize(
    ("template", "said"),
    [
        (SPEAKER + "{% if 'taboo' in messages[0].content %}"
         "{{ raise_exception('no\\ntaboo') }}{% endif %}", "no taboo"),
        (SPEAKER + "{{ 1 // (messages[0].content | length - 5) }}", "division"),
        (SPEAKER + "{% if add_generation_prompt and 'taboo' in messages[0].content %}"
         "{{ raise_exception('no prompt') }}{% endif %}", "no prompt"),
    ],
)  # fmt: skip
def test_a_chat_template_that_fails_on_one_row_names_it(tmp_path, base, template, said, part):
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text(template)

    def row(said):
        return {"prompt": [{"role": "user", "content": said}],
                "completion": [{"role": "assistant", "content": "b"}]}  # fmt: skip

    whole, spoilt = [row("good day")] * 4, [row("good day")] * 2 + [row("taboo")]
    sets = {"train": whole, "validation": whole, part: spoilt}
    for name, found in sets.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    data = {name: str(tmp_path / f"{name}.jsonl") for name in sets}
    with pytest.raises(LayerswapError) as error:
        trained(tmp_path, tmp_path / "base", data=data)
    which = {"train": "row", "validation": "validation row"}[part]
    assert f"its chat template fails on {which} 3 of train, with the roles user, " in str(
        error.value
    )
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_prompt_in_messages_has_its_completion_in_messages(tmp_path, base):
    row = {"prompt": [{"role": "user", "content": "a"}], "completion": "b"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(LayerswapError, match="must both be texts or both lists of messages"):
        trained(tmp_path, base, data={"train": str(tmp_path / "rows.jsonl")})


def test_a_base_with_nan_is_not_trained(tmp_path, base, rows):
    from safetensors.torch import load_file, save_file

    spoilt = shutil.copytree(base, tmp_path / "base")
    weights = load_file(spoilt / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][2, 3] = float("nan")
    save_file(weights, spoilt / "model.safetensors", {"format": "pt"})
    with pytest.raises(LayerswapError) as caught:
        trained(tmp_path, spoilt, data=files(rows, "task"))
    assert str(caught.value) == f"{spoilt}: tensor {name!r} holds NaN or infinity"
    assert not (tmp_path / "out").exists()


def test_modules_of_an_adapter_are_in_order(tmp_path, base, rows):
    out = trained(tmp_path, base, data=files(rows, "task"), lora={"r": 2},
                  hyperparameters={"max_steps": 1})  # fmt: skip
    modules = json.loads((out / "adapter_config.json").read_text())["target_modules"]
    assert len(modules) == 7
    assert modules == sorted(modules)
