"""Training the lab's models with TRL's SFTTrainer: the base from nothing, experts from it.

The loss is on completions only (and their `</s>`), in float32, on the CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from layerswap.engine.rows import pad
from research.lab.datasets import BaseMix, LanguageMix, take
from research.lab.tasks import LabExample
from research.lab.world import MAX_LENGTH

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


IGNORED = -100
"""The label of a position that the loss leaves out."""

PARTITION: Literal["C"] = "C"
"""Partition of the second paper: of eight layers it gives three to the language, 0, 1 and 7."""
OUTSIDE: Literal["language"] = "language"
"""Owner of the embedding, the final norm and the head, which hold new words."""

StepCallback = Callable[[int, int], None]
"""Called with the steps done and the steps in all."""


@dataclass(frozen=True)
class ModelShape:
    """The size of every model of the lab; a Llama without tied embeddings."""

    layers: int = 8
    hidden: int = 96
    heads: int = 6
    mlp: int = 256


@dataclass(frozen=True)
class Training:
    """The training of one model: AdamW, linear warmup, then linear decay to zero."""

    steps: int
    learning_rate: float  # at its peak
    batch: int = 64  # examples in a step
    warmup: int = 50  # steps
    weight_decay: float = 0.0
    beta2: float = 0.98
    # The part of the partition that trains; all layers when None (paper 2, section 4.4).
    part: Literal["task", "language"] | None = None


@dataclass(frozen=True)
class Trainings:
    """The trainings of all models of the lab, and the mixes of their data.

    A joint model trains in full, at the task expert's rate, for as many steps as both experts.
    """

    shape: ModelShape = field(default_factory=ModelShape)
    base: Training = Training(steps=2500, learning_rate=2e-3, warmup=150, weight_decay=0.05)
    task: Training = Training(steps=600, learning_rate=6e-4, part="task")
    language: Training = Training(steps=300, learning_rate=1e-4, part="language")
    joint: Training = Training(steps=900, learning_rate=6e-4)
    base_mix: BaseMix = field(default_factory=BaseMix)
    language_mix: LanguageMix = field(default_factory=LanguageMix)


def new_model(
    shape: ModelShape, tokenizer: PreTrainedTokenizerFast, *, seed: int
) -> LlamaForCausalLM:
    """Make an untrained float32 model; equal seeds give equal weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    stream: Iterator[LabExample],
    training: Training,
    *,
    seed: int,
    on_step: StepCallback | None = None,
) -> float:
    """Train a float32 model in place on the next `steps * batch` examples of a stream.

    Returns the mean loss over the last tenth of the steps, in nats per completion token.
    """
    rows = encode(tokenizer, take(stream, training.steps * training.batch))
    _freeze(model, training)
    with tempfile.TemporaryDirectory() as folder:
        batches = by_length(rows, training.batch)
        trainer = _trainer(model, tokenizer, batches, training=training, seed=seed, folder=folder)
        if on_step is not None:
            trainer.add_callback(_step_callback(on_step))
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    model.train(mode=False)
    return float(losses[-1])


def encode(
    tokenizer: PreTrainedTokenizerFast, examples: Sequence[LabExample]
) -> list[dict[str, list[int]]]:
    """Encode each example as token ids and labels: `<s>`, prompt, completion, `</s>`."""
    prompts = tokenizer([e.prompt for e in examples])["input_ids"]
    answers = tokenizer([e.completion for e in examples], add_special_tokens=False)["input_ids"]
    end = [tokenizer.eos_token_id]
    return [
        {"input_ids": p + a + end, "labels": [IGNORED] * len(p) + a + end}
        for p, a in zip(prompts, answers, strict=True)
    ]


def by_length(rows: list[dict[str, list[int]]], batch: int) -> list[dict[str, list[int]]]:
    """Sort every four batches of rows by length, so that batches have less padding."""
    size = 4 * batch
    ordered: list[dict[str, list[int]]] = []
    for start in range(0, len(rows), size):
        ordered += sorted(rows[start : start + size], key=lambda row: len(row["input_ids"]))
    return ordered


def collate(rows: Sequence[dict[str, list[int]]], fill: int) -> dict[str, torch.Tensor]:
    """Pad `input_ids`, `attention_mask` and `labels` on the right: int64 `(rows, longest)`."""
    ids, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    return {
        "input_ids": pad(ids, fill=fill),
        "attention_mask": pad([[1] * len(row) for row in ids]),
        "labels": pad(labels, fill=IGNORED),
    }


def _trainer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, list[int]]],
    *,
    training: Training,
    seed: int,
    folder: str,
) -> Any:
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import SFTConfig

    from layerswap.training.expert.sft import ExpertTrainer

    arguments = SFTConfig(
        output_dir=folder,
        max_steps=training.steps,
        max_length=None,
        per_device_train_batch_size=training.batch,
        # The stream is random already; shuffling would undo the sorting by length.
        train_sampling_strategy="sequential",
        learning_rate=training.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=training.warmup,
        weight_decay=training.weight_decay,
        adam_beta2=training.beta2,
        logging_steps=max(1, training.steps // 10),
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        disable_tqdm=True,
        log_level="error",
        dataloader_pin_memory=False,
        seed=seed,
    )
    trainer = ExpertTrainer(
        model=model,
        args=arguments,
        processing_class=tokenizer,
        train_sets=[Dataset.from_list(rows)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _freeze(model: LlamaForCausalLM, training: Training) -> None:
    """Freeze the weights outside the part that trains."""
    from layerswap.training.expert.spec import ExpertSpec, Trained
    from layerswap.training.expert.trainable import names_by_part, parameter_places, trained_parts

    if training.part is None:
        return
    chosen = Trained(partition=PARTITION, outside=OUTSIDE, part=training.part)
    spec = ExpertSpec(base="lab", data="lab", train=chosen)
    places = parameter_places(model)
    parts = trained_parts(spec, model.config.num_hidden_layers, Path())
    (names,) = names_by_part(places, places, parts)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)


def _step_callback(on_step: StepCallback) -> Any:
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        """Calls `on_step` after every step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            on_step(state.global_step, state.max_steps)

    return Steps()
