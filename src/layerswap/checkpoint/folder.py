"""Opens checkpoints by their configuration and their headers alone."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerswap.checkpoint.adapter import ADAPTER_CONFIG
from layerswap.checkpoint.checkpoint import Checkpoint
from layerswap.checkpoint.configuration import check_shapes, place_all, predicted_names, read_config
from layerswap.checkpoint.gguf import configuration, read_gguf
from layerswap.checkpoint.given import CONFIG, fetch_checkpoint, is_folder, offline, refuse_url
from layerswap.checkpoint.header import TensorInfo, Translated, is_gguf
from layerswap.checkpoint.hub import HUB_ID, download
from layerswap.checkpoint.names import (
    COPIED,
    computed_buffers,
    method_of,
    quantised_names,
    unwrapped,
)
from layerswap.checkpoint.places import Pattern
from layerswap.checkpoint.read import FLOAT_DTYPES
from layerswap.checkpoint.remote import WeightFile, find_weights
from layerswap.checkpoint.shards import read_tensors
from layerswap.ground.errors import CheckpointError, error_context
from layerswap.ground.strict_json import clipped, read_json_object
from layerswap.ground.types import PathLike

HUB_GGUF = re.compile(
    rf"(?P<id>{HUB_ID.pattern})(?:@(?P<revision>[^/]+))?/(?P<file>[^@]+\.gguf)", re.IGNORECASE
)
"""A GGUF file on the Hub: `owner/name/file.gguf` or `owner/name@revision/file.gguf`."""


def open_checkpoint(
    source: PathLike,
    *,
    revision: str | None = None,
    patterns: Sequence[Pattern] = (),
    in_place: bool = False,
    quantised: bool = False,
    fetched: tuple[Path, str | None] | None = None,
) -> Checkpoint:
    """Open a checkpoint: a local folder, a GGUF file, or a Hub id that is downloaded first.

    Reads `config.json`, the index and the safetensors headers, or the GGUF header, and checks
    them against each other. No tensor is read.

    Args:
        source: local folder, path of a `.gguf` file, or `owner/name[@revision]` on the Hub, with
            `/file.gguf` behind it for a GGUF file.
        revision: Hub branch, tag or commit; the commit that it resolves to is recorded.
        patterns: places of tensors with names that no built-in layout covers.
        in_place: do not download weights that are not in the local cache, and read spans of them
            as they are needed (see `checkpoint.remote`).
        quantised: open quantised weights too, whose tensors can only be copied.
        fetched: result of `fetch_checkpoint` for the source, if it was fetched already.

    Raises:
        CheckpointError: it does not exist, is incomplete, ambiguous or damaged, or has tensors
            that no layout places.

    Example:
        >>> import layerswap as ls
        >>> opened = ls.open_checkpoint("math-expert")
        >>> opened.layers, opened.places["model.layers.1.mlp.up_proj.weight"]
        (3, Place(layer=1, role='mlp'))
    """
    source = os.fspath(source)
    if is_gguf(source):
        return _open_gguf(source, revision, patterns, in_place=in_place)
    in_place = in_place and not is_folder(source) and not offline()
    folder, commit = fetched or fetch_checkpoint(source, revision, weights=not in_place)
    name = source.partition("@")[0] if commit else source
    find = find_weights(name, folder, commit) if in_place else folder.joinpath
    try:
        config = read_config(folder)
        known = COPIED if quantised else ()
        try:
            tensors = read_tensors(folder, find)
        except CheckpointError:
            _refuse_quantised(folder, config, {}, known)  # the cause, if it is one
            raise
        _refuse_quantised(folder, config, tensors, known)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror})") from None
    with error_context(source):
        plain, wrappers = unwrapped(tensors)
        tensors = {plain[stored]: info for stored, info in tensors.items()}
        check_shapes(tensors, config)
        predicted = predicted_names(tensors, config, patterns)
        places, numbered = place_all(tensors, predicted, config, patterns)
    return Checkpoint(
        name, commit, folder, config, tensors, places, numbered=numbered,
        ignored=predicted | computed_buffers(tensors, config),
        notes=(*_wrapper_notes(wrappers), *_leftover_notes(folder)),
    )  # fmt: skip


def _open_gguf(
    source: str, revision: str | None, patterns: Sequence[Pattern], *, in_place: bool
) -> Checkpoint:
    folder, commit, find = Path(source).expanduser(), None, None
    file: WeightFile = folder.resolve() if folder.is_symlink() else folder  # as the user named it
    hub = HUB_GGUF.fullmatch(source) if not folder.exists() else None
    in_place = in_place and not offline()
    if hub is not None:
        folder, commit = download(hub["id"], revision or hub["revision"], weights=False)
        source = f"{hub['id']}/{hub['file']}"
        find = find_weights(hub["id"], folder, commit)
        if not in_place:
            _download_gguf(source, commit)
        try:
            file = find(hub["file"])
        except FileNotFoundError:
            raise CheckpointError(f"{source}: there is no such file") from None
    elif revision is not None:
        raise CheckpointError(f"{source}: a file has no revision; leave it out")
    else:
        refuse_url(source)
    header = read_gguf(file, find)
    with error_context(source):
        config = configuration(header, any_architecture=bool(patterns))
        places, numbered = place_all(
            header.tensors, predicted_names(header.tensors, config, patterns), config, patterns
        )
    return Checkpoint(
        source, commit, folder if find else Path(str(file)), config, header.tensors, places,
        gguf=header.metadata, numbered=numbered,
    )  # fmt: skip


def _download_gguf(source: str, commit: str) -> Path:
    """Download a GGUF file of the Hub with its other parts; return the repository's folder."""
    hub = HUB_GGUF.fullmatch(source)
    assert hub is not None, "the source of a GGUF file on the Hub"
    parts = re.sub(r"-\d{5}(?=-of-\d{5}\.gguf$)", "-*", hub["file"])
    return download(hub["id"], commit, weights=False, files=[parts])[0]


