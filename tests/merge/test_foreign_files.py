"""Checkpoints as other tools write them: names, leftovers, and tensors that only some have."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.merging import (
    change_config,
    change_tensors,
    copied,
    recipe_plan,
    refusal,
    same_tensors,
    tensors_of,
)
from tests.helpers.plain_checkpoints import (
    WIDTH,
    weights,
    write_adapter,
    write_checkpoint,
    write_family,
    write_tokenizer,
)

import layerswap as ls


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A base and three experts; read only."""
    return write_family(tmp_path_factory.mktemp("family"), "BF16")


def renamed(source: Path, folder: Path, name) -> Path:
    """A copy in which every tensor has the name that a function gives."""
    copied(source, folder)
    found = tensors_of(source)
    change_tensors(folder, {**dict.fromkeys(found), **{name(n): t for n, t in found.items()}})
    return folder


def with_tensors(source: Path, folder: Path, seed: int, shapes, **config) -> Path:
    draws = torch.Generator().manual_seed(seed)
    new = {n: torch.randn(shape, generator=draws).bfloat16() for n, shape in shapes.items()}
    change_config(copied(source, folder), **config)
    return change_tensors(folder, new)


@pytest.fixture
def task(family, tmp_path):
    """A copy of the task expert, to spoil."""
    return copied(family["task"], tmp_path / "task")


@pytest.fixture
def pair(task, family, tmp_path):
    """Copies of the task and the language expert, to spoil."""
    return {"task": task, "language": copied(family["language"], tmp_path / "language")}


def plan_of(task: Path, language: Path, **settings):
    return ls.swap(task=task, language=language, bottom=1, top=1, outside="task", **settings)


def ties_of(sources) -> ls.Plan:
    experts = {name: sources[name] for name in ("task", "language")}
    merge = {"method": "ties", "experts": [*experts]}
    return recipe_plan(base=sources["base"], experts=experts, merge=merge)


def merged(plan, out: Path):
    plan.save(out)
    assert ls.verify(out).passed
    return tensors_of(out)


# --- names ---

WRAPPERS = {
    "compiled": lambda n: f"_orig_mod.{n}",
    "parallel": lambda n: f"module.{n}",
    "peft": lambda n: f"base_model.model.{n}",
    "fsdp": lambda n: re.sub(r"(layers\.\d+)", r"\1._fsdp_wrapped_module", n),
}


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("both", [False, True])
def test_words_of_training_wrappers_are_left_out(family, tmp_path, kind, both):
    task = renamed(family["task"], tmp_path / "task", WRAPPERS[kind])
    language = family["language"]
    if both:
        language = renamed(language, tmp_path / "language", WRAPPERS[kind])
    plan = plan_of(task, language)
    expected = merged(plan_of(family["task"], family["language"]), tmp_path / "expected")
    assert same_tensors(merged(plan, tmp_path / "out"), expected)


def test_experts_and_base_may_have_other_prefixes(family, tmp_path):
    """As GPT-2's base on the Hub, or Gemma 3 saved by transformers 4.52."""
    bare = renamed(family["base"], tmp_path / "base", lambda n: n.removeprefix("model."))
    new = renamed(
        family["language"],
        tmp_path / "language",
        lambda n: n.replace("model.", "language_model.model."),
    )
    plan = ties_of({"base": bare, "task": family["task"], "language": new})
    assert sum("as transformers reads them" in note for note in plan.notes) == 2
    expected = merged(ties_of(family), tmp_path / "expected")
    assert same_tensors(merged(plan, tmp_path / "out"), expected)
    assert ls.delta(bare, new).layers == 3


@pytest.mark.parametrize("bake", [False, True])
def test_an_adapter_has_the_names_in_memory(family, tmp_path, bake):
    def on_disk(name):
        return (
            name
            if name.startswith("lm_head")
            else f"language_{name.replace('model.', 'model.model.', 1)}"
        )

    def in_memory(name):
        return name.replace("base_model.model.model.", "base_model.model.model.language_model.")

    base = renamed(family["base"], tmp_path / "disk", on_disk)
    change_config(base, architectures=["OtherForCausalLM"], model_type="other")
    plain, other = {}, {}
    for seed, name in enumerate(("task", "language")):
        plain[name] = write_adapter(tmp_path / f"plain-{name}", family["base"], seed, 4)
        other[name] = copied(plain[name], tmp_path / name)
        file = other[name] / "adapter_model.safetensors"
        save_file({in_memory(n): t for n, t in load_file(file).items()}, file)
    out, expected = tmp_path / "out", tmp_path / "expected"
    plan_of(other["task"], other["language"], base=base, bake=bake).save(out)
    plan_of(plain["task"], plain["language"], base=family["base"], bake=bake).save(expected)
    found, wanted = tensors_of(out), tensors_of(expected)
    name = on_disk if bake else in_memory
    assert same_tensors(found, {name(n): tensor for n, tensor in wanted.items()})


