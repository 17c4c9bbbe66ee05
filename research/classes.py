"""Writes what transformers knows of its classes of text models, as the table that layerswap ships.

    python -m research.classes

Every class is built on torch's meta device, so that no weight takes memory. Classes that cannot be
built from their default configuration are left out. `tests/checkpoint/test_classes.py` compares the
table with the installed transformers.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import gguf
import torch
import transformers
from tests.helpers import oracle
from tests.helpers.families import FAMILIES
from transformers import CONFIG_MAPPING
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.models.auto import modeling_auto as auto
from transformers.utils import logging

from layerswap.checkpoint.classes import TABLE, Table
from layerswap.checkpoint.names import canonical, start_of
from layerswap.checkpoint.places import OUTSIDE, parse_name

TASKS = {
    "SEQ_CLS": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "TOKEN_CLS": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "QUESTION_ANS": auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "MULTIPLE_CHOICE": auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,
}
"""Tasks, by PEFT's names where it has one, with the class of each type of model."""
LANGUAGE = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
)
SEVERAL = (
    auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    auto.MODEL_MAPPING_NAMES,
    auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
)
FEW = 4
"""Layers whose names are compared in memory and on disk."""


def classes() -> list[tuple[str, str]]:
    """Names of the classes for text, each with its types of models."""
    of_text = [*TASKS.values(), *LANGUAGE]
    types = {kind for names in of_text[:-1] for kind in names}  # the last has images and sounds
    found = {
        (name, kind)
        for names in (*of_text, *SEVERAL)
        for kind, listed in names.items()
        for name in ([listed] if isinstance(listed, str) else listed)
        if kind in types and hasattr(transformers, name)
    }
    return sorted(found)


def build(name: str, kind: str) -> Any:
    """An empty model of a class on the meta device; None if its defaults do not allow one."""
    model_class = getattr(transformers, name)
    configs = [CONFIG_MAPPING[kind]] if kind in CONFIG_MAPPING else []
    for config_class in (*configs, model_class.config_class):
        with suppress(Exception), torch.device("meta"):
            return model_class(config_class())
    return None


def outside(name: str) -> bool:
    """True for a tensor in no list."""
    return not any(word.isdecimal() for word in name.split("."))


def heads(model: Any) -> set[str]:
    """First words of the names that are not of the base model."""
    base, names = f"{model.base_model_prefix}.", [*model.state_dict()]
    if base == "." or not any(name.startswith(base) for name in names):
        return set()
    return {name.split(".")[0] for name in names if not name.startswith(base)}


def unties(model: Any) -> bool:
    """True for a class that has a head of its own although its configuration ties it."""
    ties = getattr(model.config, "tie_word_embeddings", False)
    has_head = hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None
    return bool(ties) and has_head and not model.all_tied_weights_keys


def unused(names: Iterable[str], siblings: Iterable[str]) -> list[str]:
    """Modules outside the layers that other classes of a type have and one lacks."""
    own = set(names)
    parents = {name[:at] for name in own for at in dots(name)}
    found = set()
    for name in sorted({*siblings} - own):
        path = next((name[:at] for at in dots(name) if name[:at] not in parents), name)
        if "." in path or path == "pooler":
            found.add(path)
    return sorted(found)


def dots(name: str) -> list[int]:
    """Positions of the dots of a name."""
    return [match.start() for match in re.finditer(r"\.", name)]


def renamed(model: Any) -> dict[str, list[str]]:
    """Names on disk whose words differ from those in memory, with the modules in memory.

    A layer's number is `#`. Weights that are several tensors in memory have several names.
    """
    few = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if all(int(word) < FEW for word in name.split(".") if word.isdecimal())
    }
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    plain = [each for each in mapping if isinstance(each, WeightRenaming)]
    several = [each for each in mapping if isinstance(each, WeightConverter)]
    found: dict[str, list[str]] = {}
    stored = revert_weight_conversion(model, dict(few)) if mapping else {}
    for name in stored:
        memory, pattern = rename_source_key(name, plain, several, model.base_model_prefix, few)
        targets = [memory]
        if pattern is not None:
            converter = next(each for each in several if pattern in each.source_patterns)
            first, *others = converter.target_patterns
            targets += [memory.replace(first, other) for other in others]
            if len(converter.source_patterns) > 1 or not others:
                continue  # experts that memory holds as one tensor
        pair = numberless(core(model, name)), sorted(numberless(core(model, t)) for t in targets)
        of_text = "#" in pair[0] and not re.search("audio|vision|visual", pair[0])
        if of_text and pair[1] != [pair[0]] and all(t.endswith(".weight") for t in pair[1]):
            found[pair[0]] = pair[1]
    return found


def stems(model: Any) -> set[str]:
    """What stands before the number of a layer, in memory and on disk, for tensors of layers."""
    layers = [name for name in both(model) if parse_name(name).layer is not None]
    return {numberless(name).partition(".#")[0] for name in layers}


def both(model: Any) -> set[str]:
    """The names of all tensors, in memory and on disk."""
    found = {*model.state_dict()}
    with suppress(Exception):
        found |= {*revert_weight_conversion(model, dict(model.state_dict()))}
    return found


def starts(model: Any) -> set[str]:
    """The first words of the names of tensors with a place."""
    owners = OUTSIDE["embedding"] | OUTSIDE["final_norm"] | OUTSIDE["head"]
    names = {name: parse_name(name) for name in both(model)}
    placed = [n for n, p in names.items() if p.layer is not None or p.rest[0] in owners]
    return {*map(start_of, placed)}


