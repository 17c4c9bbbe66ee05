"""Callbacks of a training: checkpoints by samples and by time, and lines of progress.

Imports transformers when it is imported; import this module inside functions only.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from layerswap._types import Log
from layerswap.training.expert.save import checkpoints, forget_older_states


class Checkpointing(TrainerCallback):
    """Saves and validates after every `samples` examples (paper 1, A.2), and saves by time.

    A checkpoint that was saved by time only serves to resume: a newer one replaces it, so the
    checkpoints of a finished training do not depend on the speed of the machine. Older checkpoints
    lose their optimiser states.
    """

    def __init__(self, samples: int, minutes: float, *, validate: bool) -> None:
        self.samples, self.seconds, self.validate = samples, 60 * minutes, validate
        self.saved = time.monotonic()

    def _due(self, args: Any, step: int) -> bool:
        examples = rows_of_step(args)
        return step * examples // self.samples > (step - 1) * examples // self.samples

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide after an optimiser step; the first process's clock decides for all."""
        if self._due(args, state.global_step):
            control.should_save = True
            control.should_evaluate = self.validate
        else:
            late = [time.monotonic() - self.saved >= self.seconds]
            if args.world_size > 1:
                broadcast_object_list(late)
            control.should_save = control.should_save or late[0]
        if state.global_step >= state.max_steps:
            # The end of the training is saved as the output itself.
            control.should_save = False
            control.should_evaluate = self.validate

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove what a newer checkpoint replaces."""
        self.saved = time.monotonic()
        self._clean(args, state, keep=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the last checkpoint that was saved by time."""
        self._clean(args, state, keep=None)

    def _clean(self, args: Any, state: Any, *, keep: int | None) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        for step, checkpoint in checkpoints(folder).items():
            if step != keep and not self._due(args, step):
                shutil.rmtree(checkpoint)
        forget_older_states(folder)


class ProgressLines(TrainerCallback):
    """Logs the step, the loss, the speed and the time left every `seconds`.

    `tokens` returns the number of tokens that this process has trained on.
    """

    def __init__(self, log: Log, tokens: Callable[[], int], seconds: float = 30.0) -> None:
        self.log, self.tokens, self.seconds = log, tokens, seconds
        self.loss = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.first, self.started = state.global_step, time.monotonic()
        self.shown = self.started

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Note the loss."""
        if logs and "loss" in logs:
            self.loss = f", loss {float(logs['loss']):.3f}"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log a line if it is time."""
        now, step, steps = time.monotonic(), state.global_step, state.max_steps
        if state.is_world_process_zero and (now - self.shown >= self.seconds or step >= steps):
            self.shown, passed = now, max(now - self.started, 1e-9)
            left = _duration(passed / (step - self.first) * (steps - step))
            speed = self.tokens() * args.world_size / passed
            self.log(f"step {step:,} of {steps:,}{self.loss}, {speed:,.0f} tokens/s, {left} left")


def rows_of_step(args: Any) -> int:
    """Count the rows in an optimiser step, over all processes."""
    rows: int = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return rows * int(args.world_size)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
