"""GGUF files merged into GGUF files: layers bit for bit, blends in a type that holds them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from effort import sampled
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from gguf_files import (
    LAYERS,
    TOKENS,
    add_vocabulary,
    all_of,
    close,
    floats_of,
    k_mix,
    shapes,
    tensors_of,
    values_of,
    write_gguf,
)
from merging import recipe_plan
from processes import layerswap, run

import layerswap as ls
from layerswap.checkpoint import TensorInfo
from layerswap.checkpoint.gguf import gguf_header_bytes, read_gguf
from layerswap.checkpoint.loading import load_tokenizer
from layerswap.ground.errors import LayerswapError
from layerswap.merge.gguf import RECORD_KEY

OUTSIDE = ("token_embd.weight", "output_norm.weight", "output.weight")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A task expert as Q4_K_M and a language expert as Q5_0, with one F16 layer."""
    folder = tmp_path_factory.mktemp("gguf")

    def mixed(name: str) -> str:
        return "F16" if name.startswith("blk.0.") and "norm" not in name else all_of("Q5_0")(name)

    return {
        "task": write_gguf(folder / "task.gguf", 1, k_mix, base=0),
        "language": write_gguf(folder / "language.gguf", 2, mixed, base=0),
        "base": write_gguf(folder / "base.gguf", 0, all_of("Q8_0")),
    }


def swap(files, **settings) -> ls.Plan:
    return ls.swap(task=files["task"], language=files["language"], bottom=1, top=1, **settings)


def test_layers_are_copied_bit_for_bit_in_their_own_type(files, tmp_path):
    out = swap(files).save(tmp_path / "out.gguf")
    merged, task, language = (tensors_of(path) for path in (out, files["task"], files["language"]))
    assert list(merged) == list(shapes())
    for name, result in merged.items():
        if name not in OUTSIDE:
            assert result == (task if name.startswith("blk.1.") else language)[name]
    assert {kind for kind, _ in merged.values()} == {"F16", "F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}


@pytest.mark.parametrize("kind", sampled(["F32", "BF16", "F16", "Q8_0", "Q5_1", "Q4_0"], "Q5_1"))
def test_the_type_of_blends_can_be_chosen(files, tmp_path, kind):
    experts = {"a": files["task"], "b": files["language"]}
    settings = {"soup": {"experts": ["a", "b"]}, "weights": {"a": 0.25, "b": 0.75}}
    plan = recipe_plan(settings, experts=experts, blend_type=kind)
    out = plan.save(tmp_path / "out.gguf")
    a, b = floats_of(files["task"]), floats_of(files["language"])
    for name, (result, data) in tensors_of(out).items():
        wanted = "F32" if "norm" in name else kind  # llama.cpp needs norms in float32
        expected = np.float32(0.25) * a[name] + np.float32(0.75) * b[name]
        assert result == wanted
        assert data == quants.quantize(expected, GGMLQuantizationType[wanted]).tobytes()


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    sampled(
        [
            ("Q4_0", "Q5_1", "Q5_1"),
            ("Q4_0", "Q4_0", "Q4_0"),
            ("F16", "Q4_K", "F16"),
            ("F16", "BF16", "F32"),
            ("F32", "F16", "F32"),
            ("Q4_K", "Q8_0", "Q8_0"),
            ("Q4_K", "Q5_0", "Q5_0"),
            ("Q3_K", "Q3_K", "Q8_0"),
            ("IQ4_NL", "Q6_K", "Q8_0"),
        ],
        ("F16", "Q4_K", "F16"),
        ("IQ4_NL", "Q6_K", "Q8_0"),
    ),
)
def test_blends_have_the_wider_type_of_two(tmp_path, one, other, kind):
    paths = [write_gguf(tmp_path / f"{i}.gguf", i, all_of(k)) for i, k in enumerate((one, other))]
    plan = ls.soup(paths)
    assert {t.dtype for t in plan.tensors if "norm" not in t.name} == {kind}
    assert any(f"blended into {kind}" in note for note in plan.notes)


