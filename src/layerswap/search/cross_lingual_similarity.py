"""How close the hidden states of parallel sentences are, layer by layer, in every composition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from layerswap.engine.scoring import pad_with_mask
from layerswap.engine.sweep import Sweep
from layerswap.engine.trie import Node
from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

BATCH = 32
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
    import numpy as np

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
        _batch(sweep, texts[start : start + BATCH], members)
        for start in range(0, len(texts), BATCH)
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
