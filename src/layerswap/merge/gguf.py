"""Composes GGUF files: every layer keeps the quantisation of the expert that it comes from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from layerswap.checkpoint import BLOCKS, Checkpoint, TensorInfo, parse_json
from layerswap.checkpoint.commit import PARTIAL
from layerswap.checkpoint.gguf import (
    Entry,
    Metadata,
    gguf_header_bytes,
    number_entry,
    read_gguf,
    text_entry,
    texts_entry,
)
from layerswap.checkpoint.header import block_of
from layerswap.checkpoint.read import FLOAT_DTYPES, QUANTISED, UNREAD, gguf_package
from layerswap.checkpoint.strict_json import clipped
from layerswap.compose import Recipe
from layerswap.errors import MergeError, RecipeError
from layerswap.merge.compatibility import (
    copy_notes,
    numbered_notes,
    read_vocabulary,
    tied_notes,
)
from layerswap.merge.layout import OutputTensor, Shard, everyone, terms_of, unblendable, widest
from layerswap.merge.lazy_tensors import Terms, leaves
from layerswap.merge.metadata import record
from layerswap.merge.plan import MergePlan

RECORD_KEY = "layerswap.record"
"""The metadata entry that holds what `layerswap.json` holds beside safetensors."""
FALLBACKS = ("Q8_0", "F16")
"""Types of a blend whose own type cannot be written, in the order in which they are tried."""
VOCABULARY = ("tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges")
"""What two files must agree on: which text each row of the embedding stands for."""
REPLACED = ("general.name", "general.finetune", "general.tags", "general.languages",
            "general.quantization_version", RECORD_KEY)  # fmt: skip
REPLACED_PREFIXES = ("general.base_model.", "split.")
NORMAL = 1
"""The kind of an ordinary token in `tokenizer.ggml.token_type`."""
COMPUTED = re.compile(
    r"rope\.(freq|scaling)|sliding_window|softcap|scale|expert|head_count_kv|epsilon"
)
"""Hyperparameters that change what a model computes, by their names after the architecture's."""
DEFAULTS = {"rope.freq_base": 10_000.0, "rope.scaling.factor": 1.0, "expert_weights_scale": 1.0,
            "logit_scale": 1.0}  # fmt: skip
"""What llama.cpp takes where a file has no such key; nothing, zero or `none` for the others."""
MODELFILE = "Modelfile"
MODELFILE_HEAD = "# Written by layerswap"


