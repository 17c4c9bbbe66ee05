"""Item-response screening: compositions estimated from a few informative documents.

MERGE3 (2502.10436): an item-response model, fitted to a few compositions that are scored on all
documents, says how hard each document is and how well it tells compositions apart. The others are
scored on anchors alone, a document of each cluster of alike ones, and the model gives what they
would reach on the rest. Those with the highest estimates are then scored on all documents.

The model is the two-parameter logistic one with one ability. It is fitted here, by its posterior
mode: few compositions say little of a document, so priors must. MERGE3 interpolates between the
abilities of the experts; with one ability that can give any.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]
    ScoreOn = Callable[[Sequence[int], Sequence[int]], Array]
    """Scores in 0..1 of some compositions on documents at some places."""

SPREAD, HARDNESS = 0.5, 2.0
"""Standard deviations of the priors of a discrimination's logarithm and of a difficulty."""
SHARE = 0.5
"""Weight of the anchors' own score in an estimate, delta of MERGE3's GMP-IRT."""


@dataclass(frozen=True)
class Items:
    """Documents as items: a composition of ability t answers right with `sigmoid(a t - d)`.

    Attributes:
        discrimination: a, float64 `(documents,)`, positive.
        difficulty: d, the same shape.
    """

    discrimination: Array
    difficulty: Array

    def probability(self, ability: float) -> Array:
        """The chance of a right answer to every document."""
        from scipy.special import expit

        return expit(self.discrimination * ability - self.difficulty)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Screening:
    """How compositions were screened.

    Attributes:
        estimates: per composition its mean score, estimated where it was not scored on all.
        examples: per composition, how many documents it was scored on.
        survivors: positions of the compositions that were scored on all documents.
        documents: number of all documents.
    """

    estimates: tuple[float, ...]
    examples: tuple[int, ...]
    survivors: tuple[int, ...]
    documents: int

    @property
    def saved(self) -> float:
        """Share of all scores that did not have to be computed."""
        return 1 - sum(self.examples) / (len(self.examples) * self.documents)

    def __str__(self) -> str:
        return (
            f"{len(self.survivors)} of {len(self.examples)} compositions were scored on all "
            f"{self.documents} examples; the others were estimated from {min(self.examples)} "
            f"({self.saved:.0%} of the scores saved)"
        )


def screen(
    score: ScoreOn,
    members: Sequence[int],
    documents: int,
    *,
    calibration: int = 6,
    anchors: int = 40,
    finalists: int = 3,
    seed: int = 0,
) -> Screening:
    """Score some compositions on all documents, estimate the others, and score the best of them.

    Args:
        score: gives scores in 0..1.
        members: the compositions, neighbours alike.
        documents: how many there are.
        calibration: compositions that the model is fitted to, spread evenly over `members`.
        anchors: documents that the others are scored on.
        finalists: compositions with the highest estimates, scored on all documents at the end.
        seed: of the clusters.

    Raises:
        EvaluationError: a setting out of range, or a score outside 0..1.
    """
    import numpy as np

    if not members:
        raise EvaluationError("a screening needs compositions")
    estimator = Estimator(score, documents, calibration=calibration, anchors=anchors, seed=seed)
    spread = np.linspace(0, len(members) - 1, min(calibration, len(members))).round().astype(int)
    estimator([members[i] for i in spread])
    estimator(members)
    return estimator.finish(members, finalists)


class Estimator:
    """Scores compositions as they come: the first on all documents, the others on anchors.

    Args:
        score: gives scores in 0..1.
        documents: how many there are.
        calibration: compositions that the model is fitted to, the first that come.
        anchors: documents that the others are scored on.
        seed: of the clusters.

    Raises:
        EvaluationError: a setting out of range, or a score outside 0..1.
    """

    def __init__(
        self, score: ScoreOn, documents: int, *, calibration: int, anchors: int, seed: int = 0
    ) -> None:
        if documents < 2 or calibration < 2 or anchors < 1:
            raise EvaluationError(
                "a screening needs two documents, two compositions to fit the model to, and an "
                "anchor"
            )
        self._score, self._documents, self._seed = score, documents, seed
        self._calibration, self._count = calibration, min(anchors, documents)
        self._known: list[Array] = []
        self._fitted: tuple[Items, Any, Array] | None = None
        self.estimates: dict[int, float] = {}
        self.examples: dict[int, int] = {}

    def __call__(self, members: Sequence[int]) -> list[float]:
        """The mean score of every composition, estimated where it is not scored on all."""
        import numpy as np

        new = [one for one in dict.fromkeys(members) if one not in self.estimates]
        lack = self._calibration - len(self._known)
        if first := new[:lack] if lack > 0 else []:
            self._known += list(self._whole(first))
        if others := new[len(first) :]:
            if self._fitted is None:
                items, _ = fit_items(np.array(self._known))
                self._fitted = items, *choose_anchors(items, self._count, seed=self._seed)
            items, chosen, weights = self._fitted
            for one, answers in zip(
                others, _checked(self._score(others, chosen.tolist())), strict=True
            ):
                self.estimates[one] = estimate(items, chosen, weights, answers)
                self.examples[one] = len(chosen)
        return [self.estimates[one] for one in members]

    def finish(self, members: Sequence[int], finalists: int) -> Screening:
        """Score the compositions with the highest estimates on all documents.

        Raises:
            EvaluationError: there is to be no finalist.
        """
        if finalists < 1:
            raise EvaluationError("a screening needs a finalist")
        estimated = [one for one in members if self.examples[one] < self._documents]
        if best := sorted(estimated, key=lambda one: -self.estimates[one])[:finalists]:
            self._whole(best)
        return Screening(
            tuple(self.estimates[one] for one in members),
            tuple(self.examples[one] for one in members),
            tuple(i for i, one in enumerate(members) if self.examples[one] == self._documents),
            self._documents,
        )

    def _whole(self, members: Sequence[int]) -> Array:
        found = _checked(self._score(members, range(self._documents)))
        self.estimates |= dict(zip(members, found.mean(axis=1).tolist(), strict=True))
        self.examples |= dict.fromkeys(members, self._documents)
        return found


