"""The kinds of input, and the functions that open them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from layerswap.checkpoint.adapted import AdaptedModel
from layerswap.checkpoint.checkpoint import Checkpoint
from layerswap.checkpoint.configuration import read_config
from layerswap.checkpoint.folder import SafetensorsFolder
from layerswap.checkpoint.gguf_file import GGUFFile
from layerswap.checkpoint.given import Given
from layerswap.checkpoint.places import Pattern
from layerswap.checkpoint.quantised import QuantisedFolder
from layerswap.ground.errors import CheckpointError
from layerswap.ground.types import PathLike

KINDS: dict[str, type[Checkpoint]] = {
    "gguf": GGUFFile,
    "adapter": AdaptedModel,
    "quantised": QuantisedFolder,
    "safetensors": SafetensorsFolder,
}
"""The kinds of input; the first that takes an input opens it."""


def open_any(given: Given) -> Checkpoint:
    """Open an input of any kind; an adapter still lacks its base."""
    try:
        return next(kind for kind in KINDS.values() if kind.takes(given)).open(given)
    except OSError as error:
        raise CheckpointError(f"{given.source}: cannot be read ({error.strerror})") from None


def open_checkpoint(
    source: PathLike,
    *,
    revision: str | None = None,
    patterns: Sequence[Pattern] = (),
    in_place: bool = False,
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

    Raises:
        CheckpointError: it does not exist, is incomplete, ambiguous or damaged, is quantised or an
            adapter, or has tensors that no layout places.

    Example:
        >>> import layerswap as ls
        >>> opened = ls.open_checkpoint("math-expert")
        >>> opened.layers, opened.places["model.layers.1.mlp.up_proj.weight"]
        (3, Place(layer=1, role='mlp'))
    """
    return open_any(Given(os.fspath(source), revision, patterns, in_place, whole=True, plain=True))


def open_expert(source: str, base: Checkpoint, *, patterns: Sequence[Pattern] = ()) -> Checkpoint:
    """Open a full checkpoint, or an adapter over `base`, under the base's names."""
    opened = open_any(Given(source, patterns=patterns, plain=True))
    return opened.over(base, patterns).matched(base)


def open_configuration(source: str, *, revision: str | None = None) -> Checkpoint:
    """Open only a checkpoint's configuration; no weights are downloaded."""
    given = Given(source, revision, weights=False)
    folder, commit = given.fetched
    return Checkpoint(given.name, commit, folder, read_config(folder), {}, {})
