"""TRL's SFTTrainer over several data sets, mixed at random or in turns, and its callbacks.

Imports TRL when it is imported; import this module inside functions only.
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset, concatenate_datasets
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.data import DataLoader, Sampler
from transformers import TrainerCallback

from layerswap.ground.errors import TrainingError
from layerswap.ground.types import Log, duration
from layerswap.training.expert.head import ADVICE, IGNORED, use_labelled_positions
from layerswap.training.expert.hyperparameters import rows_of_step
from layerswap.training.expert.save import checkpoints, forget_older_states
from layerswap.training.expert.trl_inside import OpenTrainer

TOKENS = frozenset({"input_ids", "labels"})
"""Columns of tokenised rows."""
_FILLER = {"labels": [IGNORED], "seq_lengths": [1]}
"""Columns of a row of one token without a label."""


class EpochSampler(Sampler[int]):
    """An order of rows that differs between epochs, and is the same in every process."""

    def __init__(self, seed: int) -> None:
        self.seed, self.epoch, self.asked = seed, 0, False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order together with the seed."""
        self.epoch = epoch

    def generator(self) -> torch.Generator:
        """The source of the order of this epoch, which is now asked for."""
        self.asked = True
        return torch.Generator().manual_seed(self.seed + self.epoch)


class FilledSampler(EpochSampler):
    """All rows in the order that one process has, then a filler up to a whole batch of all.

    accelerate would give rows of the beginning to the processes that have none left. `size` is the
    number of rows and the index of the filler, `batch` the rows of a batch over all processes.
    """

    def __init__(self, size: int, *, batch: int, seed: int) -> None:
        super().__init__(seed)
        self.size, self.filled = size, -size % batch

    def __len__(self) -> int:
        return self.size + self.filled

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size, generator=self.generator()).tolist()
        yield from [self.size] * self.filled


class TurnSampler(EpochSampler):
    """Rows of two data sets, in turns of whole optimiser steps.

    `every` steps on one, then as many on the other. An epoch ends when the smaller data set
    has no whole turn left, so that the step's number alone determines the turn, also
    across epochs and in a resumed training. Every epoch has a new order. `sizes` are those of the
    two data sets, which are concatenated; `step` is the number of rows in an optimiser step, over
    all processes.
    """

    def __init__(self, sizes: tuple[int, int], *, step: int, every: int, seed: int) -> None:
        super().__init__(seed)
        self.sizes, self.turn = sizes, step * every
        self.turns = min(sizes) // self.turn
        if not self.turns:
            raise ValueError(
                f"each data set needs rows for one turn of {every} steps, {self.turn}; "
                f"they have {sizes[0]} and {sizes[1]}"
            )

    def __len__(self) -> int:
        return 2 * self.turns * self.turn

    def __iter__(self) -> Iterator[int]:
        generator = self.generator()
        first, second = (torch.randperm(size, generator=generator) for size in self.sizes)
        second = second + self.sizes[0]
        for i in range(self.turns):
            rows = slice(i * self.turn, (i + 1) * self.turn)
            yield from first[rows].tolist()
            yield from second[rows].tolist()


