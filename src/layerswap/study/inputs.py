"""Inputs of a study: models, data and files as absolute paths, and their fingerprints."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from layerswap.checkpoint import fingerprint, open_checkpoint
from layerswap.ground.errors import RecipeError
from layerswap.training.expert.spec import Data, Files

PATTERN = frozenset("*?[")
TOKEN = re.compile(r"[^\s'\"\[\]{},]+")
"""A possible path in a YAML, which may have tags of lm-eval."""
READER = re.compile(r"^dataset_path: *(\S+)", re.MULTILINE)
"""The reader of a task's data: a format of files, or a data set of the Hub."""


def model_of(source: str, folder: Path, key: str) -> str:
    """Resolve a model to an absolute folder or a Hub id; errors name `key`."""
    local = folder / Path(source).expanduser()
    there = _exists(local) and local.is_dir()
    if source.startswith((".", "/", "~")) and not there:
        raise RecipeError(f"{key}: {local}: no such folder")
    return str(local.absolute()) if there else source


def layers_of(base: str) -> int:
    """The layers of a base, whose headers are read once."""
    return _layers(base, Path(base).stat().st_mtime_ns if Path(base).is_dir() else 0)


@cache
def _layers(base: str, changed: int) -> int:
    return open_checkpoint(base).layers


def resolve_data(data: Data, folder: Path) -> Any:
    """Resolve existing data to absolute paths: a folder, or files by their part."""
    if isinstance(data, Files):
        names = data.model_dump(exclude_none=True)
        return {part: existing_path(folder / name) for part, name in names.items()}
    if not (_exists(folder / data) and (folder / data).is_dir()):
        raise RecipeError(f"data: {folder / data}: no such folder or ready mix")
    return existing_path(folder / data)


def existing_path(path: Path) -> str:
    """Resolve a file, a folder or a pattern to an absolute path; refuse a missing one."""
    path = path.expanduser()
    exists = any(files_of(path)) if PATTERN & set(path.name) else _exists(path)
    if not exists:
        raise RecipeError(f"{path}: no such {'file' if path.suffix else 'folder'}")
    return str(path.absolute())


def _exists(path: Path) -> bool:
    """True if a path exists; False for a path that the file system cannot hold."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def fingerprints(*paths: str | None) -> dict[str, str]:
    """Fingerprints of every file of these paths, folders or patterns; a Hub id has none."""
    return {
        str(file): _fingerprint(file, file.stat().st_size, file.stat().st_mtime_ns)
        for path in paths
        if path is not None
        for file in files_of(Path(path))
    }


def folder_fingerprints(*paths: str | None) -> dict[str, str]:
    """Compute one fingerprint per folder, from names and files; missing folders have none."""
    found = {}
    for path in paths:
        if path is not None and Path(path).is_dir():
            files = fingerprints(path).items()
            lines = "\n".join(
                f"{Path(name).relative_to(path).as_posix()} {digest}" for name, digest in files
            )
            found[path] = hashlib.sha256(lines.encode()).hexdigest()
    return found


def task_fingerprints(*folders: str) -> dict[str, str]:
    """Fingerprints of folders of lm-eval tasks, and of other files that their YAMLs name."""
    named = {
        token
        for text in _yaml_in(folders)
        for token in TOKEN.findall(text)
        if "/" in token and Path(token).is_file()
    }
    return folder_fingerprints(*folders) | fingerprints(*sorted(named))


def _yaml_in(folders: Iterable[str | Path]) -> Iterator[str]:
    """The texts of the YAML files in some folders."""
    for path in (file for folder in folders for file in files_of(Path(folder))):
        if path.suffix in (".yaml", ".yml"):
            yield path.read_text("utf-8", errors="replace")


def mix_fingerprints(text: str, folder: Path) -> dict[str, str]:
    """Fingerprints of the local files that a mix reads."""
    return fingerprints(*(str(folder / path) for path in _paths(yaml.safe_load(text))))


def _paths(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        if isinstance(data.get("path"), str):
            yield data["path"]
        if isinstance(data.get("parallel"), dict):
            yield from map(str, data["parallel"].values())
        data = list(data.values())
    if isinstance(data, list):
        for value in data:
            yield from _paths(value)


@cache
def _fingerprint(file: Path, size: int, changed: int) -> str:
    """Cached, since most steps of a plan read the same files."""
    return fingerprint(file)


def files_of(path: Path) -> Iterator[Path]:
    """List the files of a path, a folder or a pattern, in order."""
    if PATTERN & set(path.name):
        files = list(path.parent.glob(path.name))
    elif path.is_dir():
        files = [file for file in path.rglob("*") if "__pycache__" not in file.parts]
    else:
        files = [path]
    yield from sorted(file for file in files if file.is_file())


def own_readers(include: Iterable[Path]) -> bool:
    """True if all tasks of some folders read local files, and no data set of the Hub."""
    readers = [reader for text in _yaml_in(include) for reader in READER.findall(text)]
    return bool(readers) and {*readers} <= {"json", "csv", "parquet", "text"}