@pytest.mark.parametrize("predicting", ["task", "language", "task language"])
def test_layers_that_predict_further_tokens_stay_if_all_sources_have_them(tmp_path, predicting):
    files = {
        name: write_gguf(tmp_path / f"{name}.gguf", i, base=0, predicting=name in predicting)
        for i, name in enumerate(("task", "language"), start=1)
    }
    plan = swap(files)
    out = plan.save(tmp_path / "out.gguf")
    both = predicting == "task language"
    fields = {f.name: f.contents() for f in GGUFReader(out).fields.values()}
    assert fields["llama.block_count"] == LAYERS + both
    assert fields.get("llama.nextn_predict_layers", 0) == both
    assert [name for name in tensors_of(out) if "nextn" in name] == both * [
        f"blk.{LAYERS}.nextn.eh_proj.weight"
    ]
    assert any("leaves out 1 tensors" in note for note in plan.notes) != both


def test_the_metadata_is_that_of_the_task_expert_with_an_origin(files, tmp_path):
    out = swap(files).save(tmp_path / "out.gguf")
    merged, task = (
        {f.name: f.contents() for f in GGUFReader(path).fields.values()}
        for path in (out, files["task"])
    )
    changed = {"general.name", "GGUF.kv_count"}
    for key, value in task.items():
        assert merged[key] == value or key in changed
    assert merged["general.name"] == "tiny 1 x tiny 2"
    assert merged["general.base_model.count"] == 2
    assert merged["general.base_model.1.name"] == "tiny 2"
    assert merged["general.tags"] == ["merge", "layerswap"]
    assert merged["general.quantization_version"] == 2
    record = json.loads(merged[RECORD_KEY])
    assert record["recipe"]["swap"] == {"bottom": 1, "top": 1}
    assert record["sources"]["task"]["fingerprints"].keys() == {"model.gguf"}


@pytest.mark.parametrize("alignment", [32, 256])
def test_every_tensor_is_aligned_and_the_file_is_whole(tmp_path, alignment):
    entries = {"general.alignment": alignment}
    task, language = (
        write_gguf(tmp_path / f"{seed}.gguf", seed, entries=entries) for seed in (1, 2)
    )
    plan = ls.swap(task=task, language=language, bottom=1, top=1)
    out = plan.save(tmp_path / "new" / "out.gguf")
    assert out.stat().st_size == plan.nbytes
    tensors = ls.open_checkpoint(out).tensors.values()
    assert all(tensor.offset % alignment == 0 for tensor in tensors)
    assert [path.name for path in out.parent.iterdir()] == ["out.gguf"]


@pytest.mark.slow
def test_partitions_places_and_methods_with_a_base(files, tmp_path):
    """TIES over dequantised files is TIES over the same numbers in safetensors."""
    from plain_checkpoints import write_tensors

    def ties(base, **experts):
        merge = {"method": "ties", "experts": ["task", "language"], "density": 0.3}
        return recipe_plan(base=base, experts=experts, merge=merge)

    out = ties(**files).save(tmp_path / "ties.gguf")
    folders = {}
    for name, path in files.items():
        folder = folders[name] = tmp_path / name
        folder.mkdir()
        config = {"model_type": "llama", "num_hidden_layers": LAYERS, "vocab_size": len(TOKENS)}
        (folder / "config.json").write_text(json.dumps(config))
        write_tensors(folder / "model.safetensors", floats_of(path), "F32")
    reference = ls.open_checkpoint(ties(**folders).save(tmp_path / "ties"))
    for name, (kind, data) in tensors_of(out).items():
        values = reference.elements(name, 0, reference.tensors[name].elements)
        rows = values.reshape(reference.tensors[name].shape)
        assert quants.quantize(rows, GGMLQuantizationType[kind]).tobytes() == data
    assert ls.verify(out, full=True).passed

    partition = ls.partition("B", task=files["task"], language=files["language"])
    assert all(tensor.verbatim for tensor in partition.tensors)
    kept = ls.revert(files["base"], files["task"], layers="1").save(tmp_path / "kept.gguf")
    merged = tensors_of(kept)
    assert merged["blk.1.ffn_up.weight"] == tensors_of(files["base"])["blk.1.ffn_up.weight"]
    assert merged["blk.2.ffn_up.weight"] == tensors_of(files["task"])["blk.2.ffn_up.weight"]


