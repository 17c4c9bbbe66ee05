"""Places against the modules of real transformers models, and against names found on disk."""

from __future__ import annotations

import gguf
import pytest
from tests.helpers.effort import sampled
from tests.helpers.families import FAMILIES, LAYERS
from tests.helpers.oracle import ENCODERS, attention_of, build, encoder, stacks
from torch import nn

from layerswap.checkpoint import places
from layerswap.checkpoint.classes import HEADS, PREFIXES
from layerswap.checkpoint.configuration import configured_layers, encoder_layers
from layerswap.checkpoint.names import canonical, renaming
from layerswap.checkpoint.places import (
    ROLES,
    Pattern,
    Place,
    alias,
    count_layers,
    place,
    place_by_number,
    place_tensors,
)
from layerswap.ground.errors import CheckpointError, RecipeError

# --- language models ---


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_of_a_family_has_the_place_of_its_module(name):
    built = build(name)
    memory = place_tensors(built.memory, layers=LAYERS)
    assert memory == built.memory
    disk = place_tensors(built.disk, layers=LAYERS)
    assert disk.keys() == built.disk.keys()
    wrong = {key: where for key, where in disk.items()
             if where not in [memory[name] for name in built.disk[key]]}  # fmt: skip
    assert wrong == {}
    assert count_layers(memory) == count_layers(disk) == LAYERS
    expected = {"attention", "embedding"} | ({"mlp"} if "mamba" not in name else set())
    assert expected <= {where.role for where in disk.values()}


RENAMED = (
    "gemma3 llava mistral3 internvl qwen2_vl qwen2_5_vl paligemma gpt_neox gpt2 nemotron_h-dense"
)


@pytest.mark.parametrize("name", RENAMED.split())
def test_names_on_disk_and_in_memory_agree(name):
    memory, disk = build(name)
    assert len({canonical(key) for key in memory}) == len(memory)
    for key, names in disk.items():
        assert canonical(key) in {canonical(name) for name in names}, key
    new = renaming(list(disk), list(memory))
    assert {new.get(key, key) for key in disk} <= set(memory)


# --- encoders, encoder-decoders, and their heads ---


@pytest.mark.parametrize(
    "name", sampled(ENCODERS, "BertForPreTraining", "T5ForConditionalGeneration")
)
def test_layers_and_heads_of_encoders_and_encoder_decoders(name):
    """The oracle numbers the modules of the lists, from the encoder's first to the decoder's last.

    A head is what is not in the base model, or pools its output.
    """
    model = encoder(name)
    layers = [layer for stack in stacks(model) for layer in stack]
    of_layer = {id(tensor): i for i, layer in enumerate(layers) for tensor in layer.parameters()}
    attention = attention_of(layers)
    base = {id(tensor) for tensor in model.base_model.parameters()}
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    places = place_tensors([key for key, _ in model.named_parameters()])
    config = {**model.config.to_dict(), "architectures": [name]}
    assert count_layers(places) == len(layers) == configured_layers(config)
    assert encoder_layers(config) == (0 if len(stacks(model)) == 1 else 3)
    for key, tensor in model.named_parameters():
        where = places[key]
        assert where.layer == of_layer.get(id(tensor)), key
        if id(tensor) in attention:
            assert where.role == "attention", key
        elif where.layer is not None:
            assert where.role in ("mlp", "norm", "router"), key
        elif id(tensor) not in base or "pooler" in key:
            assert where.role == "head", key
        else:
            assert where.role in ("embedding", "final_norm", "other"), key
            assert where.role == "embedding" or id(tensor) not in embedded or "rel" in key, key


# --- names found on disk ---

ATTENTION, MLP = Place(0, "attention"), Place(0, "mlp")
HEAD, OTHER = Place(None, "head"), Place(None, "other")


def _table(text: str) -> dict[str, Place]:
    """Names with their place, from lines such as `0 mlp: layers.0.fc1.bias layers.0.fc2.bias`."""
    table = {}
    for line in text.strip().splitlines():
        where, _, names = line.partition(": ")
        layer, role = where.split()
        for name in names.split():
            table[name] = Place(None if layer == "-" else int(layer), role)
    return table


