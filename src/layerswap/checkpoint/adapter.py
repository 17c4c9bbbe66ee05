"""LoRA and rsLoRA adapters on disk, read by their configuration and headers alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.header import TensorInfo, read_header
from layerswap.checkpoint.read import FLOAT_DTYPES, read_matrix
from layerswap.checkpoint.strict_json import clipped, read_json_object
from layerswap.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Factors = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
KEY = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.weight)?"
)
BLOCK_ROWS = 256
"""Rows of a delta that are multiplied out together. A fixed grid, so that a value does not depend
on which chunk of its tensor was asked for."""


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one weight: `scaling * B @ A` (Hu et al., 2021, equation 3).

    Attributes:
        a: `lora_A`, [rank, in].
        b: `lora_B`, [out, rank].
        scaling: `alpha / rank`, or `alpha / sqrt(rank)` with rsLoRA.
        transposed: whether the weight is stored as [in, out] (Conv1D layers, embeddings).
    """

    a: TensorInfo
    b: TensorInfo
    scaling: float
    transposed: bool

    @property
    def rank(self) -> int:
        """The rank of the delta."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight that the delta is added to."""
        shape = self.b.shape[0], self.a.shape[1]
        return shape[::-1] if self.transposed else shape

    def factors(self) -> Factors:
        """`left @ right` is the delta in the layout of the weight; both float64."""
        import numpy as np

        a, b = (read_matrix(info) for info in (self.a, self.b))
        left, right = (a.T, b.T) if self.transposed else (b, a)
        return np.ascontiguousarray(left) * self.scaling, np.ascontiguousarray(right)

    def elements(self, factors: Factors, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Elements [start, stop) of the delta in row-major order, as a float32 vector.

        Args:
            factors: what `factors` gave.
            start: first element.
            stop: one past the last element.
        """
        import numpy as np

        left, right = factors
        width = self.shape[1]
        first = start // width // BLOCK_ROWS * BLOCK_ROWS
        blocks = [
            (left[row : row + BLOCK_ROWS] @ right).astype(np.float32).reshape(-1)
            for row in range(first, math.ceil(stop / width), BLOCK_ROWS)
        ]
        return np.concatenate(blocks)[start - first * width : stop - first * width]


@dataclass(frozen=True)
class Adapter:
    """One PEFT adapter.

    Attributes:
        folder: where its files are.
        config: the content of `adapter_config.json`.
        modules: what it adds, by the path of the module in the model.
        saved: tensors it replaces whole (PEFT's `modules_to_save`), by name in the model.
    """

    folder: Path
    config: Mapping[str, Any]
    modules: Mapping[str, LowRank]
    saved: Mapping[str, TensorInfo]

    @property
    def base(self) -> str | None:
        """The base that the adapter names, a folder or a Hub id."""
        name = self.config.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    @property
    def base_revision(self) -> str | None:
        """The Hub revision of the base that the adapter names."""
        revision = self.config.get("revision")
        return revision if isinstance(revision, str) and revision != "main" else None


def read_adapter(folder: Path) -> Adapter:
    """The adapter in a folder.

    Raises:
        CheckpointError: it is incomplete or damaged, or does more than LoRA and rsLoRA do, such
            as DoRA or trained biases.
    """
    config = read_json_object(folder / ADAPTER_CONFIG)
    _check_kind(folder, config)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        raise CheckpointError(
            f"{folder}: has only pickled weights (.bin); load it with PEFT and save it again"
            if pickled
            else f"{folder}: an adapter without {ADAPTER_WEIGHTS}"
        )
    stored = read_header(folder / ADAPTER_WEIGHTS)
    pairs, saved = _sort(folder, stored)
    modules = {path: _low_rank(folder, path, pair, config) for path, pair in pairs.items()}
    if not modules:
        raise CheckpointError(f"{folder}: the adapter has no LoRA weights")
    return Adapter(folder, config, modules, saved)


def match_tensors(adapter: Adapter, names: Iterable[str]) -> dict[str, str]:
    """The weight in a checkpoint of every module of an adapter.

    Names on disk may lack, or add, the outer words that the model in memory has.

    Args:
        adapter: the adapter.
        names: the tensors of the checkpoint.

    Raises:
        CheckpointError: a module has no weight in the checkpoint.
    """
    tails: dict[str, list[str]] = {}
    for name in names:
        words = name.split(".")
        for i in range(len(words)):
            tails.setdefault(".".join(words[i:]), []).append(name)
    return {path: _find(adapter, f"{path}.weight", tails) for path in adapter.modules}


def _find(adapter: Adapter, wanted: str, tails: Mapping[str, list[str]]) -> str:
    words = wanted.split(".")
    for i in range(len(words) - 1):
        found = tails.get(".".join(words[i:]), [])
        # Without its outer words a name must stand whole, or `mlp.weight` would match any layer.
        if i:
            found = [name for name in found if name == ".".join(words[i:])]
        if len(found) == 1:
            return found[0]
    raise CheckpointError(
        f"{adapter.folder}: adapts {clipped(repr(wanted))}, which the base does not have"
    )


def _check_kind(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{folder}: a {clipped(str(kind))} adapter; only LoRA can be merged")
    bias = config.get("bias", "none")
    if bias != "none":
        raise CheckpointError(
            f"{folder}: trains biases (bias: {clipped(str(bias))}); merge it into its base with "
            "PEFT's merge_and_unload first"
        )
    for key, what in _MORE_THAN_LORA.items():
        if config.get(key):
            raise CheckpointError(
                f"{folder}: {what} ({key}) is more than LoRA; merge it into its base with PEFT's "
                "merge_and_unload first"
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(("pissa", "olora", "corda", "loftq")):
        raise CheckpointError(
            f"{folder}: was initialised with {clipped(start)}, which changes the base too; save "
            "it again with PEFT's path_initial_model_for_weight_conversion"
        )


_MORE_THAN_LORA = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of the adapter",
    "use_qalora": "QALoRA",
    "target_parameters": "an adapter of bare parameters",
    "layer_replication": "repeating layers",
    "trainable_token_indices": "training single tokens",
    "megatron_config": "a Megatron adapter",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "routing between adapters",
}


def _sort(
    folder: Path, stored: Mapping[str, TensorInfo]
) -> tuple[dict[str, dict[str, TensorInfo]], dict[str, TensorInfo]]:
    """LoRA matrices by module and side, and the tensors that are saved whole."""
    pairs: dict[str, dict[str, TensorInfo]] = {}
    saved = {}
    for name, info in stored.items():
        found = KEY.fullmatch(name)
        if found:
            side = found["side"] + ("e" if found["embedding"] else "")
            pairs.setdefault(found["module"], {})[side] = info
        elif name.startswith("base_model.model.") and ".lora_" not in name:
            # PEFT stores an adapted embedding's own weight too, as its base_layer.
            bare = name.replace(".modules_to_save", "").replace(".base_layer", "")
            saved[bare.removeprefix("base_model.model.")] = info
        else:
            raise CheckpointError(
                f"{folder}: tensor {clipped(repr(name))} is not part of a LoRA adapter"
            )
    return pairs, saved


def _low_rank(
    folder: Path, path: str, pair: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> LowRank:
    embedding = "Ae" in pair or "Be" in pair
    a, b = (pair.get(side + ("e" if embedding else "")) for side in "AB")
    if a is None or b is None or len(pair) != 2:
        raise CheckpointError(f"{folder}: {clipped(repr(path))} has not one lora_A and one lora_B")
    shapes = f"lora_A {list(a.shape)}, lora_B {list(b.shape)}"
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise CheckpointError(f"{folder}: {clipped(repr(path))} does not fit together: {shapes}")
    if not {a.dtype, b.dtype} <= set(FLOAT_DTYPES):
        raise CheckpointError(f"{folder}: {clipped(repr(path))} is {a.dtype}, not floating point")
    rank = int(_number(folder, config, "r", path))
    if rank != a.shape[0]:
        raise CheckpointError(
            f"{folder}: {ADAPTER_CONFIG} gives {clipped(repr(path))} rank {rank}, but {shapes}"
        )
    alpha = _number(folder, config, "lora_alpha", path)
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(a, b, scaling, embedding or bool(config.get("fan_in_fan_out")))


def _number(folder: Path, config: Mapping[str, Any], key: str, path: str) -> float:
    """Rank or alpha of a module: the first pattern that matches decides, as in PEFT."""
    pattern = config.get("rank_pattern" if key == "r" else "alpha_pattern") or {}
    value = config.get(key)
    for expression, special in pattern.items() if isinstance(pattern, dict) else ():
        try:
            hit = re.match(rf"(.*\.)?({expression})$", path)
        except re.error:
            raise CheckpointError(
                f"{folder}: {clipped(repr(expression))} is not a regular expression"
            ) from None
        if hit:
            value = special
            break
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"{folder}: {ADAPTER_CONFIG} has no {key} for {clipped(repr(path))}")
    return value