# ---------------------------------------------------------------- verifying and resuming


def test_a_merge_is_verified_and_every_wrong_byte_is_found(files, tmp_path):
    plan = swap(files)
    out = plan.save(tmp_path / "out.gguf")
    report = ls.verify(out, full=True)
    assert report.passed
    assert report.computed.tensors == len(OUTSIDE)
    whole = out.read_bytes()
    result = ls.open_checkpoint(out).tensors
    for name in ("blk.1.ffn_up.weight", "token_embd.weight"):
        spoilt = bytearray(whole)
        spoilt[result[name].offset + 100] ^= 1
        out.write_bytes(spoilt)
        (line,) = ls.verify(out, full=True).findings
        assert f"tensor {name!r} differs from" in line
    spoilt = bytearray(whole)
    spoilt[whole.index(b"tiny 1 x tiny 2")] ^= 1
    out.write_bytes(spoilt)
    (line,) = ls.verify(out, full=True).findings
    assert "the header is not the one that the merge writes" in line


def test_copies_need_no_package_and_blends_say_which(files, tmp_path, monkeypatch):
    def missing(extra):
        return ["gguf"] if extra == "gguf" else []

    monkeypatch.setattr("layerswap.versions.missing_of", missing)
    out = swap(files, outside="language").save(tmp_path / "out.gguf")
    assert ls.verify(out, full=True).passed
    with pytest.raises(
        LayerswapError, match=r"needs gguf; .* pip install -e \"\.\[gguf\]\" in the"
    ):
        swap(files)


def test_deltas_and_magnitudes_are_those_of_the_numbers(files):
    base = floats_of(files["base"])
    means = {}
    for expert in ("task", "language"):
        atlas = ls.delta(files["base"], files[expert])
        changes = {tensor: change for (_, tensor), change in atlas.changes.items()}
        assert set(changes) == set(base)
        mavs = []
        for name, values in floats_of(files[expert]).items():
            delta = np.abs(values - base[name])
            mavs.append(delta.mean(axis=0) if delta.ndim > 1 else delta.mean(keepdims=True))
            assert np.allclose(changes[name].rows, mavs[-1], rtol=1e-4)
        means[expert] = np.concatenate(mavs).mean()
    result = swap(files, base=files["base"], weights="magnitude").magnitude
    ratio = result["task"] / result["language"]
    assert np.isclose(ratio, means["language"] / means["task"], rtol=1e-4)
    assert ratio != 1


# ---------------------------------------------------------------- refusals


