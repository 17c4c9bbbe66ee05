"""Signals that select a composition without labelled data in the target language.

A signal gives each composition one value per prompt, 1 or 0, and reads no answer to a
target-language problem. On a real model neither signal chose better zones than the default
(docs/questions.md), so the default swap is kept unless the lead of another composition is clear.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from layerswap.engine.sweep import Sweep
from layerswap.evaluation.examples import read_examples
from layerswap.ground.errors import EvaluationError
from layerswap.search.conditions import TASK_EXPERT, Condition
from layerswap.search.protocol import Values

if TYPE_CHECKING:
    from layerswap.search.evaluator import Evaluator

Texts = Sequence[Sequence[str]]
"""`[composition][prompt]`: the answer read from a generation, `""` without an answer."""
Read = Callable[[Sequence[int]], str]
"""Reads the answer from generated tokens."""


def answers(
    sweep: Sweep, prompts: Sequence[Sequence[int]], read: Read, **settings: Any
) -> list[list[str]]:
    """Returns every composition's answer to every prompt; settings are `Sweep.generate`'s."""
    written = sweep.generate(prompts, **settings)
    return [[read(one.tokens) for one in row] for row in written]


def agreement(texts: Texts, reference: Sequence[str]) -> list[Values]:
    """Returns per composition and prompt 1 if the answer is the reference's.

    The reference is the task expert on the source-language parallels of the prompts, the language
    in which it has learned the task. Prompts without an answer of the reference are left out.
    """
    if any(len(row) != len(reference) for row in texts):
        raise EvaluationError(f"the reference has {len(reference)} answers, unlike the prompts")
    known = [i for i, text in enumerate(reference) if text]
    if not known:
        raise EvaluationError("the task expert answers none of the source-language prompts")
    return [np.array([float(row[i] == reference[i]) for i in known]) for row in texts]


def consensus(texts: Texts) -> list[Values]:
    """Returns per composition and prompt 1 if most compositions give its answer.

    A missing answer never agrees. Of answers given equally often the first in the alphabet counts.
    """
    modes = []
    for column in zip(*texts, strict=True):
        counts = Counter(filter(None, column))
        modes.append(min(counts, key=lambda text: (-counts[text], text), default=None))
    return [
        np.array([float(text == mode) for text, mode in zip(row, modes, strict=True)])
        for row in texts
    ]


def signal_values(evaluator: Evaluator, conditions: Sequence[Condition]) -> dict[Condition, Values]:
    """Computes the settings' signal for every composition, per prompt."""
    spec, sweep = evaluator.spec.without_labels, evaluator.sweep
    assert spec is not None, "the settings say how to choose without labels"
    assert isinstance(sweep, Sweep), "the schema refuses another engine"
    if TASK_EXPERT not in evaluator.members:
        raise EvaluationError("without_labels needs swaps, which have a task expert")
    settings: dict[str, Any] = {
        "max_new_tokens": spec.max_new_tokens,
        "stop": tuple(spec.stop),
        "tokenizer": evaluator.tokenizer,
    }
    read = _reader(evaluator.tokenizer, spec.answer)

    def read_prompts(path: str) -> list[list[int]]:
        tokenizer = evaluator.tokenizer
        examples = read_examples(Path(path))
        return [evaluator.spec.prompt_ids(tokenizer, one.prompt + one.text) for one in examples]

    prompts = read_prompts(spec.prompts)
    members = [evaluator.members[one] for one in conditions]
    texts = answers(sweep, prompts, read, members=members, **settings)
    if spec.signal == "consensus":
        return dict(zip(conditions, consensus(texts), strict=True))
    assert spec.parallel is not None, "the schema asks for it"
    twins = read_prompts(spec.parallel)
    if len(twins) != len(prompts):
        raise EvaluationError(
            f"{spec.parallel} has {len(twins)} prompts and {spec.prompts} {len(prompts)}; they "
            "must be the same, line by line"
        )
    expert = evaluator.members[TASK_EXPERT]
    [reference] = answers(sweep, twins, read, members=[expert], **settings)
    return dict(zip(conditions, agreement(texts, reference), strict=True))


def _reader(tokenizer: Any, pattern: str | None) -> Read:
    def read(tokens: Sequence[int]) -> str:
        text = str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()
        if pattern is None:
            return text
        matches = [match.group() for match in re.finditer(pattern, text)]
        return matches[-1] if matches else ""

    return read