def fit_items(responses: Array) -> tuple[Items, Array]:
    """The items, and the ability of every composition, at the mode of their posterior.

    Priors: abilities of mean 0 and variance 1, difficulties of mean 0, discriminations whose
    logarithm has mean 0.

    Args:
        responses: scores in 0..1, `(compositions, documents)`.
    """
    import numpy as np
    from scipy.optimize import minimize

    people, count = responses.shape
    rates = np.clip(responses.mean(axis=0), 0.05, 0.95)
    start = np.concatenate([np.zeros(count), np.log(1 / rates - 1), np.zeros(people)])
    # Abilities that are all equal are a saddle; start them in the order of the scores.
    means = responses.mean(axis=1)
    start[2 * count :] = (means - means.mean()) / (means.std() or 1)
    found = minimize(posterior, start, args=(responses,), jac=True, method="L-BFGS-B").x
    items = Items(np.exp(found[:count]), found[count : 2 * count])
    return items, found[2 * count :]


def posterior(values: Array, responses: Array) -> tuple[float, Array]:
    """Minus the logarithm of the posterior, up to a constant, and its gradient.

    Args:
        values: logarithms of discriminations, difficulties, and abilities, one after the other.
        responses: see `fit_items`.
    """
    import numpy as np
    from scipy.special import expit

    count = responses.shape[1]
    logs, difficulty, ability = np.split(values, [count, 2 * count])
    slope = np.exp(logs)
    score = slope * ability[:, None] - difficulty
    likelihood = (responses * score - np.logaddexp(0, score)).sum()
    prior = (logs**2).sum() / SPREAD**2 + (difficulty**2).sum() / HARDNESS**2 + (ability**2).sum()
    error = expit(score) - responses
    gradient = [
        slope * (error * ability[:, None]).sum(axis=0) + logs / SPREAD**2,
        -error.sum(axis=0) + difficulty / HARDNESS**2,
        (error * slope).sum(axis=1) + ability,
    ]
    return float(prior / 2 - likelihood), np.concatenate(gradient)


def choose_anchors(items: Items, count: int, *, seed: int = 0) -> tuple[Any, Array]:
    """Documents that stand for clusters of alike ones, by k-means over their parameters.

    Where there are fewer different documents than anchors, large clusters get several.

    Args:
        items: the documents.
        count: anchors, at most as many as documents.
        seed: of k-means.

    Returns:
        Places of the anchors, ascending, and weights that sum to 1: each cluster has its share of
        the documents.
    """
    import numpy as np
    from scipy.cluster.vq import kmeans2

    points = np.stack([items.discrimination, items.difficulty], axis=1)
    points = (points - points.mean(axis=0)) / np.maximum(points.std(axis=0), 1e-12)
    centres = np.unique(points, axis=0)
    if len(centres) > count:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # clusters that end up empty
            rng = np.random.default_rng(seed)
            centres, _ = kmeans2(centres, count, minit="++", rng=rng)
    distances = np.linalg.norm(points[:, None] - centres, axis=2)
    owner = distances.argmin(axis=1)
    clusters = [np.flatnonzero(owner == number) for number in np.unique(owner)]
    taken = [1] * len(clusters)
    while sum(taken) < count:
        left = [len(c) / n if n < len(c) else 0.0 for c, n in zip(clusters, taken, strict=True)]
        taken[int(np.argmax(left))] += 1
    weights = np.zeros(len(points))
    for cluster, several in zip(clusters, taken, strict=True):
        nearest = np.argsort(distances[cluster, owner[cluster]], kind="stable")[:several]
        weights[cluster[nearest]] = len(cluster) / several / len(points)
    anchors = np.flatnonzero(weights)
    return anchors, weights[anchors]


def ability_of(items: Items, answers: Array) -> float:
    """The most likely ability of a composition by its answers to these documents, and the prior."""
    import numpy as np
    from scipy.optimize import minimize_scalar

    def loss(ability: float) -> float:
        score = items.discrimination * ability - items.difficulty
        likelihood = float((answers * score - np.logaddexp(0, score)).sum())
        return ability**2 / 2 - likelihood

    return float(minimize_scalar(loss, bounds=(-8, 8), method="bounded").x)


def estimate(items: Items, anchors: Any, weights: Array, answers: Array) -> float:
    """The mean score on all documents (2502.10436, GMP-IRT).

    Half of it is the weighted score on the anchors; the other half is the score on the anchors and
    the model's expectation of the rest, by their numbers.

    Args:
        items: all documents.
        anchors: places of those that were answered.
        weights: of the anchors.
        answers: scores on them.
    """
    import numpy as np

    mine = Items(items.discrimination[anchors], items.difficulty[anchors])
    expected = items.probability(ability_of(mine, answers))
    weighted = float((weights * answers).sum())
    rest = np.delete(expected, anchors)
    share = len(answers) / len(expected)
    model = share * weighted + (1 - share) * (float(rest.mean()) if len(rest) else 0.0)
    return SHARE * weighted + (1 - SHARE) * model


def _checked(scores: Array) -> Array:
    import numpy as np

    found = np.asarray(scores, dtype=np.float64)
    if found.min() < 0 or found.max() > 1:
        raise EvaluationError("item_response needs scores between 0 and 1")
    return found
