"""LoRA and rsLoRA adapters on disk, opened from configuration and headers only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.header import TensorInfo, read_header
from layerswap.checkpoint.names import canonical, in_memory, without_training_words
from layerswap.checkpoint.places import LONGEST_NAME, compile_pattern
from layerswap.checkpoint.read import FLOAT_DTYPES, read_matrix
from layerswap.ground.errors import CheckpointError, error_context
from layerswap.ground.strict_json import clipped, quoted, read_json_object

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Factors = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PICKLED_ADAPTER = "adapter_model.bin"
ZERO3 = (
    "DeepSpeed ZeRO-3 writes such files; save again with "
    "`stage3_gather_16bit_weights_on_model_save` or convert its checkpoint with zero_to_fp32.py"
)
KEY = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])"
    r"(?:\.default)?(?:\.weight)?"
)
TINKER = re.compile(r"(?:^|\.)unembed_tokens$|\.in_proj_[qkv]$|\.experts\.w[123]$")
"""Matches names of modules in Tinker's format of adapters."""
BLOCK_ROWS = 256
"""Rows of a delta to multiply together. The grid is fixed, so that a value does not depend on the
chunk of its tensor that is read."""
MERGE_FIRST = "merge it into its base with PEFT's merge_and_unload first"
MORE_THAN_LORA = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of the adapter",
    "use_qalora": "QALoRA",
    "target_parameters": "an adapter of bare parameters",
    "layer_replication": "repeating layers",
    "trainable_token_indices": "training single tokens",
    "megatron_config": "a Megatron adapter",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "routing between adapters",
    "kasa_config": "KaSA",
    "use_bdlora": "block-diagonal LoRA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
"""Settings of PEFT that are refused, with their names in a message."""
UNMERGED = "PEFT cannot merge it into its base either"
REMEDIES = {
    "lora_bias": f"{MERGE_FIRST}, which works only if the adapted modules have biases",
    "layer_replication": "PEFT does not merge it right, since the repeated layers share weights",
    "alora_invocation_tokens": UNMERGED,
}
"""What to do with settings of `MORE_THAN_LORA` for which `MERGE_FIRST` is wrong."""
NOT_MERGEABLE = frozenset(
    {
        "ADAPTION_PROMPT", "CARTRIDGE", "CPT", "LILY", "MULTITASK_PROMPT_TUNING", "POLY",
        "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "SHADOW", "XLORA",
    }
)  # fmt: skip
"""Types of adapters that PEFT cannot merge into a base."""
STARTS = frozenset({"gaussian", "orthogonal", "eva", "mica"})
"""Initialisations that do not change the base. Others may, so they are refused."""
REPEATED = ("pissa", "olora")
"""Initialisations that PEFT computes anew, and exactly, when it loads the adapter."""
CONVERT = (
    "save it again with PEFT's path_initial_model_for_weight_conversion, which needs the adapter "
    "as it was before its training"
)


