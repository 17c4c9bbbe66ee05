"""Training an expert: from a spec to a folder that transformers, PEFT and vLLM load."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Checkpoint, Place, open_checkpoint
from layerswap.checkpoint.commit import refuse_target
from layerswap.checkpoint.versions import need_extras, versions
from layerswap.compose.composition import all_places
from layerswap.errors import TrainingError
from layerswap.merge.documents import fingerprint
from layerswap.merge.guard import check_apart
from layerswap.train.distributed import check_distributed
from layerswap.train.finish import LIBRARIES, TRAINING, read_training, write_training
from layerswap.train.hyperparameters import sft_config
from layerswap.train.resuming import checkpoints
from layerswap.train.rows import Rows, load_rows
from layerswap.train.trained import Part, rates_by_place, trained_parts

if TYPE_CHECKING:
    from layerswap.train.expert_schema import ExpertSpec

Say = Callable[[str], None]
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Job:
    """A training, decided and checked; nothing has been written.

    Attributes:
        spec: what the user asked for.
        base: what is fine-tuned; only headers have been read.
        tokenizer: the base's.
        sets: the data sets.
        parts: the places that train.
        rates: what the learning rate is multiplied by, at places where it is not 1.
        config: TRL's configuration.
        decay: share of the steps over which a stable schedule decays.
        out: the output folder.
    """

    spec: ExpertSpec
    base: Checkpoint
    tokenizer: Any
    sets: tuple[Rows, ...]
    parts: tuple[Part, ...]
    rates: Mapping[Place, float]
    config: Any
    decay: float | None
    out: Path

    @cached_property
    def base_fingerprints(self) -> dict[str, str]:
        """Of the base's weight files, by name; reading them costs 4 MiB a file."""
        return {file.name: fingerprint(file) for file in self.base.files}

    @property
    def key(self) -> str:
        """What the trained weights depend on, as a SHA-256: two jobs of one key are the same."""
        told = {
            "spec": self.spec.model_dump(mode="json", exclude={"base"}),
            "base": self.base_fingerprints,
            "data": [rows.fingerprints for rows in self.sets],
            "parts": [sorted(map(str, part)) for part in self.parts],
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    @property
    def record(self) -> dict[str, Any]:
        """What is known before the training begins."""
        config = self.config.to_dict()
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
                }
                for rows in self.sets
            ],
            "places": [
                [
                    [place.layer, place.role]
                    for place in all_places(self.base.layers)
                    if place in part
                ]
                for part in self.parts
            ],
            "hyperparameters": {k: v for k, v in config.items() if k not in _PATHS},
            "versions": versions(*LIBRARIES),
        }


_PATHS = ("output_dir", "logging_dir", "run_name", "hub_token", "local_rank")


def train_expert(
    spec: ExpertSpec,
    out: Path,
    *,
    folder: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    say: Say = lambda line: None,
) -> Path:
    """Train an expert and write it to `out`.

    Every process of a distributed training calls this; the first writes.

    Args:
        spec: what to train.
        out: the folder to create. It gets the expert, `layerswap-training.json`, and
            `checkpoints/checkpoint-<step>` on the way.
        folder: what relative paths of the spec are relative to.
        resume: go on from the newest checkpoint in `out`; bit for bit as if it had never stopped.
            A finished training is left as it is.
        overwrite: replace a folder that a training wrote.
        say: told what a user should know before and while it trains.

    Returns:
        `out`, absolute.

    Raises:
        LayerswapError: something that is asked for cannot be had; nothing was written.

    Example: `train_expert(read_expert(Path("swahili.yaml")), Path("experts/swahili"))`
    """
    job = plan_expert(spec, out, folder=folder)
    if not _open_output(job, resume=resume, overwrite=overwrite):
        say(f"{job.out}: finished already")
        return job.out
    from layerswap.train.fitting import fit

    try:
        fit(job, say)
    except BaseException:
        # What ends before its first checkpoint has nothing to go on from, and leaves nothing.
        if not checkpoints(job.out / CHECKPOINTS) and not resume:
            shutil.rmtree(job.out, ignore_errors=True)
        raise
    return job.out


def plan_expert(spec: ExpertSpec, out: Path, *, folder: Path | None = None) -> Job:
    """Decide and check a training without writing or training anything.

    Raises:
        LayerswapError: as `train_expert`.
    """
    need_extras("training", "train")
    check_distributed(spec)
    folder = folder or Path()
    source = spec.base
    if not source.startswith(("/", "~")) and (folder / source).is_dir():
        source = str(folder / source)
    base = open_checkpoint(source)
    check_apart(out, {"the base": base})
    parts = trained_parts(spec, base.layers, folder)
    rates = rates_by_place(spec.rates, base.layers)
    sets = tuple(load_rows(data, folder=folder, limit=spec.limit) for data in spec.data_sets)
    target = out.expanduser().absolute()
    form = "text" if all(rows.form == "text" for rows in sets) else sets[0].form
    config, decay = sft_config(spec, target / CHECKPOINTS, rows=form)
    tokenizer = _tokenizer(base, sets)
    return Job(spec, base, tokenizer, sets, tuple(parts), rates, config, decay, target)


def _tokenizer(base: Checkpoint, sets: tuple[Rows, ...]) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(base.folder)
    except Exception as error:  # what tokenizers raise shares no class
        reason = " ".join(str(error).split())[:200]
        raise TrainingError(f"{base.source}: its tokenizer cannot be loaded ({reason})") from None
    for rows in sets:
        if rows.conversational and not tokenizer.chat_template:
            raise TrainingError(
                f"{base.source}: its tokenizer has no chat template, and {rows.name} is made of "
                "messages; build the mix with kind: prompt-completion, or give it a chat_template"
            )
    if tokenizer.eos_token is None:
        raise TrainingError(f"{base.source}: its tokenizer has no end-of-sequence token")
    return tokenizer


def _open_output(job: Job, *, resume: bool, overwrite: bool) -> bool:
    """Make or check the output folder; whether there is anything to do."""
    from accelerate import PartialState

    state = PartialState()
    todo = True
    if state.is_main_process:
        todo = _open_folder(job, resume=resume, overwrite=overwrite)
    state.wait_for_everyone()
    return todo if state.is_main_process else not read_training(job.out)["finished"]


def _open_folder(job: Job, *, resume: bool, overwrite: bool) -> bool:
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