VISION_4 = "vision_tower.vision_model.encoder.layers.3"
ON_DISK_TEXTS = {
    "meta": """
- embedding: tok_embeddings.weight
0 attention: layers.0.attention.wq.weight layers.0.attention.wk.weight
0 attention: layers.0.attention.wv.weight layers.0.attention.wo.weight
0 mlp: layers.0.feed_forward.w1.weight layers.0.feed_forward.w2.weight
0 mlp: layers.0.feed_forward.w3.weight
0 norm: layers.0.attention_norm.weight layers.0.ffn_norm.weight
- final_norm: norm.weight
- head: output.weight
- other: rope.freqs
""",
    "gemma3-v4": f"""
- embedding: language_model.model.embed_tokens.weight
0 attention: language_model.model.layers.0.self_attn.q_norm.weight
0 mlp: language_model.model.layers.0.mlp.down_proj.weight
0 norm: language_model.model.layers.0.pre_feedforward_layernorm.weight
- final_norm: language_model.model.norm.weight
- other: multi_modal_projector.mm_input_projection_weight
- other: multi_modal_projector.mm_soft_emb_norm.weight
- other: vision_tower.vision_model.embeddings.patch_embedding.weight
- other: {VISION_4}.self_attn.q_proj.weight {VISION_4}.layer_norm1.bias
- other: vision_tower.vision_model.post_layernorm.weight
""",
    "gemma3n": """
0 attention: model.language_model.layers.0.self_attn.q_proj.weight
0 other: model.language_model.layers.0.laurel.linear_left.weight
- embedding: model.language_model.embed_tokens_per_layer.weight
- other: model.audio_tower.conformer.3.attention.attn.k_proj.weight
- other: model.vision_tower.timm_model.blocks.0.0.bn1.weight
- other: model.embed_audio.embedding.weight model.embed_vision.embedding_projection.weight
""",
    "mixtral-v4": """
0 router: model.layers.0.block_sparse_moe.gate.weight
0 mlp: model.layers.0.block_sparse_moe.experts.0.w1.weight
0 mlp: model.layers.0.block_sparse_moe.experts.7.w2.weight
""",
    "granitemoe-v4": """
0 mlp: model.layers.0.block_sparse_moe.input_linear.weight
0 mlp: model.layers.0.block_sparse_moe.output_linear.weight
0 router: model.layers.0.block_sparse_moe.router.layer.weight
0 mlp: model.layers.0.shared_mlp.input_linear.weight
""",
    "qwen-vl-v4": """
0 attention: model.layers.0.self_attn.q_proj.bias
- other: visual.blocks.5.attn.qkv.weight visual.merger.mlp.0.weight
""",
    "llama-3.2-vision": """
0 attention: language_model.model.layers.0.cross_attn.q_norm.weight
0 other: language_model.model.layers.0.cross_attn_attn_gate
- head: language_model.lm_head.weight
- other: vision_model.global_transformer.layers.3.mlp.fc1.weight multi_modal_projector.weight
""",
    "gpt2-hub": """
- embedding: wte.weight wpe.weight
0 attention: h.0.attn.c_attn.weight h.0.attn.bias h.0.attn.masked_bias
0 mlp: h.0.mlp.c_proj.bias
0 norm: h.0.ln_2.bias
- final_norm: ln_f.weight
""",
    "bert-hub": """
- embedding: bert.embeddings.LayerNorm.gamma bert.embeddings.position_ids
- embedding: bert.embeddings.word_embeddings.weight
0 mlp: bert.encoder.layer.0.output.LayerNorm.beta
- head: cls.predictions.transform.LayerNorm.gamma cls.seq_relationship.weight
""",
    "buffers-llama": "0 attention: model.layers.0.self_attn.rotary_emb.inv_freq",
    "buffers-llama-4.45": """
0 mlp: model.layers.0.mlp.up_proj.weight
- other: model.rotary_emb.inv_freq
""",
    "buffers-neox": """
0 attention: gpt_neox.layers.0.attention.bias gpt_neox.layers.0.attention.masked_bias
0 attention: gpt_neox.layers.0.attention.rotary_emb.inv_freq
""",
    "buffers-neo": "0 attention: transformer.h.0.attn.attention.masked_bias",
    "buffers-codegen": "0 attention: transformer.h.0.attn.causal_mask",
    "buffers-fairseq": """
0 mlp: model.layers.0.fc1.bias
- embedding: model.embed_positions.weights
- other: decoder.version pretrained_model.decoder.version
""",
}
ON_DISK = {checkpoint: _table(text) for checkpoint, text in ON_DISK_TEXTS.items()}


