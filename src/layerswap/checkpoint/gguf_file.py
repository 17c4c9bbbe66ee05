"""A GGUF file as a checkpoint, beside other GGUF files or beside safetensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from layerswap.checkpoint.checkpoint import Checkpoint
from layerswap.checkpoint.configuration import place_all
from layerswap.checkpoint.gguf import Metadata, configuration, read_gguf
from layerswap.checkpoint.gguf_view import (
    NOT_OF_TRANSFORMERS,
    check_family,
    check_settings,
    translated,
)
from layerswap.checkpoint.given import Given, offline, refuse_url
from layerswap.checkpoint.header import is_gguf
from layerswap.checkpoint.hub import HUB_ID, download
from layerswap.checkpoint.names import text_config
from layerswap.checkpoint.remote import WeightFile, find_weights
from layerswap.checkpoint.vocabulary import read_vocabulary
from layerswap.ground.errors import CheckpointError, MergeError, error_context
from layerswap.ground.strict_json import clipped

HUB_GGUF = re.compile(
    rf"(?P<id>{HUB_ID.pattern})(?:@(?P<revision>[^/]+))?/(?P<file>[^@]+\.gguf)", re.IGNORECASE
)
"""A GGUF file on the Hub: `owner/name/file.gguf` or `owner/name@revision/file.gguf`."""
VOCABULARY = ("tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges")
"""Keys that two files must agree on: the text of each row of the embedding."""
COMPUTED = re.compile(
    r"rope\.(freq|scaling)|sliding_window|softcap|scale|expert|head_count_kv|epsilon"
)
"""Hyperparameters that change what a model computes, by their names after the architecture's."""
DEFAULTS = {"rope.freq_base": 10_000.0, "rope.scaling.factor": 1.0, "expert_weights_scale": 1.0,
            "logit_scale": 1.0}  # fmt: skip
"""llama.cpp's values if a file has no such key; nothing, zero or `none` for the others."""
NORMAL = 1
"""The type of an ordinary token in `tokenizer.ggml.token_type`."""


