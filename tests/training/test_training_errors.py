"""Trainings that are refused: one line each, and nothing is left behind."""

import json
import shutil

import pytest
import torch
from lab_files import write_jsonl
from merging import refusal
from safetensors.torch import load_file, save_file
from small_experts import data_files, train_expert

from layerswap.ground.errors import LayerswapError
from layerswap.training.expert import job, trainer
from layerswap.training.expert.spec import check_expert
from layerswap.training.expert.trainer import train

PARTS = {"task": "D", "language": "D"}
SPECS = [
    ({}, "give one of data, mix and simultaneous"),
    ({"data": "swahili"}, "swahili is a ready recipe; build it first"),
    ({"data": "nowhere"}, "no such folder"),
    ({"data": {"train": "nowhere.jsonl"}}, "nowhere.jsonl: no such file"),
    ({"data": "D", "preset": "math-9"}, "no preset 'math-9'"),
    ({"data": "D", "hyperparameters": {"learning_rat": 1}}, "has no such name.*learning_rate"),
    ({"data": "D", "hyperparameters": {"learning_rate": "fast"}}, "must be a valid number.*'fast'"),
    ({"data": "D", "hyperparameters": {"learning_rate": 1e30}}, "try a lower learning rate"),
    ({"data": "D", "hyperparameters": {"max_length": 0}}, "must be at least 1; found 0"),
    ({"data": "D", "seed": -1}, "seed: write a number from 0"),
    ({"data": "D", "hyperparameters": {"save_steps": 5}}, "cannot be set here; give `save_every`"),
    ({"data": "D", "hyperparameters": {"lr_scheduler_type": "x"}}, "hyperparameters: x is not"),
    ({"data": "D", "hyperparameters": {"lr_scheduler_type": "cosine_with_min_lr"}}, "min_lr"),
    ({"data": "D", "hyperparameters": {"report_to": "wandb"}}, "wandb"),
    ({"data": "D", "hyperparameters": {"max_length": 2}}, "no row has a label within"),
    ({"data": "D", "train": {"partition": "A"}}, "give the part that trains"),
    ({"data": "D", "train": {"places": [{"layers": "0-9"}]}}, "not inside 0-3"),
    ({"data": "D", "train": {"partition": "A", "recipe": "swap.yaml"}}, "not both"),
    ({"data": "D", "train": {}}, "give the places that train"),
    ({"data": "D", "train": {"partition": "C", "part": "language", "places": [{"layers": "1-2"}]}},
     "no place belongs to .language."),
    ({"data": "D", "load_in_4bit": True}, "load_in_4bit belongs to lora"),
    ({"data": "D", "load_in_4bit": True, "lora": {}}, "pip install bitsandbytes"),
    ({"data": "D", "lora": {"target_modules": ["no"]}}, "and in target_modules"),
    ({"data": "D", "lora": {}, "train": {"places": [{"layers": "outside"}]}},
     "no attention or mlp matrix"),
    ({"data": "D", "effective_batch": 30, "hyperparameters": {"per_device_train_batch_size": 16}},
     "not a multiple of"),
    ({"simultaneous": PARTS}, "simultaneous needs train.partition"),
    ({"simultaneous": PARTS, "train": {"partition": "A", "part": "task"}}, "leave train.part"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "message"), SPECS)
