"""The safetensors files of a folder, with their index, and other files in their place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath, PureWindowsPath

from layerswap.checkpoint.given import AGAIN, INDEX, NOT_SAFETENSORS, SINGLE, check_link, other_kind
from layerswap.checkpoint.header import TensorInfo, read_header
from layerswap.checkpoint.remote import CONNECTIONS, RemoteFile, WeightFile
from layerswap.ground.errors import CheckpointError
from layerswap.ground.strict_json import quoted, read_json_object

NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
MOST_INDEXED = 500_000
"""Most tensors of a checkpoint; Kimi K2 has 208,000 in its quantised form."""

Find = Callable[[str], WeightFile]
"""Finds a weight file by name; raises FileNotFoundError, or returns a path that does not exist."""


def read_tensors(folder: Path, find: Find) -> dict[str, TensorInfo]:
    """Read the headers of all weights in a folder, checked against its index."""
    index = folder / INDEX
    try:
        single = find(SINGLE)
    except FileNotFoundError:
        single = folder / SINGLE
    if isinstance(single, Path):
        check_link(single)
    has_single, has_index = isinstance(single, RemoteFile) or single.exists(), index.exists()
    if has_single and has_index:
        raise CheckpointError(
            f"{folder}: has both {SINGLE} and {INDEX}; remove the one that is out of date"
        )
    if has_index:
        return _read_shards(folder, index, find)
    if has_single:
        return read_header(single)
    if names := sorted(path.name for path in folder.glob("*.safetensors")):
        whole = _whole_set(names)
        if whole:
            return {n: i for name in whole for n, i in read_header(folder / name).items()}
        why = f"has {names[0]} but neither {SINGLE} nor {INDEX}; "
        if names == ["consolidated.safetensors"]:
            why += "its names are not those of transformers: download model*.safetensors"
        elif any(map(NUMBERED.fullmatch, names)):
            why += AGAIN
        elif len(names) == 1:
            why += f"if it is the whole model, rename it to {SINGLE}"
        else:
            why += "the index says which of its files are the model, so download or save it too"
    else:
        why = next((why for form, why in NOT_SAFETENSORS.items() if any(folder.glob(form))), "")
        why = why or f"has no weights; {other_kind(folder)}"
    raise CheckpointError(f"{folder}: {why}")


def _whole_set(names: Iterable[str]) -> list[str]:
    """Return the shard names of the only complete set, also without an index; else none."""
    sets: dict[tuple[str, int], dict[int, str]] = {}
    for match in filter(None, map(NUMBERED.fullmatch, names)):
        key = match["stem"], int(match["count"])
        sets.setdefault(key, {})[int(match["number"])] = match[0]
    whole = [parts for (_, n), parts in sets.items() if [*parts] == [*range(1, 1 + n)]]
    return [*whole[0].values()] if len(whole) == 1 else []


def _read_shards(folder: Path, index: Path, find: Find) -> dict[str, TensorInfo]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    if len(weight_map) > MOST_INDEXED:
        raise CheckpointError(f"{index}: lists more than {MOST_INDEXED:,} tensors")
    files = weight_map.values()
    listed = Counter(file if isinstance(file, str) else None for file in files)
    names = sorted(_shard_name(file, index) for file in listed)

    def read(name: str) -> dict[str, TensorInfo]:
        try:
            file = find(name)
            if isinstance(file, Path) and not file.is_file():
                raise FileNotFoundError
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder}: shard {name}, named by {INDEX}, is missing; {AGAIN}"
            ) from None
        header = read_header(file)
        for tensor in header.values() if len(header) > listed[name] else ():
            _check_indexed(tensor, weight_map.get(tensor.name), index)
        return header

    tensors: dict[str, TensorInfo] = {}
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        headers = list(pool.map(read, names))
    for tensor in (tensor for header in headers for tensor in header.values()):
        _check_indexed(tensor, weight_map.get(tensor.name), index)
        tensors[tensor.name] = tensor
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        raise CheckpointError(
            f"{index}: lists {quoted(absent[0])} in {weight_map[absent[0]]}, which does not hold it"
            + (f" (and {len(absent) - 1} more)" if len(absent) > 1 else "")
            + "; take it out of the index, or download both again"
        )
    return tensors


def _shard_name(value: object, index: Path) -> str:
    """Check that a value of a weight_map is the bare name of a safetensors file."""
    if not isinstance(value, str):
        raise CheckpointError(f"{index}: weight_map has a value that is not text")
    if not value.endswith(".safetensors") or not value.isprintable():
        raise CheckpointError(f"{index}: {quoted(value)} is not the name of a safetensors file")
    # By the rules of both systems: a backslash or a drive must not mean different files.
    if value != PurePosixPath(value).name or value != PureWindowsPath(value).name:
        raise CheckpointError(f"{index}: {quoted(value)} points outside its folder")
    return value


def _check_indexed(tensor: TensorInfo, listed: object, index: Path) -> None:
    name = quoted(tensor.name)
    if listed is None:
        raise CheckpointError(f"{tensor.file}: holds {name}, which {index.name} lacks")
    if listed != tensor.file.name:
        raise CheckpointError(f"{tensor.file}: holds {name}, which {index.name} puts in {listed}")