@pytest.mark.slow
def test_the_command_says_what_a_gguf_output_shares(files, tmp_path):
    asked = ["merge", "--task", files["task"], "--language", files["language"],
             "--out", tmp_path / "Merged.gguf"]  # fmt: skip
    done = layerswap(*asked, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["file"].endswith("Merged.gguf")
    done = layerswap(*asked, "--overwrite")
    assert "nothing shared with the experts)" in done.stdout


def with_rope_table(path):
    """A file of Llama 3.1, whose table scales positions."""
    write_gguf(path, 3)
    old = read_gguf(path)
    table = TensorInfo("rope_freqs.weight", "F32", (32,), path, 0, 128)
    listed = [(t.name, t.dtype, t.shape) for t in (*old.tensors.values(), table)]
    raw = old.metadata.raw
    entries = [(k, kind, raw[i:j]) for k, (kind, i, j) in old.metadata.spans.items()]
    header, offsets, nbytes = gguf_header_bytes(entries, listed, old.metadata.alignment)
    data = bytearray(header.ljust(nbytes, b"\0"))
    for info, offset in zip(old.tensors.values(), offsets, strict=False):
        data[offset : offset + info.nbytes] = path.read_bytes()[info.offset :][: info.nbytes]
    path.write_bytes(data)
    return path


def test_a_head_that_only_one_file_has(files, tmp_path):
    """The other's head is its embedding; zeros behind the last tensor are padding."""
    tied = write_gguf(tmp_path / "h.gguf", 3, head=False)
    tied.write_bytes(tied.read_bytes() + bytes(32))
    for task, language in ((files["task"], tied), (tied, files["task"])):
        plan = ls.swap(task=task, language=language, bottom=1, top=1, outside="task")
        assert any("it gets a copy of its embedding" in note for note in plan.notes)
        out = plan.save(tmp_path / "out.gguf", overwrite=True)
        found = {t.name: t.data.tobytes() for t in GGUFReader(out).tensors}
        source = {t.name: t.data.tobytes() for t in GGUFReader(task).tensors}
        head = source.get("output.weight", source["token_embd.weight"])
        assert found["output.weight"] == head
        assert ls.verify(out).passed


def test_files_that_do_not_fit_together(files, tmp_path):
    for path, message in (
        (write_gguf(tmp_path / "v.gguf", 3, tokens=[*TOKENS[:-1], "odd"]),
         r"tokenizers of task and language differ: tokenizer.ggml.tokens \d+ is '.*' and 'odd'; "
         "rows of GGUF files cannot be aligned, so merge the safetensors"),
        (write_gguf(tmp_path / "l.gguf", 3, layers=2), "number of layers differs: 3 in task, 2 in"),
        (with_rope_table(tmp_path / "f.gguf"),
         "language stores 'rope_freqs.weight' and task does not"),
        (write_gguf(tmp_path / "r.gguf", 3, entries={"llama.rope.scaling.type": "linear"}),
         "llama.rope.scaling.type is 'linear' in language, but task has none"),
    ):  # fmt: skip
        with pytest.raises(LayerswapError, match=message):
            ls.swap(task=files["task"], language=path)
    template = {"tokenizer.chat_template": "{{ x }}"}
    templated = write_gguf(tmp_path / "c.gguf", 3, entries=template)
    note = ls.swap(task=templated, language=files["language"]).notes
    assert not any("chat_template" in line for line in note)  # the first has one, which is written
    plan = ls.swap(task=files["task"], language=templated)
    assert "tokenizer.chat_template: only language has this; copied" in plan.notes
    out = ls.open_checkpoint(plan.save(tmp_path / "templated.gguf"))
    assert out.metadata["tokenizer.chat_template"] == "{{ x }}"
    same = ls.swap(task=files["task"], language=files["task"], outside="task").notes
    assert same == [
        "task and language have the same weights: no composition of them changes anything"
    ]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"tokenizer": "union"}, "tokenizer: vocabularies of GGUF files cannot be aligned"),
        ({"dtype": "float16"}, "dtype: is for safetensors; set blend_type"),
        ({"max_shard_size": "1GB"}, "max_shard_size: a GGUF output is one file"),
    ],
)
def test_settings_without_meaning_for_gguf_are_refused(files, setting, message):
    with pytest.raises(LayerswapError, match=message):
        swap(files, **setting)


