"""Experts with different heads: classifiers, language models, encoder-decoders, embeddings."""

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tests.helpers.merging import change_config, change_tensors, refusal, tensors_of, tiny_llama

import layerswap as ls
from layerswap.checkpoint.places import HEAD

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
         "num_attention_heads": 4, "max_position_embeddings": 66, "pad_token_id": 1}  # fmt: skip
MT5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 3,
       "num_decoder_layers": 2}  # fmt: skip
CLASSIFIER = "XLMRobertaForSequenceClassification"
LABELS = ["entailment", "neutral", "contradiction"]
POOLER = "pooler.dense.weight"


def _save(model, folder, seed, labels=None):
    """A fine-tuned copy of a model, with every weight changed."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    if labels:
        model.config.id2label = dict(enumerate(labels))
        model.config.label2id = {label: i for i, label in enumerate(labels)}
    model.save_pretrained(folder)
    return str(folder)


def _xlmr(name, seed=0, **more):
    torch.manual_seed(seed)
    return getattr(tf, name)(tf.XLMRobertaConfig(**SMALL, **more))


def test_a_swap_of_a_classifier_and_a_masked_language_model_of_the_hub(tmp_path):
    """The output is the classifier with the language expert's bottom and top layer."""
    task = _save(_xlmr(CLASSIFIER, num_labels=3), tmp_path / "t", 1)
    language = _save(_xlmr("XLMRobertaForMaskedLM"), tmp_path / "l", 2)
    plain = tensors_of(language)
    # The Hub's files have more, and names that transformers no longer writes.
    stored = plain | {
        "roberta.pooler.dense.weight": torch.randn(32, 32),
        "roberta.pooler.dense.bias": torch.zeros(32),
        "roberta.embeddings.position_ids": torch.arange(66)[None],
        "lm_head.decoder.weight": plain["roberta.embeddings.word_embeddings.weight"].clone(),
        "lm_head.decoder.bias": plain["lm_head.bias"].clone(),
    }
    for name in [name for name in stored if "LayerNorm" in name]:
        old = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
        stored[old] = stored.pop(name)
    save_file(stored, f"{language}/model.safetensors", {"format": "pt"})
    ls.swap(task=task, language=language, bottom=1, top=1, outside="task").save(tmp_path / "out")
    merged, ours = tensors_of(tmp_path / "out"), tensors_of(task)
    assert merged.keys() == ours.keys()
    for name, tensor in merged.items():
        swapped = ".layer.0." in name or ".layer.3." in name
        assert torch.equal(tensor, (plain if swapped else ours)[name]), name
    model, loading = tf.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(model).__name__ == CLASSIFIER
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]


def test_a_head_comes_from_no_model_of_another_class(tmp_path):
    task = _save(_xlmr(CLASSIFIER), tmp_path / "t", 1)
    language = _save(_xlmr("XLMRobertaForMaskedLM"), tmp_path / "l", 2)
    message = refusal(ls.swap, task=task, language=language, outside="language")
    assert message.startswith("the head cannot come from language: the output is a model of class")
    swap = "swap: {task: task, language: sw, outside: language}"
    remedy = message.partition("with `")[2].removesuffix("`")
    text = f"{{experts: {{task: {task}, sw: {language}}}, {swap}, {remedy}}}"
    assert [*ls.make_plan(ls.parse_recipe(text)).composition[HEAD].experts] == ["task"]


def test_deltas_of_heads_that_the_base_lacks_and_the_remedy(tmp_path):
    a, b = (_save(_xlmr(CLASSIFIER), tmp_path / str(i), i) for i in (1, 2))
    base = _save(_xlmr("XLMRobertaForMaskedLM"), tmp_path / "base", 3)
    text = (
        f"{{base: {base}, experts: {{a: {a}, b: {b}}}, merge: {{method: ties, experts: [a, b]}}}}"
    )
    message = refusal(lambda: ls.make_plan(ls.parse_recipe(text)))
    assert message.startswith("the base has no head of class XLMRobertaForSequenceClassification")
    remedy = message.partition("with `")[2].removesuffix("`")
    plan = ls.make_plan(ls.parse_recipe(text[:-1] + f", {remedy}}}"))
    plan.save(tmp_path / "out")
    head = "classifier.out_proj.weight"
    assert torch.equal(tensors_of(tmp_path / "out")[head], tensors_of(a)[head])


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_rows_of_heads_are_averaged_by_the_names_of_their_labels(order, tmp_path):
    a = _save(_xlmr(CLASSIFIER, num_labels=3), tmp_path / "a", 1, LABELS)
    b = _save(_xlmr(CLASSIFIER, num_labels=3), tmp_path / "b", 2, [LABELS[i] for i in order])
    # As FSDP2 names the class; label2id alone names the labels.
    architectures = [f"FSDP{CLASSIFIER}"]
    change_config(tmp_path / "b", drop="id2label", num_labels=3, architectures=architectures)
    ls.soup([a, b]).save(tmp_path / "out")
    for name in ("classifier.out_proj.weight", "classifier.out_proj.bias"):
        rows = torch.stack([tensors_of(b)[name][order.index(i)] for i in range(3)])
        assert torch.allclose(tensors_of(tmp_path / "out")[name], (tensors_of(a)[name] + rows) / 2)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["id2label"]["0"] == LABELS[0]


