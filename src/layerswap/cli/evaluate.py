"""`layerswap eval` and `layerswap compare`: models judged as the papers do, and side by side."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli.options import Device, ModelDtype


class Engine(enum.Enum):
    """What answers."""

    sweep = "sweep"
    hf = "hf"
    vllm = "vllm"


class Format(enum.Enum):
    """How a comparison is printed."""

    text = "text"
    markdown = "markdown"
    latex = "latex"


def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="Folders, Hub ids, adapters, or recipes (.yaml).")
    ],
    *,
    suite: Annotated[
        str,
        typer.Option(
            help="layer-swapping, unreasonable, or one benchmark: mgsm, belebele, "
            "flores, mbpp, mmlu."
        ),
    ],
    language: Annotated[
        list[str], typer.Option(help="Any code or name (sw, swh_Latn, Swahili); may be repeated.")
    ],
    out: Annotated[Path, typer.Option(help="The folder for results; an earlier one goes on.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder with published benchmark files [LAYERSWAP_DATA].")
    ] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="Exemplars in a prompt.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most documents of a task.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Found if not given.")] = None,
    device: Device = None,
    dtype: ModelDtype = None,
    engine: Annotated[Engine, typer.Option(help="What answers.")] = Engine.sweep,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Run programs that a model wrote, in a sandbox.")
    ] = False,
) -> None:
    """Judge models on the papers' benchmarks in any language, online or from local files.

    Recipes are judged without being written; models of the same experts are swept together.

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

    def log(line: str) -> None:
        typer.echo(line, err=True)

    need_extras("judging", "eval")
    open_device(pick_device(device))
    check_dtype(dtype)
    plans = open_models(models)
    folder = files.open_folder(out)
    tasks = TaskFolder(folder / files.TASKS)
    asked = write_suite(
        suite, language, tasks, data=DataFolder.given(data), shots=shots, allow_code=allow_code,
        skip=log,
    )  # fmt: skip
    settings = Settings(limit, batch_size, pick_device(device), dtype, engine.value, allow_code)
    with step_progress("judging models", len(plans)) as progress:
        results = run_suite(
            plans, asked, tasks.root, settings=settings,
            store=AnswerStore(folder / files.ANSWERS), log=log, progress=progress,
        )  # fmt: skip
    files.write_results(folder, results, asked)
    for name, result in results.items():
        for one in asked:
            score = files.headline(result, one)
            typer.echo(f"{name}: {one.benchmark} {one.name}: {one.metric[0]} {score:.4g}")
    typer.echo(f"wrote {folder}")


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `layerswap eval` wrote.")],
    *,
    model: Annotated[
        list[str] | None, typer.Option(help="Which models, the reference first; may be repeated.")
    ] = None,
    to: Annotated[Format, typer.Option(help="How to print it.")] = Format.text,
) -> None:
    """Models side by side, with intervals and marks where they differ beyond chance.

    Example: layerswap compare results/base results/swap --to latex
    """
    from layerswap.evaluation.compare import compare_runs
    from layerswap.report import tables as side_by_side

    table = compare_runs(runs, models=model)
    written = {
        Format.text: side_by_side.as_text,
        Format.markdown: side_by_side.as_markdown,
        Format.latex: side_by_side.as_latex,
    }
    typer.echo(written[to](table))
