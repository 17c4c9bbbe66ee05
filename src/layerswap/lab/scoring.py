"""Answers of compositions to the lab's questions: exactly right or not, and as text.

Greedy decoding writes the right answer if and only if, at every position of the answer, the most
likely next token after the right tokens so far is the right token. One teacher-forced forward pass
therefore scores a whole batch of all compositions with the result of `model.generate`. The answer
includes its `</s>`, so an answer that runs on is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from layerswap.ground.types import Advance
from layerswap.lab.questions import NEW_TOKENS, Question

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerFast

    from layerswap.engine.sweep import Sweep


def sweep_correct(
    sweep: Sweep,
    tokenizer: PreTrainedTokenizerFast,
    asked: Sequence[Question],
    *,
    members: Sequence[int] | None = None,
    progress: Advance | None = None,
) -> npt.NDArray[np.bool_]:
    """Return true for every question that a composition answers exactly: `(compositions, n)`.

    `members` are the numbers of the compositions; all when None.
    `progress` is called after each batch with the number of questions in it.
    """
    import numpy as np

    prompts = tokenizer([one.prompt for one in asked])["input_ids"]
    answers = tokenizer([f" {one.answer}" for one in asked], add_special_tokens=False)["input_ids"]
    requests = [
        (prompt, [*answer, tokenizer.eos_token_id])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    chosen = sweep.choose(members)
    right = np.zeros((len(chosen), len(requests)), dtype=bool)
    for scores in sweep.iter_loglikelihood(requests, members=chosen, batch_size=256):
        right[:, scores.requests] = scores.greedy
        if progress is not None:
            progress(len(scores.requests))
    return right


def sweep_written(
    sweep: Sweep,
    tokenizer: PreTrainedTokenizerFast,
    asked: Sequence[Question],
    *,
    members: Sequence[int] | None = None,
) -> list[list[str]]:
    """Write the greedy text of every composition after each prompt: `[composition][prompt]`."""
    if not asked:
        return [[] for _ in sweep.choose(members)]
    prompts = tokenizer([one.prompt for one in asked])["input_ids"]
    rows = sweep.generate(prompts, members=members, max_new_tokens=NEW_TOKENS)
    return [
        [text.strip() for text in tokenizer.batch_decode(
            [list(generation.tokens) for generation in row], skip_special_tokens=True)]
        for row in rows
    ]  # fmt: skip