def test_heads_of_other_labels_are_not_averaged(tmp_path):
    a = _save(_xlmr(CLASSIFIER, num_labels=3), tmp_path / "a", 1, LABELS)
    b = _save(_xlmr(CLASSIFIER, num_labels=3), tmp_path / "b", 2, ["sports", "science", "politics"])
    assert refusal(ls.swap, task=a, language=b).startswith("labels differ: entailment, neutral")
    for outside, labels in (("task", LABELS), ("language", ["sports", "science", "politics"])):
        out = ls.swap(task=a, language=b, outside=outside).save(tmp_path / outside)
        assert [*json.loads((out / "config.json").read_text())["id2label"].values()] == labels
    c = _save(_xlmr(CLASSIFIER, num_labels=3), tmp_path / "c", 3)
    assert ls.soup([a, c]).notes == [
        "expert_2 does not name its labels: they are taken in the order of expert_1's"
    ]


def test_a_head_with_another_number_of_labels_is_left_out(tmp_path):
    a, b = (_save(_xlmr(CLASSIFIER, num_labels=n), tmp_path / str(n), n) for n in (3, 2))
    (note, _) = (plan := ls.swap(task=a, language=b)).notes
    assert note == "language: its head is left out: it has 2 labels, and the output has 3"
    head = "classifier.out_proj.weight"
    assert torch.equal(tensors_of(plan.save(tmp_path / "out"))[head], tensors_of(a)[head])


def test_an_encoder_without_a_head_is_not_tied(tmp_path):
    """Its pooler and its embedding may come from two experts."""
    a, b = (_save(_xlmr("XLMRobertaModel"), tmp_path / str(i), i) for i in (1, 2))
    change_config(Path(b), pad_token_id=2)
    (note,) = (note for note in ls.soup([a, b]).notes if "one base" not in note)
    assert note == f"pad_token_id is 1 in expert_1, 2 in expert_2; the output uses {a}'s"
    places = "[{layers: outside, roles: [head], take: a}]"
    recipe = f"{{experts: {{a: {a}, b: {b}}}, soup: {{experts: [a, b]}}, places: {places}}}"
    ls.make_plan(ls.parse_recipe(recipe)).save(tmp_path / "out")
    change_tensors(Path(b), {"pooler.dense.weight": None, "pooler.dense.bias": None})
    alone = ls.swap(task=a, language=b)
    assert f"language: it gets the head of {a}: it has no pooler" in alone.notes
    for folder in (tmp_path / "out", alone.save(tmp_path / "alone")):
        assert torch.equal(tensors_of(folder)[POOLER], tensors_of(a)[POOLER])


def test_a_tied_model_with_positions_may_store_its_matrix_as_head(tmp_path):
    words, head = "roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"
    a, b = (_save(_xlmr("XLMRobertaForMaskedLM"), tmp_path / str(i), i) for i in (1, 2))
    change_tensors(Path(a), {words: None, head: (ours := tensors_of(a)[words])})
    out = tensors_of(ls.soup([a, b]).save(tmp_path / "out"))
    torch.testing.assert_close(out[head], (ours + tensors_of(b)[words]) / 2)
    assert words not in out


