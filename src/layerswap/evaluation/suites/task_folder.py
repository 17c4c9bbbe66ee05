"""Tasks as files: YAML, rows and the functions they name, which lm-eval itself can run too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from layerswap.errors import EvaluationError


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
