"""What speaks for a composition where no labelled data in the target language exists.

Every signal gives one number per composition, higher is better, at the price of a sweep. None
reads the answer to a target-language problem. `docs/sweeps.md` says how well each found the best
composition on the lab.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.engine.generation import Sampling
from layerswap.engine.sweep import Sweep
from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Values = npt.NDArray[np.float64]
    """One per composition, higher is better."""

Ids = Sequence[int]
Read = Callable[[Sequence[int]], str]
"""What a generation answers: text from token ids, `""` where it answers nothing."""


@dataclass(frozen=True)
class Answers:
    """What compositions wrote after the same prompts.

    Attributes:
        members: positions of the compositions, one per row of `tokens` and `texts`.
        tokens: `[composition][prompt]`, the tokens written.
        texts: `[composition][prompt]`, what was read from them as the answer.
    """

    members: Sequence[int]
    tokens: Sequence[Sequence[tuple[int, ...]]]
    texts: Sequence[Sequence[str]]


def ask(
    sweep: Sweep,
    prompts: Sequence[Ids],
    read: Read,
    *,
    members: Sequence[int] | None = None,
    **settings: Any,
) -> Answers:
    """Every composition's answer to every prompt.

    Args:
        sweep: the compositions.
        prompts: token ids.
        read: makes an answer of a generation.
        members: positions of the compositions; all when None.
        settings: as `Sweep.iter_generate`, `max_new_tokens` among them.
    """
    chosen = sweep.choose(members)
    written = sweep.generate(prompts, members=chosen, **settings)
    tokens = [[one.tokens for one in row] for row in written]
    return Answers(chosen, tokens, [[read(one) for one in row] for row in tokens])


def agreement(answers: Answers, reference: Sequence[str]) -> Values:
    """Share of prompts answered as a reference answers them.

    The reference is the task expert on the source-language parallels of the prompts: the
    language in which it has learned the task. Prompts that it does not answer count for nothing.

    Args:
        answers: of the compositions, on target-language prompts.
        reference: its answers, by prompt.

    Raises:
        EvaluationError: the two are of different length, or the reference answers nothing.
    """
    import numpy as np

    if any(len(row) != len(reference) for row in answers.texts):
        raise EvaluationError(f"{len(reference)} answers to agree with, but other prompts")
    known = [i for i, text in enumerate(reference) if text]
    if not known:
        raise EvaluationError("the task expert answers none of the source-language prompts")
    return np.array([np.mean([row[i] == reference[i] for i in known]) for row in answers.texts])


def consensus(answers: Answers) -> Values:
    """Share of prompts answered as most compositions answer them.

    No answer is never the consensus. Of answers given equally often, the first in order of text.
    """
    import numpy as np

    columns = list(zip(*answers.texts, strict=True))
    modes = [_mode(column) for column in columns]
    return np.array(
        [
            np.mean([bool(a) and a == mode for a, mode in zip(row, modes, strict=True)])
            for row in answers.texts
        ]
    )


def confidence(
    sweep: Sweep, prompts: Sequence[Ids], answers: Answers, *, batch_size: int = 16
) -> Values:
    """Mean log-probability of a token of what a composition itself wrote, in nats.

    Distinct texts are scored under all compositions together, and each reads its own.
    """
    import numpy as np

    asked: dict[tuple[int, tuple[int, ...]], int] = {}
    for row in answers.tokens:
        for prompt, text in enumerate(row):
            if text:
                asked.setdefault((prompt, text), len(asked))
    if not asked:
        return np.zeros(len(answers.members))
    scores = sweep.loglikelihood(
        [(list(prompts[prompt]), list(text)) for prompt, text in asked],
        members=answers.members,
        batch_size=batch_size,
    )
    means = []
    for number, row in enumerate(answers.tokens):
        own = [asked[prompt, text] for prompt, text in enumerate(row) if text]
        count = sum(scores.tokens[request].shape[1] for request in own)
        means.append(scores.logprob[number, own].sum() / count if count else -np.inf)
    return np.array(means)


def self_consistency(
    sweep: Sweep,
    prompts: Sequence[Ids],
    read: Read,
    *,
    samples: int = 5,
    temperature: float = 0.7,
    seed: int = 0,
    members: Sequence[int] | None = None,
    **settings: Any,
) -> Values:
    """How often sampled answers to a prompt are its most frequent one (Wang et al., 2023).

    Args:
        sweep: the compositions.
        prompts: token ids.
        read: makes an answer of a generation.
        samples: generations per prompt.
        temperature: of the draws.
        seed: of the draws.
        members: positions of the compositions; all when None.
        settings: as `Sweep.iter_generate`, `max_new_tokens` among them.
    """
    import numpy as np

    repeated = [prompt for prompt in prompts for _ in range(samples)]
    sampling = Sampling(temperature=temperature, seed=seed)
    answers = ask(sweep, repeated, read, members=members, sampling=sampling, **settings)
    shares = []
    for row in answers.texts:
        groups = [row[start : start + samples] for start in range(0, len(row), samples)]
        shares.append([sum(a == _mode(group) and bool(a) for a in group) for group in groups])
    means: Values = np.array(shares, dtype=np.float64).mean(axis=1) / samples
    return means


def fluency(
    sweep: Sweep,
    texts: Sequence[Ids],
    *,
    members: Sequence[int] | None = None,
    batch_size: int = 16,
) -> Values:
    """Mean log-probability of a token of plain target-language text, in nats: minus ln perplexity.

    Args:
        sweep: the compositions.
        texts: token ids, two at least; the first of each is only read.
        members: positions of the compositions; all when None.
        batch_size: texts that are read together.
    """
    requests = [(list(text[:1]), list(text[1:])) for text in texts if len(text) > 1]
    if not requests:
        raise EvaluationError("there is no text of two tokens and more to measure fluency on")
    scores = sweep.loglikelihood(requests, members=members, batch_size=batch_size)
    tokens = sum(len(rest) for _, rest in requests)
    return scores.logprob.sum(axis=1) / tokens  # type: ignore[no-any-return]


def combined(signals: Mapping[str, Values]) -> Values:
    """Mean rank under several signals, as a share of the best possible; ties share a rank.

    Ranks, because the units of the signals differ.
    """
    import numpy as np
    from scipy.stats import rankdata

    ranks = [rankdata(values) for values in signals.values()]
    return np.mean(ranks, axis=0) / len(ranks[0])  # type: ignore[no-any-return]


def _mode(texts: Sequence[str]) -> str:
    counts = Counter(text for text in texts if text)
    return min(counts, key=lambda text: (-counts[text], text)) if counts else ""
