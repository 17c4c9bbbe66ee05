"""TRL's SFTTrainer over several data sets, mixed or in turns, with its callbacks, masks and head.

Sparse fine-tuning (Ansell et al., 2022) trains the elements in masks alone, by a callback.

The head computes log-probabilities of labels without the logits of a whole batch, for training on
a CPU. With a vocabulary of 262,144 the logits are the largest cost of a small model. TRL's fused
head skips positions without a label only where Triton runs, and computes every tile again for the
gradient. Here the head sees the labelled positions alone, in chunks, and the gradient of a chunk is
computed while its logits exist: three matrix products instead of four, in constant memory.

Imports TRL when it is imported; import this module inside functions only.
"""

from __future__ import annotations

import functools
import shutil
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset, concatenate_datasets
from torch.utils.data import Sampler
from transformers import TrainerCallback
from trl import SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

from layerswap._types import Log
from layerswap.methods.thresholds import Stream, magnitude_thresholds
from layerswap.training.expert.save import checkpoints, forget_older_states

CHUNK_LOGITS = 1 << 25
"""Logits in memory at a time (128 MiB of float32)."""
IGNORED = -100
_SCALED = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier",
           "logits_scaling")  # fmt: skip
"""Settings of models whose logits are not simply the product of hidden states and head."""


