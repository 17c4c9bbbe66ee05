"""TRL's SFTTrainer over several data sets, mixed at random or in turns.

Imports TRL when it is imported; import this module inside functions only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from torch.utils.data import Sampler
from transformers import TrainerCallback
from trl import SFTTrainer

from layerswap.training.expert.callbacks import rows_of_step
from layerswap.training.expert.head import use_labelled_positions

_COLUMNS = ("input_ids", "labels", "seq_lengths")
"""Columns of prepared rows that are kept when data sets are joined."""


class TurnSampler(Sampler[int]):
    """Rows of two data sets, in turns of whole optimiser steps.

    `every` steps on one, then as many on the other. An epoch is as long as the smaller data set
    allows and has whole turns only, so that the step's number alone determines the turn, also
    across epochs and in a resumed training. Every epoch has a new order.

    Args:
        sizes: numbers of rows of the two data sets, which are concatenated.
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
    clipping sees only the active part (paper 2, section 4.5, "Optimizer"). A turn is `every` steps.
    """

    def __init__(self, parts: Sequence[Sequence[torch.nn.Parameter]], every: int) -> None:
        self.parts, self.every = parts, every

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Change the active part before the first forward pass of an optimiser step."""
        active = state.global_step // self.every % 2
        for number, parameters in enumerate(self.parts):
            for parameter in parameters:
                parameter.requires_grad_(number == active)


class ExpertTrainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer over one or more data sets.

    Args:
        train_sets: rows in TRL's forms; each set is prepared separately, so columns may differ.
        validation_sets: the same; may be empty.
        every: steps in a turn, where two sets take turns; None mixes all rows at random.
        decay: fraction of the steps in which a stable schedule decays, if not given in steps.
        rest: arguments of SFTTrainer.

    Attributes:
        rates: factors of the learning rate by name of a parameter; 1 elsewhere. Set before
            training, because adapters have no names before the trainer exists.
        tokens: number of tokens that this process has trained on.
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
        decay: float | None = None,
        **rest: Any,
    ) -> None:
        self.rates: Mapping[str, float] = {}
        self.tokens = 0
        self.every, self.decay = every, decay
        validation = validation_sets[0] if validation_sets else None
        super().__init__(train_dataset=train_sets[0], eval_dataset=validation, **rest)
        if self.args.loss_type == "nll":  # its gradient is that of a sum
            adapted = hasattr(self.model, "get_base_model")
            use_labelled_positions(self.model.get_base_model() if adapted else self.model)
        prepared = [self.train_dataset, *(self._prepare(s, "train") for s in train_sets[1:])]
        self.sizes = (len(prepared[0]), len(prepared[-1]))
        self.train_dataset = _join(prepared)
        if validation is not None:
            rows = [self.eval_dataset, *(self._prepare(s, "eval") for s in validation_sets[1:])]
            self.eval_dataset = _join(rows)

    def create_optimizer(self, model: Any = None) -> Any:
        """Make SFTTrainer's optimiser, with a parameter group for every rate."""
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

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make SFTTrainer's schedule, with its decay in steps now that their number is known."""
        if self.decay is not None:
            steps = max(1, round(self.decay * num_training_steps))
            kwargs = {**self.args.lr_scheduler_kwargs, "num_decay_steps": steps}
            self.args.lr_scheduler_kwargs = kwargs
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run SFTTrainer's step and count its tokens, padding included."""
        self.tokens += inputs["input_ids"].numel()
        return super().training_step(model, inputs, *args, **kwargs)

    def _prepare(self, rows: Dataset, name: str) -> Dataset:
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
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        step = rows_of_step(self.args)
        return TurnSampler(self.sizes, step=step, every=self.every, seed=seed)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no card: the finished expert has one."""


def _join(sets: Sequence[Dataset]) -> Dataset:
    if len(sets) == 1:
        return sets[0]
    columns = [name for name in _COLUMNS if name in sets[0].column_names]
    return concatenate_datasets([rows.select_columns(columns) for rows in sets])
