"""`layerswap sweep`, `eval` and `compare`: evaluate compositions and models, and compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from layerswap.cli import options, output
from layerswap.evaluation.suites import suite_names


def sweep(spec: Path, *, out: Path, allow_code: options.AllowCode = False) -> None:
    """Evaluate a grid of compositions, and select the best model.

    Selects among compositions, averages and experts on the development split, and reports on the
    test split. Writes scores, the selected recipe and a report into the folder OUT. A second run
    computes only what is new.

    Example: layerswap sweep sweep.yaml --out results

    Options:
        spec SWEEP.yaml: Recipe, grid and tasks.
        out: Folder of results. Answers in it are reused.
    """
    from layerswap.evaluation.response_cache import nothing_if_refused
    from layerswap.evaluation.sandbox import programs_allowed
    from layerswap.experiment import sweep_page as files
    from layerswap.experiment.answers import ANSWERS, open_folder
    from layerswap.experiment.spec import read_sweep
    from layerswap.experiment.sweeps import run_sweep
    from layerswap.experiment.tables import balanced_table, scores_table
    from layerswap.versions import need_extras

    checked, recipe = read_sweep(spec)
    need_extras("a sweep", "eval")
    with nothing_if_refused(out.expanduser() / ANSWERS):
        folder = open_folder(out, "sweep")
        progress = output.answer_progress("evaluating", folder / ANSWERS)
        with progress as store, programs_allowed(allow_code):
            result = run_sweep(checked, recipe, store=store, log=output.log)
            facts = files.write_result(result, folder)
    lines: list[object] = [
        scores_table(result),
        *filter(None, [balanced_table(result)]),
        *(f"note: {note}" for note in result.best.notes),
        files.lead(result, folder),
        f"wrote {folder / files.PAGE} and {folder / files.RECIPE}",
    ]
    output.finish("sweep", {**facts, "folder": str(folder)}, lines)
    output.suggest("merge", out / files.RECIPE, "--out", output.unused("merged"))


_SUITE = Option(metavar="NAME|FILE.yaml", help=f"Suite or benchmark: {', '.join(suite_names())}.")


def evaluate(
    models: list[str],
    *,
    out: Path,
    suite: Annotated[str | None, _SUITE] = None,
    language: list[str] | None = None,
    answer_language: str | None = None,
    answer_text: list[str] | None = None,
    data: Path | None = None,
    allow_code: options.AllowCode = False,
    evaluation: options.EvaluationOptions,
) -> None:
    """Evaluate models on lm-eval tasks, or on the papers' benchmarks in any language they have.

    A recipe is evaluated in memory, without being written. Models made of the same experts are
    evaluated together. Writes scores and answers into the folder OUT.

    Example: layerswap eval merged swap.yaml --tasks gsm8k,arc_easy --limit 100 --out results

    Options:
        models: Folders, Hub ids, adapters, or recipes (.yaml).
        out: Folder of results. Reuses its answers, and keeps results of other models.
        language: Language of a suite: code or name (sw, swh_Latn, Swahili). Repeatable.
        answer_language: Language that answers to --tasks should be in: code or name.
        answer_text CODE=FILE: Text to learn a language from, for --answer-language. Repeatable.
        data: Folder of published files of a suite [LAYERSWAP_DATA].
    """
    from functools import partial

    from layerswap.experiment import evaluations
    from layerswap.experiment.tables import evaluation_table

    settings = evaluation.settings()
    done = evaluations.evaluate(
        models, suite=suite, language=language or (), data=data,
        answer_language=answer_language or "",
        answer_texts=options.read_pairs("--answer-text", answer_text, "CODE=FILE"),
        out=out, log=output.log, allow_code=allow_code,
        open_store=partial(output.answer_progress, "evaluating"),
        **settings.model_dump(exclude_unset=True),
    )  # fmt: skip
    scores, notes = [*done.records()], [f"note: {note}" for note in done.said]
    lines: list[object] = [evaluation_table(scores), *notes, f"wrote {done.folder}"]
    facts = {"scores": scores, "identified": [*done.notes], "folder": str(done.folder)}
    output.finish("eval", facts, lines)
    if len(models) > 1:
        output.suggest("compare", out)


def compare(
    runs: list[Path],
    *,
    model: list[str] | None = None,
    to: Literal["text", "markdown", "latex"] = "text",
) -> None:
    """Compare models by score and by paired difference, on the documents that all have.

    Prints a table; nothing is written.

    Example: layerswap compare results/base results/swap --to latex

    Options:
        runs: Folders that eval, sweep or study wrote.
        model: Model to show, the reference first. Repeatable.
        to: Format of the table.
    """
    from layerswap.experiment import runs as answered
    from layerswap.experiment.tables import comparison_tables

    compared = answered.compare(runs, models=model or ())
    lines: list[object] = []
    for table in comparison_tables(compared):
        if to == "text":
            lines += [table, ""]
        elif to == "latex":
            lines += [*table.latex().split("\n"), ""]
        else:
            lines += [*table.markdown().split("\n"), "", table.caption, ""]
    for note in compared.said:
        output.log(f"note: {note}")
    facts = {"models": compared.models, "scores": [*compared.records()],
             "means": [*compared.means()], "notes": compared.said}  # fmt: skip
    output.finish("compare", facts, lines[:-1])
