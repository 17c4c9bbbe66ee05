"""A folder of quantised safetensors, whose tensors can only be copied."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from layerswap.checkpoint.checkpoint import Checkpoint
from layerswap.checkpoint.folder import SafetensorsFolder
from layerswap.checkpoint.given import CONFIG, Given
from layerswap.checkpoint.header import TensorInfo
from layerswap.checkpoint.names import COPIED, PROVENANCE, method_of, quantised_names, settings_of
from layerswap.checkpoint.read import FLOAT_DTYPES
from layerswap.ground.errors import CheckpointError, MergeError, shortened
from layerswap.ground.strict_json import clipped, read_json_object


class QuantisedFolder(SafetensorsFolder):
    """A folder whose configuration names a quantisation."""

    cannot = dict.fromkeys(
        ("dtype", "weights=magnitude"), "is quantised, so its tensors can only be copied"
    )
    no_adapter = (
        "is quantised; give the unquantised base (--base), or merge adapters alone into an adapter"
    )

    @classmethod
    def takes(cls, given: Given) -> bool:
        """True if `config.json` names a quantisation."""
        return quantisation_in(given.fetched[0]) is not None

    @classmethod
    def stored(cls, given: Given, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
        """Read the headers; refuse weights that are not quantised or cannot be copied."""
        folder, method = given.fetched[0], str(method_of(config))
        cause = None
        if given.plain or method not in COPIED:
            can = "can only be copied by a swap" if method in COPIED else "cannot be merged"
            cause = CheckpointError(
                f"{folder}: quantised weights ({clipped(method, 40)}) {can}; use the unquantised "
                "checkpoint"
            )
        try:
            tensors = super().stored(given, config)
        except CheckpointError as error:
            raise cause or error from None
        plain = all(info.dtype in FLOAT_DTYPES for info in tensors.values())
        if plain and not quantised_names(tensors):
            raise CheckpointError(
                f"{folder}: its weights are not quantised, but {CONFIG} says that they are (some "
                "tools leave this entry after a merge); remove quantization_config from it"
            )
        if cause is not None:
            raise cause
        return tensors

    @cached_property
    def quantised(self) -> frozenset[str]:
        """Names of the tensors of quantised weights, all parts of them."""
        return quantised_names(self.tensors)

    def check_beside(self, name: str, other: Checkpoint, other_name: str) -> None:
        """Also refuse other settings of the quantisation."""
        super().check_beside(name, other, other_name)
        first, second = (settings_of(c.config) or {} for c in (self, other))
        for key in sorted({*first} & {*second} - PROVENANCE):
            if first[key] != second[key]:
                each = (
                    f"{shortened(first[key])} in {name}, {shortened(second[key])} in {other_name}"
                )
                raise MergeError(f"quantization_config.{key} differs: {each}")


def quantisation_in(folder: Path) -> str | None:
    """Name the quantisation of the weights in a folder; None for plain or missing weights."""
    path = folder / CONFIG
    return method_of(read_json_object(path, infinities=True)) if path.is_file() else None
