"""Measures the base on this machine: memory, disk, and seconds per token of a real training."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from layerswap.checkpoint.loading import (
    load_causal_lm,
    open_device,
    pick_device,
    without_progress_bars,
)
from layerswap.engine.memory import free_bytes
from layerswap.ground.errors import StudyError
from layerswap.study.estimate import Measured

STEPS = 3
"""Steps of the measurement; the first one warms up and is not counted."""
ROWS = 16


def choose_device(given: str | None) -> str:
    """The device of a study: the given one, if it works, else a GPU if there is one."""
    if given is not None:
        open_device(given)
    return pick_device(given)


def memory_gb(device: str) -> float:
    """Memory that is free on the device, GB."""
    return free_bytes(open_device(device)) / 1e9


def check_disk(folder: Path, needed_gb: float) -> None:
    """Refuse a disk without room for a study."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(there).free / 1e9
    if free < needed_gb:
        raise StudyError(
            f"{folder}: the study needs {needed_gb:,.1f} GB of disk and {free:,.1f} GB are free; "
            "free some, choose another disk, or take fewer --seeds"
        )


def measure(
    expert: dict[str, Any],
    rows: Sequence[tuple[str, str]],
    device: str,
    look: Callable[[Any, Any], None] = lambda model, tokenizer: None,
) -> Measured:
    """Train a few steps of the real training on real rows, and read them; writes nothing.

    `expert` has the keys of an `EXPERT.yaml` without data. `look` gets the untrained model and its
    tokenizer.
    """
    import torch
    from transformers import TrainerCallback

    from layerswap.training.expert.job import plan_training
    from layerswap.training.expert.spec import check_expert
    from layerswap.training.expert.trainer import make_trainer

    class Clock(TrainerCallback):
        """Notes the time and the tokens after every step."""

        def __init__(self) -> None:
            self.marks: list[tuple[float, int]] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            self.marks.append((time.perf_counter(), trainer.tokens))

    repeated = [rows[i % len(rows)] for i in range(STEPS * ROWS)]
    with TemporaryDirectory() as folder, without_progress_bars():
        data = Path(folder) / "rows.jsonl"
        pairs = [{"prompt": prompt, "completion": text} for prompt, text in repeated]
        data.write_bytes(("\n".join(map(json.dumps, pairs)) + "\n").encode())
        hyperparameters = {**expert["hyperparameters"], "max_steps": STEPS,
                           "per_device_train_batch_size": ROWS}  # fmt: skip
        spec = check_expert({**expert, "data": {"train": str(data)},
                             "hyperparameters": hyperparameters})  # fmt: skip
        job = plan_training(spec, Path(folder) / "expert")
        frozen = spec.lora and device != "cpu"
        model = load_causal_lm(job.base.folder, dtype="auto" if frozen else "float32",
                               named=job.base.source)  # fmt: skip
        trainer, clock = make_trainer(job, model, lambda line: None), Clock()
        look(trainer.model.eval(), job.tokenizer)
        trainer.add_callback(clock)
        trainer.train()
        (first, before), (last, after) = clock.marks[0], clock.marks[-1]
        texts = [prompt + text for prompt, text in repeated[:ROWS]]
        batch = job.tokenizer(texts, return_tensors="pt", padding=True, truncation=True,
                              max_length=hyperparameters["max_length"])  # fmt: skip
        ids = batch["input_ids"].to(next(trainer.model.parameters()).device)
        with torch.inference_mode():
            started = time.perf_counter()
            trainer.model.eval()(ids, logits_to_keep=1)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            seconds = time.perf_counter() - started
    train, read = (after - before) / max(last - first, 1e-6), ids.numel() / max(seconds, 1e-6)
    return Measured(train, read, device)
