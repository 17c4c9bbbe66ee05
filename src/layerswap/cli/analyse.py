"""Analyses of experts and merges: `layerswap delta` and the papers' under `layerswap analyse`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from layerswap.cli import commands, options, output
from layerswap.ground.errors import RecipeError


def delta(
    *,
    base: options.Base,
    experts: options.Experts,
    out: options.OutFolder,
    axis: options.Axis = "input",
    threshold: Annotated[
        float | None,
        typer.Option(
            min=0, show_default="each expert's top 15%", help="Smallest MAV of a row that counts."
        ),
    ] = None,
    numbers: Annotated[
        bool, typer.Option("--numbers", help="Write the percentages into the map.")
    ] = False,
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
) -> None:
    """Map the rows that fine-tuning changed, by layer and matrix.

    Also measures conflicts between experts, and how much of a delta bfloat16 loses. Writes
    tables, figures and an interactive page into the folder OUT.

    Example: layerswap delta --base llama --task math-expert --language swahili-expert --out map
    """
    from layerswap.checkpoint import refuse_target
    from layerswap.deltas.atlas import ATLAS, measure, open_subjects
    from layerswap.merge.target import check_apart
    from layerswap.merge.tokenizers import differences
    from layerswap.report.delta_map import atlas_facts, write_atlas

    refuse_target(out, marker=ATLAS, overwrite=overwrite)
    subjects = open_subjects(base, *experts.named())
    check_apart(out, {"the base": subjects.base, **subjects.experts})
    if tokenizers := differences({"base": subjects.base, **subjects.experts}):
        output.log(
            f"note: {tokenizers}; the changes of embedding and head are between other tokens"
        )
    with output.step_progress("reading", subjects.nbytes, "bytes") as progress:
        atlas = measure(subjects, axis=axis, threads=threads, progress=progress)
    written = write_atlas(atlas, out, threshold=threshold, numbers=numbers, overwrite=overwrite)
    facts = {**atlas_facts(atlas, threshold), "folder": str(written.folder)}
    output.finish("delta", facts, written.lines)


class Line(commands.OptionGroup):
    """The points that linearity measures."""

    steps: Annotated[
        int, typer.Option(min=2, help="Number of steps from one expert to the other.")
    ] = 4
    max_length: Annotated[int, typer.Option(min=2, help="Largest length of a text, in tokens.")] = (
        256
    )
    dtype: Annotated[
        str,
        typer.Option(
            metavar=options.DTYPES,
            help="Dtype of the arithmetic. Below float32, rounding adds to the result.",
        ),
    ] = "float32"


def linearity(
    *,
    base: options.Base,
    task_expert: options.TaskExpert,
    language_expert: options.LanguageExpert,
    text: Annotated[
        Path, typer.Option(help="Texts to measure on: one per line, or JSON Lines with `text`.")
    ],
    out: options.OutFolder,
    line: Line,
    device: options.Device = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Measure the loss on the line between two experts, and how far their deltas add up.

    Writes a table and a figure into the folder OUT.

    Example: layerswap analyse linearity --base b --task t --language l --text sw.txt --out line
    """
    from layerswap.checkpoint import refuse_target
    from layerswap.checkpoint.loading import pick_device
    from layerswap.evaluation.linearity import measure_linearity
    from layerswap.report.charts import TABLE, write_linearity

    refuse_target(out, marker=TABLE, overwrite=overwrite)
    measured = measure_linearity(
        base, task_expert, language_expert, text, device=pick_device(device), **line.given()
    )
    written = write_linearity(measured, out, overwrite=overwrite)
    for row in (*measured.lines(), f"wrote {written}"):
        output.say(row)


def composability(
    table: Annotated[
        Path, typer.Argument(metavar="MERGES.csv", help="One row per merge: CSV or Parquet.")
    ],
    *,
    merged: Annotated[str, typer.Option(help="Column with the scores of the merges.")],
    figure: Annotated[
        Path | None, typer.Option(help="SVG file to write, with the correlations drawn.")
    ] = None,
) -> None:
    """Correlate the scores of experts with the scores of their merges (paper 2, section 5).

    Every other numeric column is a signal, such as the task expert's English score. Prints a
    table of rank correlations; only --figure writes a file.

    Example: layerswap analyse composability merges.csv --merged mgsm_sw --figure signals.svg
    """
    from layerswap.cli.tables import predictor_table
    from layerswap.evaluation.statistics import predictors, read_merges
    from layerswap.report.charts import draw_intervals

    signals, quality = read_merges(table, merged)
    correlations = predictors(signals, quality)
    output.say(predictor_table(correlations, len(quality)))
    if figure is not None:
        rows = [(row.signal, row.spearman) for row in correlations]
        title = f"Spearman's correlation with {merged}"
        drawn = draw_intervals(rows, measure=title, unit="rho")
        figure.write_bytes((drawn.svg() + "\n").encode())
        output.say(f"wrote {figure}")


