"""Zones of a swap from parallel text alone, after Tran et al. (Findings of ACL 2026).

    python -m research.parallel lab                       # the lab's pairs, on development problems
    python -m research.parallel zones MODEL TEXT ENGLISH  # the zones of any language expert

Sentences and their translations are read by the language expert. After each layer, the mean of the
hidden states over the tokens of a sentence should lie nearest to that of its translation, by
cosine. Layers that find at least half as many translations as the best layer are shared by the
languages; those below and above belong to the language. No task and no composition is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research.lab.scoring import load

SENTENCES = 100
SHARED = 0.5
"""Share of the best layer's translations that a layer of the middle finds at least."""


def retrieved(model: Any, tokenizer: Any, texts: Sequence[str], others: Sequence[str]) -> Any:
    """Share of sentences found by their translations after each layer, both ways: `(layers,)`."""
    import torch

    sides = []
    for side in (texts, others):
        means = []
        for text in side:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            with torch.inference_mode():
                states = model(ids, output_hidden_states=True).hidden_states[1:]
            means.append([state[0].float().mean(0).numpy() for state in states])
        sides.append(np.array(means).swapaxes(0, 1))  # (layers, sentences, width)
    found = []
    for one, other in zip(*sides, strict=True):
        centred = [side - side.mean(0) for side in (one, other)]
        unit = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in centred]
        similar = unit[0] @ unit[1].T
        right = np.arange(len(similar))
        found.append(np.mean([similar.argmax(1) == right, similar.argmax(0) == right]))
    return np.array(found)


def zones(found: Any) -> tuple[int, int]:
    """Bottom and top of a swap from the share of translations found after each layer."""
    shared = np.flatnonzero(found >= SHARED * found.max())
    return int(shared[0]), int(len(found) - 1 - shared[-1])


def lab() -> None:
    """Print the zones of every pair of the lab, and both scores on development problems."""
    import random

    import layerswap as ls
    from layerswap.lab.assets import shipped
    from layerswap.lab.scoring import sweep_correct
    from research.lab.scoring import questions
    from research.lab.tasks import problem
    from research.lab.world import world_of

    world_lab = shipped()
    world = world_of(world_lab)
    for language in world_lab.languages:
        target, words = world.language(language), world.source.vocabulary(common_only=False)

        def sentences(spoken: Any, words: Any = words) -> list[str]:
            rng = random.Random(0)
            return [
                problem([spoken] * 2, words, "train", rng, biggest=world.settings.biggest).prompt
                for _ in range(SENTENCES)
            ]

        texts, english = sentences(target), sentences(world.source)
        documents = questions("task_target", language, "development", 1000, world=world)
        experts = zip(world_lab.task_experts, world_lab.language_experts[language], strict=True)
        for pair, (task, expert) in enumerate(experts, 1):
            model, tokenizer = load(expert)
            found = retrieved(model, tokenizer, texts, english)
            bottom, top = zones(found)
            default = ls.swap(task=task, language=expert)
            drawn = ls.swap(task=task, language=expert, bottom=bottom, top=top)
            right = sweep_correct(ls.Sweep([default, drawn]), tokenizer, documents).mean(1)
            print(
                f"{language} {pair}: found {np.round(found, 2).tolist()}; bottom {bottom}, top "
                f"{top}: {right[1]:.3f}; default {default.composition}: {right[0]:.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    asked = parser.add_subparsers(dest="asked", required=True)
    asked.add_parser("lab")
    of_model = asked.add_parser("zones")
    of_model.add_argument("model", type=Path, help="folder of a language expert")
    of_model.add_argument("texts", nargs=2, type=Path, help="text and its English, line by line")
    given = parser.parse_args()
    if given.asked == "lab":
        lab()
        return
    model, tokenizer = load(given.model)
    texts, others = (path.read_text("utf-8").splitlines()[:SENTENCES] for path in given.texts)
    found = retrieved(model, tokenizer, texts, others)
    print(np.round(found, 2).tolist(), zones(found))


if __name__ == "__main__":
    main()
