"""The places of the tensors of transformers' models, by the modules that own them.

The oracle never looks at a tensor's name: it walks the model and takes the role from the class of
the module that owns the tensor. Files on disk have other names than memory has, so every tensor is
filled with a number of its own before it is saved, and the number found on disk says whose it is.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from safetensors.torch import load_file
from tests.helpers.families import FAMILIES, LAYERS, TEXT, Family, model_of
from torch import nn

from layerswap.checkpoint.places import Place

MIXERS = ("Attention", "GatedDeltaNet", "Mixer", "MambaLayer", "ShortConv", "RecurrentBlock")


def _is_router(tensor: torch.Tensor, owner: nn.Module, layer: nn.Module) -> bool:
    """True for a tensor with one number, row or entry per expert that belongs to none of them."""
    mixture = any(type(m).__name__.endswith("Experts") for m in layer.modules())
    inside = type(owner).__name__.endswith(("Experts", "Expert"))
    return mixture and not inside and tensor.ndim < 3 and tensor.shape[0] in (1, 4)


def _layer_role(child: nn.Module, family: Family) -> str:
    name = type(child).__name__
    if any(word in name for word in MIXERS):
        return "attention"
    if "Norm" in name:
        return "norm"
    if name.endswith("Router"):
        return "router"
    if any(word in name for word in ("MLP", "Mlp", "MoE", "Moe", "FeedForward", "Experts")):
        return "mlp"
    if any(word in name for word in ("AltUp", "Laurel")):
        return "other"
    assert isinstance(child, nn.Linear), name
    assert family.linear is not None
    return family.linear


def _decoder_role(decoder: nn.Module, child_name: str, child: nn.Module, family: Family) -> str:
    if child_name in family.outside:
        return family.outside[child_name]
    if isinstance(child, nn.Embedding):
        return "embedding"
    assert "Norm" in type(child).__name__, child_name
    order = [name for name, _ in decoder.named_children()]
    stack = next(n for n, c in decoder.named_children() if _is_stack(c))
    return "embedding" if order.index(child_name) < order.index(stack) else "final_norm"


def _is_stack(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == LAYERS


def _oracle(model: nn.Module, family: Family) -> dict[str, Place]:
    """The place of every name of the state dict, from the modules that own the tensors."""
    candidates = [m for m in model.modules() if any(_is_stack(c) for c in m.children())]
    shared = model.get_input_embeddings()
    [decoder] = [m for m in candidates if any(c is shared for c in m.children())]
    [stack] = [c for c in decoder.children() if _is_stack(c)]
    head = model.get_output_embeddings()
    roles: dict[int, Place] = {}  # id of a module -> place of what it owns
    for module in model.modules():
        roles[id(module)] = Place(None, "other")
    for name, child in decoder.named_children():
        if child is stack or not list(child.state_dict()):
            continue
        role = _decoder_role(decoder, name, child, family)
        roles.update((id(module), Place(None, role)) for module in child.modules())
    for index, layer in enumerate(stack):
        roles[id(layer)] = Place(index, "other")
        for child in layer.children():
            if not list(child.state_dict()):
                continue
            place_ = Place(index, _layer_role(child, family))
            roles.update((id(module), place_) for module in child.modules())
    roles[id(head)] = Place(None, "head")
    found = {}
    for name, tensor in model.state_dict().items():
        owner = model.get_submodule(name.rpartition(".")[0])
        found[name] = where = roles[id(owner)]
        if where.role == "mlp" and _is_router(tensor, owner, stack[where.layer]):
            found[name] = Place(where.layer, "router")
    return found


class Built(NamedTuple):
    memory: dict[str, Place]  # names in memory -> place
    disk: dict[str, list[str]]  # names on disk -> names in memory of the tensor (two if it is tied)


@functools.cache
def build(name: str) -> Built:
    torch.set_num_threads(1)
    model = model_of(name)
    memory = _oracle(model, FAMILIES[name])
    owners: dict[int, list[str]] = {}
    numbers: dict[int, int] = {}
    with torch.no_grad():
        for key, tensor in model.state_dict(keep_vars=True).items():
            number = numbers.setdefault(id(tensor), len(numbers))
            owners.setdefault(number, []).append(key)
            tensor.fill_(number)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stored = load_file(Path(folder, "model.safetensors"))
    found = {key: tensor.unique().tolist() for key, tensor in stored.items()}
    assert all(len(values) == 1 for values in found.values()), found
    assert {int(value) for [value] in found.values()} == set(owners)  # nothing was lost
    return Built(memory, {key: owners[int(value)] for key, [value] in found.items()})


# --- encoders and encoder-decoders ---

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
         "intermediate_size": 48, "max_position_embeddings": 64}  # fmt: skip
PAIR = {"vocab_size": 64, "d_model": 32, "encoder_layers": 3, "decoder_layers": LAYERS,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "max_position_embeddings": 64, "pad_token_id": 1}  # fmt: skip
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 3,
      "num_decoder_layers": LAYERS}  # fmt: skip
DEBERTA = {"relative_attention": True, "pos_att_type": "c2p|p2c", "position_biased_input": False}
GEMMA = {**TEXT, "num_hidden_layers": LAYERS, "sliding_window": 16}
ENCODERS = {
    "BertForPreTraining": SMALL,
    "BertModel": SMALL,
    "XLMRobertaForSequenceClassification": SMALL | {"pad_token_id": 1},
    "XLMRobertaXLForMaskedLM": SMALL | {"pad_token_id": 1},
    "DistilBertForMaskedLM": {"vocab_size": 64, "dim": 32, "n_layers": LAYERS, "n_heads": 4,
                              "hidden_dim": 48, "max_position_embeddings": 64},
    "DebertaForTokenClassification": SMALL | DEBERTA,
    "DebertaV2ForMultipleChoice": SMALL | DEBERTA | {"position_buckets": 8},
    "MPNetForMaskedLM": SMALL,
    "ElectraForMaskedLM": SMALL | {"embedding_size": 16},
    "ElectraForPreTraining": SMALL | {"embedding_size": 16},
    "ElectraForMultipleChoice": SMALL | {"embedding_size": 16},
    "ModernBertForMaskedLM": SMALL | {"pad_token_id": 0},
    "LongformerForMaskedLM": SMALL | {"attention_window": 4},
    "RemBertForMaskedLM": SMALL | {"input_embedding_size": 16},
    "BartForSequenceClassification": PAIR,
    "M2M100ForConditionalGeneration": PAIR,
    "WhisperForConditionalGeneration": PAIR | {"num_mel_bins": 8, "max_source_positions": 16},
    "Speech2TextForConditionalGeneration": PAIR | {"conv_channels": 16, "max_source_positions": 16},
    "LEDForConditionalGeneration": PAIR | {"attention_window": 4},
    "NllbMoeForConditionalGeneration": PAIR | {"num_experts": 4, "encoder_sparse_step": 2,
                                               "decoder_sparse_step": 2},
    "T5ForConditionalGeneration": T5,
    "T5EncoderModel": T5,
    "UMT5EncoderModel": T5,
    "LongT5Model": T5,
    "LongT5ForConditionalGeneration": T5 | {"encoder_attention_type": "transient-global"},
    "SwitchTransformersForConditionalGeneration": T5 | {"num_experts": 4},
    "MT5ForConditionalGeneration": T5,
    "T5GemmaForConditionalGeneration": {"encoder": GEMMA | {"num_hidden_layers": 3},
                                        "decoder": GEMMA},
}  # fmt: skip


@functools.cache
def encoder(name: str) -> nn.Module:
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        model: nn.Module = model_class(model_class.config_class(**ENCODERS[name]))
    return model


def stacks(model: nn.Module) -> list[nn.ModuleList]:
    """The lists of layers, the encoder's before the decoder's."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) in (LAYERS, 3)]
    outer = [m for m in lists if not any(m is not other and m in [*other.modules()]
                                         for other in lists)]  # fmt: skip
    return sorted((m for m in outer if len([*m.parameters()]) > 2 * len(m)), key=len, reverse=True)


def attention_of(layers: Iterable[nn.Module]) -> set[int]:
    """The ids of the tensors in the attention modules of some layers."""
    return {
        id(tensor)
        for layer in layers
        for module in layer.modules()
        if "Attention" in type(module).__name__ and "Layer" not in type(module).__name__
        for tensor in module.parameters()
    }
