"""Trains experts: loads the model, runs TRL's trainer, and writes the expert."""

from __future__ import annotations

import logging
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.hub import TRAINING
from layerswap.checkpoint.loading import load_causal_lm, without_progress_bars
from layerswap.engine.rows import learns_positions, model_max_length
from layerswap.ground import system
from layerswap.ground.commit import atomic_folder, write_json
from layerswap.ground.errors import TrainingError, one_line
from layerswap.ground.lease import Lease, Owner, held
from layerswap.ground.types import Log, PathLike, counted
from layerswap.training.expert.hyperparameters import launched_with
from layerswap.training.expert.job import TrainingJob, plan_training
from layerswap.training.expert.save import (
    CHECKPOINTS,
    DRAFT,
    checkpoints,
    put_in_place,
    read_training,
    resumable,
)
from layerswap.training.expert.spec import ExpertSpec, check_expert, read_expert
from layerswap.training.expert.trainable import adapter_targets, names_by_part, parameter_places
from layerswap.training.mix.card import ending_warning, length_warning, unknown_warning

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STOPPING = "stopping after this step, with a checkpoint; Ctrl-C again stops at once"


def train(
    spec: ExpertSpec | Mapping[str, Any] | PathLike,
    out: PathLike,
    *,
    folder: PathLike | None = None,
    resume: bool = False,
    overwrite: bool = False,
    log: Log = lambda line: None,
    **overrides: Any,
) -> Path:
    """Train an expert and write it to `out`.

    Every process of a distributed training calls this; the first writes.

    Args:
        spec: the expert: a YAML file, its content as a mapping, or a checked specification.
        out: the folder to create, with the expert, `layerswap-training.json`, and
            `checkpoints/checkpoint-<step>` while it trains.
        folder: base of relative paths in the specification; the folder of the YAML file, or the
            working folder, if not given.
        resume: continue from the newest checkpoint in `out`, bit for bit as if it had never
            stopped. A finished training is left unchanged.
        overwrite: overwrite a folder that a training wrote.
        log: called with one line about the training at a time.
        overrides: keys of the specification with other values, for example `seed=2`.

    Returns:
        `out`, absolute.

    Raises:
        LayerswapError: the training is not possible; nothing was written.

    Example:
        >>> import layerswap as ls
        >>> expert = ls.train({"base": "base", "data": {"train": "rows.jsonl"}}, out="expert")
        >>> saved = ls.soup([expert]).save("copy")
    """
    from accelerate import PartialState

    if isinstance(spec, str | os.PathLike):
        folder = Path(spec).parent if folder is None else folder
        spec = read_expert(Path(spec))
    if overrides or not isinstance(spec, ExpertSpec):
        given = spec.model_dump(exclude_unset=True) if isinstance(spec, ExpertSpec) else dict(spec)
        spec = check_expert(given | overrides)
    job = plan_training(spec, out, folder=folder, resume=resume)
    state = PartialState()
    first = state.is_main_process
    with held(job.out, Owner(), beside=True) if first else nullcontext() as lease:
        if first:
            _open_folder(job, resume=resume, overwrite=overwrite)
        state.wait_for_everyone()
        if read_training(job.out)["finished"]:
            log(f"{job.out}: already finished")
        else:
            _fit_or_clean(job, lease, log, resume=resume)
    return job.out


def _fit_or_clean(job: TrainingJob, lease: Lease | None, log: Log, *, resume: bool) -> None:
    """Train; a training that ends before its first checkpoint leaves nothing."""
    try:
        with without_progress_bars(), warnings.catch_warnings():
            # TRL, PEFT and transformers warn about each other.
            warnings.simplefilter("ignore", FutureWarning)
            _fit(job, log)
    except BaseException as error:
        # Libraries name other causes of a disk without room for a file of weights.
        full = (isinstance(error, OSError | RuntimeError)
                and shutil.disk_usage(job.out).free < 2 * job.base.nbytes)  # fmt: skip
        if lease and not checkpoints(job.out / CHECKPOINTS) and not resume:
            lease.discard()
        if full:
            what = "pass --resume" if job.out.is_dir() else "run it again"
            raise TrainingError(
                f"{job.out}: cannot be written, the disk is full; make room for several "
                f"checkpoints of {job.base.nbytes / 1e6:,.0f} MB and {what}"
            ) from None
        raise


