"""Chooses a composition where no labelled data in the target language exist, by signals.

Every signal gives one number per composition, higher is better, at the price of a sweep. None reads
the answer to a target-language problem. `docs/sweeps.md` says how well each chose on the lab.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from layerswap.engine.generation import Sampling
from layerswap.engine.rows import pad_with_mask
from layerswap.engine.sweep import Sweep
from layerswap.engine.trie import Node
from layerswap.errors import EvaluationError
from layerswap.evaluation.examples import read_examples
from layerswap.search.spec import NEEDS, Signal, WithoutLabels

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from layerswap.search.conditions import Condition
    from layerswap.search.evaluator import Evaluator

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
    from scipy.stats import rankdata

    ranks = [rankdata(values) for values in signals.values()]
    return np.mean(ranks, axis=0) / len(ranks[0])  # type: ignore[no-any-return]


def _mode(texts: Sequence[str]) -> str:
    counts = Counter(text for text in texts if text)
    return min(counts, key=lambda text: (-counts[text], text)) if counts else ""


SENTENCE_BATCH = 32
"""Sentences that are read together."""
SentencePair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a sentence in the source language, and of the same in the target language."""


def cross_lingual_similarity(
    sweep: Sweep, pairs: Sequence[SentencePair], *, members: Sequence[int] | None = None
) -> npt.NDArray[np.float64]:
    """How much closer parallel sentences are than others, after every layer.

    A sentence is the mean of its tokens' hidden states, less the mean over all sentences of its
    language, because hidden states share a large direction. Closeness is the mean cosine of the
    parallel pairs minus the mean cosine of all other pairs across the languages: 0 where the
    languages have nothing in common, 1 at most.

    Args:
        sweep: the compositions.
        pairs: at least two.
        members: positions of the compositions; all when None.

    Returns:
        float64 `(compositions, layers)`.

    Raises:
        EvaluationError: fewer than two pairs, or an empty sentence.
    """
    if len(pairs) < 2 or not all(first and second for first, second in pairs):
        raise EvaluationError("closeness needs two pairs of sentences and more, none empty")
    chosen = sweep.choose(members)
    sides = [_sentences(sweep, [pair[side] for pair in pairs], chosen) for side in (0, 1)]
    found = [
        [_margin(a, b) for a, b in zip(*(side[member] for side in sides), strict=True)]
        for member in chosen
    ]
    return np.array(found)


def _sentences(
    sweep: Sweep, texts: Sequence[Sequence[int]], members: Sequence[int]
) -> dict[int, list[torch.Tensor]]:
    """Per composition and layer the sentences `(texts, width)`, float64, on the CPU."""
    import torch

    parts = [
        _batch(sweep, texts[start : start + SENTENCE_BATCH], members)
        for start in range(0, len(texts), SENTENCE_BATCH)
    ]
    return {
        member: [
            torch.cat(states) for states in zip(*(part[member] for part in parts), strict=True)
        ]
        for member in members
    }


def _batch(
    sweep: Sweep, texts: Sequence[Sequence[int]], members: Sequence[int]
) -> dict[int, list[torch.Tensor]]:
    import torch

    ids, mask = pad_with_mask(texts)
    inputs = {"input_ids": ids.to(sweep.device), "use_cache": False}
    found: dict[int, list[torch.Tensor]] = {member: [] for member in members}

    def keep(node: Node, hidden: torch.Tensor) -> None:
        pooled = _pooled(hidden, mask)
        for member in node.members:
            found[member].append(pooled)

    with torch.inference_mode():
        if sweep.runner.exact is None:
            # The first run of a sweep checks that its layers can be called one by one.
            next(sweep.runner.run(inputs, members))
        if sweep.runner.exact:
            for _ in sweep.runner.states(sweep.runner.trie(members), inputs, after_layer=keep):
                pass
        else:
            for member in members:
                output: Any = sweep.switch(member)(**inputs, output_hidden_states=True)
                found[member] = [_pooled(state, mask) for state in output.hidden_states[1:]]
    return found


