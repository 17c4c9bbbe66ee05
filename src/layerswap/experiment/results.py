"""Several results of one command: `eval` and `compare` on benchmarks, languages and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.evaluation.classifier import Worth, worths_in_words
from layerswap.evaluation.statistics import Interval, holm, paired_bootstrap_p
from layerswap.experiment.answers import grouped
from layerswap.experiment.cautions import cautions_on
from layerswap.experiment.compare import Compared, Model, over_languages

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Results:
    """The results of `eval` and `compare`: one for each benchmark, language and metric.

    Attributes:
        results: each with the first of `models` as its selected model, if they are compared.
        models: names of the models, the reference first; without baselines after `eval`.
        notes: lines about documents that are left out, and about learned languages.
        folder: that holds the scores and the answers.
    """

    results: Sequence[Compared]
    models: Sequence[str]
    notes: Sequence[str] = ()
    folder: Path | None = None

    @property
    def said(self) -> list[str]:
        """The notes, the cautions, and the worth of every model in labels."""
        cautions = [str(one) for by in self.results for one in cautions_on(by)]
        worth = [
            f"{by.heading}: {model} is worth {worths_in_words(found)}, by a linear classifier that "
            "is cross-validated on the test documents"
            for (by, model), found in self.worth.items() if found
        ]  # fmt: skip
        return [*self.notes, *cautions, *worth]

    @cached_property
    def worth(self) -> dict[tuple[Compared, Model], dict[str, Worth]]:
        """Worth in labels of each model of `models`, by result, model and measure."""
        return {(by, model): by.worth_of(model) for by in self.results for model in self.models}

    @property
    def by_benchmark(self) -> list[list[Compared]]:
        """The languages of each benchmark and metric."""
        return [*grouped(self.results, lambda by: (by.benchmark, by.metric)).values()]

    @cached_property
    def uncorrected(self) -> dict[tuple[Compared, Model], float]:
        """P-values of paired bootstrap tests against the selected model, by result and model."""
        return {
            (by, model): paired_bootstrap_p(by.scores[model], by.scores[by.selected])
            for by in self.results for model in by.against(by.selected)
        }  # fmt: skip

    @cached_property
    def p_values(self) -> dict[tuple[Compared, Model], float]:
        """The p-values of `uncorrected`, corrected by Holm over all."""
        return dict(zip(self.uncorrected, holm([*self.uncorrected.values()]), strict=True))

    def records(self) -> Iterator[dict[str, Any]]:
        """A row for each benchmark, language, metric and model, and for balanced measures.

        `low`, `high` and `n` are the 95% bootstrap interval over documents, `documents` those that
        the model answered. `difference` is paired, model minus the selected one, with its interval
        from `lower` to `upper`; `p` is corrected, `p_bootstrap` is not. After `eval` of a task with
        labels, `worth_in_labels` has the measures.
        """
        for by in self.results:
            gaps, balanced = by.against(by.selected), by.balanced_against(by.selected)
            where = {"benchmark": by.benchmark, "language": by.language, "task": by.task}
            for model in dict.fromkeys([*by.wholes, *by.scores]):
                row = {"model": model, **where, "metric": by.metric}
                if (interval := by.intervals.get(model)) is not None:
                    row |= {"score": interval.mean, **interval.bounds}
                if isinstance(whole := by.wholes.get(model), Interval):
                    row |= {"score": whole.mean, **whole.bounds}
                elif whole is not None:
                    row["score"] = whole
                if model in gaps:
                    row |= {**_apart(gaps[model]), "p": self.p_values[by, model],
                            "p_bootstrap": self.uncorrected[by, model]}  # fmt: skip
                if found := self.worth.get((by, model)):
                    row["worth_in_labels"] = {
                        name: asdict(labels) for name, labels in found.items()
                    }
                yield row | ({"documents": by.counts[model]} if model in by.counts else {})
            for model, answers in by.classified.items():
                for metric, interval in vars(answers.balanced).items():
                    gap = getattr(balanced.get(model), metric, None)
                    yield {"model": model, **where, "metric": metric, "score": interval.mean,
                           **interval.bounds, **_apart(gap)}  # fmt: skip

    def means(self) -> Iterator[dict[str, Any]]:
        """Yield the means over languages of every model that has scores in all of them."""
        for same in self.by_benchmark:
            for model in self.models if len(same) > 1 else ():
                mean, reference = over_languages(same, model), self.models[0]
                gap = over_languages(same, model, reference) if model != reference else None
                if mean is not None:
                    yield {"model": model, "benchmark": same[0].benchmark, "metric": same[0].metric,
                           "score": mean.mean, **mean.bounds, **_apart(gap)}  # fmt: skip

    def to_pandas(self) -> pd.DataFrame:
        """The rows of `records`."""
        import pandas as pd

        return pd.DataFrame(list(self.records()))

    def __repr__(self) -> str:
        where = f" in {self.folder}" if self.folder else ""
        return f"{', '.join(self.models)} on {len(self.results)} results{where}"

    def _repr_html_(self) -> str:
        return str(self.to_pandas().to_html(index=False, float_format="{:.3f}".format))


def _apart(gap: Interval | None) -> dict[str, float]:
    """Return the columns of a paired difference; an empty mapping without a difference."""
    return {"difference": gap.mean, "lower": gap.low, "upper": gap.high} if gap else {}
