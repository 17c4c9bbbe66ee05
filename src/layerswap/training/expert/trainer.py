"""Trains experts: checks a specification, prepares model, adapters and data, and runs TRL."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap._types import Log, PathLike
from layerswap.checkpoint import Checkpoint, Place, fingerprint, open_checkpoint
from layerswap.checkpoint.commit import refuse_target
from layerswap.checkpoint.loading import (
    load_adapter,
    load_causal_lm,
    load_tokenizer,
    without_progress_bars,
)
from layerswap.checkpoint.remote import TRAINING
from layerswap.compose.composition import all_places
from layerswap.errors import TrainingError
from layerswap.merge.target import check_apart
from layerswap.training.expert.distributed import check_distributed
from layerswap.training.expert.hyperparameters import SCHEDULE, sft_config
from layerswap.training.expert.rows import TrainingRows, equal_parts, load_rows
from layerswap.training.expert.save import (
    CHECKPOINTS,
    DRAFT,
    LIBRARIES,
    checkpoints,
    put_in_place,
    read_training,
    resumable,
    write_training,
)
from layerswap.training.expert.spec import ExpertSpec, check_expert, read_expert
from layerswap.training.expert.trainable import (
    Part,
    adapter_targets,
    names_by_part,
    parameter_places,
    rates_by_name,
    rates_by_place,
    trained_parts,
)
from layerswap.training.mix.card import boundary_warning
from layerswap.versions import need_extras, versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIRST = "first"
"""Folder of the checkpoints of the first training, where an expert is trained twice (sparse)."""
MASK = "mask.safetensors"
_PATHS = ("output_dir", "logging_dir", "run_name", "hub_token", "local_rank")


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
    if isinstance(spec, str | os.PathLike):
        folder = Path(spec).parent if folder is None else folder
        spec = read_expert(Path(spec))
    if overrides or not isinstance(spec, ExpertSpec):
        given = spec.model_dump(exclude_unset=True) if isinstance(spec, ExpertSpec) else dict(spec)
        spec = check_expert(given | overrides)
    job = plan_training(spec, out, folder=folder, resume=resume)
    if not _open_output(job, resume=resume, overwrite=overwrite):
        log(f"{job.out}: finished already")
        return job.out
    try:
        with without_progress_bars(), warnings.catch_warnings():
            # Of TRL, PEFT and transformers about each other.
            warnings.simplefilter("ignore", FutureWarning)
            _fit(job, log)
    except BaseException:
        # A training that ends before its first checkpoint cannot be resumed, so it leaves nothing.
        if not checkpoints(job.out / CHECKPOINTS) and not resume:
            shutil.rmtree(job.out, ignore_errors=True)
        raise
    return job.out


@dataclass(frozen=True)
class TrainingJob:
    """A training that has been checked; nothing has been written.

    Attributes:
        spec: its specification.
        base: the checkpoint to fine-tune; only headers have been read.
        tokenizer: the base's.
        sets: the data sets.
        parts: the places that train.
        rates: factors of the learning rate, at places where it is not 1.
        config: TRL's configuration.
        decay: fraction of the steps in which a stable schedule decays.
        out: the output folder.
    """

    spec: ExpertSpec
    base: Checkpoint
    tokenizer: Any
    sets: tuple[TrainingRows, ...]
    parts: tuple[Part, ...]
    rates: Mapping[Place, float]
    config: Any
    decay: float | None
    out: Path

    @cached_property
    def base_fingerprints(self) -> dict[str, str]:
        """Fingerprints of the base's weight files, by name; reads 4 MiB of each."""
        return {file.name: fingerprint(file) for file in self.base.files}

    @property
    def key(self) -> str:
        """SHA-256 of everything that determines the trained weights."""
        inputs = {
            "spec": self.spec.model_dump(mode="json", exclude={"base", "save_minutes"}),
            "base": self.base_fingerprints,
            "data": [rows.fingerprints for rows in self.sets],
            "parts": [sorted(map(str, part)) for part in self.parts],
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()

    @property
    def record(self) -> dict[str, Any]:
        """The record of the training before its first step."""
        ordered = all_places(self.base.layers)
        return {
            "key": self.key,
            "finished": False,
            "spec": self.spec.model_dump(mode="json", exclude_defaults=True),
            "base": {
                "source": self.base.source,
                "revision": self.base.revision,
                "fingerprints": self.base_fingerprints,
            },
            "data": [
                {
                    "name": rows.name,
                    "train": len(rows.train),
                    "validation": len(rows.validation) if rows.validation is not None else 0,
                    "fingerprints": rows.fingerprints,
                    "contaminated": rows.contaminated,
                }
                for rows in self.sets
            ],
            "places": [
                [[place.layer, place.role] for place in ordered if place in part]
                for part in self.parts
            ],
            "hyperparameters": {
                key: value for key, value in self.config.to_dict().items() if key not in _PATHS
            },
            "versions": versions(*LIBRARIES),
        }


def plan_training(
    spec: ExpertSpec, out: PathLike, *, folder: PathLike | None = None, resume: bool = False
) -> TrainingJob:
    """Check a training without writing or training anything; see `train`."""
    need_extras("training", "train")
    if spec.load_in_4bit and find_spec("bitsandbytes") is None:
        raise TrainingError("load_in_4bit: needs bitsandbytes; run `pip install bitsandbytes`")
    check_distributed(spec)
    folder, target = Path(folder or ""), Path(out).expanduser().absolute()
    local = not spec.base.startswith(("/", "~")) and (folder / spec.base).is_dir()
    base = open_checkpoint(str(folder / spec.base) if local else spec.base)
    check_apart(target, {"the base": base})
    parts = trained_parts(spec, base.layers, folder)
    rates = rates_by_place(spec.rates, base.layers)
    sets = tuple(load_rows(data, folder=folder, limit=spec.limit) for data in spec.data_sets)
    form = "text" if all(rows.form == "text" for rows in sets) else sets[0].form
    parameters = sum(math.prod(tensor.shape) for tensor in base.tensors.values())
    begun = resume and (target / TRAINING).is_file()
    config, decay = sft_config(
        spec, target / CHECKPOINTS, rows=form, parameters=parameters,
        begun_in=read_training(target)["hyperparameters"].get("bf16") if begun else None,
    )  # fmt: skip
    tokenizer = _load_tokenizer(base)
    for rows in sets:
        _check_template(base, tokenizer, rows)
    return TrainingJob(spec, base, tokenizer, sets, tuple(parts), rates, config, decay, target)


def make_trainer(job: TrainingJob, model: PreTrainedModel, log: Log = lambda line: None) -> Any:
    """TRL's trainer for a job, with adapters, frozen parts, turns and checkpoints set up."""
    from transformers import PrinterCallback, ProgressCallback

    from layerswap.training.expert import sft

    places = parameter_places(model)
    held_out = [rows.validation for rows in job.sets if rows.validation is not None]
    validate = len(held_out) == len(job.sets)
    turns = job.spec.simultaneous
    try:
        trainer: Any = sft.ExpertTrainer(
            model=model,
            args=job.config,
            processing_class=job.tokenizer,
            peft_config=_lora(job, model),
            train_sets=[rows.train for rows in job.sets],
            validation_sets=equal_parts(held_out) if validate else [],
            every=turns.every if turns else None,
        )
    except (ValueError, RuntimeError, ImportError) as error:  # from TRL and from trackers
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
        by_part = [[named[name] for name in part] for part in parts]
        trainer.add_callback(sft.AlternatingTurns(by_part, turns.every))
    spec = job.spec
    trainer.add_callback(sft.Checkpointing(spec.save_every, spec.save_minutes, validate=validate))
    # Neither prints dictionaries on standard output.
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(sft.ProgressLines(log, lambda: trainer.tokens))
    _set_decay(trainer, job.decay)
    return trainer


def _fit(job: TrainingJob, log: Log) -> None:
    """Train and write the output, from the newest checkpoint if there is one."""
    started = time.perf_counter()
    if job.spec.sparse:
        _train_first(job, log)
    model = _load_model(job)
    trainer = make_trainer(job, model, log)
    parameters = list(trainer.model.parameters())
    counts = {
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "all": sum(p.numel() for p in parameters),
    }
    for line in _announcement(job, trainer, counts):
        log(line)
    if job.spec.sparse:
        _apply_mask(job, trainer)
    _run(trainer)
    trainer.save_model(str(job.out / DRAFT))
    if trainer.is_world_process_zero():
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        if job.spec.bake:
            dtype = _bake(job)
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


def _run(trainer: Any) -> None:
    checkpoint = resumable(Path(trainer.args.output_dir))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    # The logged loss skips NaN, so check the weights: all of them, because the part that is frozen
    # at the end of alternating turns has trained too.
    if not all(p.isfinite().all() for p in trainer.model.parameters()):
        raise TrainingError("the weights are not numbers any more; try a lower learning rate")


def _load_tokenizer(base: Checkpoint) -> Any:
    tokenizer = load_tokenizer(base.folder, named=base.source)
    if tokenizer.eos_token is None:
        raise TrainingError(f"{base.source}: its tokenizer has no end-of-sequence token")
    return tokenizer


def _check_template(base: Checkpoint, tokenizer: Any, rows: TrainingRows) -> None:
    """Refuse messages that the chat template refuses, by their roles or by what they say."""
    if not rows.conversational:
        return
    remedy = "build the mix with kind: prompt-completion, or give it a chat_template"
    if not tokenizer.chat_template:
        raise TrainingError(
            f"{base.source}: its tokenizer has no chat template, and {rows.name} is made of "
            f"messages; {remedy}"
        )
    for part, held in (("row", rows.train), ("validation row", rows.validation or ())):
        for number, row in enumerate(held, start=1):
            turns = [turn for column in row.values() for turn in column]
            try:
                tokenizer.apply_chat_template(turns, tokenize=False)
                if "prompt" in row:
                    tokenizer.apply_chat_template(
                        row["prompt"], tokenize=False, add_generation_prompt=True
                    )
            except Exception as error:  # a template is a program, and raises whatever it likes
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise TrainingError(
                    f"{base.source}: its chat template fails on {part} {number} of {rows.name}, "
                    f"with the roles {', '.join(turn['role'] for turn in turns)} ({reason}); "
                    f"{remedy}"
                ) from None


def _load_model(job: TrainingJob) -> PreTrainedModel:
    from transformers import set_seed

    set_seed(job.spec.seed)
    # On a CPU weights are float32, whatever is computed in; on a GPU a frozen base keeps its dtype.
    frozen = job.spec.lora and not job.config.use_cpu
    dtype = job.spec.dtype or ("auto" if frozen else "float32")
    options = _quantization(job.spec)
    model = load_causal_lm(job.base.folder, dtype=dtype, named=job.base.source, **options)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not parameter.isfinite().all():
            raise TrainingError(f"{job.base.source}: tensor {name!r} holds NaN or infinity")
    return model


def _quantization(spec: ExpertSpec) -> dict[str, Any]:
    """QLoRA's base: 4-bit NormalFloat with double quantization (Dettmers et al., 2023)."""
    if not spec.load_in_4bit:
        return {}
    import torch
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
    )
    return {"quantization_config": config}