@pytest.mark.parametrize("first", ["task", "language"])
def test_adapters_of_two_classes_have_the_names_of_their_bases_class(family, tmp_path, first):
    norm, adapters = "base_model.model.model.layers.1.input_layernorm.weight", {}
    for seed, name in enumerate(("task", "language")):
        adapters[name] = write_adapter(
            tmp_path / name, family["base"], seed, 4, modules_to_save=["input_layernorm"]
        )
        file = adapters[name] / "adapter_model.safetensors"
        save_file({**load_file(file), norm: torch.full((WIDTH,), 1.0 + seed)}, file)
    plan_of(**adapters, base=family["base"]).save(tmp_path / "expected")
    file = adapters[first] / "adapter_model.safetensors"
    save_file({n.replace(".model.layers", ".layers"): t for n, t in load_file(file).items()}, file)
    bare = renamed(family["base"], tmp_path / "bare", lambda name: name.removeprefix("model."))
    plan_of(**adapters, base=bare).save(tmp_path / "out")
    assert same_tensors(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "expected"))


# --- tensors that only some have ---

MTP = {"mtp.fc.weight": (WIDTH, 2 * WIDTH), "mtp.layers.0.mlp.up_proj.weight": (96, WIDTH)}
BEHIND = {
    "model.layers.3.eh_proj.weight": (WIDTH, 2 * WIDTH),
    "model.layers.3.self_attn.q_proj.weight": (WIDTH, WIDTH),
}
BUFFER = {"model.layers.1.self_attn.rotary_emb.inv_freq": (8,)}


@pytest.mark.parametrize("extra", [MTP, BEHIND, BUFFER], ids=["mtp", "layer", "buffer"])
@pytest.mark.parametrize("owner", ["base", "task", "language"])
def test_ignored_tensors_of_some_sources_are_left_out(family, tmp_path, extra, owner):
    has = with_tensors(family[owner], tmp_path / owner, 1, extra)
    sources = {**{n: family[n] for n in ("base", "task", "language")}, owner: has}
    plan = ties_of(sources)
    (note,) = (note for note in plan.notes if note.endswith("not all sources have them"))
    assert note.startswith(f"{owner}: leaves out {len(extra)} tensors")
    assert merged(plan, tmp_path / "out").keys() == tensors_of(family["task"]).keys()
    assert ls.delta(sources["base"], sources["task"], sources["language"]).layers == 3


def test_a_layer_behind_the_last_one_needs_no_pattern(family, tmp_path):
    experts = {n: with_tensors(family[n], tmp_path / n, 1, BEHIND) for n in ("task", "language")}
    found = merged(plan_of(**experts), tmp_path / "out")
    assert all(torch.equal(found[n], tensors_of(experts["task"])[n]) for n in BEHIND)


def test_moved_layers_leave_the_layer_behind_out(family, tmp_path):
    task = with_tensors(family["task"], tmp_path / "task", 1, BEHIND)
    layers = [{"sources": [{"model": "task", "layer_range": [0, 2]}]}] * 2
    merge = {"merge_method": "passthrough", "slices": layers}
    plan = recipe_plan(experts={"task": task}, mergekit=merge)
    assert "behind its last layer are left out" in "\n".join(plan.notes)
    found = merged(plan, tmp_path / "out")
    assert not any("eh_proj" in name for name in found)


# --- leftovers and other kinds ---

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 5123456789\n"
PAGE = "<!DOCTYPE html><html><body>504 Gateway Time-out</body></html>"


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (POINTER, "this is a Git LFS pointer, not the file; run `git lfs pull` in its folder"),
        (PAGE, "this is a web page or XML, not the file; download it again"),
    ],
    ids=["pointer", "page"],
)
def test_what_a_download_left_is_named(task, family, file, text, why):
    (task / file).write_text(text)
    assert refusal(plan_of, task, family["language"]) == f"task: {task / file}: {why}"