def _fit(job: TrainingJob, log: Log) -> None:
    """Train and write the output, from the newest checkpoint if there is one."""
    started = time.perf_counter()
    if job.config.use_cpu:
        system.keep_freed_memory()
    log(f"loading {job.base.source}")
    model = _load_model(job)
    rows = sum(len(data.train) for data in job.sets)
    log(f"tokenising {rows:,} rows")
    trainer = make_trainer(job, model, log)
    parameters = list(trainer.model.parameters())
    counts = {
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "all": sum(p.numel() for p in parameters),
    }
    for line in _announcement(job, trainer, counts):
        log(line)
    with system.first_interrupt(STOPPING) as asked:
        _run(trainer, asked, log)
        _save(job, trainer, counts, started)
        if asked.is_set():
            raise KeyboardInterrupt


def _save(job: TrainingJob, trainer: Any, counts: dict[str, int], started: float) -> None:
    """Write the finished expert; `started` is `time.perf_counter()` before the training, s."""
    trainer.save_model(str(job.out / DRAFT))
    if trainer.is_world_process_zero():
        dtype = next(p.dtype for p in trainer.model.parameters() if p.is_floating_point())
        record = read_training(job.out) | {
            "finished": True,
            "parameters": counts,
            "steps": trainer.state.global_step,
            "losses": _losses(trainer.state.log_history),
            "log": trainer.state.log_history,
            "seconds": round(time.perf_counter() - started, 1),
        }
        put_in_place(job.out, job.base, record, dtype=str(dtype).removeprefix("torch."))
    trainer.accelerator.wait_for_everyone()


def make_trainer(job: TrainingJob, model: PreTrainedModel, log: Log) -> Any:
    """Make TRL's trainer for a job, with adapters, frozen parts, turns and checkpoints set up."""
    from transformers import PrinterCallback, ProgressCallback

    from layerswap.training.expert.sft import (
        AlternatingTurns,
        Checkpointing,
        ExpertTrainer,
        ProgressLines,
    )

    spec = job.spec
    places = parameter_places(model)
    held_out = [rows.validation for rows in job.sets if rows.validation is not None]
    validate = len(held_out) == len(job.sets)
    smallest = min(map(len, held_out), default=0)  # a fair validation set (paper 2, section 4.5)
    logger = logging.getLogger("trl")
    level = logger.level
    if any(job.prompt_warnings):
        logger.setLevel(logging.ERROR)  # TRL says the same without the name of the data set
    try:
        trainer: Any = ExpertTrainer(
            model=model,
            args=job.config,
            processing_class=job.tokenizer,
            peft_config=_lora_config(job, model),
            train_sets=[rows.train for rows in job.sets],
            validation_sets=[s.select(range(smallest)) for s in held_out] if validate else [],
            every=spec.simultaneous.every if spec.simultaneous else None,
            decay=job.decay,
        )
    except (ValueError, RuntimeError, ImportError) as error:  # from TRL and from trackers
        raise TrainingError(one_line(error, 300)) from None
    finally:
        logger.setLevel(level)
    if not min(*trainer.sizes, len(trainer.eval_dataset) if validate else 1):
        raise TrainingError(
            "no row has a label within max_length tokens; raise hyperparameters.max_length"
        )
    named = dict(trainer.model.named_parameters())
    parts = names_by_part(named, places, job.parts)
    trained = {name for part in parts for name in part}
    for name, parameter in named.items():
        parameter.requires_grad_(name in trained)
    if spec.simultaneous:
        owners = dict(trainer.model.named_modules())
        by_part = [[(owners[owner], own) for name in part
                    for owner, _, own in [name.rpartition(".")]] for part in parts]  # fmt: skip
        trainer.add_callback(AlternatingTurns(by_part, spec.simultaneous.every))
    trainer.add_callback(Checkpointing(spec.save_every, spec.save_minutes, validate=validate))
    # Both print dictionaries on standard output.
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(ProgressLines(log, lambda: trainer.tokens))
    return trainer


def _run(trainer: Any, asked: Event, log: Log) -> None:
    """Train from the newest checkpoint; once `asked`, save a checkpoint and stop."""
    from layerswap.training.expert.sft import SavedStop

    engine = "FSDP" if launched_with("fsdp") else ""
    checkpoint = resumable(Path(trainer.args.output_dir), engine)
    trainer.add_callback(SavedStop(asked, log))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    # The logged loss skips NaN, so check the weights: all of them, because the part that is frozen
    # at the end of alternating turns has trained too.
    if not all(_is_finite(p) for p in trainer.model.parameters()):
        raise TrainingError("the weights hold NaN or infinity; try a lower learning rate")


