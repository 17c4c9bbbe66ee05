"""The selected composition of each language of a study: as a recipe, and as a merged model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from layerswap._types import Log
from layerswap.compose.recipe import read_recipe
from layerswap.errors import StudyError
from layerswap.merge import make_plan
from layerswap.report.tables import interval_words
from layerswap.study.journal import StudyJournal
from layerswap.study.results import StudyResults
from layerswap.study.step_functions import recipes_of

BEST, MERGED = "best", "merged"


def write_best(journal: StudyJournal, results: StudyResults) -> list[Path]:
    """Write `best/<language>.yaml` for each language: the recipe of its selected composition.

    This is `BenchmarkResult.best` on the language's first benchmark.

    Args:
        journal: of the study.
        results: of the study.

    Raises:
        OSError: the files cannot be written.
    """
    folder = journal.root / BEST
    folder.mkdir(exist_ok=True)
    written: list[Path] = []
    for found in results.benchmarks:
        path = folder / f"{found.language}.yaml"
        if path in written:
            continue
        step = journal.graph[f"evaluate/{found.language}"]
        inputs = {name: journal.bring(name) for name in step.needs}
        recipe = dict(recipes_of(step.settings, inputs))[found.best]
        score = interval_words(found.best_score)
        head = f"# {found.benchmark} in {found.language}, {found.best}: {score}%\n"
        text = yaml.safe_dump({**recipe, "bake": True}, sort_keys=False, allow_unicode=True)
        path.write_text(head + text, "utf-8")
        written.append(path)
    return written


def merge_best(root: Path, languages: Sequence[str] = (), *, log: Log) -> Iterator[Path]:
    """Write the selected model of each language into `merged/<language>`, with its card.

    Args:
        root: the study's folder.
        languages: as the study writes them; all when empty.
        log: called with each line of progress.

    Raises:
        StudyError: the study has no such language, or no recipe yet.
        LayerswapError: a model cannot be written.
    """
    known = {path.stem: path for path in sorted((root / BEST).glob("*.yaml"))}
    if not known:
        raise StudyError(f"{root}: has no {BEST}/<language>.yaml yet; finish the study first")
    for language in languages or known:
        if language not in known:
            raise StudyError(f"{root}: has no {language!r}; its languages are {', '.join(known)}")
        log(f"merging the model of {language}")
        plan = make_plan(read_recipe(known[language]))
        (root / MERGED).mkdir(exist_ok=True)
        yield plan.save(root / MERGED / language, overwrite=True)