def test_a_pointer_in_place_of_a_gguf_file_is_named(tmp_path):
    file = tmp_path / "a.gguf"
    file.write_text(POINTER)
    assert "git lfs pull" in refusal(plan_of, file, file)


@pytest.mark.parametrize("every", [True, False])
def test_empty_matrices_are_refused(task, every):
    empty = {n: torch.zeros(0) for n, t in tensors_of(task).items() if every or t.ndim > 1}
    change_tensors(task, empty)
    for call in (lambda: plan_of(task, task), lambda: ls.delta(task, task)):
        assert "have no elements, such as 'lm_head.weight' of shape [0]; DeepSpeed" in refusal(call)


@pytest.mark.parametrize("method", ["bitsandbytes", "fp8", "gptq"])
def test_plain_weights_that_the_configuration_calls_quantised_are_named(task, family, method):
    """As unsloth and others left it after merging an adapter into the dequantised base."""
    change_config(task, quantization_config={"quant_method": method})
    message = refusal(plan_of, task, family["language"])
    assert "its weights are not quantised, but config.json says that they are" in message
    assert "remove quantization_config from it" in message


@pytest.mark.parametrize("matrix", [("weight", torch.uint8), ("qweight", torch.int32)])
def test_packed_matrices_without_a_word_in_the_configuration_are_named(task, family, matrix):
    name = f"model.layers.1.mlp.up_proj.{matrix[0]}"
    change_tensors(task, {name: torch.zeros(96, 1, dtype=matrix[1])})
    message = refusal(plan_of, task, family["language"])
    assert repr(name) in message
    assert "as quantised weights are" in message


def test_an_adapter_with_the_configuration_of_its_base(family, tmp_path):
    """As Axolotl writes it."""
    adapters = {}
    for seed, name in enumerate(("task", "language")):
        adapters[name] = write_adapter(tmp_path / name, family["base"], seed, 4)
    plan_of(**adapters, base=family["base"]).save(tmp_path / "expected")
    for folder in adapters.values():
        (folder / "config.json").write_text((family["base"] / "config.json").read_text())
    out = merged(plan_of(**adapters, base=family["base"]), tmp_path / "out")
    assert same_tensors(out, tensors_of(tmp_path / "expected"))


