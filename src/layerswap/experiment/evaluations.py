"""`layerswap.evaluate` and `layerswap.compare`: the commands `eval` and `compare` from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from layerswap.checkpoint.loading import open_device, pick_device
from layerswap.evaluation.harness import (
    check_task_names,
    evaluate_models,
    open_models,
)
from layerswap.evaluation.identifier import identifying
from layerswap.evaluation.languages import ANSWER, REASONING, Speaks
from layerswap.evaluation.metrics import ADDED, BESIDE
from layerswap.evaluation.response_cache import (
    AnswerStore,
    composition_key,
    nothing_if_refused,
)
from layerswap.evaluation.sandbox import programs_allowed
from layerswap.evaluation.settings import EvaluationSettings
from layerswap.evaluation.statistics import Interval, classified_of, mean_interval
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
from layerswap.evaluation.suites.suites import WrittenTask, check_askable, write_suite
from layerswap.experiment import answers as files
from layerswap.experiment.baselines import answers_of_baselines, baselines_of
from layerswap.experiment.conditions import BASELINES
from layerswap.ground.errors import RecipeError
from layerswap.ground.types import Log, PathLike, listed
from layerswap.ground.yaml_file import validate
from layerswap.versions import need_extras

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Evaluation:
    """The scores of models on tasks, and the folder that holds them and the answers.

    Attributes:
        scores: a row for each model, task and metric. `low`, `high` and `n` are the 95% bootstrap
            interval over `n` documents, where every document has a score.
        identified: held-out errors of a learned identifier of the answers' language.
    """

    scores: Sequence[Mapping[str, Any]]
    folder: Path
    identified: Sequence[str] = ()

    def to_pandas(self) -> pd.DataFrame:
        """The scores, a row each."""
        import pandas as pd

        return pd.DataFrame(list(self.scores))

    def __repr__(self) -> str:
        models, tasks = ({row[key] for row in self.scores} for key in ("model", "task"))
        models -= {name for name in models if name.partition(",")[0] in BASELINES}
        return f"Evaluation of {len(models)} models on {len(tasks)} tasks in {self.folder}"

    def _repr_html_(self) -> str:
        return str(self.to_pandas().to_html(index=False))


def evaluate(
    models: PathLike | Sequence[PathLike],
    tasks: str | Sequence[str] = (),
    *,
    out: PathLike,
    include: PathLike | Sequence[PathLike] = (),
    suite: str | None = None,
    language: str | Sequence[str] = (),
    data: PathLike | None = None,
    answer_language: str = "",
    answer_texts: Mapping[str, PathLike] | None = None,
    allow_code: bool = False,
    log: Log = lambda line: None,
    open_store: Callable[[Path], AbstractContextManager[AnswerStore]] | None = None,
    **settings: Any,
) -> Evaluation:
    """Evaluate models on lm-eval tasks, or on a suite in some languages.

    Models made of the same experts are evaluated together. This is `layerswap eval` from Python.

    Args:
        models: folders, Hub ids, adapters, or recipes (`.yaml`), one or several.
        tasks: lm-eval tasks, one or several; or give a `suite`.
        out: the folder of results. Answers in it are reused.
        include: folders with further task YAMLs, one or several.
        suite: a suite or benchmark by name, or a file of one.
        language: languages of the suite, by code or name.
        data: folder of published files of the suite.
        answer_language: the language that answers to `tasks` should be in.
        answer_texts: texts by language, from which an identifier is learned if py3langid does not
            know the language: `{"wo": "wolof.txt", "en": "english.txt"}`.
        allow_code: run programs that a model writes, in the sandbox; without it MBPP is left out.
        log: called with what the evaluation costs, and what it skips.
        open_store: opens the file of answers, such as with a progress bar.
        settings: further settings: `limit`, `num_fewshot`, `batch_size`, `device`,
            `dtype`, `engine`, `seed`.

    Raises:
        LayerswapError: a setting is wrong, or models or tasks cannot be loaded.

    Example:
        done = ls.evaluate(["merged", "math-expert"], suite="mgsm", language="sw", out="results")
        done.to_pandas()
        ls.compare("results")
    """
    checked = validate(EvaluationSettings, settings, where="evaluate", expected="settings by name")
    names, languages, out = listed(tasks), listed(language), Path(out)
    if (suite is None) == (not names):
        raise RecipeError("give either tasks or a suite")
    if suite is not None and not languages:
        raise RecipeError("a suite needs a language")
    need_extras("evaluating", "eval")
    speaks: str | Speaks | None = None
    identified: list[str] = []
    if answer_language or answer_texts:
        speaks, identified = identifying(answer_language, answer_texts or {})
    for code in languages:
        check_askable(suite or "", code, allow_code=allow_code)
    # Models come before what takes seconds: torch and lm-eval's index.
    plans = open_models([str(model) for model in listed(models)])
    open_device(pick_device(checked.device))
    folders = [Path(path).absolute() for path in listed(include)]
    check_task_names(names, folders)
    store_of = open_store or (lambda path: closing(AnswerStore(path)))
    with nothing_if_refused(out / files.ANSWERS):
        folder = files.open_folder(out)
        earlier = files.earlier_answers(folder)
        task_folder = TaskFolder(folder / files.TASKS)
        written = [] if suite is None else write_suite(
            suite, languages, task_folder,
            data=DataFolder.given(None if data is None else Path(data)),
            shots=checked.num_fewshot, allow_code=allow_code, skip=log,
        )  # fmt: skip
        with store_of(folder / files.ANSWERS) as store, programs_allowed(allow_code):
            results = evaluate_models(
                plans, names or [task.name for task in written], folders or [task_folder.root],
                settings=checked, store=store, log=log, scratch=folder,
            )  # fmt: skip
    written = written or files.tasks_of(results, answer_language)
    weights = {name: composition_key(plan) for name, plan in plans.items()}
    kept, replaced = files.kept_answers(earlier, results, weights)
    rows = files.write_results(
        folder, results, written, kept=kept,
        of_model={name: {"weights": key} for name, key in weights.items()},
        speaks=speaks, further=partial(_of_baselines, written),
    )  # fmt: skip
    if replaced:
        more = f" and {len(replaced) - 3} more" if len(replaced) > 3 else ""
        log(f"replaced earlier results in {out}: {', '.join(replaced[:3])}{more}")
    if models_kept := sorted({row.model for row in kept if not row.is_baseline}):
        log(f"kept earlier results in {out} of {', '.join(models_kept)}")
    scores = _scores(results, written, rows)
    return Evaluation(scores, folder, identified)


def _of_baselines(
    tasks: Sequence[WrittenTask], rows: Sequence[files.Answer]
) -> Iterator[files.Answer]:
    """Answers of the baselines that need no model, to the documents of every task."""
    done = set[str]()
    for (_, task), group in files.headlines(rows, tasks).items():
        if task not in done:
            done.add(task)
            yield from answers_of_baselines(group, baselines_of([], group))


def _scores(
    results: Mapping[str, Mapping[str, Any]],
    tasks: Sequence[WrittenTask],
    rows: Sequence[files.Answer],
) -> list[dict[str, Any]]:
    """A row for each model and task, for balanced measures, and for shares of languages."""
    headlines = files.headlines(rows, tasks)
    corpus = {task.name for task in tasks if task.document_metric is not None}  # such as BLEU
    intervals = {key: _mean(group) for key, group in headlines.items() if key[1] not in corpus}
    scores: list[dict[str, Any]] = []
    for name, result in results.items():
        for task in tasks:
            interval = intervals.get((name, task.name))
            scores.append({
                "model": name, "benchmark": task.benchmark, "task": task.name,
                "metric": task.metric[0], "score": files.headline(result, task),
                **(interval.bounds if interval else {}),
            })  # fmt: skip

    scores += [
        {"model": group[0].model, "benchmark": group[0].benchmark, "task": key[1],
         "metric": group[0].metric, "score": intervals[key].mean, **intervals[key].bounds}
        for key, group in headlines.items() if group[0].is_baseline
    ]  # fmt: skip

    def add(model: str, task: str, metric: str, interval: Interval) -> None:
        scores.append({"model": model, "task": task, "metric": metric, "score": interval.mean,
                       **interval.bounds})  # fmt: skip

    for key, group in headlines.items():
        if answers := classified_of([(row.label, row.predicted) for row in group]):
            for metric, interval in vars(answers.balanced).items():
                add(*key, metric, interval)
    main = {(row.task, row.filter) for row in rows if row.main}
    shares = files.grouped(
        (row for row in rows
         if row.metric in (*ADDED, *BESIDE, ANSWER, REASONING) and not row.main
         and (row.task, row.filter) in main),
        lambda row: (row.model, row.task, row.metric),
    )  # fmt: skip
    for (name, task_name, metric), group in shares.items():
        add(name, task_name, metric, _mean(group))
    return scores


def _mean(rows: Sequence[files.Answer]) -> Interval:
    return mean_interval(np.array([row.score for row in rows]))