def _adapter(folder, model, base, seed, **settings):
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **settings))
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", ["llama", "xlm-roberta"])
def test_an_adapter_of_a_classifier_and_one_of_a_language_model(family, tmp_path, monkeypatch):
    base = tmp_path / "base"
    if family == "llama":
        torch.manual_seed(0)
        tf.LlamaForCausalLM(tiny_llama(pad_token_id=0)).save_pretrained(base)
        targets, language_class, head = ["q_proj"], tf.AutoModelForCausalLM, "score"
    else:
        _xlmr("XLMRobertaForMaskedLM").save_pretrained(base)
        targets, language_class, head = ["query"], tf.AutoModelForMaskedLM, "classifier"
    classes = tf.AutoModelForSequenceClassification
    task = _adapter(
        tmp_path / "t", classes.from_pretrained(base, num_labels=3), base, 1,
        target_modules=targets, task_type="SEQ_CLS",
    )  # fmt: skip
    language = _adapter(
        tmp_path / "l", language_class.from_pretrained(base), base, 2, target_modules=targets
    )
    plan = ls.swap(task=task, language=language, bottom=1, top=1, outside="task")
    plan.save(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    exec(Path("README.md").read_text().split("```python\n")[1].split("```")[0], card := {})
    assert type(card["model"]).__name__ == "PeftModelForSequenceClassification"
    fresh = classes.from_pretrained(base, num_labels=3)
    loaded = dict(PeftModel.from_pretrained(fresh, tmp_path / "out").named_parameters())
    ours, theirs = (load_file(f"{f}/adapter_model.safetensors") for f in (task, language))
    heads = [name for name in ours if f".{head}." in name]
    assert heads
    for name in heads:
        where = name.replace(f".{head}.", f".{head}.modules_to_save.default.")
        assert torch.equal(loaded[where], ours[name]), name
    for name in theirs:
        if ".lora_A" in name:
            source = theirs if ".0." in name or ".3." in name else ours
            pair = [name, name.replace("lora_A", "lora_B")]
            a, b = (source[each] for each in pair)
            mine = [loaded[each.replace(".weight", ".default.weight")] for each in pair]
            assert torch.allclose(mine[1] @ mine[0], b @ a * 4, atol=1e-6), name
    ls.swap(task=task, language=language, bottom=1, top=1, outside="task", bake=True).save(
        tmp_path / "full"
    )
    model, loading = classes.from_pretrained(tmp_path / "full", output_loading_info=True)
    assert model.config.num_labels == 3
    assert not loading["missing_keys"]


def test_the_pooler_and_the_labels_that_peft_did_not_save(tmp_path):
    base = tmp_path / "base"
    tf.BertForMaskedLM(tf.BertConfig(**SMALL)).save_pretrained(base)
    task, language = (
        _adapter(
            tmp_path / str(i), tf.AutoModelForSequenceClassification.from_pretrained(base), base, i,
            target_modules=["query"], task_type="SEQ_CLS",
        )
        for i in (1, 2)
    )  # fmt: skip
    notes = ls.swap(task=task, language=language, bottom=1, top=1).notes
    assert any("lacks 2 tensors of its class" in note and "pooler" in note for note in notes)
    assert any("task and language do not name their labels" in note for note in notes)
    torch.manual_seed(7)
    tf.BertForPreTraining(tf.BertConfig(**SMALL)).save_pretrained(base)
    plan = ls.swap(task=task, language=language, bottom=1, top=1, bake=True)
    assert not any("lacks" in note for note in plan.notes)
    found, name = tensors_of(plan.save(tmp_path / "full")), f"bert.{POOLER}"
    assert torch.equal(found[name], tensors_of(base)[name])
    for folder, labels in ((task, ["no", "yes"]), (language, ["yes", "no"])):
        (Path(folder) / "config.json").write_text(json.dumps({"id2label": dict(enumerate(labels))}))
    out = ls.swap(task=task, language=language, bottom=1, top=1).save(tmp_path / "out")
    name = "base_model.model.classifier.weight"
    a, b, mean = (load_file(f"{f}/adapter_model.safetensors")[name] for f in (task, language, out))
    torch.testing.assert_close(mean, (a + b.flip(0)) / 2)
    kept = base.rename(tmp_path / "kept")
    tf.BertForSequenceClassification(tf.BertConfig(**SMALL)).save_pretrained(base)
    for folder in (language, task):  # as of mT5, whose head has another name
        file = Path(folder) / "adapter_model.safetensors"
        save_file({n: t for n, t in load_file(file).items() if ".lora_" in n}, file)
        if folder == language:
            out = ls.swap(task=task, language=language).save(tmp_path / "alone")
            assert torch.equal(load_file(out / "adapter_model.safetensors")[name], a)
    notes = ls.swap(task=task, language=language, base=kept, bottom=1, top=1).notes
    assert any("saves no head for its class BertForSequence" in note for note in notes)


def test_heads_of_unknown_names_in_a_file_without_its_class_are_left_out(tmp_path):
    config = {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    classifier = tf.DebertaV2ForSequenceClassification(tf.DebertaV2Config(**config))
    task = _save(classifier, tmp_path / "task", 1)
    hub = _save(tf.DebertaV2Model(tf.DebertaV2Config(**config)), tmp_path / "hub", 2)
    body = {f"deberta.{name}": tensor for name, tensor in tensors_of(hub).items()}
    heads = {"lm_predictions.lm_head.bias": torch.zeros(64),
             "mask_predictions.classifier.bias": torch.zeros(1)}  # fmt: skip
    save_file({**body, **heads}, f"{hub}/model.safetensors", {"format": "pt"})
    change_config(Path(hub), architectures=None)
    plan = ls.swap(task=task, language=hub, bottom=1, top=1, outside="task")
    merged = tensors_of(plan.save(tmp_path / "out"))
    assert merged.keys() == tensors_of(task).keys()
    for name, tensor in merged.items():
        swapped = ".layer.0." in name or ".layer.3." in name
        assert torch.equal(tensor, (body if swapped else tensors_of(task))[name]), name


def test_layers_of_an_encoder_decoder_are_numbered_from_input_to_output(tmp_path):
    task, language = (
        _save(tf.MT5ForConditionalGeneration(tf.MT5Config(**MT5)), tmp_path / str(i), i)
        for i in (1, 2)
    )
    plan = ls.swap(task=task, language=language, bottom=1, top=1, outside="task")
    assert plan.composition.layers == 5
    assert any("layers 0 to 2 are the encoder's, 3 to 4 the decoder's" in n for n in plan.notes)
    plan.save(tmp_path / "out")
    merged, a, b = map(tensors_of, (tmp_path / "out", task, language))
    for name, tensor in merged.items():
        swapped = name.startswith(("encoder.block.0.", "decoder.block.1."))
        assert torch.equal(tensor, (b if swapped else a)[name]), name


def test_keys_and_values_of_layers_that_share_them_are_no_part_of_the_model(tmp_path, monkeypatch):
    config = tf.Gemma4TextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, intermediate_size=48,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        global_head_dim=8, sliding_window=16, num_kv_shared_layers=2, max_position_embeddings=64,
        hidden_size_per_layer_input=8, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    a, b, base = (_save(tf.Gemma4ForCausalLM(config), tmp_path / str(i), i) for i in range(3))
    stored = tensors_of(base)
    stored |= {
        name.replace(f".layers.{i}.", f".layers.{i + 2}."): tensor.clone()
        for name, tensor in stored.items()
        for i in (0, 1)
        if f".layers.{i}." in name and ("k_proj" in name or "v_proj" in name or "k_norm" in name)
    }
    assert len(stored) > len(tensors_of(base))
    recipe = (
        f"{{base: {base}, experts: {{a: {a}, b: {b}}}, merge: {{method: ties, experts: [a, b]}}}}"
    )
    ls.make_plan(ls.parse_recipe(recipe)).save(tmp_path / "plain")
    save_file(stored, f"{base}/model.safetensors", {"format": "pt"})
    ls.make_plan(ls.parse_recipe(recipe)).save(tmp_path / "hub")
    plain, hub = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "hub")
    assert all(torch.equal(tensor, hub[name]) for name, tensor in plain.items())
    plan = ls.swap(task=a, language=b)
    monkeypatch.setattr("layerswap.merge.compatibility.missing_tensors", None)  # asked once
    assert len(plan.grid(bottom=[0, 1], top=[0, 1])) == 4


def test_a_language_model_without_its_head_gets_the_other_s(tmp_path):
    body = _save(tf.LlamaModel(tiny_llama()), tmp_path / "body", 1)
    whole = _save(tf.LlamaForCausalLM(tiny_llama()), tmp_path / "whole", 2)
    plan = ls.soup([body, whole])
    assert any(note.startswith("expert_1: it gets the head of ") for note in plan.notes)
    out = plan.save(tmp_path / "out")
    model, loading = tf.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not loading["missing_keys"]
    assert torch.equal(model.lm_head.weight, tensors_of(whole)["lm_head.weight"])
    ours, theirs = (tensors_of(folder) for folder in (body, whole))
    mean = (ours["layers.0.mlp.up_proj.weight"] + theirs["model.layers.0.mlp.up_proj.weight"]) / 2
    torch.testing.assert_close(model.model.layers[0].mlp.up_proj.weight.data, mean)
    assert refusal(ls.swap, task=body, language=whole, outside="task").startswith(
        "the head cannot come from task: the output is a model of class LlamaForCausalLM"
    )
    (tmp_path / "body" / "modules.json").write_text("[]")  # of sentence-transformers: no head
    assert not any("head" in tensor.name for tensor in ls.soup([body, whole]).tensors)


def test_the_modules_of_sentence_transformers_stay_whole_or_the_merge_is_refused(tmp_path):
    for name, pooling in (("a", "cls"), ("b", "mean")):
        folder = tmp_path / name
        _save(_xlmr("XLMRobertaModel"), folder, ord(name))
        modules = [{"path": path} for path in ("", "1_Pooling", "mods/dense")]
        for path, text in (("1_Pooling/config.json", pooling), ("mods/dense/x/w.safetensors", "w"),
                           ("config_sentence_transformers.json", {"__version__": name}),
                           ("modules.json", modules)):  # fmt: skip
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(json.dumps(text))
    given = {"task": tmp_path / "a", "language": tmp_path / "b", "outside": "task"}
    plan = ls.swap(**given)
    (note,) = (note for note in plan.notes if "language has another" in note)
    assert note.startswith("language has another 1_Pooling/config.json; the output has ")
    plan.save(tmp_path / "out")
    for name in ("modules.json", "1_Pooling/config.json", "mods/dense/x/w.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    assert ls.verify(tmp_path / "out").findings == []
    pooling = tmp_path / "out" / "1_Pooling"
    (pooling / "more.json").write_text("{}")
    found = f"{pooling / 'more.json'}: not a file that the merge writes"
    assert ls.verify(tmp_path / "out").findings == [found]
    weights = tmp_path / "a" / "mods" / "dense" / "x" / "w.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    refused = f"{weights.parent}: a module without safetensors; load {tmp_path / 'a'} with "
    assert refusal(ls.swap, **given).startswith(refused)
    weights.with_name("pytorch_model.bin").unlink()  # as in the cache of the Hub
    weights.with_name("config.json").write_text('{"in_features": 1}')
    assert refusal(ls.swap, **given).startswith(refused)
    (tmp_path / "a" / "modules.json").write_text('[{"path": "../b"}]')
    assert "'../b' leads out of the folder" in refusal(ls.swap, **given)


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("RoFormerForTokenClassification", "AutoModelForTokenClassification"),
        ("XLMRobertaForMaskedLM", "AutoModelForMaskedLM"),
        ("XLMRobertaModel", "AutoModel"),
        ("MT5ForConditionalGeneration", "AutoModelForSeq2SeqLM"),
        ("LlamaForCausalLM", "AutoModelForCausalLM"),
    ],
)
def test_the_card_loads_the_output_as_its_class(name, auto, tmp_path):
    configs = {"XLM": tf.XLMRobertaConfig(**SMALL), "MT5": tf.MT5Config(**MT5),
               "Lla": tiny_llama(), "RoF": tf.RoFormerConfig(**SMALL)}  # fmt: skip
    folders = [_save(getattr(tf, name)(configs[name[:3]]), tmp_path / str(i), i) for i in (1, 2)]
    out = ls.soup(folders).save(tmp_path / "out")
    card = (out / "README.md").read_text()
    assert f"from transformers import {auto}, AutoTokenizer" in card
    assert f"model = {auto}.from_pretrained(folder)" in card
    assert ("model.generate" in card) is (auto[-2:] == "LM" and "Masked" not in auto)
    assert type(getattr(tf, auto).from_pretrained(out)).__name__ == name


