"""Finds published benchmark files, and writes lm-eval tasks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerswap.errors import EvaluationError

VARIABLE = "LAYERSWAP_DATA"
"""Environment variable that stands for `--data`."""
DEPTH = 3
"""How deep below the folder a file may lie."""


class DataFolder:
    """Finds published files at any depth of a folder.

    Args:
        root: the folder; None where everything comes from the Hub.

    Raises:
        EvaluationError: the folder is not there.
    """

    def __init__(self, root: Path | None) -> None:
        if root is not None and not root.is_dir():
            raise EvaluationError(f"--data {root}: no such folder")
        self.root = root

    @classmethod
    def given(cls, root: Path | None) -> DataFolder:
        """The folder on the command line, or the one in the environment, or none."""
        named = os.environ.get(VARIABLE)
        return cls(root if root is not None else Path(named) if named else None)

    def find(self, *names: str) -> Path | None:
        """The first file or folder of one of these names, the least deep first."""
        if self.root is None:
            return None
        for name in names:
            for depth in range(DEPTH + 1):
                found = sorted(self.root.glob("/".join(["*"] * depth + [name])))
                if found:
                    return found[0]
        return None

    def snapshot(self, name: str) -> Path | None:
        """A downloaded copy of a data set of the Hub, as `<owner>/<name>` or `<name>`."""
        return self.find(name, name.rsplit("/", 1)[-1])


def hub_rows(
    name: str, config: str | None, split: str, data: DataFolder, *, wanted: str
) -> list[dict[str, Any]]:
    """The rows of a split of a data set, from a downloaded copy or from the Hub.

    Args:
        name: `<owner>/<name>` on the Hub.
        config: its configuration.
        split: its split.
        data: where a copy may be.
        wanted: for the message: the files that would do instead, and where they come from.

    Raises:
        EvaluationError: it cannot be had.
    """
    copy = data.snapshot(name)
    try:
        return list(_load(copy, name, config, split))
    except Exception as error:  # transports and parsers share no class of error
        why = " ".join(str(error).split())[:160]
        where = str(copy) if copy else f"{name} on the Hub"
        raise EvaluationError(
            f"{where}: cannot be read ({type(error).__name__}: {why}); give {wanted} in --data "
            f"DIR, or in {VARIABLE}"
        ) from None


def _load(copy: Path | None, name: str, config: str | None, split: str) -> Iterator[dict[str, Any]]:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    if copy is not None:
        yield from load_dataset("parquet", data_files=_parquet(copy, config, split), split="train")
        return
    try:
        yield from load_dataset(name, config, split=split)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        # The Hub keeps a copy in parquet of every data set that is a script.
        yield from load_dataset(name, config, split=split, revision="refs/convert/parquet")


def _parquet(copy: Path, config: str | None, split: str) -> list[str]:
    """The parquet files of a split, as the Hub lays them out: by folder, or by name."""
    folders = [copy / (config or ""), copy / "data" / (config or ""), copy / (config or "") / split]
    patterns: Sequence[str] = (f"{split}-*.parquet", f"{split}.parquet", f"{split}/*.parquet")
    for folder in folders:
        for pattern in patterns:
            files = sorted(folder.glob(pattern))
            if files:
                return [str(file) for file in files]
    raise FileNotFoundError(f"no parquet files of {config or 'the data set'}, split {split}")


class Function(str):
    """A function in a module beside the task's YAML: `module.name`."""


class TaskFolder:
    """A folder of tasks that lm-eval reads with `--include_path`.

    Args:
        root: the folder; it is made.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.root.mkdir(parents=True, exist_ok=True)

    def module(self, name: str, source: str) -> None:
        """Write a module that tasks of this folder take functions from."""
        self._write(f"{name}.py", source)

    def rows(self, name: str, splits: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, Any]:
        """Write rows as JSON Lines; what a task needs to read them."""
        files = {}
        for split, rows in splits.items():
            lines = (json.dumps(row, ensure_ascii=False) for row in rows)
            files[split] = str(self._write(f"{name}.{split}.jsonl", "\n".join(lines) + "\n"))
        return {
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": files},
        }

    def task(self, name: str, config: Mapping[str, Any]) -> str:
        """Write a task, or a group with its key `group`; its name."""
        import yaml

        class Dumper(yaml.SafeDumper):
            """Writes functions with lm-eval's tag."""

        Dumper.add_representer(
            Function, lambda dumper, value: dumper.represent_scalar("!function", str(value))
        )
        named = dict(config) if "group" in config else {"task": name, **config}
        text = yaml.dump(named, Dumper=Dumper, sort_keys=False, allow_unicode=True)
        self._write(f"{name}.yaml", text)
        return name

    def _write(self, name: str, text: str) -> Path:
        path = self.root / name
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
        return path


def builtin(relative: str) -> str:
    """The path of one of lm-eval's own YAML files, to include.

    Raises:
        EvaluationError: lm-eval is not installed, or has it no more.
    """
    try:
        import lm_eval
    except ImportError:
        raise EvaluationError('tasks need lm-eval: pip install "layerswap[eval]"') from None
    path = Path(str(lm_eval.__file__)).parent / "tasks" / relative
    if not path.is_file():
        raise EvaluationError(f"this version of lm-eval has no {relative}")
    return str(path)
