"""Which signal finds a good composition without labels, on the lab, where the truth is known.

    python -m research.signals

For every scarce language and seed, the quickstart's grid is scored on test problems (the truth) and
under every signal of `search.unlabelled`, none of which reads an answer in the scarce language. A
signal is as good as its rank correlation with the truth is high and its regret is low: the true
score of the best composition minus that of the one it chooses.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.compose import default_zones, zone_grid
from layerswap.engine.sweep import Sweep
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.quickstart import BOTTOMS, TOPS
from layerswap.lab.scoring import load
from layerswap.lab.tasks import LabExample, LabSplit, Skill, examples, parallel
from layerswap.merge import Plan, swap
from layerswap.search.unlabelled import (
    agreement,
    ask,
    combined,
    confidence,
    consensus,
    cross_lingual_similarity,
    fluency,
    self_consistency,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Values = npt.NDArray[np.float64]

PROMPTS, TRUTH = 200, 500
NEW_TOKENS = 4
BATCH = 64


@dataclass(frozen=True)
class Findings:
    """One pair of experts.

    Attributes:
        language: the scarce language.
        seed: of both experts, from 1.
        truth: share of test problems answered right, by composition.
        default: position of the paper's default among the compositions.
        signals: per signal its values, by composition.
    """

    language: str
    seed: int
    truth: Values
    default: int
    signals: Mapping[str, Values]

    def correlation(self, signal: str) -> float:
        """Spearman's rank correlation with the truth; 0 where the signal is constant."""
        import numpy as np
        from scipy.stats import spearmanr

        values = self.signals[signal]
        if np.ptp(values) == 0 or np.ptp(self.truth) == 0:
            return 0.0
        return float(spearmanr(values, self.truth).statistic)

    def regret(self, signal: str) -> float:
        """The best true score minus that of the signal's choice, the first of equals."""
        return float(self.truth.max() - self.truth[int(self.signals[signal].argmax())])

    @property
    def default_regret(self) -> float:
        """The best true score minus that of the paper's default."""
        return float(self.truth.max() - self.truth[self.default])

    @property
    def blind_regret(self) -> float:
        """The best true score minus the mean: the regret of a composition drawn at random."""
        return float(self.truth.max() - self.truth.mean())


def study(lab: Lab, language: str, pair: int) -> Findings:
    """Every signal on one pair of experts."""
    plan = swap(task=lab.task_experts[pair], language=lab.language_experts[language][pair])
    layers = plan.composition.layers
    zones = list(zone_grid(layers, bottom=BOTTOMS, top=TOPS))
    plans = [plan.grid(bottom=[z.bottom], top=[z.top])[0] for z in zones]
    expert = swap(task=lab.task_experts[pair], language=lab.task_experts[pair])
    default = next(i for i, z in enumerate(zones) if z == default_zones(layers))
    bench = _Bench(lab, language, Sweep(plans, dtype="float32"), expert)
    return Findings(language, pair + 1, bench.truth(), default, bench.signals())


class _Bench:
    """The lab's questions, put to the compositions of one pair."""

    def __init__(self, lab: Lab, language: str, sweep: Sweep, expert: Plan) -> None:
        self._world, self._language, self._sweep = lab.world, language, sweep
        self._expert = Sweep([expert], dtype="float32")
        _, self._tokenizer = load(lab.base)

    def truth(self) -> Values:
        return self._share("problem", self._language, "test", TRUTH)

    def signals(self) -> dict[str, Values]:
        source = self._world.source.name
        asked = examples(self._world, self._language, "problem", "development", PROMPTS, seed=7)
        prompts = [self._ids(one.prompt) for one in asked]
        twins = [self._ids(parallel(self._world, one, source).prompt) for one in asked]
        answers = ask(self._sweep, prompts, self._read, max_new_tokens=NEW_TOKENS)
        reference = ask(self._expert, twins, self._read, max_new_tokens=NEW_TOKENS).texts[0]
        told = examples(
            self._world, self._language, "comprehension", "development", PROMPTS, seed=7
        )
        texts = [self._ids(one.prompt) for one in told]
        pairs = [(self._ids(parallel(self._world, one, source).prompt), text)
                 for one, text in zip(told, texts, strict=True)]  # fmt: skip
        near = cross_lingual_similarity(self._sweep, pairs)
        third = near.shape[1] // 3
        found = {
            "source task": self._share("problem", source, "development", PROMPTS),
            "language, generic": self._share(
                "comprehension", self._language, "development", PROMPTS
            ),
            "agreement": agreement(answers, reference),
            "consensus": consensus(answers),
            "confidence": confidence(self._sweep, prompts, answers, batch_size=BATCH),
            "self-consistency": self_consistency(
                self._sweep, prompts[: PROMPTS // 4], self._read, max_new_tokens=NEW_TOKENS
            ),
            "fluency": fluency(self._sweep, texts, batch_size=BATCH),
            "closeness, all layers": near.mean(axis=1),
            "closeness, middle": near[:, third:-third].mean(axis=1),
        }
        for names in COMBINATIONS:
            found[" + ".join(names)] = combined({name: found[name] for name in names})
        return found

    def _share(self, skill: Skill, language: str, split: LabSplit, n: int) -> Values:
        asked = examples(self._world, language, skill, split, n, seed=0)
        requests = [(self._ids(one.prompt), self._rest(one)) for one in asked]
        scores = self._sweep.loglikelihood(requests, batch_size=BATCH)
        return scores.greedy.mean(axis=1)  # type: ignore[no-any-return]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text).input_ids)

    def _rest(self, one: LabExample) -> list[int]:
        ids = self._tokenizer(one.completion, add_special_tokens=False).input_ids
        return [*ids, self._tokenizer.eos_token_id]

    def _read(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()


COMBINATIONS = (
    ("source task", "language, generic"),
    ("agreement", "confidence"),
    ("agreement", "consensus"),
    ("agreement", "fluency"),
    ("source task", "confidence"),
    ("agreement", "consensus", "confidence"),
)


def table(found: Sequence[Findings]) -> str:
    """Markdown: per signal the mean correlation and mean and largest regret, least regret first."""
    import numpy as np

    def row(name: str, correlation: str, regrets: list[float]) -> tuple[float, str]:
        mean, worst = np.mean(regrets), np.max(regrets)
        return float(mean), f"| {name} | {correlation} | {mean:.3f} | {worst:.3f} |"

    rows: list[tuple[float, str]] = [
        row("the paper's default", "", [one.default_regret for one in found]),
        row("a composition at random", "", [one.blind_regret for one in found]),
    ]
    for name in found[0].signals:
        rho = np.mean([one.correlation(name) for one in found])
        rows.append(row(name, f"{rho:+.2f}", [one.regret(name) for one in found]))
    head = "| signal | rank correlation | mean regret | largest regret |\n|---|---:|---:|---:|"
    return "\n".join([head, *(line for _, line in sorted(rows))])


def main() -> None:
    """Print a table per language and one over all pairs."""
    lab: Any = shipped()
    everything: list[Findings] = []
    for language in lab.languages:
        found = []
        for pair in range(len(lab.task_experts)):
            found.append(study(lab, language, pair))
        sys.stdout.write(f"\n{language}\n\n{table(found)}\n")
        sys.stdout.flush()
        everything += found
    sys.stdout.write(f"\nall\n\n{table(everything)}\n")


if __name__ == "__main__":
    main()
