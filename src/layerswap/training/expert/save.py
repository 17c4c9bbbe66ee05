"""Checkpoints of a training: which one to go on from, and what old ones need not keep."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerswap.checkpoint import Checkpoint
from layerswap.checkpoint.commit import sync_tree, write_json
from layerswap.checkpoint.folder import CONFIG
from layerswap.errors import TrainingError
from layerswap.merge.metadata import COPIED, set_dtype

STATE = "trainer_state.json"
"""The last file that a checkpoint gets: with it, the checkpoint is whole."""
OPTIMIZER = ("optimizer.pt", "optimizer.bin", "scheduler.pt")
_NAME = re.compile(r"checkpoint-(\d+)", re.ASCII)


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, in the order of their steps."""
    found = {
        int(match[1]): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name)) and is_whole(path)
    }
    return [found[step] for step in sorted(found)]


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end."""
    try:
        state = json.loads((checkpoint / STATE).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and "global_step" in state


def newest(folder: Path) -> Path | None:
    """The checkpoint to go on from; None where there is none. Unfinished ones are removed.

    Raises:
        TrainingError: the newest has no optimiser state.
    """
    whole = checkpoints(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        if _NAME.fullmatch(path.name) and path not in whole:
            shutil.rmtree(path, ignore_errors=True)
    if not whole:
        return None
    sharded = any(whole[-1].glob("optimizer_*")) or any(whole[-1].glob("global_step*"))
    if not sharded and not any((whole[-1] / name).is_file() for name in OPTIMIZER[:2]):
        raise TrainingError(f"{whole[-1]}: has no optimiser state, so it cannot be gone on from")
    return whole[-1]


def forget_older_states(folder: Path) -> None:
    """Remove optimiser states, two thirds of a checkpoint, from all but the newest checkpoint."""
    for path in checkpoints(folder)[:-1]:
        for name in OPTIMIZER:
            (path / name).unlink(missing_ok=True)
        for shards in (*path.glob("optimizer_*"), *path.glob("global_step*")):
            shutil.rmtree(shards, ignore_errors=True)


TRAINING = "layerswap-training.json"
"""The record in every folder that `layerswap train` writes."""
DRAFT = ".unfinished"
"""A folder in the output where its files are written before they are moved into place."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json", CONFIG)
LIBRARIES = ("layerswap", "torch", "transformers", "trl", "peft", "accelerate", "datasets")


def read_training(folder: Path) -> dict[str, Any]:
    """The record of a training.

    Raises:
        TrainingError: the folder holds none.
    """
    path = folder / TRAINING
    try:
        record = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise TrainingError(
            f"{folder}: no {TRAINING}; `layerswap train` did not write it"
        ) from None
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path}: cannot be read ({error})") from None
    if not isinstance(record, dict) or "key" not in record:
        raise TrainingError(f"{path}: not the record of a training")
    return record


def write_training(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the record, in one step."""
    write_json(folder / TRAINING, record)


def put_in_place(out: Path, base: Checkpoint, record: Mapping[str, Any], *, dtype: str) -> None:
    """Make the output of what was saved in its draft folder.

    Configuration and tokenizer are the base's own files, so that experts of one base differ in
    nothing but weights. `config.json` (or `adapter_config.json`) comes last: without it a folder
    does not load, so one that loads is whole.

    Args:
        out: the output, with the weights in its draft folder.
        base: what was fine-tuned.
        record: of the training, finished.
        dtype: of the weights.
    """
    draft = out / DRAFT
    wanted = {file for pattern in WEIGHTS for file in draft.glob(pattern)}
    for file in set(draft.iterdir()) - wanted:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    adapter = (draft / "adapter_config.json").is_file()
    groups = COPIED[1:2] if adapter else COPIED
    for name in (name for group in groups for name in group):
        if (base.folder / name).is_file():
            shutil.copyfile(base.folder / name, draft / name)
    if not adapter:
        (draft / CONFIG).write_text(json.dumps(_config(base, dtype), indent=2) + "\n", "utf-8")
    (draft / "README.md").write_text(card(record, base, adapter=adapter), "utf-8")
    mode = 0o666 & ~_umask()
    for file in draft.iterdir():
        file.chmod(mode)  # safetensors' own files are for the owner alone
    sync_tree(draft)
    last = draft / ("adapter_config.json" if adapter else CONFIG)
    for file in sorted(draft.iterdir(), key=lambda file: (file == last, file.name)):
        file.replace(out / file.name)
    draft.rmdir()
    write_training(out, record)


def card(record: Mapping[str, Any], base: Checkpoint, *, adapter: bool) -> str:
    """The model card of an expert."""
    import yaml
    from huggingface_hub import ModelCardData

    name = base.source if base.revision else base.folder.resolve().name
    metadata = ModelCardData(
        base_model=[name],
        base_model_relation="adapter" if adapter else "finetune",
        library_name="peft" if adapter else "transformers",
        tags=["layerswap", "sft"],
    ).to_yaml()
    said = yaml.safe_dump({**record["spec"], "base": name}, sort_keys=False, allow_unicode=True)
    data = "\n".join(
        f"- {entry['name']}: {entry['train']:,} rows, {entry['validation']:,} to validate on"
        for entry in record["data"]
    )
    losses = record["losses"]
    return (
        f"---\n{metadata}\n---\n\n# An expert\n\nFine-tuned from {name} with layerswap "
        f"{record['versions']['layerswap']}; {record['parameters']['trained']:,} of "
        f"{record['parameters']['all']:,} parameters trained.\n\n## Data\n\n{data}\n\n"
        f"## Training\n\n```yaml\n{said}```\n\nFinal loss {losses['training']}, validation loss "
        f"{losses['validation']} (nats per token). `{TRAINING}` holds the whole record.\n"
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _config(base: Checkpoint, dtype: str) -> dict[str, Any]:
    config = dict(base.config)
    config.pop("auto_map", None)  # weights never run code from a repository
    set_dtype(config, dtype)
    return config