def _lora(job: TrainingJob, model: PreTrainedModel) -> Any:
    lora = job.spec.lora
    if lora is None:
        return None
    from peft import LoraConfig

    chosen = lora.model_dump(exclude={"target_modules", "exclude_modules"})
    if lora.lora_alpha == int(lora.lora_alpha):
        chosen["lora_alpha"] = int(lora.lora_alpha)
    targets = adapter_targets(model, job.parts, lora)
    return LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **chosen)


def _bake(job: TrainingJob) -> Any:
    """Merge the adapter in the draft folder into the base, in float32."""
    import torch

    draft = job.out / DRAFT
    whole = job.spec.model_copy(update={"load_in_4bit": False, "dtype": "float32"})
    base = _load_model(replace(job, spec=whole))
    adapted: Any = load_adapter(base, draft)
    merged = adapted.merge_and_unload()
    shutil.rmtree(draft)
    dtype = getattr(torch, job.spec.dtype or "float32")
    merged.to(dtype).save_pretrained(draft)
    return dtype


def _set_decay(trainer: Any, fraction: float | None) -> None:
    """Give a warmup-stable-decay schedule its decay in steps, now that their number is known."""
    if fraction is None:
        return
    args = trainer.args
    steps = args.max_steps
    if steps <= 0:
        batches = len(trainer.get_train_dataloader())
        each = max(1, math.ceil(batches / args.gradient_accumulation_steps))
        steps = math.ceil(args.num_train_epochs * each)
    kept = {**args.lr_scheduler_kwargs, "num_decay_steps": max(1, round(fraction * steps))}
    setattr(args, SCHEDULE, kept)