@pytest.mark.parametrize("names", ON_DISK.values(), ids=ON_DISK)
def test_names_that_transformers_no_longer_writes(names):
    assert place_tensors(names) == names


def test_every_word_of_the_tables_is_in_a_checked_name():
    names = [key for name in FAMILIES for key in (*build(name).memory, *build(name).disk)]
    names += [key for listed in ON_DISK.values() for key in listed]
    names += [key for name in ENCODERS for key in encoder(name).state_dict()]
    names += [gguf.TENSOR_NAMES[tensor] for arch in gguf.MODEL_TENSORS.values() for tensor in arch]
    seen = {word for key in names for word in key.split(".")}
    tables = (places.OWNERS, places.INSIDE, places.OUTSIDE)
    words = {word for table in tables for row in table.values() for word in row}
    words |= places.WRAPPERS | places.STACKS | places.OUTSIDE_LEAVES
    assert words - seen - PREFIXES - HEADS == set()


# --- what is not known is reported ---

LLAMA_LAYER = ["model.layers.{}.self_attn.q_proj.weight", "model.layers.{}.mlp.up_proj.weight"]


def _llama(*layers: int) -> list[str]:
    return [name.format(layer) for layer in layers for name in LLAMA_LAYER]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight_scale",  # quantised: not to be averaged
        "model.layers.0.self_attn.q_proj.weight_scale_inv",
        "model.layers.0.self_attn.q_proj.qweight",
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
        "model.layers.0.time_mix.A_log",
        "bert.encoder.layer.0.attention.self.query.weight_scale",
        "model.layers.61.eh_proj.weight",  # DeepSeek-V3's prediction of further tokens
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.00.self_attn.q_proj.weight",
        "model.layers.1_0.self_attn.q_proj.weight", "model.layers.²self_attn.q_proj.weight",
        f"model.layers.{'9' * 5000}.mlp.up_proj.weight", "model.layers.0",
        "model.norm.running_mean", "layers", "model", "",
    ],
)  # fmt: skip
def test_an_unknown_name_is_never_guessed(name):
    assert place(name) is None
    with pytest.raises(CheckpointError, match="1 of 3 tensors"):
        place_tensors([*_llama(0), name])


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "bloom", "deepseek_v3"])
def test_one_strange_word_anywhere_makes_a_name_unknown(family):
    for name in build(family).disk:
        words = name.split(".")
        for at, word in enumerate(words):
            strange = ".".join([*words[:at], word + "x", *words[at + 1 :]])
            assert place(strange) is None, strange


def _blocks(stack, layers, *inside):
    return [f"{stack}.{layer}.{name}" for layer in range(layers) for name in inside]


def test_the_one_list_with_as_many_members_is_the_layers():
    names = [
        *_blocks("rwkv.blocks", 3, "ffn.key.weight", "ln.weight", "parts.0.w", "parts.1.w"),
        *_blocks("vision_model.blocks", 3, "w"),  # a tower that the tables know
        *_blocks("convolutions", 2, "w"),
        "top.weight", "embed_tokens.weight",
    ]  # fmt: skip
    places, numbered = place_by_number(names, layers=3)
    assert list(places) == names
    assert places["rwkv.blocks.2.parts.1.w"] == Place(2, "other")
    assert places["embed_tokens.weight"] == Place(None, "embedding")
    assert places["top.weight"] == places["convolutions.1.w"] == Place(None, "other")
    assert places["vision_model.blocks.0.w"] == Place(None, "other")
    assert numbered.stack == "rwkv.blocks"
    assert numbered.roleless == {n for n in names if n[:4] not in ("visi", "embe")}


def test_roles_that_the_tables_know_stay():
    names = [*_llama(0, 1), *_blocks("model.layers", 2, "time_mix.w", "mlp.shared_experts.w_in.w")]
    places, numbered = place_by_number(names, layers=2)
    assert places["model.layers.1.mlp.up_proj.weight"] == Place(1, "mlp")
    assert numbered.roleless == set(names[-4:])


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        ([*_blocks("a.blocks", 2, "w"), *_blocks("b.blocks", 2, "w")], 2),  # which of the two?
        (_blocks("a.blocks", 3, "w"), 2),
        (_blocks("a.blocks", 2, "w"), 3),
        (_blocks("a.blocks", 2, "w"), 10**12),
        (["a.w", "b.w"], 0),
        (["a.w", "b.w"], -1),
        ([*_blocks("a.blocks", 2, "w"), "model.layers.0.mlp.up_proj.weight"], 2),
        ([*_blocks("a.blocks", 2, "w"), "a.blocks.1.shared_block.w"], 2),  # of several layers?
        ([*_blocks("a.blocks", 2, "w"), "sharedNorm.w"], 2),
        (["0.w", "1.w"], 2),
        ([*_blocks("books", 2, "w"), *_blocks("a.blocks", 3, "w")], 2),  # the larger list is not it
    ],
)
def test_ambiguous_lists_are_not_taken_for_layers(names, layers):
    assert place_by_number(names, layers=layers) is None


