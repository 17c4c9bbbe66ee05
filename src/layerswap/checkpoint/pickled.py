"""Pickled weights (`.bin`), converted to safetensors once, and only if the user allows it.

`torch.load(weights_only=True)` accepts only tensors and plain containers, so that no code in the
file runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from layerswap.checkpoint.commit import atomic_folder
from layerswap.checkpoint.header import DTYPE_BITS, TensorInfo, header_bytes, read_header
from layerswap.checkpoint.read import torch_dtype
from layerswap.checkpoint.strict_json import clipped, open_source, quoted, read_json_object
from layerswap.errors import CheckpointError, LayerswapError
from layerswap.versions import need_extras

if TYPE_CHECKING:
    import torch

PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
MANIFEST = "converted.json"
"""Sources and sizes of the converted files."""


def read_pickled(folder: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a checkpoint with only pickled weights.

    The files are converted to safetensors in the cache (`$LAYERSWAP_CACHE`, else
    `~/.cache/layerswap`), one at a time. A conversion is reused as long as the pickled files stay
    the same.
    """
    need_extras("reading pickled weights", "models")
    files = _files(folder)
    key = hashlib.sha256(json.dumps(_stamps(files)).encode()).hexdigest()[:24]
    target = _cache() / "converted" / key
    try:
        if not _is_whole(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_folder(target, marker=MANIFEST, overwrite=target.exists()) as draft:
                sizes = {file.name: _convert(file, draft) for file in files}
                manifest = {"made_from": _stamps(files), "sizes": sizes}
                (draft / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written ({error.strerror})") from None
    except LayerswapError as error:
        # Another process may have converted the same files in the meantime.
        if not _is_whole(target):
            raise CheckpointError(str(error)) from None
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(target / f"{file.stem}.safetensors").items():
            if name in tensors:
                raise CheckpointError(f"{folder}: two files hold {quoted(name)}")
            tensors[name] = info
    return tensors


def _files(folder: Path) -> list[Path]:
    index = folder / PICKLED_INDEX
    if not index.is_file():
        return [folder / PICKLED]
    weight_map = read_json_object(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names:
        raise CheckpointError(f"{index}: weight_map lists no files")
    for name in names:
        if not isinstance(name, str) or name != PurePosixPath(name).name or "\\" in name:
            raise CheckpointError(f"{index}: {quoted(name)} points outside its folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: shard {name}, named by {index.name}, is missing")
    return [folder / name for name in sorted(set(names))]


def _stamps(files: list[Path]) -> list[list[str | int]]:
    """Identify files by path, size, time and inode."""
    stats = [(file.resolve(), file.stat()) for file in files]
    return [[str(path), s.st_size, s.st_mtime_ns, s.st_ino] for path, s in stats]


def _cache() -> Path:
    own = os.environ.get("LAYERSWAP_CACHE")
    common = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own).expanduser() if own else Path(common).expanduser() / "layerswap"


def _is_whole(target: Path) -> bool:
    """True if all files of a conversion have their size: an existing folder proves nothing."""
    try:
        sizes = read_json_object(target / MANIFEST).get("sizes")
        return isinstance(sizes, dict) and all(
            (target / f"{Path(name).stem}.safetensors").stat().st_size == size
            for name, size in sizes.items()
        )
    except (OSError, CheckpointError):
        return False


def _convert(file: Path, folder: Path) -> int:
    """Write the tensors of one pickled file as safetensors; return the new file's bytes."""
    import torch

    dtypes = {torch_dtype(dtype): dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0}
    weights = _load(file)
    for name, tensor in weights.items():
        if tensor.dtype not in dtypes or tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(f"{file}: {quoted(name)} is no plain tensor")
    tensors = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    header = header_bytes(
        [(name, dtypes[t.dtype], tuple(t.shape), t.nbytes) for name, t in tensors.items()],
        {"format": "pt"},
    )
    path = folder / f"{file.stem}.safetensors"
    with path.open("wb") as out:
        out.write(header)
        for tensor in tensors.values():
            if tensor.nbytes:
                out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return path.stat().st_size


def _load(file: Path) -> Mapping[str, torch.Tensor]:
    import torch

    with open_source(file):
        pass  # torch opens it by its name
    try:
        try:
            weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before torch 1.6 cannot be mapped
            weights = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged stream can make pickle raise anything
        reason = _reason(error)
        raise CheckpointError(f"{file}: cannot be read as tensors only ({reason})") from None
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{file}: holds no tensors by name")
    for name, value in weights.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{file}: {quoted(name)} is a {type(value).__name__}, not a tensor"
            )
    return weights


def _reason(error: Exception) -> str:
    """Return torch's reason, without its advice to load the file in a way that can run code."""
    text = str(error).strip() or type(error).__name__
    refused = re.search(r"GLOBAL (\S+)", text)
    if refused:
        return f"it asks for {clipped(refused[1])}"
    if "weights_only" in text:
        return "it holds more than tensors and plain containers"
    return clipped(text.splitlines()[0])
