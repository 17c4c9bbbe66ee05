"""Checks a training before anything is written: base, data, places and settings."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Checkpoint, fingerprint, open_checkpoint
from layerswap.checkpoint.hub import TRAINING
from layerswap.checkpoint.loading import load_tokenizer, with_thinking
from layerswap.compose.composition import all_places
from layerswap.ground.errors import DataError, TrainingError, error_context, one_line
from layerswap.ground.strict_json import read_json_object
from layerswap.ground.types import PathLike
from layerswap.merge.target import check_apart
from layerswap.reading.origins import Origin, matching_files, open_rows
from layerswap.training.expert.hyperparameters import (
    check_distributed,
    rows_of_step,
    sft_config,
)
from layerswap.training.expert.save import CHECKPOINTS, LIBRARIES, read_training
from layerswap.training.expert.spec import Data, ExpertSpec, Files
from layerswap.training.expert.trainable import Part, trained_parts
from layerswap.training.mix.card import (
    CARD,
    SPLITS,
    boundary_warning,
    load_saved,
    rendered,
    template_warning,
)
from layerswap.training.mix.examples import PROMPT_COLUMN
from layerswap.training.mix.schema import ready_recipes
from layerswap.versions import need_extras, versions

if TYPE_CHECKING:
    from datasets import Dataset

FORMS = (("prompt", "completion"), ("messages",), ("text",))
"""Columns of the rows that TRL's SFTTrainer takes."""
_PATHS = ("output_dir", "logging_dir", "run_name", "hub_token", "local_rank")


@dataclass(frozen=True)
class TrainingRows:
    """One data set, ready for the trainer."""

    name: str  # in messages and on the card
    train: Dataset  # with the columns of one of `FORMS`
    validation: Dataset | None  # with the same columns
    fingerprints: dict[str, str]  # by file name
    contaminated: dict[str, int] = field(default_factory=dict)  # rows by evaluation set

    @property
    def form(self) -> str:
        """The first of the columns: `prompt`, `messages` or `text`."""
        return str(next(form[0] for form in FORMS if form[0] in self.train.column_names))