def test_outputs_that_are_refused(files, tmp_path):
    plan = swap(files)
    out = tmp_path / "out.gguf"
    with pytest.raises(LayerswapError, match=r"into a GGUF file; end its name with \.gguf"):
        plan.save(tmp_path / "out")
    assert plan.save(tmp_path / "new" / "out.gguf").is_file()
    with pytest.raises(LayerswapError, match="cannot be loaded here; save it for"):
        plan.load()
    out.write_bytes(files["task"].read_bytes())
    for overwrite in (False, True):
        with pytest.raises(LayerswapError, match="layerswap did not write it and will not"):
            plan.save(out, overwrite=overwrite)
    ours = plan.save(tmp_path / "ours.gguf")
    with pytest.raises(LayerswapError, match="exists already; choose another output"):
        plan.save(ours)
    ours.unlink()
    out.unlink()
    out.mkdir()
    with pytest.raises(LayerswapError, match="exists and is not a file"):
        plan.save(out, overwrite=True)
    out.rmdir()
    plan.save(out)
    assert plan.save(out, overwrite=True) == out
    with pytest.raises(LayerswapError, match="would overwrite the checkpoint of task"):
        ls.swap(task=out, language=files["language"]).save(out, overwrite=True)
    with pytest.raises(LayerswapError, match="a GGUF file, where a transformers checkpoint is"):
        load_tokenizer(out)
    with pytest.raises(LayerswapError, match=f"has no {RECORD_KEY}, so layerswap did not write"):
        ls.verify(files["task"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out.gguf"]


@pytest.mark.parametrize("value", sampled([1e30, np.nan, np.inf], 1e30))
def test_numbers_too_large_for_a_block_are_refused(tmp_path, value):
    paths = [write_gguf(tmp_path / f"{seed}.gguf", seed, all_of("F32")) for seed in (1, 2)]
    info = ls.open_checkpoint(paths[0]).tensors["token_embd.weight"]
    with paths[0].open("r+b") as file:
        file.seek(info.offset + 400)
        file.write(np.float32(value).tobytes())
    half = write_gguf(tmp_path / "half.gguf", 2, all_of("Q8_0"))
    soup, experts = {"experts": ["a", "b"]}, {"a": paths[0], "b": half}
    with pytest.raises(LayerswapError, match=r"token_embd.weight' (holds NaN or|overflows Q8_0)"):
        recipe_plan(experts=experts, soup=soup, blend_type="Q8_0").save(tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    """Files of 55 and 110 MB are blended in the same memory, far below the largest file."""
    peaks = []
    code = (
        "import sys; import layerswap as ls\n"
        "ls.soup(sys.argv[1:3]).save(sys.argv[3], threads=2)\n"
        "print(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1])"
    )
    for layers in (100, 200):
        paths = [tmp_path / f"{layers}-{i}.gguf" for i in (1, 2)]
        write_gguf(paths[0], 1, all_of("Q8_0"), layers=layers)
        paths[1].write_bytes(paths[0].read_bytes())
        assert paths[0].stat().st_size > 540_000 * layers
        peaks.append(int(run(code, *paths, tmp_path / f"{layers}.gguf")))
    assert max(peaks) < 100 * 1024  # KiB
    assert peaks[1] - peaks[0] < 8 * 1024


def write_recurrent(path, architecture, seed):
    """A decoder whose layers mix tokens in a way that no table knows."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    add_vocabulary(writer, TOKENS)
    names = ("attn_norm", "ssm_in", "ffn_norm", "ffn_down")
    names = [f"blk.{layer}.{name}.weight" for layer in range(LAYERS) for name in names]
    for number, name in enumerate(
        ["token_embd.weight", *names, "output_norm.weight", "output.weight"]
    ):
        shape = (8,) if "norm" in name else (len(TOKENS), 8) if name in OUTSIDE else (8, 8)
        writer.add_tensor(name, values_of(100 * seed + number, shape))
    close(writer)
    return path


@pytest.mark.parametrize("architecture", ["rwkv7", "mamba2"])
def test_layers_of_an_architecture_without_known_roles(tmp_path, architecture):
    pair = {}
    for seed, name in enumerate(("task", "language")):
        pair[name] = write_recurrent(tmp_path / f"{name}.gguf", architecture, seed)
    out = swap(pair).save(tmp_path / "out.gguf")
    merged, task, language = (tensors_of(path) for path in (out, pair["task"], pair["language"]))
    assert merged["blk.1.ssm_in.weight"] == task["blk.1.ssm_in.weight"]
    assert merged["blk.2.ssm_in.weight"] == language["blk.2.ssm_in.weight"]
    assert merged["blk.2.ssm_in.weight"] != task["blk.2.ssm_in.weight"]
    assert any(note.startswith("takes 'blk', the only list of 3") for note in swap(pair).notes)
    attention = [{"layers": 1, "roles": ["attention"], "take": "language"}]
    recipe = swap(pair).recipe
    with pytest.raises(LayerswapError, match="the roles of 3 of 15 tensors are unknown"):
        ls.make_plan(recipe.model_validate({**recipe.model_dump(), "places": attention}))
    assert ls.verify(out, full=True).passed