def test_a_model_without_a_generation_configuration_keeps_its_own_end(tmp_path):
    for name, end in (("a", 5), ("b", 1)):
        _save(tf.LlamaForCausalLM(tiny_llama(eos_token_id=end)), tmp_path / name, end)
    (tmp_path / "a" / "generation_config.json").unlink()
    ls.swap(task=tmp_path / "a", language=tmp_path / "b", outside="task").save(tmp_path / "out")
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == 5


def test_an_adapter_over_a_base_with_other_words_on_disk(tmp_path):
    """EXAONE 3.5 is a Llama in memory, with the words of GPT-2 on disk."""
    settings = {k: v for k, v in tiny_llama().to_diff_dict().items() if k != "model_type"}
    config = tf.AutoConfig.for_model("exaone", **settings)
    torch.manual_seed(0)
    base = tmp_path / "base"
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(base)
    assert "transformer.h.0.mlp.c_fc_0.weight" in tensors_of(base)
    task, language = (
        _adapter(
            tmp_path / str(seed), tf.AutoModelForCausalLM.from_pretrained(base), base, seed,
            target_modules=["q_proj", "gate_proj"], task_type="CAUSAL_LM",
        )
        for seed in (1, 2)
    )  # fmt: skip
    ls.swap(task=task, language=language, bottom=1, top=1, outside="task", bake=True).save(
        tmp_path / "out"
    )
    merged = tensors_of(tmp_path / "out")
    for layer, adapter in ((0, language), (1, task), (3, language)):
        fresh = tf.AutoModelForCausalLM.from_pretrained(base)
        folder = tmp_path / f"whole{layer}"
        PeftModel.from_pretrained(fresh, adapter).merge_and_unload().save_pretrained(folder)
        name = f"transformer.h.{layer}.mlp.c_fc_0.weight"
        assert torch.allclose(merged[name], tensors_of(folder)[name], atol=1e-6)
        assert not torch.equal(merged[name], tensors_of(base)[name])