def _pooled(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask.to(hidden.device)[..., None]
    return ((hidden.double() * weights).sum(dim=1) / weights.sum(dim=1)).cpu()


def _margin(first: torch.Tensor, second: torch.Tensor) -> float:
    import torch

    sides = (torch.nn.functional.normalize(x - x.mean(dim=0), dim=1) for x in (first, second))
    a, b = sides
    cosines = a @ b.T
    n = len(cosines)
    parallel = cosines.diagonal().sum()
    return float(parallel / n - (cosines.sum() - parallel) / (n * (n - 1)))


BEST_FIRST: tuple[Signal, ...] = ("agreement", "closeness", "consensus", "fluency")
"""Signals by how well they chose on the lab (docs/sweeps.md); the default is the first possible."""


def choose_without_labels(
    evaluator: Evaluator, candidates: Sequence[Condition], task_expert: Condition
) -> tuple[Values, str]:
    """The value of the settings' signal for every candidate, and the signal's name.

    Args:
        evaluator: of the sweep.
        candidates: the compositions to choose from.
        task_expert: the task expert alone.

    Raises:
        EvaluationError: the files do not fit together, or there is no task expert.
    """
    spec = evaluator.spec.without_labels
    assert spec is not None, "the settings say how to choose without labels"
    if task_expert not in evaluator.members:
        raise EvaluationError("choosing without labels needs swaps, which have a task expert")
    chosen = spec.by or [_default(spec)]
    bench = _Signals(evaluator, spec, list(candidates), evaluator.members[task_expert])
    found: dict[str, Values] = {name: bench.value(name) for name in chosen}
    if len(found) == 1:
        return next(iter(found.values())), chosen[0]
    return combined(found), "mean rank of " + ", ".join(chosen)


def _default(spec: WithoutLabels) -> Signal:
    return next(
        name for name in BEST_FIRST if all(getattr(spec, file) is not None for file in NEEDS[name])
    )


class _Signals:
    """Reads the files once, asks once, and gives every signal from that."""

    def __init__(
        self,
        evaluator: Evaluator,
        spec: WithoutLabels,
        candidates: list[Condition],
        task_expert: int,
    ) -> None:
        assert isinstance(evaluator.sweep, Sweep), "signals read what vLLM does not give"
        self._evaluator, self._sweep, self._spec = evaluator, evaluator.sweep, spec
        self._candidates, self._expert = candidates, task_expert
        self._members = [evaluator.members[one] for one in candidates]
        self._read = _reader(evaluator.tokenizer, spec.answer)

    def value(self, signal: Signal) -> Values:
        """One signal for every composition."""
        ways: dict[str, Callable[[], Values]] = {
            "agreement": self._agreement,
            "consensus": lambda: consensus(self._answers),
            "confidence": lambda: confidence(
                self._sweep, self._prompts, self._answers, batch_size=self._batch
            ),
            "self_consistency": lambda: self_consistency(
                self._sweep, self._prompts, self._read, members=self._members, **self._settings
            ),
            "fluency": lambda: fluency(
                self._sweep, self._ids("text"), members=self._members, batch_size=self._batch
            ),
            "closeness": self._closeness,
            "tasks": self._tasks,
        }
        return ways[signal]()

    @cached_property
    def _prompts(self) -> list[list[int]]:
        return self._ids("prompts")

    @cached_property
    def _twins(self) -> list[list[int]]:
        found = self._ids("parallel")
        if len(found) != len(self._prompts):
            raise EvaluationError(
                f"{self._spec.parallel} has {len(found)} prompts and {self._spec.prompts} "
                f"{len(self._prompts)}; they must be the same, line by line"
            )
        return found

    @cached_property
    def _answers(self) -> Answers:
        return ask(self._sweep, self._prompts, self._read, members=self._members, **self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "max_new_tokens": self._spec.max_new_tokens,
            "stop": tuple(self._spec.stop),
            "tokenizer": self._evaluator.tokenizer,
        }

    @property
    def _batch(self) -> int:
        size = self._evaluator.spec.batch_size
        return 16 if size == "auto" else size

    def _agreement(self) -> Values:
        expert = ask(self._sweep, self._twins, self._read, members=[self._expert], **self._settings)
        return agreement(self._answers, expert.texts[0])

    def _closeness(self) -> Values:
        pairs = list(zip(self._twins, self._prompts, strict=True))
        found: Values = cross_lingual_similarity(self._sweep, pairs, members=self._members).mean(
            axis=1
        )
        return found

    def _tasks(self) -> Values:
        """Mean rank over the file's tasks: the task in the source language, reading in the target.

        Each task counts once, by the first number that it gives.
        """
        from layerswap.search.evaluator import DEVELOPMENT, by_condition

        rows = self._evaluator.rows(DEVELOPMENT, self._candidates)
        measures: dict[str, tuple[str, str, str]] = {}
        for row in rows:
            measures.setdefault(row.task, (row.task, row.metric, row.filter))
        means = {
            task: np.array([v.mean() for v in by_condition(rows, measure).values()])
            for task, measure in measures.items()
        }
        return combined(means)

    def _ids(self, key: str) -> list[list[int]]:
        path = Path(getattr(self._spec, key))
        options, tokenizer = self._evaluator.spec.options, self._evaluator.tokenizer
        texts = [one.prompt + one.text for one in read_examples(path)]
        if key == "text":
            return [list(tokenizer(text).input_ids) for text in texts]
        return [options.prompt_ids(tokenizer, text) for text in texts]


def _reader(tokenizer: Any, pattern: str | None) -> Callable[[Sequence[int]], str]:
    """What reads an answer from generated tokens."""

    def read(tokens: Sequence[int]) -> str:
        text = str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()
        if pattern is None:
            return text
        found = [match.group() for match in re.finditer(pattern, text)]
        return found[-1] if found else ""

    return read