@dataclass(frozen=True)
class GGUFMergePlan(MergePlan):
    """A plan over GGUF files alone, which writes one GGUF file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(set(tensor.stored_dtypes) & set(BLOCKS) for tensor in self.blended):
            gguf_package()

    @cached_property
    def tensors(self) -> list[OutputTensor]:
        """Every tensor that the merge will write, verbatim ones in the type of their expert."""
        return list(_tensors(self))

    @cached_property
    def shards(self) -> list[Shard]:
        """The output file."""
        alignment = _metadata(self.reference).alignment
        listed = [(tensor.name, tensor.dtype, tensor.shape) for tensor in self.tensors]
        header, offsets, nbytes = gguf_header_bytes(_entries(self), listed, alignment)
        return [Shard("model.gguf", header, tuple(zip(self.tensors, offsets, strict=True)), nbytes)]

    @property
    def blended(self) -> list[OutputTensor]:
        """The tensors that are computed."""
        return [tensor for tensor in self.tensors if not tensor.verbatim]

    @property
    def notes(self) -> list[str]:
        """How the blends are stored, and how the files differ beside their weights."""
        groups: dict[str, list[str]] = {}
        for tensor in self.blended:
            types = " and ".join(tensor.stored_dtypes)
            groups.setdefault(f"{types} blended into {tensor.dtype}", []).append(tensor.name)
        found = numbered_notes(self.reference)
        found += copy_notes(self.used, self.base)
        found += tied_notes(self.composition, self.reference, self.drop)
        found += [f"{how}: {_few(names)}" for how, names in groups.items()]
        owner = next(name for name, c in self.used.items() if c is self.reference)
        first = _metadata(self.reference)
        keys = [key for key in first.spans if key.startswith("tokenizer.")]
        for name, checkpoint in self.used.items():
            other = _metadata(checkpoint)
            differ = [k for k in keys if k in other and first.stored(k) != other.stored(k)]
            if differ:
                found.append(f"{_few(differ)} of {owner} and {name} differ; taken from {owner}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """What `layerswap plan --json` prints."""
        blended = {t.name: {"from": t.stored_dtypes, "to": t.dtype} for t in self.blended}
        return {**super().to_dict(), "format": "gguf", "blended": blended}


def refuse_for_gguf(recipe: Recipe) -> None:
    """Refuse settings of a recipe that mean nothing for GGUF files, or cannot be had.

    Raises:
        RecipeError: naming the first.
    """
    for key, why in (
        ("tokenizer", "vocabularies of GGUF files cannot be aligned"),
        ("stack", "layers of GGUF files cannot be moved"),
        ("dtype", "is of safetensors; a GGUF output has blend_type (--blend-type)"),
        ("rank", "a GGUF output is no adapter"),
    ):
        if getattr(recipe, key) is not None:
            raise RecipeError(f"{key}: {why}")
    if recipe.max_shard_size != "5GB":
        raise RecipeError("max_shard_size: a GGUF output is one file; remove it")


def check_vocabularies(checkpoints: Mapping[str, Checkpoint]) -> None:
    """Refuse GGUF files whose tokens differ: their embedding rows mean different things.

    Raises:
        MergeError: naming the first difference.
    """
    names = list(checkpoints)
    first = _metadata(checkpoints[names[0]])
    for name in names[1:]:
        other = _metadata(checkpoints[name])
        for key in VOCABULARY:
            if first.stored(key) != other.stored(key):
                found = _difference(first.get(key), other.get(key))
                raise MergeError(f"tokenizers of {names[0]} and {name} differ: {key} {found}")
        _check_one_sided(names[0], first, name, other)


def _check_one_sided(a_name: str, a: Metadata, b_name: str, b: Metadata) -> None:
    """Refuse a hyperparameter of the computation that one file has and the other lacks.

    Raises:
        MergeError: naming the first whose value is not what llama.cpp takes where there is none.
    """
    for key in sorted(set(a.spans) ^ set(b.spans)):
        _, _, name = key.partition(".")
        if key.split(".")[0] != a.get("general.architecture") or not COMPUTED.search(name):
            continue
        has, lacks, known = (a_name, b_name, a) if key in a else (b_name, a_name, b)
        default = DEFAULTS.get(name)
        if name == "attention.head_count_kv":
            default = known.get(key.removesuffix("_kv"))
        if known[key] not in (default, 0, "none", False):
            value = clipped(repr(known[key]), 40)
            raise MergeError(f"{key} is {value} in {has}, but {lacks} has none")


def check_vocabulary(name: str, checkpoint: Checkpoint, like: Checkpoint) -> None:
    """Refuse a GGUF file whose tokens are not those of a `tokenizer.json`.

    Converters write unused, control and padding tokens in their own way; where the file does not
    say which they are, one in a hundred may differ.

    Raises:
        MergeError: with an example.
    """
    tokens, ids = _metadata(checkpoint).get("tokenizer.ggml.tokens"), read_vocabulary(like)
    if not ids or not isinstance(tokens, list):
        return
    wrong = [t for t, i in ids.items() if i < len(tokens) and tokens[i] != t]
    kinds = _metadata(checkpoint).get("tokenizer.ggml.token_type")
    known = isinstance(kinds, list) and len(kinds) == len(tokens)
    ordinary = [token for token in wrong if known and kinds[ids[token]] == NORMAL]
    if ordinary or len(wrong) > len(ids) // 100:
        token = min(ordinary or wrong, key=ids.__getitem__)
        raise MergeError(
            f"tokenizers of {name} and {like.identity} differ: token {ids[token]} is "
            f"{clipped(repr(tokens[ids[token]]), 40)} and {clipped(repr(token), 40)}"
        )


def read_gguf_record(path: Path) -> dict[str, Any]:
    """The record in the metadata of a merged GGUF file.

    Raises:
        LayerswapError: the file cannot be read, or layerswap did not write it.
    """
    if PARTIAL in path.resolve().parent.name:
        raise MergeError(f"{path}: an unfinished merge; merge it again")
    text = read_gguf(path).metadata.get(RECORD_KEY)
    if not isinstance(text, str):
        raise MergeError(f"{path}: has no {RECORD_KEY}, so layerswap did not write it")
    data = parse_json(text.encode(), f"{path}: {RECORD_KEY}")
    if not isinstance(data, dict):
        raise MergeError(f"{path}: {RECORD_KEY} is not a JSON object")
    return data


def is_merged_gguf(path: Path) -> bool:
    """True for a GGUF file that layerswap wrote."""
    return RECORD_KEY in read_gguf(path).metadata


def check_modelfile(path: Path) -> Path:
    """Where the Modelfile of a GGUF file goes.

    Raises:
        MergeError: another one is there already, or the file's name would be more than one line.
    """
    target = path.with_name(MODELFILE)
    if not path.name.isprintable():
        raise MergeError(f"{path.name!r} cannot stand in a Modelfile; choose another output")
    if target.is_symlink() or target.exists():
        known = target.is_file() and target.read_bytes().startswith(MODELFILE_HEAD.encode())
        if not known:
            raise MergeError(f"{target}: exists already, and layerswap did not write it")
    return target


def write_modelfile(path: Path) -> Path:
    """Write a `Modelfile` for Ollama beside a GGUF file.

    Ollama reads the tokenizer, the context length, and a chat template that it knows from the GGUF
    file itself.

    Raises:
        MergeError: another one is there already.
    """
    target = check_modelfile(path)
    name = path.stem.lower()
    target.write_text(
        f"{MODELFILE_HEAD}: ollama create {name} -f {MODELFILE}\nFROM ./{path.name}\n", "utf-8"
    )
    return target


def _tensors(plan: GGUFMergePlan) -> Iterator[OutputTensor]:
    used, reference = plan.used, plan.reference
    experts = everyone(used, plan.base)
    for name, info in reference.tensors.items():
        blend = plan.composition[reference.places[name]]
        terms = terms_of(blend, name, experts, fishers=plan.fishers)
        only, _ = terms[0]
        if len(terms) == 1 and isinstance(only, TensorInfo):
            yield OutputTensor(name, only.dtype, info.shape, terms)
        elif any(stored.dtype not in (*FLOAT_DTYPES, *BLOCKS) for stored in leaves(terms)):
            same = unblendable(list(leaves(terms)))
            yield OutputTensor(name, same.dtype, info.shape, ((same, 1.0),))
        else:
            stored = {experts[e].tensors[name].dtype for e in blend.experts if e in used}
            dtype = _blend_type(stored or {info.dtype}, info.shape, plan.recipe.blend_type)
            _check_readable(terms)
            yield OutputTensor(name, dtype, info.shape, terms)


def _blend_type(stored: set[str], shape: tuple[int, ...], asked: str | None) -> str:
    """The type in which a blend is stored: the one asked for, or the wider of its inputs'.

    What all experts store in float32 stays so: norms and routers, which llama.cpp needs so.
    """
    wide = widest(stored & set(FLOAT_DTYPES)) if stored & set(FLOAT_DTYPES) else None
    if wide is None:
        wide = max(sorted(stored), key=lambda dtype: block_of(dtype)[1] / block_of(dtype)[0])
    if stored == {"F32"}:
        return "F32"
    for dtype in (asked or wide, *FALLBACKS):
        known = dtype in FLOAT_DTYPES or dtype in QUANTISED
        if known and shape[-1] % block_of(dtype)[0] == 0:
            return dtype
    raise AssertionError("float16 fits every row")


def _check_readable(terms: Terms) -> None:
    for stored in leaves(terms):
        if stored.dtype in UNREAD:
            raise MergeError(f"tensor {stored.name!r} is {stored.dtype}, which cannot be blended")


def _entries(plan: GGUFMergePlan) -> Iterator[Entry]:
    """The metadata of the output: the reference's, with the merge's own name, origin and record."""
    metadata = _metadata(plan.reference)
    for key, (kind, start, stop) in metadata.spans.items():
        if key not in REPLACED and not key.startswith(REPLACED_PREFIXES):
            yield key, kind, metadata.raw[start:stop]
    yield text_entry("general.name", " x ".join(_name(c) for c in plan.used.values()))
    origins = [plan.base] if plan.base else list(plan.used.values())
    yield number_entry("general.base_model.count", len(origins))
    for number, origin in enumerate(origins):
        yield text_entry(f"general.base_model.{number}.name", _name(origin))
        url = _metadata(origin).get("general.repo_url")
        if isinstance(url, str):
            yield text_entry(f"general.base_model.{number}.repo_url", url)
    tags = metadata.get("general.tags", [])
    known = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    yield texts_entry("general.tags", [*dict.fromkeys([*known, "merge", "layerswap"])])
    languages = plan.recipe.languages or metadata.get("general.languages")
    if isinstance(languages, list) and all(isinstance(code, str) for code in languages):
        yield texts_entry("general.languages", languages)
    if any(tensor.dtype in BLOCKS for tensor in plan.tensors):
        yield number_entry("general.quantization_version", 2)
    content = json.dumps(record(plan), ensure_ascii=False)
    yield text_entry(RECORD_KEY, content)


def _metadata(checkpoint: Checkpoint) -> Metadata:
    assert checkpoint.gguf is not None, "a plan over GGUF files holds another checkpoint"
    return checkpoint.gguf


def _name(checkpoint: Checkpoint) -> str:
    name = _metadata(checkpoint).get("general.name")
    return name if isinstance(name, str) and name else Path(checkpoint.source).stem


def _difference(first: Any, second: Any) -> str:
    if not isinstance(first, list) or not isinstance(second, list):
        return f"is {clipped(repr(first), 40)} and {clipped(repr(second), 40)}"
    if len(first) != len(second):
        return f"has {len(first)} and {len(second)} entries"
    pairs = enumerate(zip_longest(first, second))
    at, (one, other) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    return f"{at} is {clipped(repr(one), 40)} and {clipped(repr(other), 40)}"


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
