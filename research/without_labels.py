"""Zones that are chosen without labels on the real model: docs/real.md, from recorded signals.

    python -m research.without_labels PUBLISHED STUDY    # asks the pair of a finished study

The compositions are those of the study's grid. Prompts are sentences of MAFAND's development split,
put as the task puts its own, in the target language and in English: no document of the task is
read. Values are kept beside the study's scores, in `signals.json`; `research.transfer` makes the
table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from research import inputs
from research.transfer import HERE, LANGUAGES, SIGNALS, ZONES, words_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Values = npt.NDArray[np.float64]

NEWS = dict(zip(LANGUAGES, inputs.NEWS, strict=True))
"""What MAFAND calls the languages."""
PROMPTS = 100
NEW_TOKENS = 5
QUESTION = "Text: {text}\nTopic:"


def parallel(published: Path, code: str) -> list[tuple[str, str]]:
    """Sentences in the target language and in English, spread over the development split."""
    rows = [row["translation"] for row in inputs.translations(published, NEWS[code], "dev")]
    pairs = [(row[NEWS[code]], row["en"]) for row in rows if all(map(str.strip, row.values()))]
    return [pairs[i * len(pairs) // PROMPTS] for i in range(PROMPTS)]


def values(
    base: str, experts: Mapping[str, str], zones: Sequence[tuple[int, int]],
    texts: Sequence[tuple[str, str]], topics: Sequence[str],
) -> dict[str, Values]:  # fmt: skip
    """Every signal, by composition.

    Args:
        base: folder of the tokenizer.
        experts: folders of the `task` and the `language` expert.
        zones: bottom and top of every composition.
        texts: parallel sentences, the target language's first.
        topics: what counts as an answer.
    """
    from transformers import AutoTokenizer

    from layerswap.engine.sweep import Sweep
    from layerswap.merge import swap
    from layerswap.search.unlabelled import (
        agreement,
        ask,
        combined,
        consensus,
        cross_lingual_similarity,
    )

    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    plan = swap(task=experts["task"], language=experts["language"])
    sweep = Sweep([plan.grid(bottom=[b], top=[t])[0] for b, t in zones], dtype="float32")
    expert = Sweep([swap(task=experts["task"], language=experts["task"])], dtype="float32")

    def read(tokens: Sequence[int]) -> str:
        written = tokenizer.decode(list(tokens), skip_special_tokens=True).strip()
        return next((one for one in topics if written.startswith(one)), "")

    @cache
    def ids(text: str) -> list[int]:
        return list(tokenizer(text).input_ids)

    prompts = [ids(QUESTION.format(text=target)) for target, _ in texts]
    twins = [ids(QUESTION.format(text=english)) for _, english in texts]
    answers = ask(sweep, prompts, read, max_new_tokens=NEW_TOKENS)
    reference = ask(expert, twins, read, max_new_tokens=NEW_TOKENS).texts[0]
    found = {
        "agreement": agreement(answers, reference),
        "consensus": consensus(answers),
        "closeness": cross_lingual_similarity(
            sweep, [(ids(english), ids(target)) for target, english in texts]
        ).mean(axis=1),
    }
    pair = {name: found[name] for name in ("agreement", "consensus")}
    return found | {"agreement + consensus": combined(pair)}


def main() -> None:
    from layerswap.study.journal import read_journal

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("published", type=Path, help="folder of the published files")
    parser.add_argument("study", type=Path, help="folder of the study")
    given = parser.parse_args()
    journal = read_journal(given.study)
    settings = journal.graph["tables"].settings
    task = next((task for task, study in ZONES.items() if study == settings["name"]), None)
    if task is None:
        parser.error(f"{given.study}: the study is none of {', '.join(ZONES.values())}")
    file = HERE / settings["name"] / SIGNALS
    recorded = json.loads(file.read_text("utf-8")) if file.exists() else {}
    for code in LANGUAGES:
        if code in recorded:
            continue
        step = journal.graph[f"evaluate/{code}"]
        grid = step.settings["grid"]
        zones = [(bottom, top) for bottom in grid["bottom"] for top in grid["top"]]
        experts = {
            name: str(journal.folder(f"train/{kind}/0") / "expert")
            for name, kind in (("task", "task"), ("language", code))
        }
        texts = parallel(given.published, code)
        found = values(step.settings["base"], experts, zones, texts, words_of(task))
        recorded[code] = {
            name: {f"{b}, {t}": float(value) for (b, t), value in zip(zones, row, strict=True)}
            for name, row in found.items()
        }
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(recorded, indent=1) + "\n", "utf-8")
        print(code, recorded[code], flush=True)


if __name__ == "__main__":
    main()
