"""Compares the models of several runs side by side, on the documents that all of them answered."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from layerswap.evaluation.suites.suites import development_tasks, has_variants
from layerswap.experiment.answers import Answer, grouped, read_answers
from layerswap.experiment.compare import Compared
from layerswap.experiment.results import Results
from layerswap.ground.errors import EvaluationError
from layerswap.ground.types import PathLike, listed


def compare(runs: PathLike | Sequence[PathLike], *, models: str | Sequence[str] = ()) -> Results:
    """Compare the models of one or several runs on the documents that they share.

    This is `layerswap compare` from Python. A model that two runs evaluated is one model. Another
    name that two runs share is prefixed with the run's folder.

    Args:
        runs: folders that `eval`, `sweep` (the test split) or `study` wrote.
        models: the models to compare, the reference first; all when empty.

    Raises:
        EvaluationError: a folder holds no results, or there are fewer than two models.

    Example:
        compared = ls.compare(["results/base", "results/swap"], models=["base", "swap"])
        compared.to_pandas()
    """
    scores, flattered = _documents([Path(run) for run in listed(runs)])
    names = listed(models) or list(scores)
    unknown = next((name for name in names if name not in scores), None)
    if unknown is not None:
        raise EvaluationError(f"no model {unknown!r}; there are {', '.join(scores)}")
    if len(names) < 2:
        raise EvaluationError("a comparison needs two models; there is " + ", ".join(names))
    rows = list(dict.fromkeys(row for name in names for row in scores[name]))
    named = {name: scores[name] for name in names}
    tasks = {name: [row for row, answers in by.items()
                    if not all(answer.is_baseline for answer in answers.values())]
             for name, by in named.items()}  # fmt: skip
    asked = [name for name in names if tasks[name]]
    every = [row for own in tasks.values() for row in own]
    if len(asked) > 1 and len({*every}) == len(every):
        has = "; ".join(f"{name}: {' '.join(filter(None, tasks[name][0][:2]))}" for name in asked)
        raise EvaluationError(
            f"the models have no task in common ({has}); evaluate them on the same task"
        )
    notes = [note for row in rows for note in _differences(named, row)]
    results = [_compared(named, row, frozenset(flattered)) for row in rows]
    return Results(results, names, [*notes, *_left_out(results)])


_Row = tuple[str, str, str]


_Documents = dict[tuple[str, int], Answer]
"""By hash and its repetition."""


def _documents(runs: Sequence[Path]) -> tuple[dict[str, dict[_Row, _Documents]], set[str]]:
    """Read the scores of every document by model and row of the table, and flattered models.

    Flattered are the compositions of a study's grid, the best of which is the best of many.
    """
    read: dict[str, dict[tuple[str, Path], dict[_Row, _Documents]]] = {}
    flattered = set()
    answers = [(run, answer) for run in runs for answer in _tested(run)]
    hashes = {(run, answer.task, answer.document): answer.document_hash
              for run, answer in answers if not answer.is_baseline}  # fmt: skip
    for run, answer in answers:
        place = answer.task, answer.document
        # A baseline answers the documents of its run, perhaps in translation.
        known = hashes.get((run, *place)) if answer.is_baseline else None
        score = replace(answer, document_hash=known or answer.document_hash)
        # Without a record of the weights, a model is one only within its run.
        documents = read.setdefault(score.model, {}).setdefault((score.weights, run), {})
        documents.setdefault(_row(score), {})[place] = score
        if score.condition.zones is not None:
            flattered.add(score.model)
    for rows in (rows for places in read.values() for rows in places.values()):
        rows |= {row: _by_hash(documents) for row, documents in rows.items()}
    by_model: dict[str, dict[_Row, _Documents]] = {}
    folders = _names([*dict.fromkeys(runs)])
    for name, places in read.items():
        if len(places) == 1 or _is_one(places):
            merged = by_model.setdefault(name, {})
            for rows in places.values():
                for row, by_document in rows.items():
                    merged.setdefault(row, {}).update(by_document)
        else:
            by_model |= {f"{folders[run]}/{name}": rows for (_, run), rows in places.items()}
    return by_model, flattered


def _tested(run: Path) -> Iterator[Answer]:
    """Return a run's main answers, without the published development split for its choices."""
    answers = read_answers(run)
    chosen_on = development_tasks(answer.task for answer in answers)
    return (answer for answer in answers if answer.main and answer.task not in chosen_on)


def _names(runs: Sequence[Path]) -> dict[Path, str]:
    """Return the shortest ends of the runs' paths that differ from each other."""
    parts = {run: run.absolute().parts for run in runs}
    length = 1
    while len({path[-length:] for path in parts.values()}) < len({*parts.values()}):
        length += 1
    return {run: "/".join(path[-length:]) for run, path in parts.items()}


def _by_hash(documents: _Documents) -> _Documents:
    """Key documents by the hash of their text; equal texts are numbered by right answer."""
    ordered = sorted(documents.values(), key=lambda a: (a.target, a.task, a.document))
    equal = grouped(ordered, lambda a: a.document_hash or f"{a.task} {a.document}")
    return {(text, n): answer for text, same in equal.items() for n, answer in enumerate(same)}