def accepts(model: Any) -> Callable[[str], bool]:
    """Whether transformers finds a layer of the model behind a stem, also of older files."""
    zeros = (n for n in model.state_dict() if {*filter(str.isdecimal, n.split("."))} <= {"0"})
    first = {name: parse_name(name) for name in zeros}
    behind = {name[name.index(".0.") :] for name, parsed in first.items() if parsed.layer == 0}
    mapping = get_model_conversion_mapping(model)
    plain = [each for each in mapping if isinstance(each, WeightRenaming)]
    several = [each for each in mapping if isinstance(each, WeightConverter)]

    def finds(stem: str) -> bool:
        found = (rename_source_key(stem + rest, plain, several, model.base_model_prefix, first)[0]
                 for rest in behind)  # fmt: skip
        return any(name in first and first[name].layer == 0 for name in found)

    return finds


def core(model: Any, name: str) -> str:
    """The canonical form of a name."""
    return canonical(name.removeprefix(f"{model.base_model_prefix}."))


def numberless(name: str) -> str:
    """A name with `#` for its numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


def facts() -> Iterator[tuple[str, str, Any]]:
    """Each class that can be built: its name, type and empty model."""
    for name, kind in classes():
        model = build(name, kind)
        if model is not None:
            yield name, kind, model


def words() -> dict[str, list[str]]:
    """The words in the names of tensors, in memory, on disk and in GGUF files, by role."""
    found: dict[str, set[str]] = {}

    def add(name: str, role: str) -> None:
        parsed = parse_name(name)
        role = "mlp" if role == "router" else role
        if parsed.layer is not None:
            found.setdefault(f"owners/{role}", set()).add(parsed.rest[0])
            inside = {word for word in parsed.rest[1:] if not re.fullmatch(r"(expert_)?\d+", word)}
            found.setdefault(f"inside/{role}", set()).update(inside)
        elif role in OUTSIDE:
            found.setdefault(f"outside/{role}", set()).add(parsed.rest[0])
            leaves = parsed.rest[1:] if role != "other" else ()
            found.setdefault("outside/leaves", set()).update(leaves)

    for family in FAMILIES:
        built = oracle.build(family)
        for name, where in built.memory.items():
            add(name, where.role)
        for name, names in built.disk.items():
            add(name, built.memory[names[0]].role)
    for class_name in oracle.ENCODERS:
        model = oracle.encoder(class_name)
        attention = oracle.attention_of(m for stack in oracle.stacks(model) for m in stack)
        for name, tensor in model.named_parameters():
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            alone = "Norm" in owner and len(parse_name(name).rest) == 2
            parsed = parse_name(name)
            if parsed.layer is not None:
                add(name, "attention" if id(tensor) in attention else "norm" if alone else "mlp")
            elif parsed.rest[0] not in OUTSIDE["other"]:
                found["outside/leaves"].update(parsed.rest[1:])
    for name in gguf.TENSOR_NAMES.values():
        word = name.removeprefix("blk.{bid}.")
        if word != name and not re.match(r"(attn|attn_output|ffn)_norm", word):
            role = {"attn": "attention", "ffn": "mlp"}.get(word.split("_")[0])
            found.get(f"owners/{role}", set()).add(word)
    return {part: sorted(each) for part, each in sorted(found.items())}


def table() -> Table:
    """The facts of all classes."""
    names: dict[str, dict[str, list[str]]] = {}
    prefixes, first_words, shared, untied = set(), set(), set(), set()
    differ: dict[str, dict[str, list[str]]] = {}
    loads: list[tuple[str, Callable[[str], bool]]] = []
    before, behind = set[str](), dict[str, set[str]]()
    language = {name for listed in LANGUAGE for name in listed.values()}
    labelled = {name for listed in TASKS.values() for name in listed.values()}
    for name, kind, model in facts():
        prefixes.add(model.base_model_prefix)
        if name in language | labelled:
            first_words |= heads(model)
        untied |= {name} if unties(model) else set()
        loads.append((name, accepts(model)))
        before |= stems(model)
        for start in starts(model):
            behind.setdefault(start, set()).add(kind)
        ties = {key for key in model.all_tied_weights_keys if key.endswith(".bias")}
        keys = [key for key in model.state_dict() if outside(key)]
        of_kind = names.setdefault(kind, {"": []})
        of_kind[name] = [core(model, key) for key in keys if key not in ties]
        of_kind[""] += [core(model, key) for key in keys]
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        matches = (re.fullmatch(r"layers\.\d+\.self_attn\.(\w+)", key) for key in ignored)
        shared |= {match[1] for match in matches if match}
        with suppress(Exception):
            if pairs := renamed(model):
                differ[kind] = pairs | differ.get(kind, {})
    return {
        "transformers": transformers.__version__,
        "prefixes": sorted(prefixes - {"", "model"}),
        "heads": sorted(first_words),
        "tasks": {
            kind: given
            for kind in sorted({kind for listed in TASKS.values() for kind in listed})
            if (given := {task: listed[kind] for task, listed in TASKS.items() if kind in listed})
        },
        "unused": {
            name: found
            for of_kind in names.values()
            for name, own in of_kind.items()
            if name and (found := unused(own, of_kind[""]))
        },
        "shared": sorted(shared),
        "untied": sorted(untied),
        "renamed": dict(sorted(differ.items())),
        "layers": {
            stem: sorted({name for name, finds in loads if finds(stem)}) for stem in sorted(before)
        },
        "starts": {start: sorted(kinds) for start, kinds in sorted(behind.items())},
        "words": words(),
    }


def main() -> None:
    """Write the table."""
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    TABLE.write_text(text(table()), "utf-8")


def text(content: Mapping[str, Any]) -> str:
    """The table as JSON, one line an entry, so that a difference can be read."""
    lines = []
    for key, value in content.items():
        if isinstance(value, dict):
            rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f"{json.dumps(key)}: {{\n{rows}\n}}")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
