"""`layerswap eval` and `layerswap compare`: evaluate models, and compare their results."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from layerswap.cli import options, output
from layerswap.errors import RecipeError
from layerswap.evaluation.suites import suite_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from layerswap.evaluation.results import Score
    from layerswap.evaluation.settings import EvaluationSettings
    from layerswap.evaluation.statistics import Interval
    from layerswap.evaluation.suites.suites import WrittenTask


@options.takes_settings(*options.SETTINGS)
def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="Folders, Hub ids, adapters, or recipes (.yaml).")
    ],
    *,
    out: Annotated[Path, typer.Option(help="Folder of results. Answers in it are reused.")],
    task: options.Tasks = None,
    include: options.Include = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.yaml",
            help=f"Suite or benchmark: {', '.join(suite_names())}.",
        ),
    ] = None,
    language: Annotated[
        list[str] | None,
        typer.Option(help="Language of a suite: code or name (sw, swh_Latn, Swahili). Repeatable."),
    ] = None,
    answer_language: Annotated[
        str | None,
        typer.Option(help="Language that answers to --tasks should be in: code or name."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of published files of a suite [LAYERSWAP_DATA].")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Show accuracy after batch calibration too, of tasks with labels."
        ),
    ] = False,
    settings: EvaluationSettings,
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
    from layerswap.evaluation.languages import identified_code
    from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
    from layerswap.evaluation.suites.suites import check_askable, write_suite
    from layerswap.versions import need_extras

    names = options.task_names(task)
    _check_kinds(names, suite, language, data, answer_language)
    need_extras("evaluating", "eval")
    if answer_language:
        identified_code(answer_language)
    for one in language or ():
        check_askable(suite or "", one, allow_code=settings.allow_code)
    plans = open_models(models)  # before what takes seconds: torch and lm-eval's index
    open_device(pick_device(settings.device))
    folders = [path.absolute() for path in include or ()]
    check_task_names(names, folders)
    folder = files.open_folder(out)
    written = TaskFolder(folder / files.TASKS)
    asked = []
    if suite is not None:
        asked = write_suite(
            suite, language or (), written, data=DataFolder.given(data),
            shots=settings.num_fewshot, allow_code=settings.allow_code, skip=output.log,
        )  # fmt: skip
    with output.answer_progress("evaluating", folder / files.ANSWERS) as store:
        results = evaluate_models(
            plans, names or [one.name for one in asked], folders or [written.root],
            settings=settings, store=store, log=output.log,
        )  # fmt: skip
    asked = asked or files.tasks_of(results, answer_language or "")
    rows = files.write_results(folder, results, asked)
    scores = _scores(results, asked, rows, calibrated=calibrate)
    if calibrate and not any(one["metric"] == CALIBRATED for one in scores):
        output.log("no task has the same labels for every document: nothing is calibrated")
    lines: list[object] = [evaluation_table(scores), f"wrote {folder}"]
    if len(results) > 1:
        lines.append(f"next: layerswap compare {folder}")
    facts = {"scores": scores, "folder": str(folder)}
    output.finish("eval", facts, lines)


def _check_kinds(
    names: Sequence[str],
    suite: str | None,
    language: list[str] | None,
    data: Path | None,
    answer_language: str | None,
) -> None:
    """Refuse options of suites beside tasks, and options of tasks beside a suite."""
    if (suite is None) == (not names):
        raise RecipeError("give either --tasks or --suite")
    if suite is not None and not language:
        raise RecipeError("--suite needs --language")
    if names and (language or data):
        raise RecipeError("--language and --data belong to --suite; tasks have their own")
    if suite is not None and answer_language:
        raise RecipeError("--answer-language belongs to --tasks; a suite knows its languages")
    options.refuse_checkpoint("--language", language, takes="a language code or name")


def _scores(
    results: Mapping[str, Mapping[str, Any]],
    asked: Sequence[WrittenTask],
    rows: Sequence[Score],
    *,
    calibrated: bool,
) -> list[dict[str, Any]]:
    """A row for each model and task, and for the language shares of the answers.

    Args:
        results: results by model.
        asked: the tasks.
        rows: every score of every document.
        calibrated: add a row for accuracy after calibration.
    """
    import numpy as np

    from layerswap.evaluation import results as files
    from layerswap.evaluation.harness import CALIBRATED
    from layerswap.evaluation.languages import ANSWER, REASONING
    from layerswap.evaluation.statistics import mean_interval

    intervals = files.intervals_of(rows, asked)
    scores: list[dict[str, Any]] = [
        {"model": name, "benchmark": one.benchmark, "task": one.name, "metric": one.metric[0],
         "score": files.headline(result, one), **_reach(intervals.get((name, one.name)))}
        for name, result in results.items() for one in asked
    ]  # fmt: skip
    metrics = (*([CALIBRATED] if calibrated else []), ANSWER, REASONING)
    for (model, name, metric), shares in files.by_task(rows, metrics).items():
        found = mean_interval(np.array(shares))
        scores.append({"model": model, "task": name, "metric": metric, "score": found.mean,
                       **_reach(found)})  # fmt: skip
    return scores


def _reach(found: Interval | None) -> dict[str, float]:
    """The bounds of an interval and the number of its documents."""
    return {} if found is None else {"low": found.low, "high": found.high, "n": found.n}


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
    """Compare models side by side, with intervals and marks for significant differences.

    Prints a table; nothing is written.

    Example: layerswap compare results/base results/swap --to latex
    """
    from layerswap.cli.tables import comparison_table
    from layerswap.evaluation.results import compare_runs

    found = compare_runs(runs, models=model)
    table = comparison_table(found)
    lines: list[object] = [table]
    if to == "latex":
        lines = [*table.latex().split("\n")]
    elif to == "markdown":
        lines = [*table.markdown().split("\n"), "", table.caption]
    output.finish("compare", asdict(found), lines)