def test_a_training_that_is_not_possible_is_one_line(
    tmp_path, base, rows, spec, message, monkeypatch
):
    monkeypatch.setattr(job, "find_spec", lambda name: None)  # no bitsandbytes
    text = json.dumps(spec).replace('"D"', json.dumps(data_files(rows, "task")))
    with pytest.raises(LayerswapError, match=message) as caught:
        train(check_expert({"base": str(base), **json.loads(text)}), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_files_of_one_name_count_each_and_no_file_validates_itself(tmp_path):
    for folder, text in (("a", "x y"), ("b", "z")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text(json.dumps({"text": text}))
    data = job.Files(train="a/rows.jsonl", validation="b/rows.jsonl")
    prints = job.load_rows(data, folder=tmp_path).fingerprints
    assert [*prints] == ["rows.jsonl", "rows.jsonl (1)"]
    assert len({*prints.values()}) == 2
    with pytest.raises(LayerswapError, match=r"data.validation: a/\*.jsonl: is training data too"):
        job.load_rows(job.Files(train="a/rows.jsonl", validation="a/*.jsonl"), folder=tmp_path)


TURNS = [{"role": "user", "content": "Ana"}, {"role": "assistant", "content": "Ben"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": 1, "completion": 2}, "row 1: prompt is not a text"),
        ({"prompt": "a", "completion": None}, "row 1: completion is not a text"),
        ({"prompt": "a", "completion": ""}, "row 1: completion is not a text .*or is empty"),
        ({"prompt": "a", "completion": " \n"}, "row 1: completion is not a text .*or is empty"),
        ({"text": ""}, "row 1: text is not a text, or is empty"),
        ({"messages": [{"role": "user"}]}, "row 1: messages is not a list of messages"),
        ({"question": "a"}, "has columns question; a trainer takes prompt and completion"),
        ({"prompt": TURNS[:1], "completion": "b"}, "must both be texts or both lists of messages"),
        (
            [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": TURNS[1:]}],
            "row 2: completion mixes texts and lists of messages",
        ),
        ({"messages": TURNS}, "no chat template, and bad is made of messages"),
        ({"messages": TURNS, "system": "In Swahili."}, "has a column system, which would change"),
        ({"messages": TURNS, "tools": [{"name": "f"}]}, "has a column tools, which would change"),
    ],
)
def test_a_row_that_a_trainer_does_not_take_is_one_line(tmp_path, base, row, message):
    rows = row if isinstance(row, list) else [row]
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(LayerswapError, match=message):
        train_expert(tmp_path, base, data={"train": str(tmp_path / "bad.jsonl")})
    assert not (tmp_path / "out").exists()


def test_a_loss_of_completions_needs_completions(tmp_path, base):
    (tmp_path / "bad.jsonl").write_text(json.dumps({"messages": TURNS, "tools": None}) + "\n")
    settings = {"hyperparameters": {"completion_only_loss": True}}
    with pytest.raises(LayerswapError, match="completion_only_loss: bad has messages and no compl"):
        train_expert(tmp_path, base, data={"train": str(tmp_path / "bad.jsonl")}, **settings)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_training_is_never_overwritten(tmp_path, base, rows):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    spec = check_expert({"base": str(base), "data": data_files(rows, "task")})
    for overwrite in (False, True):
        with pytest.raises(LayerswapError):
            train(spec, out, overwrite=overwrite)
    with pytest.raises(LayerswapError, match="did not write it"):
        train(spec, out, resume=True)
    assert (out / "thesis.txt").exists()


def test_a_base_with_nan_is_not_trained(tmp_path, base, rows):
    spoilt = shutil.copytree(base, tmp_path / "base")
    weights = load_file(spoilt / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][2, 3] = float("nan")
    save_file(weights, spoilt / "model.safetensors", {"format": "pt"})
    message = refusal(train_expert, tmp_path, spoilt, data=data_files(rows, "task"))
    assert message == f"{spoilt}: tensor {name!r} holds NaN or infinity"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("value", "finite"), [(6e4, True), (float("inf"), False)])
def test_large_weights_of_float16_are_finite(value, finite):
    assert trainer._is_finite(torch.full((9,), value, dtype=torch.float16)) is finite


SPEAKER = "{% for m in messages %}{{ m.content }}{% endfor %}"
ON_ALL = [
    ("{{ raise_exception('System role not supported') }}", "System role not supported"),
    ("{% for m in messages %}{{ m.content", "unexpected end"),
    ("{{ messages[9].content.x }}", "row 1 of train"),
]
ON_ONE = [
    (SPEAKER + "{% if 'taboo' in messages[0].content %}"
     "{{ raise_exception('no\\ntaboo') }}{% endif %}", "no taboo"),
    (SPEAKER + "{{ 1 // (messages[0].content | length - 5) }}", "division"),
    (SPEAKER + "{% if add_generation_prompt and 'taboo' in messages[0].content %}"
     "{{ raise_exception('no prompt') }}{% endif %}", "no prompt"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "message", "split", "number"),
    [
        *((template, message, "train", 1) for template, message in ON_ALL),
        *((*case, split, 3) for case in ON_ONE for split in ("train", "validation")),
    ],
)
def test_a_chat_template_that_fails_names_the_row(tmp_path, base, template, message, split, number):
    folder = shutil.copytree(base, tmp_path / "base")
    (folder / "chat_template.jinja").write_text(template)

    def row(text):
        return {"prompt": [{"role": "user", "content": text}],
                "completion": [{"role": "assistant", "content": "b"}]}  # fmt: skip

    good = [row("good day")] * 4
    for name in ("train", "validation"):
        lines = [*good[:2], row("taboo")] if name == split else good
        write_jsonl(tmp_path / f"{name}.jsonl", lines)
    data = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "validation")}
    said = refusal(train_expert, tmp_path, folder, data=data)
    kind = {"train": "row", "validation": "validation row"}[split]
    expected = f"its chat template fails on {kind} {number} of train, with the roles user, ass"
    assert expected in said
    assert message in said
    assert not (tmp_path / "out").exists()


