"""`layerswap sweep`, `eval` and `compare`: evaluate compositions and models, and compare them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from layerswap.cli import commands, options, output
from layerswap.errors import RecipeError
from layerswap.evaluation.suites import suite_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from layerswap.evaluation.results import Score
    from layerswap.evaluation.settings import EvaluationSettings
    from layerswap.evaluation.statistics import Interval
    from layerswap.evaluation.suites.folders import TaskFolder
    from layerswap.evaluation.suites.suites import WrittenTask


def sweep(
    spec: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="Recipe, grid and tasks.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder of results. Answers in it are reused.")],
    allow_code: options.AllowCode = False,
) -> None:
    """Evaluate a grid of compositions, or random ones, and select the best.

    Selects on the development split and reports on the test split. Writes scores, the selected
    recipe and a report into the folder OUT. A second run computes only what is new.

    Example: layerswap sweep sweep.yaml --out results
    """
    from layerswap.report import sweeps as files
    from layerswap.search.spec import read_sweep
    from layerswap.search.sweeps import run_sweep
    from layerswap.versions import need_extras

    checked, recipe = read_sweep(spec)
    if allow_code:
        checked = checked.model_copy(update={"allow_code": True})
    need_extras("a sweep", "eval")
    folder = files.prepare_folder(out)
    with output.answer_progress("evaluating", folder / files.ANSWERS) as store:
        result = run_sweep(checked, recipe, store=store, log=output.log)
        facts = files.write_result(result, folder)
    table = files.results_table(result)
    lines: list[object] = [
        *([table] if table else []),
        *(f"note: {note}" for note in result.best.notes),
        files.lead(result),
        f"wrote {folder / files.PAGE} and {folder / files.RECIPE}",
    ]
    output.finish("sweep", {**facts, "folder": str(folder)}, lines)


class Asked(commands.Group):
    """The tasks of an evaluation: those of lm-eval by name, or a suite in some languages."""

    task: options.Tasks = None
    include: options.Include = None
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.yaml", help=f"Suite or benchmark: {', '.join(suite_names())}."
        ),
    ] = None
    language: Annotated[
        list[str] | None,
        typer.Option(help="Language of a suite: code or name (sw, swh_Latn, Swahili). Repeatable."),
    ] = None
    answer_language: Annotated[
        str | None,
        typer.Option(help="Language that answers to --tasks should be in: code or name."),
    ] = None
    data: Annotated[
        Path | None, typer.Option(help="Folder of published files of a suite [LAYERSWAP_DATA].")
    ] = None

    def check(self, *, allow_code: bool) -> None:
        """Refuse options of suites beside tasks, options of tasks beside a suite, and no task."""
        from layerswap.evaluation.languages import identified_code
        from layerswap.evaluation.suites.suites import check_askable
        from layerswap.versions import need_extras

        if (self.suite is None) == (not self.task):
            raise RecipeError("give either --tasks or --suite")
        if self.suite is not None and not self.language:
            raise RecipeError("--suite needs --language")
        if self.suite is None and (self.language or self.data):
            raise RecipeError("--language and --data belong to --suite; tasks have their own")
        if self.suite is not None and self.answer_language:
            raise RecipeError("--answer-language belongs to --tasks; a suite knows its languages")
        options.refuse_checkpoint("--language", self.language, takes="a language code or name")
        need_extras("evaluating", "eval")
        if self.answer_language:
            identified_code(self.answer_language)
        for language in self.language or ():
            check_askable(self.suite or "", language, allow_code=allow_code)

    def written(self, folder: TaskFolder, settings: EvaluationSettings) -> list[WrittenTask]:
        """The tasks of the suite, written into a folder for lm-eval."""
        from layerswap.evaluation.suites.folders import DataFolder
        from layerswap.evaluation.suites.suites import write_suite

        if self.suite is None:
            return []
        return write_suite(
            self.suite, self.language or (), folder, data=DataFolder.given(self.data),
            shots=settings.num_fewshot, allow_code=settings.allow_code, skip=output.log
        )  # fmt: skip


def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="Folders, Hub ids, adapters, or recipes (.yaml).")
    ],
    *,
    out: Annotated[Path, typer.Option(help="Folder of results. Answers in it are reused.")],
    asked: Asked,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Show accuracy after batch calibration too, of tasks with labels."
        ),
    ] = False,
    evaluation: options.Evaluation,
) -> None:
    """Evaluate models on lm-eval tasks, or on the papers' benchmarks in any language they have.

    A recipe is evaluated in memory, without being written. Models made of the same experts are
    evaluated together. Writes scores and answers into the folder OUT.

    Example: layerswap eval merged swap.yaml --tasks gsm8k,arc_easy --limit 100 --out results
    """
    from layerswap.checkpoint.loading import open_device, pick_device
    from layerswap.cli.tables import evaluation_table
    from layerswap.evaluation import results as files
    from layerswap.evaluation.harness import (
        CALIBRATED,
        check_task_names,
        evaluate_models,
        open_models,
    )
    from layerswap.evaluation.response_cache import composition_key
    from layerswap.evaluation.suites.folders import TaskFolder

    settings = evaluation.settings()
    asked.check(allow_code=settings.allow_code)
    plans = open_models(models)  # before what takes seconds: torch and lm-eval's index
    open_device(pick_device(settings.device))
    names = options.task_names(asked.task)
    folders = [path.absolute() for path in asked.include or ()]
    check_task_names(names, folders)
    folder = files.open_folder(out)
    task_folder = TaskFolder(folder / files.TASKS)
    tasks = asked.written(task_folder, settings)
    with output.answer_progress("evaluating", folder / files.ANSWERS) as store:
        results = evaluate_models(
            plans, names or [task.name for task in tasks], folders or [task_folder.root],
            settings=settings, store=store, log=output.log
        )  # fmt: skip
    tasks = tasks or files.tasks_of(results, asked.answer_language or "")
    weights = {name: {"weights": composition_key(plan)} for name, plan in plans.items()}
    rows = files.write_results(folder, results, tasks, columns=weights)
    scores = _scores(results, tasks, rows, calibrated=calibrate)
    if calibrate and not any(score["metric"] == CALIBRATED for score in scores):
        output.log("no task has the same labels for every document: nothing is calibrated")
    lines: list[object] = [evaluation_table(scores), f"wrote {folder}"]
    output.finish("eval", {"scores": scores, "folder": str(folder)}, lines)


def _scores(
    results: Mapping[str, Mapping[str, Any]],
    tasks: Sequence[WrittenTask],
    rows: Sequence[Score],
    *,
    calibrated: bool,
) -> list[dict[str, Any]]:
    """A row for each model and task, and for the language shares of the answers."""
    import numpy as np

    from layerswap.evaluation import results as files
    from layerswap.evaluation.harness import CALIBRATED
    from layerswap.evaluation.languages import ANSWER, REASONING
    from layerswap.evaluation.statistics import mean_interval

    intervals = files.intervals_of(rows, tasks)
    scores: list[dict[str, Any]] = [
        {"model": name, "benchmark": task.benchmark, "task": task.name, "metric": task.metric[0],
         "score": files.headline(result, task), **_bounds(intervals.get((name, task.name)))}
        for name, result in results.items() for task in tasks
    ]  # fmt: skip
    metrics = (*([CALIBRATED] if calibrated else []), ANSWER, REASONING)
    for (model, name, metric), shares in files.by_task(rows, metrics).items():
        interval = mean_interval(np.array(shares))
        scores.append({"model": model, "task": name, "metric": metric, "score": interval.mean,
                       **_bounds(interval)})  # fmt: skip
    return scores


def _bounds(interval: Interval | None) -> dict[str, float]:
    """The bounds of an interval and its number of documents."""
    return {} if interval is None else {"low": interval.low, "high": interval.high, "n": interval.n}


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders that eval, sweep or study wrote.")],
    *,
    model: Annotated[
        list[str] | None, typer.Option(help="Model to show, the reference first. Repeatable.")
    ] = None,
    to: Annotated[
        Literal["text", "markdown", "latex"], typer.Option(help="Format of the table.")
    ] = "text",
) -> None:
    """Compare models by score and by paired difference, on the documents that all have.

    Prints a table; nothing is written.

    Example: layerswap compare results/base results/swap --to latex
    """
    from layerswap.cli.tables import comparison_tables
    from layerswap.evaluation.results import compare_runs

    compared = compare_runs(runs, models=model)
    lines: list[object] = []
    for table in comparison_tables(compared):
        if to == "text":
            lines += [table, ""]
        elif to == "latex":
            lines += [*table.latex().split("\n"), ""]
        else:
            lines += [*table.markdown().split("\n"), "", table.caption, ""]
    for note in compared.notes:
        output.log(f"note: {note}")
    output.finish("compare", asdict(compared), lines[:-1])
