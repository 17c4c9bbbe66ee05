"""Checkpoints on disk: reading, writing atomically, and the places of tensors by their names.

A checkpoint is opened by its JSON and its headers, without torch.
"""

from layerswap.checkpoint.adapter import LowRank, read_adapter
from layerswap.checkpoint.checkpoint import Checkpoint
from layerswap.checkpoint.header import BLOCKS, TensorInfo, header_bytes, read_header
from layerswap.checkpoint.kinds import open_checkpoint, open_configuration, open_expert
from layerswap.checkpoint.names import text_config
from layerswap.checkpoint.places import Place
from layerswap.checkpoint.read import fingerprint, fingerprints, sha256_of
from layerswap.ground.commit import atomic_folder, refuse_target
from layerswap.ground.strict_json import parse_json, read_json_object

__all__ = [
    "BLOCKS",
    "Checkpoint",
    "LowRank",
    "Place",
    "TensorInfo",
    "atomic_folder",
    "fingerprint",
    "fingerprints",
    "header_bytes",
    "open_checkpoint",
    "open_configuration",
    "open_expert",
    "parse_json",
    "read_adapter",
    "read_header",
    "read_json_object",
    "refuse_target",
    "sha256_of",
    "text_config",
]