SWITCHED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A{% if enable_thinking is false %}"
    "<think></think>{% endif %}{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}"
    "A{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


def test_a_chat_template_is_told_not_to_think(tmp_path, base):
    folder = shutil.copytree(base, tmp_path / "base")
    (folder / "chat_template.jinja").write_text(SWITCHED)
    turns = [{"role": "user", "content": "good"}, {"role": "assistant", "content": "day"}]
    rows = [{"prompt": turns[:1], "completion": turns[1:]}] * 4
    write_jsonl(tmp_path / "rows.jsonl", rows)
    spec = {"base": str(folder), "data": {"train": str(tmp_path / "rows.jsonl")}, "think": "off"}
    tokenizer = job.plan_training(check_expert(spec), tmp_path / "out").tokenizer
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "goodA<think></think>day"
    asked = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "goodA<think></think>"
    assert tokenizer.apply_chat_template(turns, tokenize=False, enable_thinking=True) == "goodAday"
    (folder / "chat_template.jinja").write_text(SPEAKER)
    with pytest.raises(LayerswapError, match="think: off: the chat template has no switch"):
        job.plan_training(check_expert(spec), tmp_path / "out")


def test_tokens_without_a_row_in_the_embedding_are_named_before_the_model_loads(tmp_path, base):
    from transformers import AutoTokenizer

    folder = shutil.copytree(base, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    tokenizer.save_pretrained(folder)
    lines = [{"prompt": "a", "completion": text} for text in ("b", "b <|extra|>")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    spec = {"base": str(folder), "data": {"train": str(tmp_path / "rows.jsonl")}}
    message = f"row 2 has the token '<|extra|>', which has no row; .*{size} rows; enlarge it"
    with pytest.raises(LayerswapError, match=message.replace("|", r"\|")):
        train(check_expert(spec), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_named_whatever_the_library_says(tmp_path, base, rows, monkeypatch):
    def fail(job, log):
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(trainer, "_fit", fail)
    spec = check_expert({"base": str(base), "data": data_files(rows, "task")})
    with pytest.raises(RuntimeError, match="PytorchStreamWriter"):
        train(spec, tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(LayerswapError, match=r"the disk is full; make room .* and run it again"):
        train(spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()