def test_patterns_win_over_the_list():
    names = _blocks("a.blocks", 2, "mix.w", "x.w")
    found = place_by_number(
        names, layers=2, patterns=[Pattern(r"a[.]blocks[.](?P<layer>\d+)[.]mix.*", "attention")]
    )
    assert found is not None
    assert found[0]["a.blocks.1.mix.w"] == Place(1, "attention")
    assert found[1].roleless == {"a.blocks.0.x.w", "a.blocks.1.x.w"}


def test_the_message_shows_names_and_a_pattern_that_works():
    strange = [f"model.layers.{layer}.time_mix.A_log" for layer in range(9)]
    with pytest.raises(CheckpointError) as caught:
        place_tensors([*_llama(*range(9)), *strange])
    message = str(caught.value)
    assert "9 of 27 tensors" in message
    assert repr(strange[0]) in message
    assert repr(strange[4]) in message
    assert strange[5] not in message
    assert "\n" not in message
    match = message.partition("match: '")[2].partition("', role")[0]
    places = place_tensors([*_llama(*range(9)), *strange], patterns=[Pattern(match, "attention")])
    assert places[strange[8]] == Place(8, "attention")


def test_a_hostile_name_cannot_break_the_message():
    name = "model.layers.0.it's\n\x1b[2J.weight"
    with pytest.raises(CheckpointError) as caught:
        place_tensors([*_llama(0), name])
    message = str(caught.value)
    assert message.isprintable()
    match = message.partition("match: '")[2].partition("', role")[0]
    assert Pattern(match, "other").place(name) == Place(0, "other")


@pytest.mark.parametrize(
    ("names", "layers", "message"),
    [
        (_llama(0, 2, 4), None, r"2 of 5 layers have no tensors: 1, 3;.*shard"),
        (_llama(0, 1), 1000, r"998 of 1000 .*: 2, 3, 4, 5, 6, \.\.\.;"),
        (_llama(0, 1, 2), 2, "tensors of layer 2, but the config has 2 layers"),
        (_llama(0), 10**15, "have no tensors"),
        (["lm_head.weight", "visual.layers.0.fc1.weight"], None, "no tensor belongs to a layer"),
    ],
)
def test_missing_and_extra_layers(names, layers, message):
    with pytest.raises(CheckpointError, match=message):
        place_tensors(names, layers=layers)


def test_patterns_for_the_layers_of_a_decoder_alone():
    names = ["encoder.layers.0.fc1.weight", "dec.0.fc1.weight", "dec.1.fc1.weight"]
    decoder = Pattern(r"dec\.(?P<layer>\d+)\..*", "mlp")
    with pytest.raises(CheckpointError, match="no tensors: 2; `patterns` number the layers of the"):
        place_tensors(names, layers=3, patterns=[decoder])


def test_two_lists_of_layers_are_not_mixed_up():
    names = [*_llama(0), "model.decoder.layers.1.fc1.weight"]
    with pytest.raises(CheckpointError, match=r"'model.layers' and 'model.decoder.layers'"):
        place_tensors(names)
    aside = Pattern(r"model\.decoder\..*", "other")
    assert place_tensors(names, patterns=[aside])[names[-1]] == OTHER


# --- patterns, counting, aliases ---


def test_patterns_win_over_the_tables_and_the_first_wins():
    patterns = [
        Pattern(r"model\.layers\.1\..*", "other"),
        Pattern(r"model\.layers\.(?P<layer>\d+)\.mlp\..*", "other"),
        Pattern(r"model\.layers\.(?P<layer>\d+)\.mlp\..*", "norm"),
    ]
    assert list(place_tensors(_llama(0, 1), patterns=patterns).values()) == [
        ATTENTION,
        Place(0, "other"),
        OTHER,
        OTHER,
    ]


