"""An adapter over its base, as one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from layerswap.checkpoint.adapter import Adapter, LowRank, match_tensors, read_adapter
from layerswap.checkpoint.folder import (
    CONV1D_TYPES,
    Checkpoint,
    fetch_checkpoint,
    is_adapter,
    open_checkpoint,
    text_config,
)
from layerswap.checkpoint.gguf_translation import as_transformers
from layerswap.checkpoint.header import is_gguf
from layerswap.checkpoint.places import Pattern, Place, place
from layerswap.checkpoint.strict_json import clipped
from layerswap.errors import CheckpointError


def adapt(
    base: Checkpoint,
    adapter: Adapter,
    *,
    source: str,
    revision: str | None = None,
    patterns: Sequence[Pattern] = (),
) -> Checkpoint:
    """An adapter over its base, as one checkpoint.

    Args:
        base: the base; without tensors (`open_configuration`) the adapter can only be composed
            with adapters.
        adapter: what is added to it.
        source: what the user called the adapter.
        revision: the Hub commit of the adapter.
        patterns: places of tensors whose names no built-in layout knows.

    Raises:
        CheckpointError: the adapter does not fit the base, or changes a head that is tied to the
            embedding.
    """
    try:
        _refuse_tied(base, adapter)
        weights = (
            match_tensors(adapter, base.tensors)
            if base.tensors
            else {path: f"{path}.weight" for path in adapter.modules}
        )
        low_rank = {weights[path]: low for path, low in adapter.modules.items()}
        tensors = {**base.tensors}
        places = base.places or _module_places({*low_rank, *adapter.saved}, patterns)
        low_rank = {
            name: replace(low, transposed=_is_transposed(adapter, low, places[name], base))
            for name, low in low_rank.items()
        }
        for name, info in low_rank.items():
            _check_shape(name, info.shape, base)
        for name, saved in adapter.saved.items():
            _check_shape(name, saved.shape, base)
            tensors[name] = saved
    except CheckpointError as error:
        raise error.within(source) from None
    return Checkpoint(
        source, revision, adapter.folder, base.config, tensors, places, adapter, low_rank
    )


def _is_transposed(adapter: Adapter, low: LowRank, where: Place, base: Checkpoint) -> bool:
    """True if a weight is stored as [in, out].

    The type of the base's layer decides, as in PEFT; a `fan_in_fan_out` that does not fit it
    would transpose a square delta unnoticed.
    """
    if where.layer is not None:
        return base.config.get("model_type") in CONV1D_TYPES
    return low.transposed and (
        where.role == "embedding" or not adapter.config.get("fan_in_fan_out")
    )


def _refuse_tied(base: Checkpoint, adapter: Adapter) -> None:
    text = text_config(base.config)
    if not base.config.get("tie_word_embeddings", text.get("tie_word_embeddings")):
        return
    for path in (*adapter.modules, *(name.removesuffix(".weight") for name in adapter.saved)):
        where = place(f"{path}.weight")
        if where is not None and where.role in ("embedding", "head"):
            raise CheckpointError(
                f"changes {path!r}, but embedding and head are one tensor here (tied); merge it "
                "into its base with PEFT's merge_and_unload first"
            )


def _check_shape(name: str, shape: tuple[int, ...], base: Checkpoint) -> None:
    if not base.tensors:
        return
    if name not in base.tensors:
        raise CheckpointError(f"changes {clipped(repr(name))}, which the base does not have")
    expected = base.tensors[name].shape
    if shape != expected:
        raise CheckpointError(
            f"changes {name!r} of shape {list(shape)}; in {base.identity} it is {list(expected)}"
        )


def _module_places(names: set[str], patterns: Sequence[Pattern]) -> dict[str, Place]:
    found = {name: place(name, patterns) for name in sorted(names)}
    unknown = next((name for name, where in found.items() if where is None), None)
    if unknown is not None:
        raise CheckpointError(
            f"cannot tell the layer and role of {clipped(repr(unknown))}; place it with "
            "`patterns` in the recipe"
        )
    return {name: where for name, where in found.items() if where is not None}


def open_expert(
    source: str, base: Checkpoint, *, revision: str | None = None, patterns: Sequence[Pattern] = ()
) -> Checkpoint:
    """Open a full checkpoint, or an adapter over `base`, whichever the source holds.

    A GGUF file beside a base of safetensors is read under the base's names.

    Raises:
        CheckpointError: as `open_checkpoint`, `read_adapter` and `adapt`.
    """
    if is_gguf(source):
        opened = open_checkpoint(source, revision=revision, patterns=patterns)
        return opened if base.gguf is not None else as_transformers(opened, base)
    folder, commit = fetch_checkpoint(source, revision)
    if not is_adapter(folder):
        return open_checkpoint(source, revision=revision, patterns=patterns)
    name = source.partition("@")[0] if commit else source
    return adapt(base, read_adapter(folder), source=name, revision=commit, patterns=patterns)