@pytest.mark.parametrize(
    ("task", "classes", "mapped"),
    [("CAUSAL_LM", ["LlamaForCausalLM", "LlamaModel"], None),
     ("FEATURE_EXTRACTION", ["LlamaModel", "LlamaForCausalLM"], None),
     ("SEQ_CLS", ["XLMRobertaForSequenceClassification", "XLMRobertaModel"], None),
     ("CAUSAL_LM", ["LlamaModel", "LlamaModel"], None),
     (None, ["LlamaModel", "LlamaModel"], {"base_model_class": "MistralModel"})],
)  # fmt: skip
def test_a_merged_adapter_has_the_names_of_the_class_that_opens_it(
    task, classes, mapped, tmp_path, monkeypatch
):
    base, experts = tmp_path / "base", [tmp_path / "t", tmp_path / "l"]
    llama = "Llama" in classes[0]
    model = tf.LlamaForCausalLM(tiny_llama()) if llama else _xlmr("XLMRobertaForMaskedLM")
    model.save_pretrained(base)
    for folder, name, target in zip(experts, classes, "qv", strict=True):
        targets = [f"{target}_proj" if llama else {"q": "query", "v": "value"}[target]]
        kind = task if name.endswith("Classification") else None
        model = getattr(tf, name).from_pretrained(base)
        _adapter(folder, model, base, 1, target_modules=targets, task_type=kind)
        change_config(folder, file="adapter_config.json", task_type=task, auto_mapping=mapped)
    plan = ls.soup(experts)
    if llama:  # in memory as a causal language model; PEFT fills names that it misses with zeros
        assert all(t.any() for n, t in plan.load().named_parameters() if ".lora_B" in n)
    plan.save(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    exec(Path("README.md").read_text().split("```python\n")[1].split("```")[0], card := {})
    loaded = dict(card["model"].named_parameters())
    stored = load_file("adapter_model.safetensors")
    names = [name for name in stored if ".lora_" in name]
    assert len(names) == 2 * 2 * 4
    for name in names:
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")], stored[name])
    mapped = json.loads(Path("adapter_config.json").read_text())["auto_mapping"]
    assert mapped == (
        None
        if task
        else {
            "base_model_class": "LlamaForCausalLM",
            "parent_library": tf.LlamaForCausalLM.__module__,
        }
    )


def test_a_dtype_keeps_what_is_float32_in_a_model_of_16_bits(tmp_path):
    folders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        folder = tmp_path / str(seed)
        tf.LlamaForCausalLM(tiny_llama()).bfloat16().save_pretrained(folder)
        stored = tensors_of(folder)
        stored["model.norm.weight"] = 6.8 + torch.rand(24)
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        folders.append(folder)
    ls.soup(folders, dtype="bfloat16").save(tmp_path / "out")
    merged = tensors_of(tmp_path / "out")
    assert merged["model.norm.weight"].dtype == torch.float32
    assert merged["lm_head.weight"].dtype == torch.bfloat16
