"""Reads and writes a training's folder: checkpoints, the record, and the finished expert."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerswap.checkpoint import Checkpoint, read_json_object
from layerswap.checkpoint.given import CONFIG
from layerswap.checkpoint.hub import TRAINING, local_name
from layerswap.ground.commit import sync_tree, write_json
from layerswap.ground.errors import TrainingError
from layerswap.ground.yaml_file import dump_yaml
from layerswap.merge.metadata import COPIED, copy_document, fenced, in_markdown, set_dtype

CHECKPOINTS = "checkpoints"
DRAFT = ".unfinished"
"""A folder in the output where its files are written before they are moved into place."""
LIBRARIES = ("layerswap", "torch", "transformers", "trl", "peft", "accelerate", "datasets")
_ADAPTER = "adapter_config.json"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", _ADAPTER, CONFIG)
STATE = "trainer_state.json"
"""The last file of a checkpoint; a checkpoint that has it is complete."""
_OPTIMIZER = {"": "optimizer.pt", "FSDP": "optimizer.bin"}
"""Optimiser state of a checkpoint, by the engine that shards it."""
_TO_RESUME = (*_OPTIMIZER.values(), "scheduler.pt", "pytorch_model_fsdp*")
"""Files and folders that only serve to resume; the last is FSDP's second copy of the weights."""
_NAME = re.compile(r"checkpoint-(\d+)", re.ASCII)


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a folder by their step, in order."""
    complete = {
        int(match[1]): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name)) and "global_step" in trainer_state(path)
    }
    return dict(sorted(complete.items()))


def trainer_state(checkpoint: Path) -> dict[str, Any]:
    """Read the state of the trainer in a checkpoint; empty if the checkpoint is not complete."""
    try:
        state = json.loads((checkpoint / STATE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def resumable(folder: Path, engine: str = "") -> Path | None:
    """Return the newest checkpoint, or None if there is none; remove incomplete ones.

    `engine` shards the training: `FSDP`, or none.

    Raises:
        TrainingError: another engine saved the checkpoint, or it has no optimiser state.
    """
    complete = list(checkpoints(folder).values())
    for path in folder.iterdir() if folder.is_dir() else ():
        if _NAME.fullmatch(path.name) and path not in complete:
            shutil.rmtree(path, ignore_errors=True)
    if not complete:
        return None
    newest = complete[-1]
    saved = [name for name, pattern in _OPTIMIZER.items() if any(newest.glob(pattern))]
    if not saved:
        raise TrainingError(f"{newest}: has no optimiser state, so training cannot resume from it")
    if engine not in saved:
        how = "with" if saved[0] else "without"
        raise TrainingError(
            f"{newest}: was saved {how} FSDP; resume with the launch configuration that it was "
            "started with"
        )
    return newest


def forget_older_states(folder: Path) -> None:
    """Remove what only serves to resume from all but the newest checkpoint."""
    for path in list(checkpoints(folder).values())[:-1]:
        for name in _TO_RESUME:
            for state in path.glob(name):
                shutil.rmtree(state) if state.is_dir() else state.unlink()


def read_training(folder: Path) -> dict[str, Any]:
    """Read the record of a training."""
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
        raise TrainingError(f"{path}: is not the record of a training")
    return record


def put_in_place(out: Path, base: Checkpoint, record: Mapping[str, Any], *, dtype: str) -> None:
    """Turn the weights in the draft folder into the finished output.

    Configuration and tokenizer are the base's own files, so that experts of one base differ only
    in their weights. `config.json` (or `adapter_config.json`) comes last: a folder without it does
    not load, so a folder that loads is complete.
    """
    draft = out / DRAFT
    weights = {file for pattern in _WEIGHTS for file in draft.glob(pattern)}
    for file in set(draft.iterdir()) - weights:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    adapter = (draft / _ADAPTER).is_file()
    for name in (name for group in (COPIED[1:2] if adapter else COPIED) for name in group):
        if (base.folder / name).is_file():
            copy_document(base.folder / name, draft / name)
    if adapter:
        config = read_json_object(draft / _ADAPTER)
        # PEFT writes a set, in the order of hashes that differ from run to run.
        config["target_modules"] = sorted(config["target_modules"])
        (draft / _ADAPTER).write_bytes(json.dumps(config, indent=2, sort_keys=True).encode())
    else:
        config = dict(base.config)
        config.pop("auto_map", None)  # weights never run code from a repository
        set_dtype(config, dtype)
        (draft / CONFIG).write_bytes((json.dumps(config, indent=2) + "\n").encode())
    (draft / "README.md").write_bytes(model_card(record, base, adapter=adapter).encode())
    for file in weights:  # safetensors makes its files readable by the owner alone
        shutil.copymode(draft / "README.md", file)
    sync_tree(draft)
    last = draft / (_ADAPTER if adapter else CONFIG)
    for file in sorted(draft.iterdir(), key=lambda file: (file == last, file.name)):
        file.replace(out / file.name)
    draft.rmdir()
    write_json(out / TRAINING, record)


def model_card(record: Mapping[str, Any], base: Checkpoint, *, adapter: bool) -> str:
    """Write the model card of an expert."""
    from huggingface_hub import ModelCardData

    name = base.source if base.revision else local_name(base.folder)
    # The Hub takes ids alone, and a folder's name would pass for one.
    relation = "adapter" if adapter else "finetune"
    descent: dict[str, Any] = {"base_model": [name], "base_model_relation": relation}
    metadata = ModelCardData(
        **(descent if base.revision else {}),
        library_name="peft" if adapter else "transformers",
        tags=["layerswap", "sft"],
    ).to_yaml()
    spec = dump_yaml({**record["spec"], "base": name})
    data = "\n".join(
        f"- {in_markdown(entry['name'])}: {entry['train']:,} training rows, "
        f"{entry['validation']:,} validation rows"
        for entry in record["data"]
    )
    losses = record["losses"]
    return (
        f"---\n{metadata}\n---\n\n# An expert\n\nFine-tuned from {in_markdown(name)} with "
        f"layerswap {record['versions']['layerswap']}; {record['parameters']['trained']:,} of "
        f"{record['parameters']['all']:,} parameters trained.\n\n## Data\n\n{data}\n\n"
        f"## Training\n\n{fenced(spec, 'yaml')}\n\nFinal loss {losses['training']}, validation "
        f"loss {losses['validation']} (nats per token). `{TRAINING}` holds the whole record.\n"
    )
