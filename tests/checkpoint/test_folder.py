"""Checkpoint folders, whole and broken, with the exact text of every refusal."""

from pathlib import Path

import pytest
import torch
from handmade import CONFIG, EMBEDDING, NORM, QUERY, write_config, write_index, write_weights
from merging import save_tensors
from refusals import one_line, refused

from layerswap.checkpoint import open_checkpoint, text_config
from layerswap.ground.errors import CheckpointError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
WHOLE = {NORM: SECOND, EMBEDDING: FIRST, QUERY: FIRST}


def refusal(folder):
    message = one_line(CheckpointError, open_checkpoint, str(folder))
    assert message.startswith(str(folder))
    return message.removeprefix(str(folder))


@pytest.fixture
def single(tmp_path):
    write_config(tmp_path)
    write_weights(tmp_path / "model.safetensors", EMBEDDING, QUERY, NORM)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    write_config(tmp_path)
    write_weights(tmp_path / FIRST, EMBEDDING, QUERY)
    write_weights(tmp_path / SECOND, NORM)
    write_index(tmp_path, WHOLE)
    return tmp_path


# --- whole folders ---


def test_a_single_file(single):
    checkpoint = open_checkpoint(str(single))
    assert list(checkpoint.tensors) == [EMBEDDING, QUERY, NORM]
    assert checkpoint.places[QUERY] == (0, "attention")
    assert checkpoint.layers == 1
    assert checkpoint.nbytes == 6
    assert checkpoint.config == CONFIG
    assert (checkpoint.folder, checkpoint.revision) == (single, None)
    assert checkpoint.identity == checkpoint.source == str(single)


def test_shards_come_in_the_order_of_files_and_bytes(sharded):
    checkpoint = open_checkpoint(str(sharded))
    assert [(t.name, t.file.name) for t in checkpoint.tensors.values()] == [
        (EMBEDDING, FIRST),
        (QUERY, FIRST),
        (NORM, SECOND),
    ]


def test_a_shard_that_the_index_does_not_name_is_not_read(sharded):
    (sharded / "model-00003-of-00002.safetensors").write_bytes(b"left over")
    assert len(open_checkpoint(str(sharded)).tensors) == 3


def test_an_at_sign_in_a_folder_name_is_no_revision(tmp_path):
    folder = tmp_path / "expert@2"
    folder.mkdir()
    write_config(folder)
    write_weights(folder / "model.safetensors", EMBEDDING, QUERY, NORM)
    assert open_checkpoint(str(folder)).identity == str(folder)


def test_the_text_part_of_a_multimodal_configuration():
    assert text_config({"text_config": {"a": 1}, "b": 2}) == {"a": 1}
    assert text_config({"text_config": None, "b": 2}) == {"text_config": None, "b": 2}
    assert text_config({"b": 2}) == {"b": 2}


# --- shards and their index ---


BOTH = f": has both model.safetensors and {INDEX}; remove the one that is out of date"


def replaced_by_a_folder(folder):
    (folder / INDEX).unlink()
    (folder / INDEX).mkdir()


AGAIN = "a download was interrupted, so download the checkpoint again"
OUT = "take it out of the index, or download both again"
BROKEN = {
    "missing": (
        lambda folder: (folder / SECOND).unlink(),
        f": shard {SECOND}, named by {INDEX}, is missing; {AGAIN}",
    ),
    "single file too": (lambda folder: write_weights(folder / "model.safetensors", NORM), BOTH),
    "in two shards": (
        lambda folder: write_weights(folder / SECOND, NORM, QUERY),
        f"/{SECOND}: holds '{QUERY}', which {INDEX} puts in {FIRST}",
    ),
    "in another shard": (
        lambda folder: write_index(folder, WHOLE | {NORM: FIRST, EMBEDDING: SECOND}),
        f"/{FIRST}: holds '{EMBEDDING}', which {INDEX} puts in {SECOND}",
    ),
    "not in the index": (
        lambda folder: write_index(folder, {NORM: SECOND, EMBEDDING: FIRST}),
        f"/{FIRST}: holds '{QUERY}', which {INDEX} lacks",
    ),
    "not in the shards": (
        lambda folder: write_index(folder, {"extra": SECOND} | WHOLE),
        f"/{INDEX}: lists 'extra' in {SECOND}, which does not hold it; {OUT}",
    ),
    "three not in the shards": (
        lambda folder: write_index(folder, {"extra": SECOND, "b": FIRST, "c": FIRST} | WHOLE),
        f"/{INDEX}: lists 'extra' in {SECOND}, which does not hold it (and 2 more); {OUT}",
    ),
    "name too long": (
        lambda folder: write_index(folder, {NORM: "n" * 300 + ".safetensors"}),
        ": cannot be read (File name too long)",
    ),
    "a folder": (replaced_by_a_folder, f"/{INDEX}: not a regular file"),
    **{
        f"weight_map {weight_map}": (
            lambda folder, weight_map=weight_map: write_index(folder, weight_map),
            f"/{INDEX}: has no weight_map",
        )
        for weight_map in (None, {}, [], "x", [FIRST])
    },
    **{
        f"value {value}": (
            lambda folder, value=value: write_index(folder, WHOLE | {QUERY: value}),
            f"/{INDEX}: weight_map has a value that is not text",
        )
        for value in (None, 1, True, [FIRST], {"file": FIRST})
    },
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_shard_or_index(sharded, change, message):
    change(sharded)
    assert refusal(sharded) == message


@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "config.json", "tokenizer.json"])
def test_a_link_to_nothing_is_an_interrupted_download(single, name):
    (single / name).unlink(missing_ok=True)
    (single / name).symlink_to("gone")
    assert refusal(single) == f"/{name}: a link to a file that does not exist; {AGAIN}"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "[" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, '{"eos_token_id": 1e400}'],
)
def test_settings_that_are_copied_are_json(single, text):
    (single / "generation_config.json").write_text(text)
    assert refusal(single).startswith("/generation_config.json: ")