def test_a_pattern_must_match_the_whole_name():
    assert Pattern(r"model\.norm", "final_norm").place("model.norm.weight") is None


@pytest.mark.parametrize(
    ("match", "role", "message"),
    [
        (r"x\.(?P<layer>\d+)", "ffn", "is not one of"),
        (r"x\.(", "mlp", "cannot be used: missing"),
        (r"x{1000000000000}", "mlp", "cannot be used: the repetition number is too large"),
        (r"([\w.]+)+!", "mlp", "cannot be used: it repeats a group"),
        (r"(?:a|a)*b", "mlp", "cannot be used: it repeats a group"),
        (r".*.*.*.*.*!", "mlp", "cannot be used: it repeats a group, has over 4 repeats, or"),
        ("a?" * 30 + "a" * 30, "mlp", "cannot be used: it repeats a group, has over 4 repeats, or"),
        ("(" * 5000 + ")" * 5000, "mlp", "cannot be used: "),
        (r"x\.\d+", "mlp", "needs a group"),
        (r"x\.(?P<layer>\d+)", "embedding", "cannot have a group"),
    ],
)
def test_an_invalid_pattern(match, role, message):
    with pytest.raises(RecipeError, match=message):
        Pattern(match, role)


@pytest.mark.parametrize("name", ["x.three.y", "x..y", "x.03.y"])
def test_a_pattern_whose_layer_is_no_index(name):
    with pytest.raises(RecipeError, match="not an index"):
        place_tensors([*_llama(0), name], patterns=[Pattern(r"x\.(?P<layer>.*)\.y", "mlp")])


def test_roles_are_those_of_the_tables():
    assert set(ROLES) == {*places.OWNERS, *places.OUTSIDE, "router"}
    for table in (places.OWNERS, places.OUTSIDE):
        words = [word for row in table.values() for word in row if word != "mixer"]
        assert len(words) == len(set(words))
    # The words inside a mixer decide between the two.
    assert place("model.layers.0.mixer.up_proj.weight") == MLP
    assert place("model.layers.0.mixer.q_proj.weight") == ATTENTION


ALIASES = {
    "wq": "model.layers.3.self_attn.q_proj.weight layers.3.attention.wq.weight",
    "wk": "model.layers.3.self_attn.k_proj.weight layers.3.attention.wk.weight",
    "wv": "model.layers.3.self_attn.v_proj.weight layers.3.attention.wv.weight",
    "wo": "model.layers.3.self_attn.o_proj.weight layers.3.attention.wo.weight "
    "transformer.h.3.attn.c_proj.weight model.layers.3.self_attn.dense.weight "
    "model.decoder.layers.3.self_attn.out_proj.weight",
    "w1": "model.layers.3.mlp.gate_proj.weight layers.3.feed_forward.w1.weight "
    "model.layers.3.mlp.experts.7.gate_proj.weight model.decoder.layers.3.fc1.weight "
    "transformer.h.3.mlp.c_fc.weight transformer.h.3.mlp.fc_in.weight "
    "transformer.h.3.mlp.dense_h_to_4h.weight",
    "w2": "model.layers.3.mlp.down_proj.weight layers.3.feed_forward.w2.weight "
    "model.layers.3.mlp.experts.down_proj transformer.h.3.mlp.c_proj.weight "
    "model.decoder.layers.3.fc2.weight transformer.h.3.mlp.fc_out.weight "
    "transformer.h.3.mlp.dense_4h_to_h.weight",
    "w3": "model.layers.3.mlp.up_proj.weight layers.3.feed_forward.w3.weight "
    "model.layers.3.block_sparse_moe.experts.7.w3.weight",
    None: "model.layers.3.self_attn.q_proj.bias model.layers.3.self_attn.qkv_proj.weight "
    "model.layers.3.self_attn.q_norm.weight model.layers.3.mlp.gate.weight "
    "model.layers.3.input_layernorm.weight lm_head.weight nonsense "
    "vision_tower.encoder.layers.3.self_attn.q_proj.weight",
}


@pytest.mark.parametrize("expected", ALIASES)
def test_the_names_that_the_papers_use(expected):
    for name in ALIASES[expected].split():
        assert alias(name) == expected, name


def test_names_beside_a_language_model_are_towers():
    names = ["language_model.model.layers.0.mlp.up_proj.weight", "projector.query", "encoder.x"]
    assert [where.layer for where in place_tensors(names, layers=1).values()] == [0, None, None]