def _differences(scores: Mapping[str, Mapping[_Row, _Documents]], row: _Row) -> Iterator[str]:
    """Describe different prompts of models; refuse documents whose right answers differ."""
    where, common = " ".join(filter(None, row[:2])), _common(scores.values(), row)
    first, ways = "", dict[str, str]()
    # An earlier version did not record these settings.
    written = all(a.generation for by in scores.values() for a in by.get(row, {}).values()
                  if not a.is_baseline)  # fmt: skip
    for name, by in scores.items():
        if row not in by or any(answer.is_baseline for answer in by[row].values()):
            continue
        first = first or name
        pairs = [(by[row][key], scores[first][row][key]) for key in common]
        if other := sum("" != _right(a) != _right(b) != "" for a, b in pairs):
            raise EvaluationError(
                f"{where}: the right answers to {other:,} of {len(common):,} documents differ "
                f"between {first} and {name}; evaluate both on one version of the test"
            )
        how = {f"{a.prompts}, filter={a.filter!r}{f', {a.generation}' * written}"
               for a in by[row].values() if a.prompts}  # fmt: skip
        ways |= {name: " and ".join(sorted(how))} if how else {}
    if len({*ways.values()}) > 1:
        listed_ways = "; ".join(f"{name} by {how}" for name, how in ways.items())
        yield f"{where}: the models were asked differently: {listed_ways}"


def _right(answer: Answer) -> str:
    """Return the right answer as text; several right answers are sorted."""
    text = answer.target.strip()
    with suppress(ValueError, SyntaxError):  # a text, not a list of them
        known = literal_eval(text) if text.startswith("[") else None
        return str(sorted(map(str, known))) if isinstance(known, list) else text
    return text


def _is_one(places: Mapping[tuple[str, Path], Mapping[_Row, _Documents]]) -> bool:
    """True if runs of one name had equal weights, and equal scores wherever both have a score."""
    weights = {weights for weights, _ in places}
    first: dict[tuple[_Row, tuple[str, int]], Answer] = {}
    same = all(
        (other := first.setdefault((row, document), answer)).score == answer.score
        and all(one == two or "" in (one, two) for one, two in
                ((other.prompts, answer.prompts), (other.generation, answer.generation)))
        for rows in places.values() for row, by in rows.items() for document, answer in by.items()
    )  # fmt: skip
    return same and len(weights) == 1 and "" not in weights


def _left_out(results: Iterable[Compared]) -> Iterator[str]:
    """Describe the documents that are left out because a model lacks them."""
    for by in results:
        common = len(next(iter(by.scores.values())))
        if {*by.counts.values()} != {common}:
            has = ", ".join(f"{name} {count:,}" for name, count in by.counts.items()
                            if name not in by.baselines)  # fmt: skip
            yield (
                f"{' '.join(filter(None, [by.benchmark, by.language]))}: compared on the "
                f"{common:,} documents that all models have; {has}"
            )


def _row(score: Answer) -> _Row:
    # Each direction of a translation is a benchmark.
    variants = has_variants(score.benchmark)
    benchmark = score.task.rpartition("_")[0] if variants else score.benchmark
    return benchmark, score.language, score.metric


def _compared(
    scores: Mapping[str, Mapping[_Row, _Documents]], row: _Row, flattered: frozenset[str]
) -> Compared:
    """Compare models with the first, on the documents that all models of a row share."""
    common = _common(scores.values(), row)
    if not common:
        raise EvaluationError(
            f"{' '.join(row)}: the models share no document; {_unlike(scores, row)}, or an earlier "
            "version wrote some answers"
        )
    answered = {name: by[row] for name, by in scores.items() if row in by}
    return Compared.of(
        {name: [by[document] for document in common] for name, by in answered.items()},
        selected=next(iter(scores)), benchmark=row[0], language=row[1], flattered=flattered,
        counts={name: len(by) for name, by in answered.items()},
    )  # fmt: skip


def _unlike(scores: Mapping[str, Mapping[_Row, _Documents]], row: _Row) -> str:
    """Explain why models share no document: they differ in choices, prompts or tests."""
    first, *others = [
        sorted(by[row].values(), key=lambda a: (a.task, a.document)) for by in scores.values()
        if row in by and not any(answer.is_baseline for answer in by[row].values())
    ]  # fmt: skip
    for other in others:
        if {a.text for a in first} & {a.text for a in other}:
            return "their labels or choices differ, or the order of these"
        if [a.target for a in first] == [a.target for a in other]:
            return f"their prompts differ: {first[0].text!r:.80} and {other[0].text!r:.80}"
    return "their test files differ"


def _common(scores: Iterable[Mapping[_Row, _Documents]], row: _Row) -> list[tuple[str, int]]:
    """List the documents that all models answered in the first one's order, as translations."""
    first, *others = [by[row] for by in scores if row in by]
    shared = set(first).intersection(*others)
    return sorted(shared, key=lambda key: (first[key].task, first[key].document))