class FisherSample(commands.OptionGroup):
    """The examples that an estimate draws."""

    labels: Annotated[
        str,
        typer.Option(
            metavar="model|data",
            help="Source of the labels: the model's predictions, or the data (empirical Fisher).",
        ),
    ] = "model"
    examples: Annotated[int, typer.Option(min=1, help="Number of examples drawn.")] = 256
    max_length: Annotated[
        int, typer.Option(min=2, help="Largest length of an example, in tokens.")
    ] = 1024
    seed: Annotated[int, typer.Option(help="Seed of the examples and the labels.")] = 0
    device: options.Device = None


def fisher(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint or Hub id.")],
    *,
    data: Annotated[
        Path,
        typer.Option(help="Texts: .jsonl with text, or prompt and completion, or .txt by line."),
    ],
    out: options.OutFolder,
    sample: FisherSample,
    overwrite: options.Overwrite = False,
) -> None:
    """Estimate the importance of each weight of an expert, for Fisher-weighted averaging.

    Trains nothing; holds the model twice in memory, in float32. Writes the folder OUT, which a
    recipe names as `fisher` of the expert.

    Example: layerswap analyse fisher math-expert --data gsm8k.jsonl --out math-fisher
    """
    from layerswap.evaluation.fisher import estimate_fisher

    folder = estimate_fisher(
        model, data, out, overwrite=overwrite, progress=output.step_progress,
        **sample.given()
    )  # fmt: skip
    output.say(f"wrote {folder}")


def freeze_or_revert(
    spec: Annotated[Path, typer.Argument(metavar="EXPERT.yaml", help="Expert, trained in full.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder of the trainings. Finished ones are kept.")],
    part: Annotated[
        Literal["task", "language"], typer.Option(help="Part of a partition that the expert keeps.")
    ],
    task: Annotated[
        list[str], typer.Option("--task", help="Benchmark: an lm-eval task. Repeatable.")
    ],
    partitions: Annotated[
        str, typer.Option(help="Partitions to compare, separated by commas.")
    ] = "A,B,C,Z",
    include: options.Include = None,
    evaluation: options.Prompts,
) -> None:
    """Compare training a part alone with training all and reverting the rest, per partition.

    Reproduces table 2 of the second paper. Writes the trainings into the folder OUT, and prints the
    scores as a table.

    Example: layerswap analyse freeze-or-revert math.yaml --out runs --part task --task gsm8k
    """
    from layerswap.checkpoint.loading import open_device, pick_device
    from layerswap.cli.tables import places_table
    from layerswap.training.expert.select import freeze_or_revert as both_ways
    from layerswap.training.expert.select import scorer
    from layerswap.training.expert.spec import read_expert

    options.refuse_checkpoint("--task", task, takes="an lm-eval task")
    settings = evaluation.settings()
    open_device(pick_device(settings.device))
    score = scorer(task, include=include or (), settings=settings)
    rows = both_ways(
        read_expert(spec), out, part=part, score=score, folder=spec.parent, log=output.log,
        partitions=[name.strip() for name in partitions.split(",")]
    )  # fmt: skip
    output.say(places_table(rows))


def select(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `layerswap train` wrote.")],
    *,
    keep: Annotated[int, typer.Option(min=1, help="Number of checkpoints to keep.")] = 3,
    of_any_run: Annotated[
        bool, typer.Option("--of-any-run", help="Allow all kept checkpoints to come from one run.")
    ] = False,
    task: options.Tasks = None,
    include: options.Include = None,
    role: Annotated[
        Literal["task", "language"] | None,
        typer.Option(help="Kind of expert. Its published signals replace --task."),
    ] = None,
    language: options.Language = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write with all scores.")] = None,
    overwrite: options.Overwrite = False,
    evaluation: options.Prompts,
) -> None:
    """Score every checkpoint of several runs and keep the best.

    Ranks by validation loss, by --task, or by the published signals of --role. Those are Belebele
    and Global-MMLU for language experts, and English MGSM for task experts. Prints a table; only
    --out writes a file.

    Example: layerswap analyse select runs/* --role language --language sw --keep 3
    """
    from layerswap.cli.tables import selection_table
    from layerswap.ground.yaml_file import refuse_text, write_text
    from layerswap.training.expert import select as selection

    settings = evaluation.settings()
    if out is not None:
        refuse_text(out, overwrite=overwrite)
    if task and role:
        raise RecipeError("give --task or --role, not both")
    options.refuse_checkpoint("--task", task, takes="an lm-eval task")
    options.refuse_checkpoint("--language", language, takes="a language code or name")
    names = options.task_names(task)
    if role is not None:
        names = selection.signal_tasks(role, language)
    score = None
    if names:
        score = selection.scorer(names, include=include or (), settings=settings)
    selected = selection.select(runs, keep=keep, of_any_run=of_any_run, score=score)
    output.say(selection_table(selected))
    if out is not None:
        write_text(out, selected.to_json(), overwrite=overwrite)
        output.say(f"wrote {out}")
