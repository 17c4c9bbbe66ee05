"""How often a model's greedy answer is exactly the right one.

Nothing is generated. Greedy decoding writes the gold answer if and only if, at every position
of the answer, the most likely next token after the *gold* tokens so far is the gold token: as
long as no position has failed, the text decoded so far is the gold text. One teacher-forced
forward pass therefore scores a whole batch, and gives what `model.generate` would (the tests
compare them). The answer includes its `</s>`: an answer that runs on is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from layerswap._types import Advance
from layerswap.checkpoint.loading import load_causal_lm, load_tokenizer
from layerswap.errors import CheckpointError, RecipeError
from layerswap.lab.tasks import LabExample, LabSplit, Skill, examples
from layerswap.lab.train import IGNORED, collate, encode
from layerswap.lab.world import World, make_world

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from layerswap.engine.sweep import Sweep

LabMeasure = Literal["task_target", "task_source", "comprehension_target", "comprehension_source"]
MEASURES: tuple[LabMeasure, ...] = get_args(LabMeasure)
"""The task and comprehension, each in the scarce (target) and in the source language."""
NEW_TOKENS = 8
"""Longer than any answer."""


def load(folder: Path | str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A checkpoint folder as a float32 model in evaluation mode on the CPU, and its tokenizer.

    Raises:
        CheckpointError: the folder does not exist or holds no checkpoint.
    """
    if not (Path(folder) / "config.json").is_file():
        raise CheckpointError(f"{folder}: no checkpoint here (config.json is missing)")
    return load_causal_lm(folder, dtype="float32"), load_tokenizer(folder)


def correct(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[LabExample],
    *,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> npt.NDArray[np.bool_]:
    """Whether the model answers each example exactly, decoding greedily.

    Args:
        model: any causal model over the tokenizer's ids, in any dtype, on any device.
        tokenizer: the lab's.
        examples: what to answer; at least one.
        batch_size: examples in a forward pass; they are batched by length.
        progress: called after each batch with the examples done and the examples in all.

    Returns:
        bool `(n,)`, in the order of `examples`.
    """
    import numpy as np

    if not examples:
        raise RecipeError("there is nothing to score: no examples")
    rows = encode(tokenizer, examples)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
    right = np.zeros(len(rows), dtype=bool)
    for start in range(0, len(rows), batch_size):
        chosen = order[start : start + batch_size]
        right[chosen] = _correct_batch(model, tokenizer, [rows[i] for i in chosen])
        if progress is not None:
            progress(start + len(chosen), len(rows))
    return right


def sweep_correct(
    sweep: Sweep,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[LabExample],
    *,
    batch_size: int = 256,
    progress: Advance | None = None,
) -> npt.NDArray[np.bool_]:
    """Whether every composition answers each example exactly, decoding greedily; see `correct`.

    Args:
        sweep: compositions over the tokenizer's ids.
        tokenizer: the lab's.
        examples: what to answer; at least one.
        batch_size: examples in a forward pass.
        progress: called after each batch with the number of examples in it.

    Returns:
        bool `(compositions, n)`, in the order of `examples`.
    """
    import numpy as np

    if not examples:
        raise RecipeError("there is nothing to score: no examples")
    rows = encode(tokenizer, examples)
    starts = [row["labels"].count(IGNORED) for row in rows]
    requests = [
        (row["input_ids"][:start], row["input_ids"][start:])
        for row, start in zip(rows, starts, strict=True)
    ]
    right = np.zeros((len(sweep), len(requests)), dtype=bool)
    for scores in sweep.iter_loglikelihood(requests, batch_size=batch_size):
        right[:, scores.requests] = scores.greedy
        if progress is not None:
            progress(len(scores.requests))
    return right


def sweep_written(
    sweep: Sweep, tokenizer: PreTrainedTokenizerFast, examples: Sequence[LabExample]
) -> list[list[str]]:
    """What every composition writes greedily after each prompt: `[composition][prompt]`."""
    prompts = tokenizer([e.prompt for e in examples])["input_ids"]
    rows = sweep.generate(prompts, max_new_tokens=NEW_TOKENS)
    return [
        [text.strip() for text in tokenizer.batch_decode([list(one.tokens) for one in row],
                                                         skip_special_tokens=True)]
        for row in rows
    ]  # fmt: skip


def questions(
    measure: LabMeasure,
    language: str,
    split: LabSplit,
    n: int,
    *,
    seed: int = 0,
    world: World | None = None,
) -> list[LabExample]:
    """The `n` examples that a measure asks; `language` is the scarce one.

    Raises:
        RecipeError: no such measure, language or split, or `n` below 1.
    """
    if measure not in MEASURES:
        raise RecipeError(f"no measure {measure!r} in the lab; it has {', '.join(MEASURES)}")
    world = world or make_world()
    spoken = world.language(language) if measure.endswith("target") else world.source
    skill: Skill = "problem" if measure.startswith("task") else "comprehension"
    return examples(world, spoken.name, skill, split, n, seed=seed)


def score_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    language: str,
    split: LabSplit,
    n: int,
    *,
    seed: int = 0,
    measures: Sequence[LabMeasure] = MEASURES,
    world: World | None = None,
    batch_size: int = 64,
) -> dict[LabMeasure, npt.NDArray[np.bool_]]:
    """Right or wrong, on `n` examples of every measure; `language` is the scarce one.

    Equal `language`, `split`, `n` and `seed` ask equal questions, so the answers of two models
    are paired.

    Returns:
        Per measure, bool `(n,)`.

    Raises:
        RecipeError: no such measure, language or split, or `n` below 1.
    """
    asked = {m: questions(m, language, split, n, seed=seed, world=world) for m in measures}
    return {
        measure: correct(model, tokenizer, rows, batch_size=batch_size)
        for measure, rows in asked.items()
    }


def _correct_batch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, list[int]]]
) -> Any:
    import torch

    batch = collate(rows, int(tokenizer.pad_token_id))
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    gold = batch.pop("labels")[:, 1:]
    with torch.inference_mode():
        written = model(**batch, use_cache=False).logits[:, :-1].argmax(dim=-1)
    return ((written == gold) | (gold == IGNORED)).all(dim=1).cpu().numpy()
