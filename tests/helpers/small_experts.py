"""Trains small experts in tests, and compares their weights."""

import torch
from merging import tensors_of

from layerswap.checkpoint import open_checkpoint, open_expert
from layerswap.training.expert.spec import check_expert
from layerswap.training.expert.trainer import train

FAST = {"learning_rate": 1e-2, "per_device_train_batch_size": 16, "logging_steps": 1}


def data_files(rows, name, *, validation=False):
    parts = ("train", "validation") if validation else ("train",)
    return {part: str(rows / f"{name}-{part}.jsonl") for part in parts}


def train_expert(tmp_path, base, *, hyperparameters=None, name="out", log=print, **spec):
    spec = {"base": str(base), "hyperparameters": {**FAST, **(hyperparameters or {})}, **spec}
    return train(check_expert(spec), tmp_path / name, log=log)


def changed(folder, base):
    """Names of the tensors that are not the base's."""
    after, before = tensors_of(folder), tensors_of(base)
    return {name for name in before if not torch.equal(after[name], before[name].float())}


def open_adapter(folder, base):
    return open_expert(str(folder), open_checkpoint(str(base)))