@dataclass(frozen=True, repr=False)
class GGUFFile(Checkpoint):
    """A GGUF file, which may be split into parts; `folder` is the file, or its folder on the Hub.

    Attributes:
        metadata: its metadata, from which `config` is made.
        view: True under the names, shapes and configuration of a transformers model.
    """

    no_adapter = "is a GGUF file, to which adapters cannot be added; give its safetensors"

    metadata: Metadata = field(kw_only=True)
    view: bool = False

    @property
    def form(self) -> str:
        """A GGUF file, or safetensors if it is read as a transformers model."""
        return "safetensors" if self.view else "gguf"

    @classmethod
    def takes(cls, given: Given) -> bool:
        """True for the name of a GGUF file, existing or not."""
        return is_gguf(given.source)

    @classmethod
    def open(cls, given: Given) -> Self:
        """Read the header, of all parts."""
        source = given.source
        folder, commit, find = Path(source).expanduser(), None, None
        file: WeightFile = folder.resolve() if folder.is_symlink() else folder
        hub = HUB_GGUF.fullmatch(source) if not folder.exists() else None
        if hub is not None:
            folder, commit = download(hub["id"], given.revision or hub["revision"], weights=False)
            source = f"{hub['id']}/{hub['file']}"
            find = find_weights(hub["id"], folder, commit)
            if not given.in_place or offline():
                _download(source, commit)
            try:
                file = find(hub["file"])
            except FileNotFoundError:
                raise CheckpointError(f"{source}: there is no such file") from None
        elif given.revision is not None:
            raise CheckpointError(f"{source}: a file has no revision; leave it out")
        else:
            refuse_url(source)
        header = read_gguf(file, find)
        with error_context(source):
            config = configuration(header, any_architecture=bool(given.patterns))
            places, numbered, predicted = place_all(header.tensors, config, given.patterns)
        return cls(
            source, commit, folder if find else Path(str(file)), config, header.tensors, places,
            numbered=numbered, ignored=predicted, metadata=header.metadata,
        )  # fmt: skip

    def matched(self, like: Checkpoint) -> Checkpoint:
        """View the file as the transformers model that another checkpoint is."""
        return self if like.form == self.form else self.as_transformers(like)

    def as_transformers(self, like: Checkpoint, *, settings: bool = True) -> GGUFFile:
        """View the file under another checkpoint's names, shapes, dtypes and configuration.

        With `settings`, both must have the same hyperparameters.
        """
        with error_context(self.source):
            if like.quantised:
                raise CheckpointError("a GGUF file, and others are quantised safetensors")
            family = check_family(self, like)
            if settings:
                check_settings(self.config, text_config(like.config))
            tensors = translated(self, like, family)
        return replace(self, config=like.config, tensors=tensors, places=like.places, view=True)

    def check_beside(self, name: str, other: Checkpoint, other_name: str) -> None:
        """Refuse GGUF files whose tokens or one-sided hyperparameters differ."""
        if not isinstance(other, GGUFFile) or self.view:
            return super().check_beside(name, other, other_name)
        ours, theirs = self.metadata, other.metadata
        for key in VOCABULARY:
            if ours.stored(key) != theirs.stored(key):
                difference = _difference(ours.get(key), theirs.get(key))
                raise MergeError(
                    f"tokenizers of {name} and {other_name} differ: {key} {difference}; rows of "
                    "GGUF files cannot be aligned, so merge the safetensors"
                )
        _check_one_sided(name, ours, other_name, theirs)
        for table in sorted(self.tensors.keys() ^ other.tensors.keys()):
            if NOT_OF_TRANSFORMERS.fullmatch(table):
                has, lacks = (name, other_name) if table in self.tensors else (other_name, name)
                raise MergeError(
                    f"{has} stores {table!r} and {lacks} does not, so they scale positions "
                    "differently; convert both with one version of convert_hf_to_gguf.py"
                )
        return None

    def check_tokens(self, name: str, like: Checkpoint) -> None:
        """Refuse tokens other than those of the safetensors' `tokenizer.json`.

        Converters write unused, control and padding tokens in their own way. If the file does not
        mark them, one token in a hundred may differ.
        """
        ids, tokens = read_vocabulary(like.folder), self.metadata.get("tokenizer.ggml.tokens")
        if not self.view or not ids or not isinstance(tokens, list):
            return
        wrong = [t for t, i in ids.items() if i < len(tokens) and tokens[i] != t]
        kinds = self.metadata.get("tokenizer.ggml.token_type")
        known = isinstance(kinds, list) and len(kinds) == len(tokens)
        ordinary = [token for token in wrong if known and kinds[ids[token]] == NORMAL]
        if ordinary or len(wrong) > len(ids) // 100:
            token = min(ordinary or wrong, key=ids.__getitem__)
            raise MergeError(
                f"tokenizers of {name} and {like.identity} differ: token {ids[token]} is "
                f"{clipped(repr(tokens[ids[token]]), 40)} and {clipped(repr(token), 40)}"
            )

    @property
    def filled(self) -> Mapping[str, Any]:
        """The configuration: llama.cpp's defaults are checked with the other metadata."""
        return self.config

    @property
    def tokenizer_folder(self) -> None:
        """None: the tokenizer is in the metadata."""
        return

    def download(self) -> Path:
        """Download the file with its other parts; return the repository's folder."""
        assert self.revision is not None, "a file of the Hub"
        return _download(self.source, self.revision)


def metadata_of(checkpoint: Checkpoint) -> Metadata:
    """The metadata of an open GGUF file."""
    assert isinstance(checkpoint, GGUFFile), "a plan over GGUF files holds another checkpoint"
    return checkpoint.metadata


def _download(source: str, commit: str) -> Path:
    hub = HUB_GGUF.fullmatch(source)
    assert hub is not None, "the source of a GGUF file on the Hub"
    parts = re.sub(r"-\d{5}(?=-of-\d{5}\.gguf$)", "-*", hub["file"])
    return download(hub["id"], commit, weights=False, files=[parts])[0]


def _check_one_sided(a_name: str, a: Metadata, b_name: str, b: Metadata) -> None:
    """Refuse a hyperparameter that only one file has, unless its value is llama.cpp's default."""
    for key in sorted(set(a.spans) ^ set(b.spans)):
        _, _, name = key.partition(".")
        if key.split(".")[0] != a.get("general.architecture") or not COMPUTED.search(name):
            continue
        has, lacks, metadata = (a_name, b_name, a) if key in a else (b_name, a_name, b)
        default = DEFAULTS.get(name)
        if name == "attention.head_count_kv":
            default = metadata.get(key.removesuffix("_kv"))
        if metadata[key] not in (default, 0, "none", False):
            value = clipped(repr(metadata[key]), 40)
            raise MergeError(f"{key} is {value} in {has}, but {lacks} has none")


def _difference(first: Any, second: Any) -> str:
    where = "is"
    if isinstance(first, list) and isinstance(second, list):
        if len(first) != len(second):
            return f"has {len(first)} and {len(second)} entries"
        pairs = enumerate(zip(first, second, strict=True))
        at = next(i for i, (left, right) in pairs if left != right)
        first, second, where = first[at], second[at], f"{at} is"
    return f"{where} {clipped(repr(first), 40)} and {clipped(repr(second), 40)}"