def test_an_adapter_left_in_a_merged_folder_is_noted(task, family, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", family["base"], 0, 4)
    for file in adapter.iterdir():
        (task / file.name).write_bytes(file.read_bytes())
    plan = plan_of(task, family["language"])
    assert any("also holds an adapter (adapter_config.json)" in note for note in plan.notes)
    expected = merged(plan_of(family["task"], family["language"]), tmp_path / "expected")
    assert same_tensors(merged(plan, tmp_path / "out"), expected)


def test_folders_of_other_kinds_are_named(family, tmp_path):
    run = tmp_path / "run"
    for step in (500, 1000):
        copied(family["task"], run / f"checkpoint-{step}")
    cache = tmp_path / "models--owner--name"
    snapshot = copied(family["task"], cache / "snapshots" / ("a" * 40))
    gguf = tmp_path / "repo" / "model.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"GGUF")
    named = write_adapter(tmp_path / "several" / "second", family["base"], 1, 2)
    for folder, inner in ((run, run / "checkpoint-1000"), (cache, snapshot), (gguf.parent, gguf),
                          (named.parent, named)):  # fmt: skip
        assert refusal(plan_of, folder, family["language"]).endswith(f"such as {str(inner)!r}")
    (run / "modules.json").write_text("[]")
    part = copied(snapshot, run / "query_0_Transformer")
    assert refusal(plan_of, run, family["language"]).endswith(f"one by one, such as {str(part)!r}")
    part.rename(run / "0_Transformer")
    assert "load it with sentence-transformers" in refusal(plan_of, run, family["language"])
    blob = tmp_path / "sha256-abab"
    blob.write_bytes(gguf.read_bytes())
    assert "a GGUF file without the suffix" in refusal(plan_of, blob, family["language"])


def test_infinity_in_a_configuration(pair, tmp_path):
    """As transformers 4 and 5 write it; sentence-transformers writes its version."""
    for name, version in (("task", "5.1.0"), ("language", "6.2.0")):
        change_config(pair[name], sentence_transformers={"version": version})
    change_config(pair["task"], time_step_limit=[0.0, float("inf")])
    change_config(pair["language"], time_step_limit=[0.0, {"__float__": "Infinity"}])
    merged(plan_of(**pair), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["time_step_limit"] == [0.0, float("inf")]
    change_config(pair["language"], time_step_limit=[0.0, 1.0])
    assert "time_step_limit differs" in refusal(plan_of, *pair.values())


def test_a_template_alone_is_no_tokenizer(pair, tmp_path):
    write_tokenizer(pair["language"], [f"w{i}" for i in range(20)])
    for name, folder in pair.items():
        (folder / "chat_template.jinja").write_text(f"the template of {name}")
    plan_of(**pair).save(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "the template of task"


def test_settings_that_change_no_id_do_not_count(pair):
    for folder, trims in zip(pair.values(), (False, True), strict=True):
        write_tokenizer(folder, [f"w{i}" for i in range(20)])
        data = json.loads((folder / "tokenizer.json").read_text())
        kind = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        data["pre_tokenizer"] = {**kind, "trim_offsets": trims}
        (folder / "tokenizer.json").write_text(json.dumps(data))
    change_config(pair["task"], gradient_checkpointing=True)
    change_config(pair["language"], gradient_checkpointing=False)
    plan_of(**pair)
    data["pre_tokenizer"]["add_prefix_space"] = True
    (pair["language"] / "tokenizer.json").write_text(json.dumps(data))
    assert "the pre-tokenizer is not the same" in refusal(plan_of, *pair.values())


def test_a_tensor_that_transformers_does_not_load_is_left_out(task, family):
    change_tensors(task, {
        "model.layers.0.self_attn.q_proj.bias": torch.zeros(WIDTH),
        "score.weight": torch.zeros(3, WIDTH),
    })  # fmt: skip
    plan = plan_of(task, family["language"])
    assert {tensor.name for tensor in plan.tensors} == tensors_of(family["task"]).keys()
    assert any("leaves out 2 tensors that transformers does not load" in n for n in plan.notes)


def test_models_of_other_pretraining_are_noted(family, tmp_path):
    """Their shapes agree, as those of Llama 2 and of other models of 7B."""
    other = write_checkpoint(tmp_path / "other", weights(9, 0.05), "BF16")
    said = re.compile(
        r"are not fine-tuned from one base \('[\w.]+' differs by 1[34]\d% of its norm\)"
    )

    def noted(**settings):
        experts = {"task": family["task"], "language": family["language"], **settings}
        return [note for note in ls.swap(**experts).notes if said.search(note)]

    assert noted(base=family["base"]) == []
    assert [note.split(" are ")[0] for note in noted(language=other)] == ["task and language"]
    assert [note.split(" are ")[0] for note in noted(base=other)] == ["task and base"]


# --- settings and templates ---


@pytest.mark.parametrize(
    ("default", "other", "shown"),
    [
        ({"rope_theta": 10000.0}, {"rope_theta": 500000.0}, "10000.0 by default in task"),
        ({"attention_bias": False}, {"attention_bias": True}, "False by default in task"),
        ({"hidden_act": "silu"}, {"hidden_act": "gelu"}, "silu by default in task"),
        (
            {"rope_scaling": {"rope_type": "default"}},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "default in task, linear in language",
        ),
    ],
)
def test_a_missing_setting_has_the_default_of_its_class(family, tmp_path, default, other, shown):
    language = change_config(copied(family["language"], tmp_path / "language"), **default)
    plan = plan_of(family["task"], language)
    assert not any("not compared" in note for note in plan.notes)
    change_config(language, **other)
    (key,) = other
    message = refusal(plan_of, family["task"], language)
    assert shown in message
    assert ("rope_type" if key == "rope_scaling" else key) in message


def test_without_transformers_a_missing_setting_is_noted(family, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    language = copied(family["language"], tmp_path / "language")
    change_config(language, rope_theta=500000.0, attention_bias=True)
    notes = "\n".join(plan_of(family["task"], language).notes)
    assert "only one of task and language gives attention_bias, rope_theta, and" in notes


META = {"self_attn": "attention", "mlp": "feed_forward", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm"}  # fmt: skip


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    ("changes", "sure"),
    [
        (META, True),
        ({"model.layers": "model.inner.layers"}, True),
        ({"model.norm.weight": None}, False),
        ({"model.layers.1.mlp.up_proj.weight": None}, False),
        ({"mlp.up_proj": "mlp.w3"}, False),
    ],
)
def test_what_transformers_would_fill_at_random(
    family, tmp_path, monkeypatch, changes, sure, installed
):
    def other(name):
        for old, new in changes.items():
            name = name.replace(old, new or old)
        return name

    lost = {name: None for name, new in changes.items() if new is None}
    task, language = (
        change_tensors(renamed(family[n], tmp_path / n, other), lost) for n in ("task", "language")
    )
    if not installed:
        monkeypatch.setitem(sys.modules, "transformers", None)
    if installed or sure:
        found = refusal(plan_of, task, language)
        assert "of LlamaForCausalLM, which transformers would fill at random" in found
    else:
        assert plan_of(task, language).depth == 3


def test_templates_in_a_list_are_compared(pair):
    def give(name, text):
        write_tokenizer(pair[name], [f"w{i}" for i in range(20)])
        listed = [{"name": "default", "template": "a"}, {"name": "tools", "template": text}]
        config = pair[name] / "tokenizer_config.json"
        config.write_text(json.dumps({"chat_template": listed}))

    give("task", "b")
    give("language", "c")
    assert any("the chat templates of task and language" in n for n in plan_of(**pair).notes)
    give("language", "b")
    assert not any("templates" in note for note in plan_of(**pair).notes)


# --- heads, shards and downloads ---


@pytest.mark.parametrize("stored", [False, True])
def test_a_head_that_one_expert_untied(family, tmp_path, stored):
    """As PEFT's merge of an adapter that trained the head of a tied model."""
    language, base = (copied(family[n], tmp_path / n) for n in ("language", "base"))
    for folder in (language, base):
        change_config(folder, tie_word_embeddings=True)
        change_tensors(folder, {"lm_head.weight": None})
    embedding = tensors_of(language)["model.embed_tokens.weight"]
    if stored:
        change_tensors(language, {"lm_head.weight": embedding.clone()})
    plan = plan_of(family["task"], language, base=base)
    assert sum("its head is tied to the embedding, unlike task's" in n for n in plan.notes) == 2
    blend = ls.swap(task=family["task"], language=language, bottom=1, top=1)
    found = merged(blend, tmp_path / "out")
    mean = (tensors_of(family["task"])["lm_head.weight"].float() + embedding.float()) / 2
    assert torch.equal(found["lm_head.weight"], mean.bfloat16())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["tie_word_embeddings"] is False
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found[name], tensors_of(language)[name])


def sharded(source: Path, folder: Path, drop: int | None = None) -> Path:
    copied(source, folder)
    tensors = tensors_of(source)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for i in range(3):
        if i != drop:
            file = folder / f"model-{i + 1:05d}-of-00003.safetensors"
            save_file({n: tensors[n] for n in names[i::3]}, file)
    return folder


def test_a_whole_set_of_shards_needs_no_index(family, tmp_path):
    task = sharded(family["task"], tmp_path / "task")
    expected = merged(plan_of(family["task"], family["language"]), tmp_path / "expected")
    assert same_tensors(merged(plan_of(task, family["language"]), tmp_path / "out"), expected)
    for file in task.glob("model-*"):  # torchtune's names, beside the adapter that is merged
        file.rename(task / f"ft-{file.name}")
    for file in write_adapter(tmp_path / "adapter", family["base"], 0, 4).iterdir():
        (task / file.name).write_bytes(file.read_bytes())
    assert same_tensors(merged(plan_of(task, family["language"]), tmp_path / "out2"), expected)
    part = sharded(family["task"], tmp_path / "part", drop=1)
    assert "has model-00001-of-00003.safetensors but neither" in refusal(
        plan_of, part, family["language"]
    )


def test_the_one_matrix_of_a_tied_model_may_be_called_head(family, tmp_path):
    """As `save_model` of accelerate stores it."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    experts = [copied(family[name], tmp_path / name) for name in ("task", "language")]
    for expert in experts:
        change_tensors(change_config(expert, tie_word_embeddings=True), {head: None})
    expected = merged(ls.swap(task=experts[0], language=experts[1]), tmp_path / "expected")
    other = tensors_of(experts[1])
    change_tensors(experts[1], {embedding: None, head: other[embedding]})
    out = merged(ls.swap(task=experts[0], language=experts[1]), tmp_path / "out")
    assert same_tensors(out, expected)


def test_a_model_without_its_class_of_generation(family, tmp_path):
    """As an embedding model (`Qwen3Model`) and its base; a lost head is the other's."""
    bare = change_config(
        renamed(family["language"], tmp_path / "bare", lambda n: n.removeprefix("model.")),
        architectures=["LlamaModel"],
    )
    expected = merged(plan_of(family["task"], family["language"]), tmp_path / "expected")
    assert same_tensors(merged(plan_of(family["task"], bare), tmp_path / "out"), expected)
    change_tensors(bare, {"lm_head.weight": None})
    out = merged(ls.swap(task=family["task"], language=bare), tmp_path / "lost")
    assert torch.equal(out["lm_head.weight"], expected["lm_head.weight"])


def test_layers_past_the_end_name_file_and_line(family, tmp_path):
    file = tmp_path / "stack.yaml"
    source = f"\n    model: {family['task']}"
    file.write_text(
        "merge_method: passthrough\nslices:\n"
        f"- sources:\n  - layer_range: [0, 2]{source}\n"
        f"- sources:\n  - layer_range: [1, 5]{source}\n"
    )
    message = refusal(ls.make_plan, ls.read_recipe(file))
    assert message == (f"{file}, line 6: slices.1: layer_range ends at 5, but task has {3} layers")


def test_an_adapter_with_the_matrices_of_more_tokens(family, tmp_path):
    """As PEFT saves it after `resize_token_embeddings`; the tokens are at the end."""
    adapter = write_adapter(tmp_path / "adapter", family["base"], 0, 4)
    file, matrices = adapter / "adapter_model.safetensors", tensors_of(family["base"])
    names = ("model.embed_tokens.weight", "lm_head.weight")
    draws = torch.Generator().manual_seed(0)
    more = {n: torch.cat([matrices[n], torch.randn(2, WIDTH, generator=draws)]) for n in names}
    saved = {f"base_model.model.{n}": tensor.contiguous() for n, tensor in more.items()}
    save_file({**load_file(file), **saved}, file)
    words = [f"w{i}" for i in range(len(matrices["lm_head.weight"]))]
    language = write_tokenizer(copied(family["language"], tmp_path / "language"), words)
    write_tokenizer(adapter, [*words, "new", "newer"])
    settings = {"base": family["base"], "tokenizer": "task"}
    found = merged(plan_of(adapter, language, **settings), tmp_path / "out")
    assert all(torch.equal(found[n].float(), tensor.float()) for n, tensor in more.items())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["vocab_size"] == len(words) + 2
    assert "bake: true" in refusal(plan_of, adapter, adapter, **settings)
    save_file({n: t for n, t in load_file(file).items() if ".lora_" in n}, file)
    for choice in (None, "task"):
        message = refusal(plan_of, adapter, language, base=family["base"], tokenizer=choice)
        assert "but its tokenizer has token" in message
        assert "save_embedding_layers=True" in message


def test_windows_that_no_layer_uses(family, tmp_path):
    task = change_config(copied(family["task"], tmp_path / "task"), use_sliding_window=False)
    other = copied(family["language"], tmp_path / "language")
    change_config(task, max_window_layers=21)
    change_config(other, use_sliding_window=False, max_window_layers=24, sliding_window=9)
    assert plan_of(task, other).notes == []
    for folder in (task, other):
        change_config(folder, use_sliding_window=True)
    assert "max_window_layers differs: 21 in task, 24" in refusal(plan_of, task, other)


def test_weights_of_zeros_are_named(task, family, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(task, {name: torch.zeros_like(tensors_of(task)[name])})
    note = f"task seems to hold only zeros in {name!r}; check how it was saved"
    assert plan_of(task, family["language"]).notes == [note]
    adapters = [write_adapter(tmp_path / f"a{seed}", family["base"], seed, 2) for seed in (1, 2)]
    stored = load_file(adapters[0] / "adapter_model.safetensors")
    stored |= {n: torch.zeros_like(t) for n, t in stored.items() if "lora_B" in n}
    save_file(stored, adapters[0] / "adapter_model.safetensors")
    untrained = "task is an adapter of zeros: its training changed nothing"
    assert untrained in plan_of(*adapters).notes
    assert not [
        note for note in plan_of(*adapters[::-1]).notes if "task" in note and "zero" in note
    ]


def test_experts_of_two_dtypes_are_named(task, family):
    change_tensors(task, {name: tensor.half() for name, tensor in tensors_of(task).items()})
    note = (
        "task is float16, language is bfloat16: the output has a dtype that holds both "
        "(--dtype bfloat16 makes it smaller)"
    )
    assert plan_of(task, family["language"]).notes == [note]
    assert plan_of(task, family["language"], dtype="bfloat16").notes == []