@dataclass(frozen=True)
class LowRank:
    """The delta of one weight: `scaling * B @ A` (Hu et al., 2021, equation 3).

    `a` is [rank, in] and `b` is [out, rank]. `scaling` is `alpha / rank`, or `alpha / sqrt(rank)`
    with rsLoRA. `transposed`: the weight is stored as [in, out] (Conv1D layers, embeddings).
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
        """The shape of the weight."""
        shape = self.b.shape[0], self.a.shape[1]
        return shape[::-1] if self.transposed else shape

    def factors(self) -> Factors:
        """Read `left` and `right`, whose product is the delta in the weight's layout; float64."""
        import numpy as np

        a, b = read_matrix(self.a), read_matrix(self.b)
        left, right = (a.T, b.T) if self.transposed else (b, a)
        return np.ascontiguousarray(left) * self.scaling, np.ascontiguousarray(right)

    def elements(self, factors: Factors, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Compute elements [start, stop) of the delta in row-major order, as a float32 vector."""
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
        folder: folder with the adapter's files.
        config: the content of `adapter_config.json`.
        modules: the deltas, by the path of the module in the model.
        saved: tensors that are replaced whole (PEFT's `modules_to_save`), by name in the model.
    """

    folder: Path
    config: Mapping[str, Any]
    modules: Mapping[str, LowRank]
    saved: Mapping[str, TensorInfo]


def read_adapter(folder: Path) -> Adapter:
    """Read a LoRA or rsLoRA adapter; refuse other kinds, such as DoRA or trained biases."""
    config = read_json_object(folder / ADAPTER_CONFIG)
    with error_context(str(folder)):
        _check_kind(config)
        if not (folder / ADAPTER_WEIGHTS).is_file():
            if (folder / PICKLED_ADAPTER).is_file():
                raise CheckpointError(
                    "has only pickled weights (.bin); load it with PEFT and save it again"
                )
            raise CheckpointError(f"the adapter has no {ADAPTER_WEIGHTS}")
    tensors = read_header(folder / ADAPTER_WEIGHTS)
    with error_context(str(folder)):
        pairs, saved = _sort(tensors)
        modules = {path: _low_rank(path, pair, config) for path, pair in pairs.items()}
        if not modules:
            why = "" if tensors else f"; {ZERO3}"
            raise CheckpointError(f"the adapter has no LoRA weights{why}")
    return Adapter(folder, config, modules, saved)


def _check_kind(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind is None and config.keys() & {"fine_tune_type", "lora_parameters", "lora_layers"}:
        raise CheckpointError("an adapter of MLX; fuse it into its base with mlx_lm.fuse")
    if kind != "LORA":
        remedy = UNMERGED if kind in NOT_MERGEABLE else MERGE_FIRST
        why = f"; {remedy}" if isinstance(kind, str) else ""
        raise CheckpointError(f"peft_type is {clipped(str(kind))}, not LORA{why}")
    bias = config.get("bias", "none")
    if bias != "none":
        raise CheckpointError(f"trains biases (bias: {clipped(str(bias))}); {MERGE_FIRST}")
    for key, label in MORE_THAN_LORA.items():
        if config.get(key) or (key.endswith("_config") and config.get(key) == {}):
            raise CheckpointError(
                f"{label} ({key}) is more than LoRA; {REMEDIES.get(key, MERGE_FIRST)}"
            )
    start = config.get("init_lora_weights")
    if not (start is None or isinstance(start, bool) or str(start).lower() in STARTS):
        remedy = MERGE_FIRST if str(start).lower() in REPEATED else CONVERT
        raise CheckpointError(
            f"was initialised with {clipped(str(start))}, which may change the base too; {remedy}"
        )


def _sort(
    tensors: Mapping[str, TensorInfo],
) -> tuple[dict[str, dict[str, TensorInfo]], dict[str, TensorInfo]]:
    """Separate LoRA matrices, by module and side, from tensors that are saved whole."""
    pairs: dict[str, dict[str, TensorInfo]] = {}
    saved = {}
    for stored, info in tensors.items():
        name = without_training_words(stored)
        match = KEY.fullmatch(name)
        if match and TINKER.search(match["module"]):
            raise CheckpointError(
                f"{quoted(match['module'])} is a name in Tinker's format of adapters; convert the "
                "adapter with tinker_cookbook.weights.build_lora_adapter"
            )
        if match:
            side = match["side"] + ("e" if match["embedding"] else "")
            pairs.setdefault(match["module"], {})[side] = info
        elif ".original_module." in name:  # the base's, beside a resized one that is saved whole
            continue
        elif name.startswith("base_model.model.") and ".lora_" not in name:
            saved[saved_name(name)] = info
        else:
            raise CheckpointError(f"tensor {quoted(name)} is not part of a LoRA adapter")
    return pairs, saved


def saved_name(name: str) -> str:
    """Return a whole saved tensor's name in the model.

    PEFT also stores the own weight of an adapted embedding, as its base_layer.
    """
    bare = without_training_words(name).replace(".modules_to_save", "").replace(".base_layer", "")
    return bare.removeprefix("base_model.model.")


def _low_rank(path: str, pair: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> LowRank:
    embedding = "Ae" in pair or "Be" in pair
    a, b = (pair.get(side + ("e" if embedding else "")) for side in "AB")
    if a is None or b is None or len(pair) != 2:
        raise CheckpointError(f"{quoted(path)} needs exactly one lora_A and one lora_B")
    if (0,) in (a.shape, b.shape):
        raise CheckpointError(f"{quoted(path)} has empty matrices; {ZERO3}")
    shapes = f"lora_A {list(a.shape)}, lora_B {list(b.shape)}"
    if len(a.shape) > 2 and len(a.shape) == len(b.shape):
        raise CheckpointError(f"{quoted(path)} is a convolution, {shapes}; {MERGE_FIRST}")
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise CheckpointError(f"{quoted(path)}: shapes do not fit together, {shapes}")
    if not {a.dtype, b.dtype} <= set(FLOAT_DTYPES):
        raise CheckpointError(f"{quoted(path)} is {a.dtype}, not floating point")
    rank = int(_number(config, "r", path))
    if rank != a.shape[0]:
        raise CheckpointError(f"{ADAPTER_CONFIG} gives {quoted(path)} rank {rank}, but {shapes}")
    alpha = _number(config, "lora_alpha", path)
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(a, b, scaling, embedding or bool(config.get("fan_in_fan_out")))


def _number(config: Mapping[str, Any], key: str, path: str) -> float:
    """Return rank or alpha of a module; the first matching pattern decides, as in PEFT."""
    patterns = config.get("rank_pattern" if key == "r" else "alpha_pattern") or {}
    value = config.get(key)
    for expression, special in patterns.items() if isinstance(patterns, dict) else ():
        try:
            compile_pattern(expression)
        except ValueError as error:
            raise CheckpointError(f"{quoted(expression)} cannot be used: {error}") from None
        if len(path) <= LONGEST_NAME and re.match(rf"(.*\.)?({expression})$", path):
            value = special
            break
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= (key == "r"):
        raise CheckpointError(f"{ADAPTER_CONFIG} has no {key} for {quoted(path)}")
    return value


def match_tensors(
    adapter: Adapter, names: Iterable[str], model_type: object = None
) -> dict[str, str]:
    """Find the stored weight of every module of an adapter among the tensors of a checkpoint.

    The modules have their names in memory. Those on disk may have other wrappers, other words, or
    hold the weights of several modules.
    """
    by_core: dict[str, list[str]] = {}
    for name in names:
        for core in {canonical(name), *in_memory(name, model_type)}:
            by_core.setdefault(core, []).append(name)
    found = {path: by_core.get(canonical(f"{path}.weight"), []) for path in adapter.modules}
    for path, stored in found.items():
        if len(stored) != 1:
            raise CheckpointError(
                f"{adapter.folder}: adapts {quoted(f'{path}.weight')}, which the base does not have"
            )
    return {path: stored[0] for path, stored in found.items()}
