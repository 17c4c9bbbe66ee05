"""A tiny chat model with a byte-level tokenizer, and its GGUF file by an independent converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_files import close, encoded
from merging import save_expert
from safetensors.torch import load_file

TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|halt|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
SPECIAL = ["<|bos|>", "<|halt|>", "<|turn|>"]
TEXT = ["Habari ya asubuhi, rafiki yangu.", "The cat sat on the mat.", "2 + 3 ni 5, si 6!"] * 40
LINES = {
    "sw": ["Habari ya asubuhi", "Rafiki yangu, ni 5"],
    "en": ["The cat sat on it", "It's 3 + 2"],
}


def save_tokenizer(folder: Path, **settings: Any) -> Any:
    """A byte-level BPE with a chat template, as GPT-2 splits words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ))  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|bos|>", eos_token="<|halt|>", pad_token="<|halt|>",
        additional_special_tokens=["<|turn|>"], **{"chat_template": TEMPLATE, **settings},
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_chat_model(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A Llama of three layers with this tokenizer."""
    import transformers

    tokenizer = save_tokenizer(folder)
    settings = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    }  # fmt: skip
    return save_expert(folder, transformers.LlamaConfig(**{**settings, **config}), seed)


def write_like(folder: Path, path: Path, *, kind: str = "F32", **changes: Any) -> Path:
    """The model as GGUF. `changes` of single entries: `bos`, `template`, `rope`, `tokens`, `pre`.

    `tensors` and `metadata` are functions that change the tensors and the writer's entries.
    """
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    if rope := changes.get("rope", 10_000.0):
        writer.add_rope_freq_base(rope)
    tokens = changes.get("tokens") or tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    import json

    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(changes.get("eos", 1))
    writer.add_pad_token_id(1)
    writer.add_add_bos_token(changes.get("bos", False))
    template = changes.get("template", TEMPLATE)
    if template:
        writer.add_chat_template(template)
    if change := changes.get("metadata"):
        change(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = (config.num_attention_heads if "q_proj" in name
                     else config.num_key_value_heads)  # fmt: skip
            split = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
            values = split.swapaxes(1, 2).reshape(values.shape)
        tensors[names.get_name(name, (".weight",))] = values
    for name, values in changes.get("tensors", lambda found: found)(tensors).items():
        own = kind if values.ndim > 1 else "F32"
        if name == "output.weight" and kind[:2] in ("Q4", "Q5"):
            own = "Q8_0"  # as llama-quantize keeps the output matrix finer
        data = encoded(np.ascontiguousarray(values, np.float32), own)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[own])
    close(writer)
    return path