class LinearLogProb(torch.autograd.Function):
    """Log-probabilities of targets under `softmax(hidden @ weight.T + bias)`.

    The gradient is that of a sum: every log-probability must be given the same gradient.
    """

    @staticmethod
    def forward(  # noqa: PLR0917, autograd passes them so
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        chunk: int,
        train: bool,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the values, and the gradients of their sum where they are needed.

        Args:
            ctx: autograd's context.
            hidden: [n, d], float32.
            weight: [vocabulary, d], float32.
            bias: [vocabulary], or None.
            targets: [n], token ids.
            chunk: logits in memory at a time.
            train: compute the gradients.
            dtype: what matrix products take and give, as under autocast; the rest is float32.

        Returns:
            Log-probability of each target, entropy (nats) and whether the target is the most
            likely token; each [n].
        """
        inputs = zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        grads = [
            torch.zeros_like(one) if needed and train and one is not None else None
            for one, needed in inputs
        ]
        values, entropies, hits = [], [], []
        head = weight.to(dtype)
        size = max(1, min(chunk // len(weight), len(targets)))
        # The memory of a chunk is taken once: fresh pages cost as much as what is written to them.
        whole = [hidden.new_empty(size, len(weight)) for _ in range(2)]
        narrow = whole[0] if dtype == torch.float32 else whole[0].to(dtype)
        for rows in torch.split(torch.arange(len(targets)), size):
            part, wanted = hidden[rows].to(dtype), targets[rows]
            one, two, product = (memory[: len(rows)] for memory in (*whole, narrow))
            torch.mm(part, head.t(), out=product)
            logits = one if product is one else one.copy_(product)
            if bias is not None:
                logits += bias
            logs = torch.log_softmax(logits, -1, out=two)
            values.append(logs.gather(-1, wanted[:, None])[:, 0])
            hits.append(logs.argmax(-1) == wanted)
            likely = torch.exp(logs, out=one)
            entropies.append(-logs.mul_(likely).sum(-1))
            # d log p(target) / d logits = one_hot(target) - p. They are subtracted before a product
            # that rounds: near p = 1 nothing but its rounding would be left of their difference.
            likely[torch.arange(len(wanted)), wanted] -= 1
            rise = likely if product is one else product.copy_(likely)
            if grads[0] is not None:
                grads[0][rows] = -(rise @ head).to(hidden.dtype)
            if grads[1] is not None:
                if product is one:
                    grads[1].addmm_(rise.t(), part, alpha=-1)
                else:
                    grads[1].sub_(rise.t() @ part)
            if grads[2] is not None:
                grads[2].sub_(likely.sum(0))
        ctx.grads = grads
        entropy, hit = torch.cat(entropies), torch.cat(hits)
        ctx.mark_non_differentiable(entropy, hit)
        return torch.cat(values), entropy, hit

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients that `forward` computed."""
        factor = grad[:1].sum()  # 0 where no position has a label
        scaled = [None if one is None else one.mul_(factor) for one in ctx.grads]
        ctx.grads = None
        return (*scaled, None, None, None, None)


def use_labelled_positions(model: Any, chunk: int = CHUNK_LOGITS) -> None:
    """Replace TRL's head of a model by `LinearLogProb` where its weights are float32 on a CPU.

    Other devices and dtypes, mixtures of experts and models that scale their logits keep TRL's
    head. Under autocast the matrix products of the head have its dtype.

    Args:
        model: a causal language model that `trl.SFTTrainer` prepared, without PEFT's wrapper.
        chunk: logits in memory at a time.
    """
    config = model.config.get_text_config()
    if any(getattr(config, name, None) is not None for name in _SCALED):
        return
    fused = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        head, labels = self.get_output_embeddings(), kwargs.get("labels")
        fits = (
            fused_lm_head
            and labels is not None
            and "shift_labels" not in kwargs
            and head.weight.dtype == torch.float32
            and head.weight.device.type == labels.device.type == "cpu"
            and not getattr(config, "output_router_logits", False)
            and not kwargs.get("output_router_logits")
        )
        if not fits:
            return fused(*args, fused_lm_head=fused_lm_head, **kwargs)
        labels, count = kwargs.pop("labels")[:, 1:], kwargs.pop("num_items_in_batch", None)
        hidden = self.base_model(*args, **kwargs | {"use_cache": False}).last_hidden_state[:, :-1]
        mask = labels != IGNORED
        lower = torch.is_autocast_enabled("cpu")
        values = LinearLogProb.apply(  # type: ignore[no-untyped-call]
            hidden[mask].float(), head.weight, head.bias, labels[mask], chunk,
            torch.is_grad_enabled(), torch.get_autocast_dtype("cpu") if lower else torch.float32,
        )  # fmt: skip
        spread = [one.new_zeros(mask.shape).masked_scatter(mask, one) for one in values]
        loss = -spread[0].sum() / (mask.sum().clamp(min=1) if count is None else count)
        return FusedCausalLMOutput(
            loss=loss, log_probs=spread[0], entropy=spread[1], is_top1=spread[2], label_mask=mask
        )

    model.forward = types.MethodType(forward, model)


Tensors = Mapping[str, torch.Tensor]


def most_changed(before: Tensors, after: Tensors, keep: float) -> dict[str, torch.Tensor]:
    """Masks of the largest changes, over all parameters together.

    The k-th largest |delta| is exact; ties with it are kept, so a mask can hold slightly more than
    `keep` of the elements. It never holds an element that did not change.

    Args:
        before: parameters by name, of any float dtype.
        after: the same parameters after a training.
        keep: fraction of all elements, in (0, 1).

    Returns:
        bool tensors of the parameters' shapes.
    """
    deltas = {name: (after[name] - before[name]).float().abs() for name in before}
    total = sum(delta.numel() for delta in deltas.values())
    streams = [_stream(delta.flatten()) for delta in deltas.values()]
    threshold = magnitude_thresholds(streams, 1, [max(1, round(keep * total))])[0][0]
    return {name: (delta >= threshold) & (delta > 0) for name, delta in deltas.items()}


def save_masks(masks: Tensors, path: Path) -> None:
    """Write masks, uint8 tensors of 0 and 1, as safetensors."""
    from safetensors.torch import save_file

    save_file({name: mask.to(torch.uint8).contiguous() for name, mask in masks.items()}, path)


def load_masks(path: Path) -> dict[str, torch.Tensor]:
    """The masks that `save_masks` wrote."""
    from safetensors.torch import load_file

    return {name: mask.bool() for name, mask in load_file(path).items()}


class Masked(TrainerCallback):
    """Restricts a training to the elements in masks.

    Gradients are masked before clipping, and weight decay of the other elements is undone after
    every step.

    Args:
        parameters: the trained parameters, by name.
        masks: bool tensors of their shapes.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], masks: Tensors) -> None:
        self.held = [
            (p, masks[name].to(p.device), p.detach().clone()) for name, p in parameters.items()
        ]
        for parameter, mask, _ in self.held:
            hooked: Any = parameter
            hooked.register_post_accumulate_grad_hook(_masking(mask))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Right after the optimiser has stepped."""
        if not args.weight_decay:
            return
        with torch.no_grad():
            for parameter, mask, start in self.held:
                parameter.copy_(torch.where(mask, parameter, start))


def _masking(mask: torch.Tensor) -> Any:
    def hook(parameter: torch.nn.Parameter) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(mask)

    return hook


def _stream(values: torch.Tensor) -> Stream:
    size = 1 << 22

    def part(start: int, stop: int) -> list[Any]:
        return [values[start:stop].cpu().numpy()]

    def chunks() -> Any:
        return (part(start, start + size) for start in range(0, len(values), size))

    return Stream(len(values), chunks, part)


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


class Checkpointing(TrainerCallback):
    """Saves and validates after every `samples` examples (paper 1, A.2), and saves by time.

    A checkpoint that was saved by time only serves a resumption: a newer one replaces it, so the
    checkpoints of a finished training do not depend on the speed of the machine. Older checkpoints
    lose their optimiser states.

    Args:
        samples: examples between checkpoints.
        minutes: maximum time between checkpoints.
        validate: compute the validation loss.
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
    """Logs the step, the loss, the speed and the time left.

    Args:
        log: called with each line.
        tokens: returns the number of tokens that this process has trained on.
        seconds: time between lines.
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


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def rows_of_step(args: Any) -> int:
    """Rows in an optimiser step, over all processes."""
    rows: int = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return rows * int(args.world_size)


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
        **rest: Any,
    ) -> None:
        self.rates: Mapping[str, float] = {}
        self.tokens = 0
        validation = validation_sets[0] if validation_sets else None
        super().__init__(train_dataset=train_sets[0], eval_dataset=validation, **rest)
        if self.args.loss_type == "nll":  # its gradient is that of a sum
            adapted = hasattr(self.model, "get_base_model")
            use_labelled_positions(self.model.get_base_model() if adapted else self.model)
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

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """SFTTrainer's step; counts its tokens, padding included."""
        self.tokens += inputs["input_ids"].numel()
        return super().training_step(model, inputs, *args, **kwargs)

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
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        step = rows_of_step(self.args)
        return TurnSampler(self.sizes, step=step, every=self.every, seed=seed)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """No card: the finished expert has one, and checkpoints are its drafts."""


def _joined(sets: Sequence[Dataset]) -> Dataset:
    kept = [name for name in KEPT if name in sets[0].column_names]
    if len(sets) == 1:
        return sets[0]
    return concatenate_datasets([rows.select_columns(kept) for rows in sets])
