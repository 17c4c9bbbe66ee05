"""TRL's SFTTrainer over several data sets, mixed or in turns, and its callbacks.

Imports TRL when it is imported; import this module inside functions only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from torch.utils.data import Sampler
from transformers import TrainerCallback
from trl import SFTTrainer

from layerswap.training.expert.save import forget_older_states

KEPT = ("input_ids", "labels", "seq_lengths")
"""Columns of prepared rows that are kept when data sets are joined."""


class TurnSampler(Sampler[int]):
    """Rows of two data sets, in turns of whole optimiser steps.

    `every` steps on one, then as many on the other. An epoch is as long as the smaller data set
    allows and has whole turns only, so that the step's number alone determines the turn, also
    across epochs and after a resumption. Every epoch has a new order.

    Args:
        sizes: numbers of rows of the two, which are concatenated.
        step: rows in an optimiser step, over all processes.
        every: steps in a turn.
        seed: seed of the order.
    """

    def __init__(self, sizes: tuple[int, int], *, step: int, every: int, seed: int) -> None:
        self.sizes, self.turn, self.seed, self.epoch = sizes, step * every, seed, 0
        self.turns = min(sizes) // self.turn
        if not self.turns:
            raise ValueError(
                f"each data set needs rows for one turn of {every} steps, {self.turn}; "
                f"they have {sizes[0]} and {sizes[1]}"
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order together with the seed."""
        self.epoch = epoch

    def __len__(self) -> int:
        return 2 * self.turns * self.turn

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        first, second = (torch.randperm(size, generator=generator) for size in self.sizes)
        second = second + self.sizes[0]
        for i in range(self.turns):
            rows = slice(i * self.turn, (i + 1) * self.turn)
            yield from first[rows].tolist()
            yield from second[rows].tolist()


class AlternatingTurns(TrainerCallback):
    """Unfreezes the active part, and freezes the other.

    A frozen parameter has no gradient, so AdamW neither steps it nor updates its moments, and
    clipping sees only the active part (paper 2, section 4.5, "Optimizer").

    Args:
        parts: the parameters of each part.
        every: steps in a turn.
    """

    def __init__(self, parts: Sequence[Sequence[torch.nn.Parameter]], every: int) -> None:
        self.parts, self.every = parts, every

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first forward pass of an optimiser step."""
        active = state.global_step // self.every % 2
        for number, parameters in enumerate(self.parts):
            for parameter in parameters:
                parameter.requires_grad_(number == active)


class EverySamples(TrainerCallback):
    """Saves and validates after every `samples` training examples (paper 1, A.2).

    Args:
        samples: examples between checkpoints.
        validate: compute the validation loss.
    """

    def __init__(self, samples: int, *, validate: bool) -> None:
        self.samples, self.validate = samples, validate

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After an optimiser step."""
        step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        done, before = state.global_step * step, (state.global_step - 1) * step
        if done // self.samples > before // self.samples:
            control.should_save = True
            control.should_evaluate = self.validate
        if state.global_step >= state.max_steps:
            # The end of the training is saved as the output itself.
            control.should_save = False
            control.should_evaluate = self.validate


class KeepNewestState(TrainerCallback):
    """Removes optimiser states that no resumption needs."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a checkpoint is written."""
        if state.is_world_process_zero:
            forget_older_states(Path(args.output_dir))


class ExpertTrainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer over one or more data sets.

    Args:
        train_sets: rows in TRL's forms; each set is prepared separately, so columns may differ.
        validation_sets: the same; may be empty.
        every: steps in a turn, where two sets take turns; None mixes all rows at random.
        rest: arguments of SFTTrainer.

    Attributes:
        rates: factors of the learning rate by name of a parameter; 1 elsewhere. Set before
            training, because adapters have no names before the trainer exists.
    """

    train_dataset: Any
    eval_dataset: Any
    completion_only_loss: bool

    def __init__(
        self,
        *,
        train_sets: Sequence[Dataset],
        validation_sets: Sequence[Dataset] = (),
        every: int | None = None,
        **rest: Any,
    ) -> None:
        self.rates: Mapping[str, float] = {}
        validation = validation_sets[0] if validation_sets else None
        super().__init__(train_dataset=train_sets[0], eval_dataset=validation, **rest)
        self.every = every
        prepared = [self.train_dataset, *(self._prepared(s, "train") for s in train_sets[1:])]
        self.sizes = (len(prepared[0]), len(prepared[-1]))
        self.train_dataset = _joined(prepared)
        if validation is not None:
            rows = [self.eval_dataset, *(self._prepared(s, "eval") for s in validation_sets[1:])]
            self.eval_dataset = _joined(rows)

    def create_optimizer(self, model: Any = None) -> Any:
        """SFTTrainer's optimiser, with a parameter group for every rate."""
        optimizer = super().create_optimizer(model)
        if not self.rates:
            return optimizer
        names = {id(p): name for name, p in (model or self.model).named_parameters()}
        groups = []
        for group in optimizer.param_groups:
            by_scale: dict[float, list[Any]] = {}
            for parameter in group["params"]:
                scale = self.rates.get(names[id(parameter)], 1.0)
                by_scale.setdefault(scale, []).append(parameter)
            for scale, parameters in by_scale.items():
                groups.append({**group, "params": parameters, "lr": group["lr"] * scale})
        optimizer.param_groups = groups
        return optimizer

    def _prepared(self, rows: Dataset, name: str) -> Dataset:
        # SFTTrainer decides by its first data set whether rows have a completion.
        before = self.completion_only_loss
        if self.args.completion_only_loss is None:
            self.completion_only_loss = "completion" in rows.column_names
        try:
            packing = self.args.packing
            if name == "eval" and self.args.eval_packing is not None:
                packing = self.args.eval_packing
            return self._prepare_dataset(
                rows, self.processing_class, self.args, packing, None, name
            )
        finally:
            self.completion_only_loss = before

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        if self.every is None:
            return super()._get_train_sampler(dataset)
        args = self.args
        step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        seed = args.seed if args.data_seed is None else args.data_seed
        return TurnSampler(self.sizes, step=step, every=self.every, seed=seed)


def _joined(sets: Sequence[Dataset]) -> Dataset:
    kept = [name for name in KEPT if name in sets[0].column_names]
    if len(sets) == 1:
        return sets[0]
    return concatenate_datasets([rows.select_columns(kept) for rows in sets])