def _train_first(job: TrainingJob, log: Log) -> None:
    """Run the first of two trainings, which finds the largest changes; only its mask is kept."""
    from layerswap.training.expert.sft import most_changed, save_masks

    folder = Path(job.config.output_dir)
    if (folder / MASK).is_file():
        return
    assert job.spec.sparse is not None, "only a sparse training is trained twice"
    log("first training: finds the parameters that change most")
    model = _load_model(job)
    named = dict(model.named_parameters())
    names = names_by_part(named, parameter_places(model), job.parts)[0]
    before = {name: named[name].detach().clone() for name in names}
    config = copy(job.config)
    config.output_dir = str(folder / FIRST)
    trainer = make_trainer(replace(job, config=config), model, log)
    _run(trainer)
    if trainer.is_world_process_zero():
        after = {name: named[name].detach() for name in names}
        draft = folder / f".{MASK}"
        save_masks(most_changed(before, after, job.spec.sparse.keep), draft)
        draft.replace(folder / MASK)
        shutil.rmtree(folder / FIRST, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()


def _apply_mask(job: TrainingJob, trainer: Any) -> None:
    from layerswap.training.expert.sft import Masked, load_masks

    masks = load_masks(Path(job.config.output_dir) / MASK)
    named = dict(trainer.model.named_parameters())
    trainer.add_callback(Masked({name: named[name] for name in masks}, masks))


def _announcement(job: TrainingJob, trainer: Any, counts: dict[str, int]) -> Iterator[str]:
    share = counts["trained"] / counts["all"]
    rows = len(trainer.train_dataset)
    yield f"training {counts['trained']:,} parameters ({share:.1%}) on {rows:,} rows"
    if job.spec.dtype in ("bfloat16", "float16") and not job.spec.lora:
        yield (
            f"note: weights in {job.spec.dtype} lose steps smaller than their rounding; "
            "the papers' rates of 1e-7 vanish in it (docs/training.md)"
        )
    whole = job.spec.dtype in (None, "float32")
    default = "bf16" not in job.spec.hyperparameters
    if trainer.args.use_cpu and trainer.args.bf16 and whole and default:
        yield (
            "matrix products in bfloat16, weights and steps in float32 "
            "(`hyperparameters: {bf16: false}` computes all in float32)"
        )
    for data in job.sets:
        if warning := boundary_warning(data.train, job.tokenizer):
            yield f"warning: {data.name}: {warning}"
        for name, count in data.contaminated.items():
            yield f"warning: {data.name}: {count:,} rows contain an item of {name}"
    if job.spec.lora and job.spec.lora.use_dora and not job.spec.bake:
        yield "note: a DoRA adapter cannot be composed; `bake: true` writes full weights that can"


def _losses(history: list[dict[str, Any]]) -> dict[str, float | None]:
    def last(key: str) -> float | None:
        found = [entry[key] for entry in history if key in entry]
        return round(float(found[-1]), 6) if found else None

    return {"training": last("loss") or last("train_loss"), "validation": last("eval_loss")}


def _open_output(job: TrainingJob, *, resume: bool, overwrite: bool) -> bool:
    """Make or check the output folder; false if the training is already finished."""
    from accelerate import PartialState

    state = PartialState()
    todo = True
    if state.is_main_process:
        todo = _open_folder(job, resume=resume, overwrite=overwrite)
    state.wait_for_everyone()
    return todo if state.is_main_process else not read_training(job.out)["finished"]


def _open_folder(job: TrainingJob, *, resume: bool, overwrite: bool) -> bool:
    if resume and job.out.is_dir():
        record = read_training(job.out)
        if record["key"] != job.key:
            raise TrainingError(
                f"{job.out}: holds another training (its settings, data or base differ); "
                "choose another output, or pass --overwrite instead of --resume"
            )
        return not record["finished"]
    if job.out.is_dir() and (job.out / TRAINING).is_file() and not overwrite:
        if read_training(job.out)["finished"]:
            state = "a finished training; choose another output or pass --overwrite"
        else:
            state = "an unfinished training; pass --resume to go on with it, or --overwrite"
        raise TrainingError(f"{job.out}: holds {state}")
    try:
        job.out.parent.mkdir(parents=True, exist_ok=True)
        refuse_target(job.out, marker=TRAINING, overwrite=overwrite)
        shutil.rmtree(job.out, ignore_errors=True)
        job.out.mkdir()
        write_training(job.out, job.record)
    except OSError as error:
        raise TrainingError(f"{job.out}: cannot be written ({error.strerror})") from None
    return True
