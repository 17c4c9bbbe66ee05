"""Composes GGUF files: every layer keeps the quantisation of the expert that it comes from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import BLOCKS, Checkpoint, TensorInfo, parse_json
from layerswap.checkpoint.gguf import (
    Entry,
    gguf_header_bytes,
    number_entry,
    read_gguf,
    text_entry,
    texts_entry,
)
from layerswap.checkpoint.gguf_file import metadata_of
from layerswap.checkpoint.header import block_of
from layerswap.checkpoint.read import FLOAT_DTYPES, QUANTISED, READ_DTYPES, gguf_package
from layerswap.compose.recipe import Recipe
from layerswap.ground.commit import atomic_file
from layerswap.ground.errors import MergeError
from layerswap.merge.folder import FolderFormat
from layerswap.merge.layout import OutputTensor, Shard, unblendable, widest
from layerswap.merge.metadata import record
from layerswap.merge.plan import Format, Plan, fetch_notes
from layerswap.merge.sources import check_unchanged
from layerswap.merge.target import RECORD_KEY, MergeOptions, is_merged_gguf
from layerswap.merge.terms import stored_tensors
from layerswap.merge.writer import (
    check_finite,
    check_written,
    measure_tensors,
    write_shard,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FALLBACKS = ("Q8_0", "F16")
"""Types of a blend whose own type cannot be written, in the order in which they are tried."""
REPLACED = ("general.name", "general.finetune", "general.tags", "general.languages",
            "general.quantization_version", RECORD_KEY)  # fmt: skip
REPLACED_PREFIXES = ("general.base_model.", "split.")
TEMPLATE = "tokenizer.chat_template"


class GGUFFormat(Format):
    """One GGUF file, which llama.cpp and Ollama load."""

    name = "gguf"
    cannot = {
        "rank": FolderFormat.cannot["rank"],
        "tokenizer": "vocabularies of GGUF files cannot be aligned",
        "dtype": "is for safetensors; set blend_type (--blend-type) for a GGUF output",
        "max_shard_size": "a GGUF output is one file; remove it",
    }

    def aligned(
        self, recipe: Recipe, checkpoints: Mapping[str, Checkpoint], base: Checkpoint | None
    ) -> None:
        """None: vocabularies of GGUF files cannot be aligned."""
        return

    def check(self, plan: Plan) -> None:
        """Also refuse blends of quantised tensors without the package that reads them."""
        super().check(plan)
        if any(set(tensor.stored_dtypes) & set(BLOCKS) for tensor in _blended(plan)):
            gguf_package()

    def tensors(self, plan: Plan) -> list[OutputTensor]:
        """Every tensor of the merged model, verbatim ones in the type of their expert."""
        used, reference, builder, tensors = plan.used, plan.reference, plan.terms, []
        for name, info in reference.tensors.items():
            blend = plan.composition[reference.places[name]]
            terms = builder.terms(blend, name)
            read = list(stored_tensors(terms))
            if len(terms) == 1 and isinstance(terms[0][0], TensorInfo):
                dtype = terms[0][0].dtype
            elif any(stored.dtype not in READ_DTYPES for stored in read):
                same = unblendable(read)
                terms, dtype = ((same, 1.0),), same.dtype
            else:
                stored = {used[e].tensors[name].dtype for e in blend.experts if e in used}
                dtype = _blend_type(stored or {info.dtype}, info.shape, plan.recipe.blend_type)
            tensors.append(OutputTensor(name, dtype, info.shape, terms))
        return tensors

    def shards(self, plan: Plan) -> list[Shard]:
        """The one output file."""
        alignment = metadata_of(plan.reference).alignment
        listed = [(tensor.name, tensor.dtype, tensor.shape) for tensor in plan.tensors]
        header, offsets, nbytes = gguf_header_bytes(_entries(plan), listed, alignment)
        return [Shard("model.gguf", header, tuple(zip(plan.tensors, offsets, strict=True)), nbytes)]

    def notes(self, plan: Plan) -> list[str]:
        """Notes that include the types of blends, and differences next to the weights."""
        notes = super().notes(plan)
        groups: dict[str, list[str]] = {}
        for tensor in _blended(plan):
            types = " and ".join(tensor.stored_dtypes)
            groups.setdefault(f"{types} blended into {tensor.dtype}", []).append(tensor.name)
        notes += [f"{how}: {_few(names)}" for how, names in groups.items()]
        owner = next(name for name, c in plan.used.items() if c is plan.reference)
        first = metadata_of(plan.reference)
        keys = [key for key in first.spans if key.startswith("tokenizer.")]
        for name, checkpoint in plan.used.items():
            other = metadata_of(checkpoint)
            differ = [k for k in keys if k in other and first.stored(k) != other.stored(k)]
            if differ:
                notes.append(f"{_few(differ)} of {owner} and {name} differ; taken from {owner}")
            extra = [k for k in other.spans if k.startswith("tokenizer.") and k not in first]
            copied = [key for key in extra if key in _lent_templates(plan)]
            for keys_of, what in ((copied, "copied"), (sorted({*extra} - {*copied}), "left out")):
                if keys_of:
                    notes.append(f"{_few(keys_of)}: only {name} has this; {what}")
        return notes + fetch_notes(plan)

    def write(self, plan: Plan, target: Path, options: MergeOptions) -> int:
        """Write the file, with the padding behind its last tensor."""
        check_finite(plan.tensors)
        (shard,) = plan.shards
        overwrite, share = options.overwrite, plan.layout == "shared"
        with atomic_file(target, is_ours=is_merged_gguf, overwrite=overwrite) as path:
            facts = measure_tensors(plan.tensors, options.workers)
            shared = write_shard(path, shard, facts, options, share=share)
            os.truncate(path, shard.nbytes)
            check_written(target, read_gguf(path).tensors, plan.account["output"])
            check_unchanged(plan.stamps)
        return shared

    def load(self, plan: Plan) -> PreTrainedModel:
        """Refuse: transformers would dequantise the model."""
        raise MergeError("a plan over GGUF files cannot be loaded here; save it for llama.cpp")


def read_gguf_record(path: Path) -> dict[str, Any]:
    """The record in the metadata of a merged GGUF file."""
    text = read_gguf(path).metadata.get(RECORD_KEY)
    if not isinstance(text, str):
        raise MergeError(f"{path}: has no {RECORD_KEY}, so layerswap did not write it")
    data = parse_json(text.encode(), f"{path}: {RECORD_KEY}")
    if not isinstance(data, dict):
        raise MergeError(f"{path}: {RECORD_KEY} is not a JSON object")
    return data


def _blended(plan: Plan) -> list[OutputTensor]:
    return [tensor for tensor in plan.tensors if not tensor.verbatim]


def _blend_type(stored: set[str], shape: tuple[int, ...], requested: str | None) -> str:
    """Choose the stored type of a blend: the requested type, or the widest input type.

    Tensors that all experts store in float32 stay so: llama.cpp needs norms and routers in it.
    """
    wide = widest(stored & set(FLOAT_DTYPES)) if stored & set(FLOAT_DTYPES) else None
    if wide is None:
        wide = max(sorted(stored), key=lambda dtype: block_of(dtype)[1] / block_of(dtype)[0])
    if stored == {"F32"}:
        return "F32"
    return writable_type(requested or wide, shape)


def writable_type(wanted: str, shape: tuple[int, ...]) -> str:
    """Return the wanted type, or the first writable one of `FALLBACKS` that fills whole rows."""
    for dtype in (wanted, *FALLBACKS):
        known = dtype in FLOAT_DTYPES or dtype in QUANTISED
        if known and shape[-1] % block_of(dtype)[0] == 0:
            return dtype
    raise AssertionError("float16 fits every row")


def _entries(plan: Plan) -> Iterator[Entry]:
    """Build the output's metadata: the reference's, with the merge's name, origin and record."""
    metadata = metadata_of(plan.reference)
    depth = _depth(plan.reference)
    for key, (value_type, start, stop) in metadata.spans.items():
        if key in depth:
            yield number_entry(key, depth[key])
        elif key not in REPLACED and not key.startswith(REPLACED_PREFIXES):
            yield key, value_type, metadata.raw[start:stop]
    yield from _lent_templates(plan).values()
    yield text_entry("general.name", " x ".join(_name(c) for c in plan.used.values()))
    origins = [plan.base] if plan.base else list(plan.used.values())
    yield number_entry("general.base_model.count", len(origins))
    for number, origin in enumerate(origins):
        yield text_entry(f"general.base_model.{number}.name", _name(origin))
        url = metadata_of(origin).get("general.repo_url")
        if isinstance(url, str):
            yield text_entry(f"general.base_model.{number}.repo_url", url)
    tags = metadata.get("general.tags", [])
    listed = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    yield texts_entry("general.tags", [*dict.fromkeys([*listed, "merge", "layerswap"])])
    languages = plan.recipe.languages or metadata.get("general.languages")
    if isinstance(languages, list) and all(isinstance(code, str) for code in languages):
        yield texts_entry("general.languages", languages)
    if any(tensor.dtype in BLOCKS for tensor in plan.tensors):
        yield number_entry("general.quantization_version", 2)
    yield text_entry(RECORD_KEY, json.dumps(record(plan), ensure_ascii=False))


def _depth(reference: Checkpoint) -> dict[str, int]:
    """The numbers of layers of a file whose layers that predict further tokens are left out."""
    metadata = metadata_of(reference)
    name = metadata.get("general.architecture")
    left_out = metadata.get(f"{name}.nextn_predict_layers") and not reference.ignored
    layers = {f"{name}.block_count": reference.layers, f"{name}.nextn_predict_layers": 0}
    return layers if left_out else {}


def _lent_templates(plan: Plan) -> dict[str, Entry]:
    """The chat templates of the first expert that has one, if the reference has none."""
    for checkpoint in plan.used.values():
        metadata = metadata_of(checkpoint)
        spans = {k: span for k, span in metadata.spans.items() if k.startswith(TEMPLATE)}
        if spans:
            lent = {} if checkpoint is plan.reference else spans
            return {k: (k, kind, metadata.raw[i:j]) for k, (kind, i, j) in lent.items()}
    return {}


def _name(checkpoint: Checkpoint) -> str:
    name = metadata_of(checkpoint).get("general.name")
    return name if isinstance(name, str) and name else Path(checkpoint.source).stem


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
