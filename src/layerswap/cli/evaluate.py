"""`layerswap eval` and `layerswap compare`: evaluate models, and compare their results."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from layerswap.cli import options, output


def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="Folders, Hub ids, adapters, or recipes (.yaml).")
    ],
    *,
    suite: Annotated[
        str,
        typer.Option(
            help="Suite (layer-swapping, unreasonable) or benchmark (mgsm, belebele, flores, "
            "mbpp, mmlu)."
        ),
    ],
    language: Annotated[
        list[str],
        typer.Option(help="Language code or name (sw, swh_Latn, Swahili). Repeatable."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of results. Answers in it are reused.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder of published benchmark files [LAYERSWAP_DATA].")
    ] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="Examples per prompt.")] = None,
    limit: options.Limit = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Batch size. Default: the largest that fits.")
    ] = None,
    device: options.Device = None,
    dtype: options.ModelDtype = None,
    engine: Annotated[
        Literal["sweep", "hf", "vllm"],
        typer.Option(help="Engine: layerswap's own, transformers one by one, or vLLM."),
    ] = "sweep",
    allow_code: options.AllowCode = False,
) -> None:
    """Evaluate models on the papers' benchmarks, in any language they have.

    A recipe is evaluated in memory, without being written. Models made of the same experts are
    evaluated together. Writes scores and answers into the folder OUT.

    Example: layerswap eval merged --suite layer-swapping --language sw --out results
    """
    from layerswap.cli.progress import step_progress
    from layerswap.engine.devices import check_dtype, open_device, pick_device
    from layerswap.evaluation import results as files
    from layerswap.evaluation.response_cache import AnswerStore
    from layerswap.evaluation.suite_run import Settings, open_models, run_suite
    from layerswap.evaluation.suites.data_folder import DataFolder
    from layerswap.evaluation.suites.suites import write_suite
    from layerswap.evaluation.suites.task_folder import TaskFolder
    from layerswap.versions import need_extras

    need_extras("judging", "eval")
    options.refuse_checkpoint("--language", language, takes="a language code or name")
    open_device(pick_device(device))
    check_dtype(dtype)
    plans = open_models(models)
    folder = files.open_folder(out)
    tasks = TaskFolder(folder / files.TASKS)
    asked = write_suite(
        suite, language, tasks, data=DataFolder.given(data), shots=shots, allow_code=allow_code,
        skip=output.log,
    )  # fmt: skip
    settings = Settings(limit, batch_size, pick_device(device), dtype, engine, allow_code)
    with step_progress("evaluating models", len(plans)) as progress:
        results = run_suite(
            plans, asked, tasks.root, settings=settings,
            store=AnswerStore(folder / files.ANSWERS), log=output.log, progress=progress,
        )  # fmt: skip
    files.write_results(folder, results, asked)
    scores: list[dict[str, Any]] = [
        {"model": name, "benchmark": one.benchmark, "task": one.name, "metric": one.metric[0],
         "score": files.headline(result, one)}
        for name, result in results.items() for one in asked
    ]  # fmt: skip
    lines = [
        f"{one['model']}: {one['benchmark']} {one['task']}: {one['metric']} {one['score']:.4g}"
        for one in scores
    ]
    facts = {"scores": scores, "folder": str(folder)}
    output.finish("eval", facts, "\n".join([*lines, f"wrote {folder}"]))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `layerswap eval` wrote.")],
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
    from layerswap.evaluation.compare import compare_runs
    from layerswap.report.tables import side_by_side

    found = compare_runs(runs, models=model)
    table = side_by_side(found)
    text = {"text": table.text, "latex": table.latex}.get(to)
    output.finish(
        "compare", asdict(found),
        text() if text else f"{table.markdown()}\n\n{table.caption}",
    )  # fmt: skip