@dataclass(frozen=True)
class TrainingJob:
    """A checked training."""

    spec: ExpertSpec
    base: Checkpoint  # only its headers have been read
    tokenizer: Any
    sets: tuple[TrainingRows, ...]
    parts: tuple[Part, ...]  # the places that train; two where two data sets take turns
    config: Any  # a trl.SFTConfig
    decay: float | None  # fraction of the steps in which a stable schedule decays
    out: Path

    @cached_property
    def base_fingerprints(self) -> dict[str, str]:
        """Fingerprints of the base's weight files, by name; reads 4 MiB of each."""
        return {file.name: fingerprint(file) for file in self.base.files}

    @cached_property
    def prompt_warnings(self) -> list[list[str]]:
        """Warnings of each data set about prompts that differ in training and evaluation."""
        return [
            [
                warning
                for warn in (boundary_warning, template_warning)
                if (warning := warn(rows.train, self.tokenizer))
            ]
            for rows in self.sets
        ]

    @cached_property
    def ends(self) -> list[str]:
        """End-of-text tokens of the tokenizer and of the base's generation settings."""
        path = self.base.folder / "generation_config.json"
        settings = read_json_object(path) if path.is_file() else self.base.config
        given = settings.get("eos_token_id")
        ids = [i for i in (given if isinstance(given, list) else [given]) if type(i) is int]
        tokens = [self.tokenizer.eos_token, *self.tokenizer.convert_ids_to_tokens(ids)]
        return [*dict.fromkeys(str(token) for token in tokens if token)]

    @property
    def batch(self) -> int:
        """Examples of an optimiser step, over all processes."""
        return rows_of_step(self.config)

    @property
    def key(self) -> str:
        """SHA-256 of everything that determines the trained weights."""
        inputs = {
            "spec": self.spec.model_dump(
                mode="json", exclude={"base", "save_minutes", "effective_batch"}
            ),
            "batch": self.batch,
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
            "processes": int(self.config.world_size),
            "batch": self.batch,
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
    """Check a training without writing anything; see `train`."""
    need_extras("training", "train")
    if spec.load_in_4bit and find_spec("bitsandbytes") is None:
        raise TrainingError("load_in_4bit: needs bitsandbytes; run `pip install bitsandbytes`")
    check_distributed()
    folder, target = Path(folder or ""), Path(out).expanduser().absolute()
    local = not spec.base.startswith(("/", "~")) and (folder / spec.base).is_dir()
    base = open_checkpoint(str(folder / spec.base) if local else spec.base)
    check_apart(target, {"the base": base})
    parts = trained_parts(spec, base.layers, folder)
    sets = tuple(load_rows(data, folder=folder, limit=spec.limit) for data in spec.data_sets)
    form = "text" if all(rows.form == "text" for rows in sets) else sets[0].form
    started = resume and (target / TRAINING).is_file()
    config, decay = sft_config(
        spec, target / CHECKPOINTS, rows=form,
        parameters=sum(tensor.elements for tensor in base.tensors.values()),
        bf16=read_training(target)["hyperparameters"].get("bf16") if started else None,
    )  # fmt: skip
    for rows in sets if config.completion_only_loss else ():
        if rows.form != "prompt":
            raise TrainingError(
                f"hyperparameters.completion_only_loss: {rows.name} has {rows.form} and no "
                "completions; build the mix with kind: chat or prompt-completion"
            )
    tokenizer = load_tokenizer(base.folder, named=base.source)
    if tokenizer.eos_token is None:
        raise TrainingError(f"{base.source}: its tokenizer has no end-of-sequence token")
    if spec.think is not None:
        template = with_thinking(tokenizer.chat_template or "", spec.think, default=True)
        tokenizer.chat_template = template
    for rows in sets:
        _check_template(base, tokenizer, rows)
        _check_tokens(base, tokenizer, rows)
    return TrainingJob(spec, base, tokenizer, sets, tuple(parts), config, decay, target)


def _check_template(base: Checkpoint, tokenizer: Any, rows: TrainingRows) -> None:
    """Refuse messages that the chat template refuses, by their roles or by their content."""
    if not isinstance(rows.train[0][rows.form], list):
        return
    remedy = "build the mix with kind: prompt-completion"
    if not tokenizer.chat_template:
        raise TrainingError(
            f"{base.source}: its tokenizer has no chat template, and {rows.name} is made of "
            f"messages; {remedy}"
        )
    for kind, split in (("row", rows.train), ("validation row", rows.validation or ())):
        for number, row in enumerate(split, start=1):
            try:
                rendered(row, tokenizer)
            except Exception as error:  # a template is a program, and may raise anything
                reason = one_line(error) or type(error).__name__
                roles = [turn["role"] for column in row.values() for turn in column]
                raise TrainingError(
                    f"{base.source}: its chat template fails on {kind} {number} of {rows.name}, "
                    f"with the roles {', '.join(roles)} ({reason}); {remedy}"
                ) from None


def _check_tokens(base: Checkpoint, tokenizer: Any, rows: TrainingRows) -> None:
    """Refuse tokens without a row in the embedding, such as those added and never trained."""
    size = base.vocabulary_size
    if not size or len(tokenizer) <= size:
        return
    remedy = (
        f"the tokenizer has {len(tokenizer):,} tokens and the embedding {size:,} rows; enlarge it "
        "in transformers (model.resize_token_embeddings(len(tokenizer))) and save the base"
    )
    for role in ("pad_token", "eos_token", "bos_token"):
        if (getattr(tokenizer, f"{role}_id") or 0) >= size:
            token = getattr(tokenizer, role)
            raise TrainingError(f"{base.source}: {role} {token!r} has no row; {remedy}")
    for number, row in enumerate(rows.train, start=1):
        ids = tokenizer(rendered(row, tokenizer)[1])["input_ids"]
        if strange := [i for i in ids if i >= size]:
            token = tokenizer.convert_ids_to_tokens(strange[0])
            raise TrainingError(
                f"{rows.name}: row {number} has the token {token!r}, which has no row; {remedy}"
            )


def load_rows(data: Data, *, folder: Path, limit: int | None = None) -> TrainingRows:
    """Load validation rows and at most `limit` training rows; `folder` is the base of paths."""
    rows = _from_files(data, folder) if isinstance(data, Files) else _from_folder(data, folder)
    if limit is not None and limit < len(rows.train):
        rows = replace(rows, train=rows.train.select(range(limit)))
    return rows


def _from_folder(data: str, folder: Path) -> TrainingRows:
    path = folder / Path(data).expanduser()
    if not path.is_dir():
        if data in ready_recipes():
            raise DataError(
                f"data: {data} is a ready recipe; build it first: "
                f"layerswap data {data} --out data/{data}"
            )
        raise DataError(f"data: {path}: no such folder; for files write `train: FILE` under data")
    mix, train, validation = load_saved(path)
    files = [path / f"{split}.parquet" for split in SPLITS]
    fingerprints = {file.name: fingerprint(file) for file in files if file.is_file()}
    contaminated: Counter[str] = Counter()
    for facts in json.loads((path / CARD).read_text("utf-8")).get("sources", {}).values():
        contaminated.update(facts.get("contaminated", {}))
    return TrainingRows(mix.name, train, validation, fingerprints, dict(contaminated))


def _from_files(data: Files, folder: Path) -> TrainingRows:
    sets: dict[str, Any] = dict.fromkeys(SPLITS)
    fingerprints: dict[str, str] = {}
    files: list[str] = []
    for split, pattern in data.model_dump(exclude_none=True).items():
        with error_context(f"data.{split}: {pattern}"):
            sets[split] = _trainer_columns(open_rows(Origin(path=pattern), folder=folder).rows)
            for file in matching_files(folder, pattern):
                if file in files:
                    raise DataError("is training data too; hold out other rows")
                name = Path(file).name
                # Files of one name in several folders are told apart by their order.
                name += f" ({len(files)})" if name in fingerprints else ""
                fingerprints[name] = fingerprint(Path(file))
                files.append(file)
    rows = TrainingRows(Path(data.train).stem, sets["train"], sets["validation"], fingerprints)
    if rows.validation is not None and rows.validation.column_names != rows.train.column_names:
        raise DataError("data.validation: its columns differ from the training columns")
    return rows


def _trainer_columns(rows: Dataset) -> Dataset:
    form = next((form for form in FORMS if set(form) <= set(rows.column_names)), None)
    if form is None:
        forms = "; ".join(" and ".join(form) for form in FORMS)
        raise DataError(f"has columns {', '.join(rows.column_names)}; a trainer takes {forms}")
    for column in rows.column_names:
        further = PROMPT_COLUMN.fullmatch(column) or column in ("images", "chat_template_kwargs")
        if further and any(rows[column]):
            raise DataError(
                f"has a column {column}, which would change the prompts and is not supported; "
                "remove it, or write its content into the messages"
            )
    for column in form:
        _check_values(rows, column)
    if len(rows) and len({isinstance(rows[0][column], str) for column in form}) > 1:
        raise DataError(f"{' and '.join(form)} must both be texts or both lists of messages")
    return rows.select_columns(list(form))


def _check_values(rows: Dataset, column: str) -> None:
    """Refuse a column unless all values are texts, or all are lists of messages."""
    first = None
    for number, value in enumerate(rows[column], start=1):
        if isinstance(value, str):
            valid = column != "messages" and (value.strip() or column == "prompt")
        else:
            valid = column != "text" and isinstance(value, list) and _are_messages(value)
        if not valid:
            kinds = {"text": "a text", "messages": "a list of messages"}
            kind = kinds.get(column, "a text or a list of messages")
            raise DataError(f"row {number}: {column} is not {kind}, or is empty")
        first = type(value) if first is None else first
        if type(value) is not first:
            raise DataError(f"row {number}: {column} mixes texts and lists of messages")


def _are_messages(turns: list[Any]) -> bool:
    return bool(turns) and all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in turns
    )
