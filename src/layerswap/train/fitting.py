"""Running a training that `train.expert` has decided: model, adapters, freezing, TRL, output."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.errors import TrainingError
from layerswap.merge.memory import without_progress_bars
from layerswap.train.finish import DRAFT, put_in_place, read_training
from layerswap.train.hyperparameters import SCHEDULE
from layerswap.train.resuming import forget_older_states, newest
from layerswap.train.rows import equal_parts
from layerswap.train.trained import (
    adapter_targets,
    names_by_part,
    parameter_places,
    rates_by_name,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from layerswap.train.expert import Job

FIRST = "first"
"""Folder of the first training's checkpoints, where an expert is trained twice (sparse)."""
MASK = "mask.safetensors"


def fit(job: Job, say: Callable[[str], None]) -> None:
    """Train, and write the output; goes on from a checkpoint where there is one.

    Raises:
        TrainingError: the training cannot be begun, or its loss is not a number any more.
    """
    started = time.perf_counter()
    if job.spec.sparse:
        _train_first(job, say)
    model = _load(job)
    trainer = make_trainer(job, model)
    counts = {
        "trained": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "all": sum(p.numel() for p in trainer.model.parameters()),
    }
    say(_announcement(job, trainer, counts))
    if job.spec.sparse:
        _mask(job, trainer)
    _run(trainer, Path(trainer.args.output_dir))
    trainer.save_model(str(job.out / DRAFT))
    if trainer.is_world_process_zero():
        record = read_training(job.out) | {
            "finished": True,
            "parameters": counts,
            "steps": trainer.state.global_step,
            "losses": _losses(trainer.state.log_history),
            "log": trainer.state.log_history,
            "seconds": round(time.perf_counter() - started, 1),
        }
        put_in_place(job.out, job.base, record, dtype=str(_dtype_of(model)).removeprefix("torch."))
    trainer.accelerator.wait_for_everyone()


def make_trainer(job: Job, model: PreTrainedModel) -> Any:
    """TRL's trainer for a job: adapters and frozen parts in place, turns and checkpoints set."""
    from layerswap.train.sft import EverySamples, ExpertTrainer, Turns

    places = parameter_places(model)
    held_out = [rows.validation for rows in job.sets if rows.validation is not None]
    whole = len(held_out) == len(job.sets)
    turns = job.spec.simultaneous
    try:
        with without_progress_bars():
            trainer: Any = ExpertTrainer(
                model=model,
                args=job.config,
                processing_class=job.tokenizer,
                peft_config=_lora(job, model),
                train_sets=[rows.train for rows in job.sets],
                validation_sets=equal_parts(held_out) if whole else [],
                every=turns.every if turns else None,
            )
    except (ValueError, RuntimeError, ImportError) as error:
        # TRL and trackers refuse with these; what our own code lets through is no such error.
        raise TrainingError(" ".join(str(error).split())[:300]) from None
    if not len(trainer.train_dataset):
        raise TrainingError("no row has anything to learn within max_length tokens")
    named = dict(trainer.model.named_parameters())
    parts = names_by_part(named, places, job.parts)
    trained = {name for part in parts for name in part}
    for name, parameter in named.items():
        parameter.requires_grad_(name in trained)
    trainer.rates = rates_by_name(named, places, job.rates)
    if turns:
        trainer.add_callback(Turns([[named[n] for n in part] for part in parts], turns.every))
    trainer.add_callback(EverySamples(job.spec.save_every, validate=whole))
    trainer.add_callback(_keeping_newest_state())
    _set_decay(trainer, job.decay)
    return trainer