def _load_model(job: TrainingJob) -> PreTrainedModel:
    import torch
    from transformers import BitsAndBytesConfig, set_seed

    set_seed(job.spec.seed)
    # On a CPU weights are float32, whatever the products are in; on a GPU a frozen base keeps its
    # dtype.
    frozen = job.spec.lora and not job.config.use_cpu
    dtype = job.spec.dtype or ("auto" if frozen else "float32")
    options: dict[str, Any] = {}
    if job.spec.load_in_4bit:  # as QLoRA: 4-bit NormalFloat, scales too (Dettmers et al., 2023)
        options["quantization_config"] = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32 if job.config.use_cpu else torch.bfloat16,
        )
    model = load_causal_lm(job.base.folder, dtype=dtype, named=job.base.source, **options)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not _is_finite(parameter):
            raise TrainingError(f"{job.base.source}: tensor {name!r} holds NaN or infinity")
    return model


def _is_finite(parameter: Any) -> bool:
    """True without NaN and infinity; `isfinite` would make copies, of an embedding in gigabytes."""
    return bool(parameter.detach().norm(float("inf")).isfinite())


def _lora_config(job: TrainingJob, model: PreTrainedModel) -> Any:
    lora = job.spec.lora
    if lora is None:
        return None
    from peft import LoraConfig

    settings = lora.model_dump(exclude={"target_modules", "exclude_modules"})
    settings["use_rslora"] = job.spec.rslora
    if lora.lora_alpha == int(lora.lora_alpha):
        settings["lora_alpha"] = int(lora.lora_alpha)
    targets = adapter_targets(model, job.parts, lora)
    return LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **settings)


def _announcement(job: TrainingJob, trainer: Any, counts: dict[str, int]) -> Iterator[str]:
    spec = job.spec
    share, rows = counts["trained"] / counts["all"], len(trainer.train_dataset)
    yield f"training {counts['trained']:,} parameters ({share:.1%}) on {rows:,} rows"
    if spec.lora:
        r, alpha = spec.lora.r, spec.lora.lora_alpha
        by, scale = ("sqrt(r), rsLoRA", alpha / r**0.5) if spec.rslora else ("r", alpha / r)
        yield f"adapters of rank {r} with scale {scale:.3g} (lora_alpha / {by})"
    if spec.dtype in ("bfloat16", "float16") and not spec.lora:
        yield (
            f"note: weights in {spec.dtype} lose steps smaller than their rounding; "
            "the papers' learning rates of 1e-7 have no effect in it (docs/training.md)"
        )
    default = "bf16" not in spec.hyperparameters and spec.dtype in (None, "float32")
    if trainer.args.use_cpu and trainer.args.bf16 and default:
        yield (
            "matrix products in bfloat16, weights and steps in float32 "
            "(`hyperparameters: {bf16: false}` computes all in float32)"
        )
    longest = None if trainer.args.packing else trainer.args.max_length
    positions = model_max_length(trainer.model)
    learns = positions and learns_positions(trainer.model, positions)
    for data, prompts in zip(job.sets, job.prompt_warnings, strict=True):
        lengths = length_warning(data.train, job.tokenizer, longest, positions)
        if learns and positions and longest and longest > positions and lengths:
            raise TrainingError(f"{data.name}: {lengths}")
        ending = ending_warning(data.train, job.tokenizer, job.ends)
        unknown = unknown_warning(data.train, job.tokenizer)
        for warning in filter(None, [*prompts, lengths, ending, unknown]):
            yield f"warning: {data.name}: {warning}"
        for name, count in data.contaminated.items():
            yield f"warning: {data.name}: {counted(count, 'row')} with an item of {name}"


def _losses(history: list[dict[str, Any]]) -> dict[str, float | None]:
    def last(key: str) -> float | None:
        values = [entry[key] for entry in history if key in entry]
        return round(float(values[-1]), 6) if values else None

    return {"training": last("loss") or last("train_loss"), "validation": last("eval_loss")}


def _open_folder(job: TrainingJob, *, resume: bool, overwrite: bool) -> None:
    """Make the output folder with the record of the training, or check the one to resume in."""
    if resume and job.out.is_dir():
        record = read_training(job.out)
        if record.get("batch", job.batch) != job.batch:
            raise TrainingError(
                f"{job.out}: started with {record['batch']} examples in a step, and "
                f"{job.config.world_size} processes would make {job.batch}; give as many processes "
                f"as before, or effective_batch: {record['batch']}"
            )
        if record["key"] != job.key:
            raise TrainingError(
                f"{job.out}: holds another training (its settings, data or base differ); "
                "choose another output, or pass --overwrite instead of --resume"
            )
        return
    if job.out.is_dir() and (job.out / TRAINING).is_file() and not overwrite:
        if read_training(job.out)["finished"]:
            state = "a finished training; choose another output or pass --overwrite"
        else:
            state = "an unfinished training; pass --resume to continue it, or --overwrite"
        raise TrainingError(f"{job.out}: holds {state}")
    with atomic_folder(job.out, marker=TRAINING, overwrite=overwrite) as draft:
        write_json(draft / TRAINING, job.record)
