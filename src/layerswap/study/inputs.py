"""Inputs of a study: their absolute paths, and fingerprints of their files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from layerswap.checkpoint import fingerprint
from layerswap.errors import RecipeError
from layerswap.study.spec import TrainingRun
from layerswap.training.expert.spec import Data, Files

PATTERN = frozenset("*?[")
TOKEN = re.compile(r"[^\s'\"\[\]{},]+")
"""A possible path in a YAML, which may have tags of lm-eval."""


def model_of(source: str, folder: Path, key: str) -> str:
    """A model: the absolute path of a local folder, or a Hub id.

    Args:
        source: as the study has it.
        folder: paths are relative to this folder.
        key: the key of the study, for the message.
    """
    local = folder / Path(source).expanduser()
    there = exists(local) and local.is_dir()
    if source.startswith((".", "/", "~")) and not there:
        raise RecipeError(f"{key}: {local}: no such folder")
    return str(local.absolute()) if there else source


def resolve_data(data: Data, folder: Path) -> Any:
    """Absolute paths of data that exist: a folder, or files by their part."""
    if isinstance(data, Files):
        names = data.model_dump(exclude_none=True)
        return {part: existing_path(folder / name) for part, name in names.items()}
    if not (exists(folder / data) and (folder / data).is_dir()):
        raise RecipeError(f"data: {folder / data}: no such folder or ready mix")
    return existing_path(folder / data)


def exists(path: Path) -> bool:
    """True if a path exists; False for a path that the file system cannot hold."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def existing_path(path: Path) -> str:
    """The absolute path of a file, a folder, or a pattern of files; refuses a missing one."""
    path = path.expanduser()
    found = any(files_of(path)) if PATTERN & set(path.name) else exists(path)
    if not found:
        raise RecipeError(f"{path}: no such {'file' if path.suffix else 'folder'}")
    return str(path.absolute())


def with_recipe(run: TrainingRun, folder: Path) -> TrainingRun:
    """The run with the absolute path of its recipe of places, if it has one."""
    if run.train is None or run.train.recipe is None:
        return run
    places = run.train.model_copy(update={"recipe": existing_path(folder / run.train.recipe)})
    return run.model_copy(update={"train": places})


def fingerprints(*paths: str | None) -> dict[str, str]:
    """Fingerprints of every file of these paths, folders or patterns; a Hub id has none."""
    return {
        str(file): _fingerprint(file, file.stat().st_size, file.stat().st_mtime_ns)
        for path in paths
        if path is not None
        for file in files_of(Path(path))
    }


def folder_fingerprint(path: str | None) -> dict[str, str]:
    """One fingerprint of all files of a folder, by their names in it; a missing folder has none."""
    if path is None or not Path(path).is_dir():
        return {}
    lines = [f"{Path(name).relative_to(path)} {one}" for name, one in fingerprints(path).items()]
    return {str(path): hashlib.sha256("\n".join(lines).encode()).hexdigest()}


def task_fingerprints(folder: str) -> dict[str, str]:
    """Fingerprints of a folder of lm-eval tasks, and of other files that its YAMLs name."""
    named = {
        token
        for path in files_of(Path(folder))
        if path.suffix in (".yaml", ".yml")
        for token in TOKEN.findall(path.read_text("utf-8", errors="replace"))
        if "/" in token and Path(token).is_file()
    }
    return folder_fingerprint(folder) | fingerprints(*sorted(named))


def mix_fingerprints(text: str, folder: Path) -> dict[str, str]:
    """Fingerprints of the local files that a mix reads."""
    return fingerprints(*(str(folder / one) for one in _paths(yaml.safe_load(text))))


def _paths(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        if isinstance(data.get("path"), str):
            yield data["path"]
        data = list(data.values())
    if isinstance(data, list):
        for one in data:
            yield from _paths(one)


@cache
def _fingerprint(file: Path, size: int, changed: int) -> str:
    """Cached, since most steps of a plan read the same files."""
    return fingerprint(file)


def files_of(path: Path) -> Iterator[Path]:
    """The files of a path, a folder or a pattern, in order."""
    if PATTERN & set(path.name):
        found = list(path.parent.glob(path.name))
    elif path.is_dir():
        found = [one for one in path.rglob("*") if "__pycache__" not in one.parts]
    else:
        found = [path]
    yield from sorted(one for one in found if one.is_file())