def _load(job: Job) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(job.spec.seed)
    # A CPU computes in float32 alone at speed; elsewhere a frozen base can stay as it is stored.
    frozen = job.spec.lora and not job.config.use_cpu
    dtype = job.spec.dtype or ("auto" if frozen else "float32")
    try:
        with without_progress_bars():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                job.base.folder, dtype=dtype
            )
    except (ValueError, KeyError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TrainingError(f"{job.base.source}: transformers cannot load it ({reason})") from None
    return model


def _lora(job: Job, model: PreTrainedModel) -> Any:
    lora = job.spec.lora
    if lora is None:
        return None
    from peft import LoraConfig

    alpha: Any = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha

    return LoraConfig(
        r=lora.r,
        lora_alpha=alpha,
        use_rslora=lora.rslora,
        lora_dropout=lora.dropout,
        target_modules=adapter_targets(model, job.parts),
        task_type="CAUSAL_LM",
    )


def _run(trainer: Any, folder: Path) -> None:
    with_state = newest(folder)
    trainer.train(resume_from_checkpoint=str(with_state) if with_state else None)
    # The logged loss leaves out what is not a number, so the weights are asked: all of them, for
    # of two parts in turns the one that is frozen at the end has trained too.
    if not all(p.isfinite().all() for p in trainer.model.parameters()):
        raise TrainingError("the weights are not numbers any more; try a lower learning rate")


def _set_decay(trainer: Any, share: float | None) -> None:
    """Give a warmup-stable-decay schedule its decay in steps, now that their number is known."""
    if share is None:
        return
    args = trainer.args
    steps = args.max_steps
    if steps <= 0:
        batches = len(trainer.get_train_dataloader())
        each = max(1, math.ceil(batches / args.gradient_accumulation_steps))
        steps = math.ceil(args.num_train_epochs * each)
    kept = {**args.lr_scheduler_kwargs, "num_decay_steps": max(1, round(share * steps))}
    setattr(args, SCHEDULE, kept)


def _train_first(job: Job, say: Callable[[str], None]) -> None:
    """The first of two trainings, which finds what changes most; only its mask is kept."""
    from layerswap.train.sparse import most_changed, save_masks

    folder = Path(job.config.output_dir)
    if (folder / MASK).is_file():
        return
    assert job.spec.sparse is not None, "only a sparse training is trained twice"
    say("first training: which parameters change most")
    model = _load(job)
    named = dict(model.named_parameters())
    names = names_by_part(named, parameter_places(model), job.parts)[0]
    before = {name: named[name].detach().clone() for name in names}
    config = copy(job.config)
    config.output_dir = str(folder / FIRST)
    trainer = make_trainer(replace(job, config=config), model)
    _run(trainer, folder / FIRST)
    if trainer.is_world_process_zero():
        after = {name: named[name].detach() for name in names}
        draft = folder / f".{MASK}"
        save_masks(most_changed(before, after, job.spec.sparse.keep), draft)
        draft.replace(folder / MASK)
        shutil.rmtree(folder / FIRST, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()


def _mask(job: Job, trainer: Any) -> None:
    from layerswap.train.sparse import Masked, load_masks

    masks = load_masks(Path(job.config.output_dir) / MASK)
    named = dict(trainer.model.named_parameters())
    trainer.add_callback(Masked({name: named[name] for name in masks}, masks))


def _keeping_newest_state() -> Any:
    from transformers import TrainerCallback

    class KeepNewestState(TrainerCallback):
        """Frees the disk of optimiser states that nothing will go on from."""

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                forget_older_states(Path(args.output_dir))

    return KeepNewestState()


def _announcement(job: Job, trainer: Any, counts: dict[str, int]) -> str:
    share = counts["trained"] / counts["all"]
    rows = len(trainer.train_dataset)
    note = ""
    if job.spec.dtype in ("bfloat16", "float16") and not job.spec.lora:
        note = (
            f"\nnote: weights in {job.spec.dtype} lose steps smaller than their rounding; "
            "the papers' rates of 1e-7 vanish in it (docs/training.md)"
        )
    return f"training {counts['trained']:,} parameters ({share:.1%}) on {rows:,} rows{note}"


def _losses(history: list[dict[str, Any]]) -> dict[str, float | None]:
    def last(key: str) -> float | None:
        found = [entry[key] for entry in history if key in entry]
        return round(float(found[-1]), 6) if found else None

    return {"training": last("loss") or last("train_loss"), "validation": last("eval_loss")}


def _dtype_of(model: PreTrainedModel) -> Any:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
