"""A folder of safetensors as a checkpoint, opened by its configuration and its headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from layerswap.checkpoint.adapter import ADAPTER_CONFIG
from layerswap.checkpoint.checkpoint import Checkpoint
from layerswap.checkpoint.configuration import check_stored, place_all, read_config
from layerswap.checkpoint.given import Given
from layerswap.checkpoint.header import TensorInfo
from layerswap.checkpoint.names import unloaded, unwrapped
from layerswap.checkpoint.shards import read_tensors
from layerswap.ground.errors import error_context

LEFTOVER = (
    f"its folder also holds an adapter ({ADAPTER_CONFIG}), which is not used; transformers adds it "
    "to the full weights when it loads the folder, so remove it if it is merged"
)


class SafetensorsFolder(Checkpoint):
    """A folder with `config.json` and safetensors files, here or on the Hub."""

    @classmethod
    def takes(cls, given: Given) -> bool:
        """True for every folder; `open` reports missing files."""
        return True

    @classmethod
    def open(cls, given: Given) -> Self:
        """Read the configuration, the index and the headers, and check them against each other."""
        folder, commit = given.fetched
        config = read_config(folder)
        tensors = cls.stored(given, config)
        with error_context(given.source):
            plain = unwrapped(tensors, config)
            tensors = {plain[stored]: info for stored, info in tensors.items()}
            check_stored(tensors, config)
            places, numbered, predicted = place_all(tensors, config, given.patterns)
        return cls(
            given.name, commit, folder, config, tensors, places, numbered=numbered,
            ignored=predicted | unloaded(tensors, config),
            notes=(LEFTOVER,) if (folder / ADAPTER_CONFIG).is_file() else (),
        )  # fmt: skip

    @classmethod
    def stored(cls, given: Given, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
        """Read the headers of the weights."""
        return read_tensors(given.fetched[0], given.find)
