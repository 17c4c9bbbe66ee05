"""What a training leaves: an ordinary checkpoint or adapter, its record, and its card."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerswap.checkpoint import Checkpoint
from layerswap.checkpoint.commit import sync_tree, write_json
from layerswap.checkpoint.folder import CONFIG
from layerswap.errors import TrainingError
from layerswap.merge.documents import COPIED, set_dtype

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
