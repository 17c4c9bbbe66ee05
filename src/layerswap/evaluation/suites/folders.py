"""Reads published benchmark files, and writes lm-eval tasks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

from layerswap.ground.errors import EvaluationError, one_line
from layerswap.ground.system import sorted_paths, unusable_name
from layerswap.reading.origins import Origin, read_files, read_hub

Rows = list[dict[str, Any]]
"""Rows of a table by the names of its columns."""
VARIABLE = "LAYERSWAP_DATA"
"""Environment variable for the default of `--data`."""
DEPTH = 3
"""Levels of subfolders that are searched for a file."""


class NotHereError(EvaluationError):
    """Data that are missing on this machine when downloads are not allowed."""


@dataclass(frozen=True)
class DataFolder:
    """Files of a published data set, found to the depth `DEPTH` below the root; none without it."""

    root: Path | None
    beside: Path | None = None  # folder of a benchmark's own YAML, which is looked into first
    fetch: bool = True  # false if nothing may be fetched from the Hub
    translated: str | None = None  # a table whose rows replace the test documents

    def __post_init__(self) -> None:
        if self.root is not None and not self.root.is_dir():
            raise EvaluationError(f"--data {self.root}: no such folder")

    @classmethod
    def given(cls, root: Path | None, **settings: Any) -> DataFolder:
        """Open the folder of --data, else of $LAYERSWAP_DATA, else none."""
        default = os.environ.get(VARIABLE)
        return cls(root if root is not None else Path(default) if default else None, **settings)

    def of(self, benchmark: Path | None) -> DataFolder:
        """The same folder for a benchmark whose YAML is a file; None for a shipped one."""
        return replace(self, beside=benchmark and benchmark.parent)

    def find(self, *names: str) -> Path | None:
        """Find the first file or folder with one of the names, the shallowest first."""
        beside = (self.beside / name for name in names if self.beside is not None)
        below = (path for name in names if self.root is not None for depth in range(DEPTH + 1)
                 for path in sorted(self.root.glob("/".join(["*"] * depth + [name]))))  # fmt: skip
        return next(chain(filter(Path.exists, beside), below), None)

    def snapshot(self, name: str) -> Path | None:
        """Find a downloaded copy of a Hub data set, under `<owner>/<name>` or `<name>`."""
        return self.find(name, name.rsplit("/", 1)[-1])


def hub_rows(name: str, config: str | None, split: str, data: DataFolder, *, wanted: str) -> Rows:
    """Read a split of a Hub data set, from a downloaded copy or from the Hub.

    `wanted` names, for the message, the files that replace the data set.
    """
    copy = data.snapshot(name)
    if copy is None and not data.fetch:
        raise NotHereError(f"{name} is not on this machine; it will be read from the Hub")
    try:
        origin = Origin(id=name, config=config, split=split)
        rows = read_files(_parquet(copy, config, split), origin) if copy else read_hub(origin)
        found: Rows = rows.to_list()
        return found
    except Exception as error:  # transports and parsers share no class of error
        why = one_line(error, 160)
        where = str(copy) if copy else f"{name} on the Hub"
        raise EvaluationError(
            f"{where}: cannot be read ({type(error).__name__}: {why}); put {wanted} into the "
            f"folder of --data or {VARIABLE}"
        ) from None


def _parquet(copy: Path, config: str | None, split: str) -> list[str]:
    """Find the Parquet files of a split in the Hub's layouts: by folder, or by name."""
    folders = [copy / (config or ""), copy / "data" / (config or ""), copy / (config or "") / split]
    patterns: Sequence[str] = (f"{split}-*.parquet", f"{split}.parquet", f"{split}/*.parquet")
    found = (sorted_paths(folder.glob(pattern)) for folder in folders for pattern in patterns)
    if files := next(filter(None, found), None):
        return [str(file) for file in files]
    raise FileNotFoundError(f"no Parquet files of {config or 'the data set'}, split {split}")


FUNCTION = "!function "
"""Beginning of a text that names a function in a module beside the task's YAML: `module.name`."""


class Verbatim(str):
    """A text from a user's file, written to YAML as text even if it begins with `!function`."""


WRITTEN: set[Path] = set()
"""Task files that this process has written, or found as it would write them."""


class TaskFolder:
    """A folder of tasks that lm-eval reads with `--include_path`; created if missing."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.root.mkdir(parents=True, exist_ok=True)

    def module(self, name: str, source: str) -> None:
        """Write a module with functions for the tasks of the folder."""
        self._write(f"{name}.py", source.encode())

    def rows(self, name: str, splits: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, str]:
        """Write the rows of a task as Parquet; return the file of each split.

        From JSON the `datasets` library would read a date as a time, and so change the text.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.Table.from_pylist([*chain.from_iterable(splits.values())]).schema
        files = {}
        for split, rows in splits.items():
            pq.write_table(pa.Table.from_pylist([*rows], schema), written := BytesIO())
            file = self._write(f"{name}.{split}.parquet", written.getvalue())
            files[split] = escape(str(file))  # `datasets` takes brackets as a pattern
        return files

    def task(self, name: str, config: Mapping[str, Any]) -> None:
        """Write the YAML of a task, or of a group if it has the key `group`."""
        import yaml

        class Dumper(yaml.SafeDumper):
            """Writes functions, such as `!function module.name`, with lm-eval's tag."""

        def represent(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
            if value.startswith(FUNCTION):
                return dumper.represent_scalar(FUNCTION.strip(), value.removeprefix(FUNCTION))
            return dumper.represent_str(value)

        Dumper.add_representer(str, represent)
        Dumper.add_representer(Verbatim, yaml.SafeDumper.represent_str)
        named = dict(config) if "group" in config else {"task": name, **config}
        text = yaml.dump(named, Dumper=Dumper, sort_keys=False, allow_unicode=True)
        self._write(f"{name}.yaml", text.encode())

    def _write(self, name: str, content: bytes) -> Path:
        # Names come from files, and from rows.
        if "/" in name or not name.isprintable() or unusable_name(name):
            raise EvaluationError(f"{name!r:.80} cannot be the name of a task's file")
        path = self.root / name
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
        WRITTEN.add(path.resolve())
        return path