class AlternatingTurns(TrainerCallback):
    """Unfreezes the active part, and freezes the other.

    A frozen parameter has no gradient, so AdamW neither steps it nor updates its moments, and
    clipping sees only the active part (paper 2, section 4.5, "Optimizer"). A turn is `every` steps.
    FSDP2 replaces every parameter, so `parts` holds the modules and the names of their parameters.
    """

    def __init__(self, parts: Sequence[Sequence[tuple[torch.nn.Module, str]]], every: int) -> None:
        self.parts, self.every, self.sharded = parts, every, True

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Change the active part before the first forward pass of an optimiser step."""
        # FSDP2 decides on the dtypes of gradients in the first pass, from what trains in it: all.
        sharded, self.sharded = self.sharded and isinstance(model, FSDPModule), False
        if sharded:
            token = torch.zeros(1, 1, dtype=torch.long, device=args.device)
            model(input_ids=token).logits.sum().backward()
            model.zero_grad()
        active = state.global_step // self.every % 2
        for number, parameters in enumerate(self.parts):
            for module, name in parameters:
                module.get_parameter(name).requires_grad_(number == active)


class Promises(TrainerCallback):
    """Checks that the Trainer calls the methods that `ExpertTrainer` overrides."""

    def __init__(self, trainer: ExpertTrainer) -> None:
        self.trainer, self.first = trainer, True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse another order of rows after the first step, and warn if our head is not used."""
        trainer, first, self.first = self.trainer, self.first, False
        if first and trainer.ordered and not trainer.sampler.asked:
            raise TrainingError(f"the Trainer did not take the rows in order; {ADVICE}")
        if first and args.use_cpu and not trainer.uses_head():
            warnings.warn(f"TRL did not use the faster head for CPUs; {ADVICE}", stacklevel=2)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a validation loss that is not ours."""
        nats, tokens = self.trainer.validated
        if not tokens or str(kwargs["metrics"]["eval_loss"]) != str(nats / tokens):
            raise TrainingError(f"the Trainer did not report the loss per token; {ADVICE}")


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
        """Remove checkpoints that a newer one replaces."""
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


class SavedStop(TrainerCallback):
    """Stops a training with a checkpoint after the current step once `asked` is set.

    In several processes, once the first process is asked.
    """

    def __init__(self, asked: threading.Event, log: Log) -> None:
        self.asked, self.log, self.stops = asked, log, False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save, unless the training ends by itself."""
        stops = [self.asked.is_set() and state.global_step < state.max_steps]
        if args.world_size > 1:
            broadcast_object_list(stops)
        if stops[0]:
            self.stops, control.should_save, control.should_evaluate = True, True, False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop when the checkpoint is complete."""
        if self.stops:
            PartialState().wait_for_everyone()  # the first process writes longest
            self.log(f"saved step {state.global_step:,}, from which the training can resume")
            raise KeyboardInterrupt


SLOW = 1.0
"""Seconds above which the first step has a line of progress of its own."""


class ProgressLines(TrainerCallback):
    """Logs the step, the loss, the speed and the time left after one step and every `seconds`.

    `tokens` returns the number of tokens that this process has trained on.
    """

    def __init__(self, log: Log, tokens: Callable[[], int], seconds: float = 30.0) -> None:
        self.log, self.tokens, self.seconds = log, tokens, seconds
        self.loss = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, and warn of a warm-up that takes the whole training."""
        self.first, self.started = state.global_step, time.monotonic()
        self.shown, warmup = self.started, args.get_warmup_steps(state.max_steps)
        if warmup >= state.max_steps and state.is_world_process_zero:
            self.log(
                f"warning: the learning rate never reaches its value, because warmup_steps is "
                f"{warmup:,} of {state.max_steps:,} steps; set hyperparameters.warmup_steps"
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Note the loss."""
        if logs and "loss" in logs:
            self.loss = f", loss {float(logs['loss']):.3f}"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log a line if it is time."""
        now, step, steps = time.monotonic(), state.global_step, state.max_steps
        first = step == self.first + 1 and now - self.started >= SLOW
        due = first or now - self.shown >= self.seconds or step >= steps
        if state.is_world_process_zero and due:
            self.shown, passed = now, max(now - self.started, 1e-9)
            left = passed / (step - self.first) * (steps - step)
            speed = self.tokens() * args.world_size / passed
            line = f"step {step:,} of {steps:,}{self.loss}, {speed:,.0f} tokens/s"
            self.log(f"{line}, {duration(left)} left")


class ExpertTrainer(OpenTrainer):
    """SFTTrainer over one or more data sets, each prepared separately, so columns may differ.

    Two sets take turns of `every` steps; without it, all rows are mixed at random. `decay` is the
    fraction of the steps in which a stable schedule decays, if not given in steps. `tokens` counts
    the tokens that this process has trained on, padding included. The validation loss is the mean
    over all labelled tokens (nats). Several processes repeat no row.
    """

    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        *,
        train_sets: Sequence[Dataset],
        validation_sets: Sequence[Dataset] = (),
        every: int | None = None,
        decay: float | None = None,
        **rest: Any,
    ) -> None:
        self.tokens, self.validated = 0, (0.0, 0)
        self.every, self.decay = every, decay
        self.sampler = EpochSampler(0)
        self.uses_head: Callable[[], bool] = lambda: True
        validation = validation_sets[0] if validation_sets else None
        if rest["args"].completion_only_loss is None:
            rest["args"].completion_only_loss = True  # of every data set whose rows have one
        super().__init__(train_dataset=train_sets[0], eval_dataset=validation, **rest)
        self.add_callback(Promises(self))
        if self.args.loss_type == "nll":  # its gradient is that of a sum
            adapted = hasattr(self.model, "get_base_model")
            model = self.model.get_base_model() if adapted else self.model
            self.uses_head = use_labelled_positions(model)
        if self.is_fsdp_enabled:
            _sum_in_float32(self.accelerator.state.fsdp_plugin)
        prepared = [self.train_dataset, *(self.prepared(s, "train") for s in train_sets[1:])]
        self.sizes = (len(prepared[0]), len(prepared[-1]))
        self.train_dataset = _join(prepared, train_sets)
        if validation is not None:
            rows = [self.eval_dataset, *(self.prepared(s, "eval") for s in validation_sets[1:])]
            fill = -sum(map(len, rows)) % self._batch("eval")
            self.eval_dataset = _join(rows, validation_sets, fill)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make SFTTrainer's schedule, with its decay in steps now that their number is known."""
        if self.decay is not None:
            steps = max(1, round(self.decay * num_training_steps))
            kwargs = {**self.args.lr_scheduler_kwargs, "num_decay_steps": steps}
            self.args.lr_scheduler_kwargs = kwargs
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run SFTTrainer's step and count its tokens."""
        self.tokens += inputs["input_ids"].numel()
        return super().training_step(model, inputs, *args, **kwargs)

    def _batch(self, name: str) -> int:
        """Rows of a batch over all processes; 1 in one process, where the last one may be small."""
        processes = self.args.world_size
        return getattr(self.args, f"{name}_batch_size") * processes if processes > 1 else 1

    @property
    def ordered(self) -> bool:
        """True if the order of rows is ours, and not the Trainer's."""
        several = self.args.world_size > 1
        return self.every is not None or (several and self.args.train_sampling_strategy == "random")

    def get_train_dataloader(self) -> Any:
        """Return the data loader: alternating turns of two data sets, or all rows shuffled."""
        args = self.args
        seed = args.seed if args.data_seed is None else args.data_seed
        if not self.ordered:
            return super().get_train_dataloader()
        if self.every is not None:
            step = rows_of_step(args)
            self.sampler = TurnSampler(self.sizes, step=step, every=self.every, seed=seed)
        else:
            batch = 1 if args.dataloader_drop_last else self._batch("train")
            self.sampler = FilledSampler(len(self.train_dataset), batch=batch, seed=seed)
        loader = DataLoader(
            _join([self.train_dataset], fill=1), batch_size=args.train_batch_size,
            sampler=self.sampler,
            collate_fn=self.data_collator, num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory, drop_last=args.dataloader_drop_last,
        )  # fmt: skip
        return self.accelerator.prepare(loader)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run SFTTrainer's step and add to the validation loss."""
        count = int(inputs["labels"][..., 1:].ne(IGNORED).sum())
        loss, *rest = super().prediction_step(model, inputs, *args, **kwargs)
        nats, tokens = self.validated
        self.validated = (nats + (float(loss) * count if count else 0), tokens + count)
        return loss, *rest

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run SFTTrainer's evaluation; its loss would weigh batches alike, and repeat rows."""
        self.validated = (0.0, 0)
        output = super().evaluation_loop(*args, **kwargs)
        nats, tokens = map(sum, zip(*gather_object([self.validated]), strict=True))
        self.validated, output.metrics["eval_loss"] = (nats, tokens), nats / max(tokens, 1)
        return output

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no card: the finished expert has one."""


def _join(sets: Sequence[Dataset], raw: Sequence[Dataset] = (), fill: int = 0) -> Dataset:
    """Concatenate prepared data sets, and append `fill` padding rows without labels.

    Columns of the `raw` data sets are left out, unless they are tokens already, and those that a
    set lacks.
    """
    texts = {name for rows in raw for name in rows.column_names} - TOKENS
    shared = set.intersection(*(set(rows.column_names) for rows in sets))
    columns = [name for name in sets[0].column_names if name in shared - texts]
    if not TOKENS.issubset(columns):
        raise TrainingError(f"TRL prepared rows with {', '.join(columns)}; {ADVICE}")
    joined = [rows.select_columns(columns) for rows in sets]
    start = sets[0][0]["input_ids"][:1] if len(sets[0]) else [0]  # no row is left: refused later
    filled = {name: [_FILLER.get(name, start)] * fill for name in columns}
    return concatenate_datasets([*joined, Dataset.from_dict(filled, features=joined[0].features)])


def _sum_in_float32(plugin: Any) -> None:
    """Let FSDP2 reduce gradients and return losses in float32; by default it rounds them too."""
    policy = plugin.mixed_precision_policy
    if isinstance(policy, MixedPrecisionPolicy):
        plugin.mixed_precision_policy = dataclasses.replace(
            policy, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
