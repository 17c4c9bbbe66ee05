"""Writes a merged model as a safetensors folder, and loads it as a model in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from layerswap.checkpoint import Checkpoint, atomic_folder, read_header
from layerswap.checkpoint.loading import (
    load_config,
    load_generation_config,
    load_tokenizer,
    load_weights,
)
from layerswap.checkpoint.read import FLOAT_CODES, as_torch
from layerswap.compose.schema import parse_size
from layerswap.ground.errors import MergeError
from layerswap.ground.types import counted
from layerswap.merge.compatibility import check_complete
from layerswap.merge.layout import (
    OutputTensor,
    Shard,
    pack_shards,
    pack_shared_shards,
    write_index,
)
from layerswap.merge.metadata import (
    copied_modules,
    left_out_notes,
    module_notes,
    record,
    tokenizer_folder,
    write_configuration,
    write_documents,
)
from layerswap.merge.plan import Format, Plan, fetch_notes
from layerswap.merge.sources import check_unchanged
from layerswap.merge.target import RECORD, MergeOptions
from layerswap.merge.terms import ModelFacts
from layerswap.merge.tokenizers import tokenizer_notes
from layerswap.merge.trained import base_notes, training_notes
from layerswap.merge.writer import (
    LOST_TO_DTYPE,
    SHARED_BYTES,
    Rounding,
    check_finite,
    check_written,
    compute_tensor,
    measure_tensors,
    rounding_note,
    write_shard,
)
from layerswap.versions import need_extras

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class FolderFormat(Format):
    """A folder with safetensors files, which transformers and vLLM load."""

    name = "safetensors"
    cannot: ClassVar[Mapping[str, str]] = {
        "rank": "applies only when adapters merge into an adapter; remove it",
        "blend_type": "applies only to GGUF merges; remove it",
    }
    moves_layers = True

    def check_source(self, first: Checkpoint) -> None:
        """Refuse weights that lack tensors of their class."""
        check_complete(first)

    def check(self, plan: Plan) -> None:
        """Also refuse modules as pickles."""
        super().check(plan)
        copied_modules(plan)

    def shards(self, plan: Plan) -> list[Shard]:
        """The output files, each up to the largest size of a shard."""
        size, metadata = parse_size(plan.recipe.max_shard_size), {"format": "pt"}
        if plan.layout == "shared":
            return pack_shared_shards(plan.tensors, size, metadata, plan.used.values())
        return pack_shards(plan.tensors, size, metadata)

    def layout_facts(self, plan: Plan) -> dict[str, Any]:
        """The layout, which decides the files, and their bytes."""
        return {"layout": plan.layout, "output_bytes": plan.nbytes}

    def notes(self, plan: Plan) -> list[str]:
        """Notes that include the experts' training, dtypes, tokenizers and downloads."""
        notes = training_notes(plan.recipe, plan.used)
        notes += base_notes(plan.used, plan.base) + super().notes(plan)
        stored = {info.dtype for info in plan.reference.tensors.values()}
        baked = any(c.low_rank for c in plan.used.values()) and not plan.recipe.dtype
        if baked and "F32" not in stored and any(t.dtype == "F32" for t in plan.tensors):
            notes.append(
                "writes float32, the adapters' dtype: the base's would lose much of their deltas "
                "(--dtype bfloat16 to write that)"
            )
        notes += _dtype_notes(plan)
        notes += tokenizer_notes(plan.sources, plan.tokenizer_owner)
        notes += module_notes(plan) + left_out_notes(plan)
        if plan.alignment is not None:
            notes.append(f"embedding and head are aligned to {plan.alignment.size} rows")
            for name, tokens in plan.alignment.added.items():
                notes.append(f"added to the tokenizer: {counted(len(tokens), 'token')} of {name}")
        return notes + fetch_notes(plan)

    def write(self, plan: Plan, target: Path, options: MergeOptions) -> int:
        """Write the shards, and the documents next to them."""
        check_finite(plan.tensors)
        shards, content = plan.shards, record(plan)
        with atomic_folder(target, marker=RECORD, overwrite=options.overwrite) as folder:
            facts = measure_tensors(plan.tensors, options.workers)
            rounding = Rounding() if any(tensor.base for tensor in plan.tensors) else None
            share, shared = plan.layout == "shared", 0
            for shard in shards:
                path = folder / shard.file
                shared += write_shard(path, shard, facts, options, rounding, share=share)
            names = [name for shard in shards for name in read_header(folder / shard.file)]
            check_written(target, names, content["tensors"]["output"])
            write_index(folder, shards)
            lost = rounding.summary() if rounding is not None else None
            measured = {LOST_TO_DTYPE: lost, SHARED_BYTES: shared if share else None}
            write_documents(folder, plan, content, measured)
            check_unchanged(plan.stamps)
        if lost is not None and (note := rounding_note(lost)) is not None:
            options.log(note)
        return shared

    def load(self, plan: Plan) -> PreTrainedModel:
        """The merged model on the CPU, bit-equal to what `write` writes."""
        plan = checked_for_loading(plan)
        facts = measure_tensors(plan.tensors)
        return build_model(plan, {t.name: load_tensor(t, facts) for t in plan.tensors})


def checked_for_loading(plan: Plan) -> Plan:
    """Check extras and sources before loading; return the plan with its sources on disk."""
    need_extras("a model in memory", "models")
    plan = plan.downloaded()
    check_unchanged(plan.stamps)
    return plan


def load_tensor(tensor: OutputTensor, facts: ModelFacts | None = None) -> torch.Tensor:
    """One output tensor as a torch tensor on the CPU, bit-equal to what `Plan.save` writes."""
    return as_torch(compute_tensor(tensor, facts), tensor.dtype)


def build_model(
    plan: Plan, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Build a plan's model, which shares the given tensors where possible."""
    if plan.reference.quantised:
        raise MergeError(
            f"{plan.reference.source}: quantised weights can only be copied here; save the plan, "
            "and load the folder with transformers or vLLM"
        )
    # transformers reads a configuration from a folder, and upgrades older ones on the way.
    with tempfile.TemporaryDirectory() as folder:
        write_configuration(Path(folder), plan)
        config = load_config(folder, named=plan.reference.source)
        generation = load_generation_config(folder, named=plan.reference.source)
    model, loading = load_weights(config, weights, dtype, named=plan.reference.source)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := loading.get(key):
            raise MergeError(
                f"{plan.reference.source}: config.json contradicts the weights; transformers found "
                f"{key.replace('_', ' ')}: {sorted(names)[:3]}"
            )
    if generation is not None:
        model.generation_config = generation
    return model


def plan_tokenizer(plan: Plan) -> Any:
    """The tokenizer of a plan's output."""
    return load_tokenizer(tokenizer_folder(plan), named=plan.tokenizer_owner.source)


def _dtype_notes(plan: Plan) -> list[str]:
    """Note experts of several dtypes: the output may be twice as large as an expert."""
    full = {n: c for n, c in plan.used.items() if c.tensors and not c.low_rank}
    stored = {n: max(c.tensors.values(), key=lambda i: i.elements).dtype for n, c in full.items()}
    if plan.recipe.dtype or len({*stored.values()} & FLOAT_CODES.keys()) < 2:
        return []
    each = ", ".join(f"{name} is {FLOAT_CODES.get(dtype, dtype)}" for name, dtype in stored.items())
    return [f"{each}: the output has a dtype that holds both (--dtype bfloat16 makes it smaller)"]
