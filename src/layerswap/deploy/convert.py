"""Writes a folder as a GGUF file, tensor by tensor, in the order of a GGUF file of its base."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from layerswap.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from layerswap.checkpoint.gguf import gguf_header_bytes, number_entry
from layerswap.checkpoint.gguf_file import metadata_of
from layerswap.checkpoint.header import is_gguf
from layerswap.compose.schema import BLEND_TYPES
from layerswap.deploy.description import Description, describe, entries_of, main_type
from layerswap.ground.commit import atomic_file
from layerswap.ground.errors import MergeError
from layerswap.merge.gguf import writable_type
from layerswap.merge.layout import OutputTensor, Shard
from layerswap.merge.target import MergeOptions, check_space, is_merged_gguf
from layerswap.merge.terms import Gathered, Run
from layerswap.merge.writer import check_finite, write_shard
from layerswap.versions import __version__

LIKE = "like"
"""The type that gives every tensor the type that it has in the file of the base."""
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}
"""llama.cpp's numbers of the types of whole files."""
HEAD_TYPES = {"Q4_0", "Q4_1", "Q5_0", "Q5_1"}
"""Types with which the output matrix is `Q8_0`, as llama-quantize keeps it finer too."""
SINGLE = re.compile(r"norm|ffn_gate_inp|rope_f")
"""Names of tensors that llama.cpp needs in float32, beside those of one dimension."""


@dataclass(frozen=True)
class Conversion:
    """A planned GGUF file.

    Attributes:
        folder: the model, in safetensors.
        like: a GGUF file of the base or of a model of the same family.
        kind: `like` or one of `BLEND_TYPES`.
        tensors: every tensor of the file, in order.
        description: the metadata that differ from those of `like`.
        notes: a line for each difference between folder and `like`.
    """

    folder: Checkpoint
    like: Checkpoint
    kind: str
    tensors: tuple[OutputTensor, ...]
    description: Description
    notes: tuple[str, ...]

    def write(self, target: Path, options: MergeOptions) -> Path:
        """Write the file atomically; memory does not grow with the model.

        Raises:
            MergeError: a tensor holds NaN or infinity, the disk is full, or the target is not
                ours; nothing is written then.
        """
        record = {
            "layerswap": __version__, "deployed": self.folder.source,
            "like": self.like.source, "type": self.kind,
        }  # fmt: skip
        name = self.folder.folder.resolve().name
        entries = entries_of(self.like, self.description, name, json.dumps(record))
        listed = [(tensor.name, tensor.dtype, tensor.shape) for tensor in self.tensors]
        header, offsets, nbytes = gguf_header_bytes(
            entries, listed, metadata_of(self.like).alignment
        )
        tensors = tuple(zip(self.tensors, offsets, strict=True))
        shard = Shard("model.gguf", header, tensors, nbytes)
        check_space(target.absolute().parent, shard.nbytes)
        check_finite(self.tensors)
        with atomic_file(target, is_ours=is_merged_gguf, overwrite=options.overwrite) as path:
            write_shard(path, shard, {}, options)
            os.truncate(path, shard.nbytes)
        return target


def plan_conversion(source: str, like: str, kind: str = LIKE) -> Conversion:
    """Plan a GGUF file of a folder with the tokenizer and hyperparameters of another GGUF file.

    Args:
        source: a folder or Hub id of safetensors, such as a merged model.
        like: a GGUF file of its base: a path, or `owner/name/file.gguf` on the Hub.
        kind: see `Conversion`.

    Raises:
        LayerswapError: the two are no pair, the family has no names in GGUF, or the type cannot be
            written. Nothing is written before.
    """
    if not is_gguf(like):
        raise MergeError(f"{like}: --like takes a GGUF file of the base")
    if kind not in (LIKE, *BLEND_TYPES):
        raise MergeError(
            f"type {kind!r} cannot be written; there are {', '.join((LIKE, *BLEND_TYPES))}. "
            "llama-quantize makes others, such as Q4_K_M, from the file"
        )
    folder = open_checkpoint(source)
    if folder.form == "gguf":
        raise MergeError(f"{source}: is a GGUF file already; deploy takes a folder")
    model = open_checkpoint(like, in_place=True)
    sources, description = describe(folder, model)
    head = "output.weight" if "output.weight" in sources else "token_embd.weight"
    tensors = []
    written: dict[str, list[str]] = {}
    for name, infos in sources.items():
        stored = model.tensors.get(name)
        wanted = kind if kind != LIKE else stored.dtype if stored else infos[0].dtype
        if kind in HEAD_TYPES and name == head:
            wanted = "Q8_0"
        single = len(infos[0].shape) == 1 or SINGLE.search(name)
        dtype = "F32" if single else writable_type(wanted, infos[0].shape)
        if dtype != wanted and kind == LIKE:
            written.setdefault(f"{wanted} of the file is written as {dtype}", []).append(name)
        tensors.append(_output(name, dtype, infos))
    most = main_type(tensors)
    if most in FILE_TYPES and (kind != LIKE or written):
        entry = number_entry("general.file_type", FILE_TYPES[most])
        description.entries[entry[0]] = entry
    notes = [
        *description.notes,
        *(f"{how}: {len(names)} tensors" for how, names in written.items()),
    ]
    if written:
        notes.append("llama-quantize makes K and IQ types from the file, such as Q4_K_M")
    return Conversion(folder, model, kind, tuple(tensors), description, tuple(notes))


def _output(name: str, dtype: str, infos: list[TensorInfo]) -> OutputTensor:
    """One tensor of the file; several of the folder are stacked."""
    if "_exps" not in name:
        return OutputTensor(name, dtype, infos[0].shape, ((infos[0], 1.0),))
    shape = (len(infos), *infos[0].shape)
    # One row of the stack is one expert.
    stacked = Gathered(shape, tuple(Run(info, 0, 1) for info in infos))
    return OutputTensor(name, dtype, shape, ((stacked, 1.0),))