OUTSIDE = [
    "../model.safetensors", "../../etc/model.safetensors", "/model.safetensors",
    "//server/share/model.safetensors", r"\\server\share\model.safetensors",
    r"..\model.safetensors", r"\model.safetensors", r"C:\model.safetensors",
    "C:model.safetensors", "C:/model.safetensors", "sub/model.safetensors",
    r"sub\model.safetensors", "./model.safetensors", "sub/../model.safetensors",
]  # fmt: skip
NO_SAFETENSORS = [
    "", ".", "..", "/", "pytorch_model.bin", "model.safetensors.bin", "model.safetensors/",
    "model.safetensors\0", "a\0.safetensors", "a\n.safetensors", "\x1b[2J.safetensors",
    "x.SAFETENSORS",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_points_outside_its_folder(sharded, name):
    write_index(sharded, WHOLE | {QUERY: name})
    assert refusal(sharded) == f"/{INDEX}: {name!r} points outside its folder"


@pytest.mark.parametrize("name", NO_SAFETENSORS)
def test_an_index_that_names_no_safetensors_file(sharded, name):
    write_index(sharded, WHOLE | {QUERY: name})
    assert refusal(sharded) == f"/{INDEX}: {name!r} is not the name of a safetensors file"


# --- no weights that can be read ---

ADAPTER = ": a LoRA adapter, where a full checkpoint is needed"
SAVE_AGAIN = "; load the model with transformers and save it again"
ELSEWHERE = "download its safetensors too, or give the folder that holds them"
PICKLED = f": has only pickled weights (.bin){SAVE_AGAIN}"


def test_an_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    write_weights(tmp_path / "adapter_model.safetensors", "a")
    assert refusal(tmp_path) == ADAPTER


def test_a_checkpoint_that_also_has_an_adapter_is_a_checkpoint(single):
    (single / "adapter_config.json").write_text("{}")
    assert len(open_checkpoint(str(single)).tensors) == 3


def test_an_empty_folder(tmp_path):
    assert refusal(tmp_path) == ": no config.json; not a Hugging Face checkpoint"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], f": has no weights; {ELSEWHERE}"),
        (["training_args.bin"], f": has no weights; {ELSEWHERE}"),
        (
            ["global_step5/x.pt", "training_args.bin"],
            ": is a checkpoint of DeepSpeed; join its parts with zero_to_fp32.py",
        ),
        (
            ["model_0/__0_0.distcp"],
            ": is a checkpoint of FSDP; join its parts with `accelerate merge-weights`",
        ),
        (["tf_model.h5"], ": has only weights of another kind (.h5); convert them to safetensors"),
        (["pytorch_model.bin"], PICKLED),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], PICKLED),
        (
            ["consolidated.safetensors"],
            f": has consolidated.safetensors but neither model.safetensors nor {INDEX}; its "
            "names are not those of transformers: download model*.safetensors",
        ),
        ([FIRST], f": has {FIRST} but neither model.safetensors nor {INDEX}; {AGAIN}"),
        (
            ["x.bin", "x.safetensors"],
            f": has x.safetensors but neither model.safetensors nor {INDEX}; if it is the whole "
            "model, rename it to model.safetensors",
        ),
    ],
)
def test_no_weights(tmp_path, files, message):
    write_config(tmp_path)
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert refusal(tmp_path) == message


def test_a_trainers_folder_with_a_configuration_at_its_top(single):
    inner = single / "checkpoint-5"
    inner.mkdir()
    write_config(inner)
    (single / "model.safetensors").unlink()
    assert refusal(single) == (
        ": has no weights; it is a trainer's folder; give a checkpoint in it, such as "
        f"{str(inner)!r}"
    )


# --- the configuration ---


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "(fp8) can only be copied by a swap"),
        ({"quantization_config": {"quant_method": "hqq"}}, "(hqq) cannot be merged"),
        ({"quantization_config": {}}, "(unknown method) cannot be merged"),
        (
            {"text_config": {"num_hidden_layers": 1, "quantization_config": {"bits": 4}}},
            "(unknown method) cannot be merged",
        ),
    ],
)
def test_quantised_weights(single, extra, why):
    write_config(single, CONFIG | extra)
    assert refusal(single) == f": quantised weights {why}; use the unquantised checkpoint"


@pytest.mark.parametrize("value", [True, "LlamaForCausalLM", [3], {"a": "b"}])
def test_architectures_that_are_no_list_of_names(single, value):
    write_config(single, CONFIG | {"architectures": value})
    expected = f"/config.json: architectures is {value!r}, not a list of class names"
    assert refusal(single) == expected


def test_a_model_type_that_is_no_name(single):
    write_config(single, CONFIG | {"model_type": [1]})
    assert refusal(single) == "/config.json: model_type is [1], not a name"


def test_a_folder_that_may_not_be_entered(single, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    assert refusal(single) == ": cannot be read (Permission denied)"


def test_one_tensor_by_name(tmp_path):

    weight = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    folder = save_tensors(tmp_path / "a", {"model.layers.0.mlp.up_proj.weight": weight})
    found = open_checkpoint(str(folder))
    assert torch.equal(found.read("model.layers.0.mlp.up_proj.weight"), weight)
    message = refused(CheckpointError, found.read, "model.norm.weight")
    assert message == f"{folder}: no tensor 'model.norm.weight'"