def open_configuration(source: str, *, revision: str | None = None) -> Checkpoint:
    """Open only a checkpoint's configuration; no weights are downloaded."""
    folder, commit = fetch_checkpoint(source, revision, weights=False)
    name = source.partition("@")[0] if commit else source
    return Checkpoint(name, commit, folder, read_config(folder), {}, {})


def quantisation_in(folder: Path) -> str | None:
    """Name the quantisation of the weights in a folder; None for plain or missing weights."""
    path = folder / CONFIG
    return method_of(read_json_object(path, infinities=True)) if path.is_file() else None


def downloaded(checkpoint: Checkpoint) -> Checkpoint:
    """Download the weights of a checkpoint that is read in place."""
    if not checkpoint.in_place:
        return checkpoint
    assert checkpoint.revision is not None, "a checkpoint of the Hub"
    if is_gguf(checkpoint.source):
        folder = _download_gguf(checkpoint.source, checkpoint.revision)
    else:
        folder, _ = fetch_checkpoint(checkpoint.source, checkpoint.revision)

    def here(info: TensorInfo) -> TensorInfo:
        file = folder / info.file.name
        if isinstance(info, Translated):
            return replace(info, file=file, stored=here(info.stored))
        return replace(info, file=file)

    return replace(checkpoint, tensors={n: here(i) for n, i in checkpoint.tensors.items()})


def _refuse_quantised(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    known: Collection[str],
) -> None:
    """Refuse quantised weights, except in the `known` formats, and a wrong `quantization_config`.

    `tensors` is empty if the weights cannot be read.
    """
    method = method_of(config)
    if method is None:
        return
    plain = all(info.dtype in FLOAT_DTYPES for info in tensors.values())
    if tensors and plain and not quantised_names(tensors):
        raise CheckpointError(
            f"{folder}: its weights are not quantised, but {CONFIG} says that they are (some tools "
            "leave this entry after a merge); remove quantization_config from it"
        )
    if method not in known:
        can = "can only be copied by a swap" if method in COPIED else "cannot be merged"
        raise CheckpointError(
            f"{folder}: quantised weights ({clipped(method, 40)}) {can}; use the unquantised "
            "checkpoint"
        )


def _wrapper_notes(words: Sequence[str]) -> tuple[str, ...]:
    """A note on removed words of training wrappers."""
    if not words:
        return ()
    return (f"{', '.join(words)}: a training wrapper's words in its names are left out",)


def _leftover_notes(folder: Path) -> tuple[str, ...]:
    """A note on an adapter that lies next to full weights."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return ()
    return (
        f"its folder also holds an adapter ({ADAPTER_CONFIG}), which is not used; transformers "
        "adds it to the full weights when it loads the folder, so remove it if it is merged",
    )
