"""Measures the base on this machine: memory, disk, and seconds per token of a real training."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from layerswap.checkpoint.loading import (
    load_causal_lm,
    open_device,
    without_progress_bars,
)
from layerswap.engine.memory import free_bytes, peak_bytes
from layerswap.ground import system
from layerswap.ground.errors import StudyError
from layerswap.study.estimate import BATCH, Measured

STEPS = 3
"""Whole steps of the measurement; the first one warms up and is not counted."""
TRIED = BATCH.bit_length()
"""Largest number of steps on fewer rows; on one row two, as the first creates the moments."""
SHARE = 0.8
"""Share of the available memory for the trial; a whole training takes more."""


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
    row: tuple[str, str],
    device: str,
    look: Callable[[Any, Any], None] = lambda model, tokenizer: None,
) -> Measured:
    """Train a few steps of the real training on copies of a row, and read them; writes nothing.

    `expert` has the keys of an `EXPERT.yaml` without data, and `row` is the longest prompt with its
    completion. Doubles the rows until the next peak of memory would not fit on the device. `look`
    gets the untrained model and its tokenizer.
    """
    import torch
    from transformers import TrainerCallback

    from layerswap.training.expert.job import plan_training
    from layerswap.training.expert.spec import check_expert
    from layerswap.training.expert.trainer import make_trainer

    class Steps(TrainerCallback):
        """Decides on the rows of each step by its peak, then notes time and tokens."""

        def __init__(self) -> None:
            self.rows, self.whole, self.peaks = 1, False, list[int]()
            self.marks: list[tuple[float, int]] = []

        def run(self, model: Any, inputs: Any, *args: Any) -> Any:
            """Compute the gradients of a whole batch in parts, or those of one part."""
            for start in range(0, BATCH if self.whole else self.rows, self.rows):
                part = {key: values[start : start + self.rows] for key, values in inputs.items()}
                loss, self.ids = one_pass(model, part, *args), part["input_ids"]
            return loss

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            if self.whole:
                self.marks.append((time.perf_counter(), trainer.tokens))
                control.should_training_stop = len(self.marks) == STEPS
                return
            self.peaks.append(peak_bytes(place))
            if len(self.peaks) == 1:  # the optimiser has no moments yet
                return
            rise = self.peaks[-1] - self.peaks[-2] if len(self.peaks) > 2 else 0
            fits = self.peaks[-1] + 2 * rise <= room
            self.rows *= 2 if fits else 1
            self.whole = not fits or self.rows == BATCH

    place = open_device(device)
    room = SHARE * (free_bytes(place) + peak_bytes(place))
    if device == "cpu":
        system.keep_freed_memory()
    with TemporaryDirectory() as folder, without_progress_bars():
        data = Path(folder) / "rows.jsonl"
        line = json.dumps(dict(zip(("prompt", "completion"), row, strict=True)))
        data.write_bytes((TRIED + STEPS) * BATCH * f"{line}\n".encode())
        hyperparameters = {**expert["hyperparameters"], "max_steps": TRIED + STEPS,
                           "per_device_train_batch_size": BATCH}  # fmt: skip
        spec = check_expert({**expert, "data": {"train": str(data)},
                             "hyperparameters": hyperparameters})  # fmt: skip
        job = plan_training(spec, Path(folder) / "expert")
        frozen = spec.lora and device != "cpu"
        model = load_causal_lm(job.base.folder, dtype="auto" if frozen else "float32",
                               named=job.base.source)  # fmt: skip
        trainer, steps = make_trainer(job, model, lambda line: None), Steps()
        look(trainer.model.eval(), job.tokenizer)
        trainer.add_callback(steps)
        one_pass, trainer.training_step = trainer.training_step, steps.run
        trainer.train()
        (first, before), (last, after) = steps.marks[0], steps.marks[-1]
        memory = peak_bytes(place) / 1e9
        ids = steps.ids.to(place)
        with torch.inference_mode():
            started = time.perf_counter()
            trainer.model.eval()(ids, logits_to_keep=1)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            seconds = time.perf_counter() - started
    train, read = (after - before) / max(last - first, 1e-6), ids.numel() / max(seconds, 1e-6)
    return Measured(train, read, device, memory_gb=memory, rows=steps.rows)
