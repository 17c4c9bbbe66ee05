"""`layerswap.evaluate`: the command `eval` from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any

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
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
from layerswap.evaluation.suites.suites import WrittenTask, check_askable, write_suite
from layerswap.experiment import answers as files
from layerswap.experiment.baselines import Baselines, answers_of_baselines, baselines_of
from layerswap.experiment.compare import Compared
from layerswap.experiment.results import Results
from layerswap.ground.errors import RecipeError
from layerswap.ground.types import Log, PathLike, listed
from layerswap.ground.yaml_file import validate
from layerswap.versions import need_extras


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
) -> Results:
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
    folders = [Path(path).absolute() for path in listed(include)]
    settings |= {"tasks": listed(tasks), "include": list(map(str, folders))}
    checked = validate(EvaluationSettings, settings, where="evaluate", expected="settings by name")
    names, languages, out = checked.tasks, listed(language), Path(out)
    for mistaken, why in (
        ((suite is None) == (not names), "give either tasks or a suite (--tasks, --suite)"),
        (suite is not None and not languages, "a suite needs a language (--language)"),
        (suite is None and (languages or data), "language and data (--data) belong to a suite"),
        (suite is not None and answer_language, "--answer-language belongs to tasks"),
        (answer_texts and not answer_language, "--answer-text belongs to --answer-language"),
    ):
        if mistaken:
            raise RecipeError(why)
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
    check_task_names(names, folders)
    store_of = open_store or (lambda path: closing(AnswerStore(path)))
    with nothing_if_refused(out / files.ANSWERS):
        folder = files.open_folder(out)
        written_before = (folder / files.ANSWERS_TABLE).is_file()
        earlier = files.read_answers(folder) if written_before else []
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
    free: dict[str, Baselines] = {}
    kept, replaced = files.kept_answers(earlier, results, weights)
    rows = files.write_results(
        folder, results, written, kept=kept,
        of_model={name: {"weights": key} for name, key in weights.items()},
        speaks=speaks, further=partial(_of_baselines, written, free),
    )  # fmt: skip
    if replaced:
        more = f" and {len(replaced) - 3} more" if len(replaced) > 3 else ""
        log(f"replaced earlier results in {out}: {', '.join(replaced[:3])}{more}")
    if models_kept := sorted({row.model for row in kept if not row.is_baseline}):
        log(f"kept earlier results in {out} of {', '.join(models_kept)}")
    return Results(list(_compared(results, written, rows, free)), [*results], identified, folder)


def _of_baselines(
    tasks: Sequence[WrittenTask], found: dict[str, Baselines], rows: Sequence[files.Answer]
) -> Iterator[files.Answer]:
    """Yield answers of the baselines without a model, and add the baselines to `found` by task."""
    for (_, task), group in files.headlines(rows, tasks).items():
        if task not in found:
            found[task] = baselines_of([], group)
            yield from answers_of_baselines(group, found[task])


def _compared(
    results: Mapping[str, Mapping[str, Any]],
    tasks: Sequence[WrittenTask],
    rows: Sequence[files.Answer],
    free: Mapping[str, Baselines],
) -> Iterator[Compared]:
    """The models on each task: by its metric, and by shares of languages and added metrics."""
    headlines = files.headlines(rows, tasks)
    for task in tasks:
        whole = {name: files.whole_score(result, task) for name, result in results.items()}
        answered = {model: group for (model, name), group in headlines.items() if name == task.name}
        labelled = free[task.name].labelled if task.name in free else None
        how: dict[str, Any] = {"selected": None, "wholes": whole, "task": task.name,
                               "labelled": labelled,
                               "benchmark": task.benchmark, "metric": task.metric[0],
                               "language": task.language}  # fmt: skip
        # BLEU and perplexity are scores of the whole task alone.
        corpus = task.document_metric is not None or not answered
        yield Compared(scores={}, **how) if corpus else Compared.of(answered, **how)
    main = {(row.task, row.filter) for row in rows if row.main}
    shares = files.grouped(
        (row for row in rows
         if row.metric in (*ADDED, *BESIDE, ANSWER, REASONING) and not row.main
         and (row.task, row.filter) in main),
        lambda row: (row.task, row.metric),
    )  # fmt: skip
    for (name, _), group in shares.items():
        by = files.grouped(group, lambda row: row.model)
        yield Compared.of(by, selected=None, task=name, benchmark=group[0].benchmark,
                          language=group[0].language)  # fmt: skip
