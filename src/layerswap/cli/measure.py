"""Commands that measure experts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerswap.cli import options, output
from layerswap.errors import RecipeError

if TYPE_CHECKING:
    from layerswap.deltas.atlas import Subjects


def delta(
    *,
    base: options.Base,
    expert: Annotated[list[str], typer.Option(help="Expert: a folder or a Hub id. Repeatable.")],
    out: options.OutFolder,
    axis: options.Axis = "input",
    threshold: Annotated[
        float | None,
        typer.Option(
            min=0, help="Smallest MAV of a row that counts. Default: each expert's top 15%."
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

    Example: layerswap delta --base llama --expert math-expert --expert swahili-expert --out map
    """
    from layerswap.checkpoint import refuse_target
    from layerswap.deltas.atlas import ATLAS, measure, open_subjects
    from layerswap.merge.target import check_apart
    from layerswap.report.delta_map import atlas_facts, write_atlas

    if axis not in ("input", "output"):
        raise RecipeError(f"--axis: {axis!r} is neither input nor output")
    refuse_target(out, marker=ATLAS, overwrite=overwrite)
    subjects = open_subjects(base, *expert)
    check_apart(out, {"the base": subjects.base, **subjects.experts})
    _note_tokenizers(subjects)
    with output.byte_progress("reading", subjects.nbytes) as progress:
        atlas = measure(
            subjects,
            axis="output" if axis == "output" else "input",
            threads=threads,
            progress=progress,
        )
    written = write_atlas(atlas, out, threshold=threshold, numbers=numbers, overwrite=overwrite)
    facts = {**atlas_facts(atlas, threshold), "folder": str(written.folder)}
    output.finish("delta", facts, written.lines)


def fisher(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint or Hub id.")],
    *,
    data: Annotated[
        Path,
        typer.Option(help="Texts: .jsonl with text, or prompt and completion, or .txt by line."),
    ],
    out: options.OutFolder,
    labels: Annotated[
        str,
        typer.Option(
            metavar="model|data",
            help="Source of the labels: the model's predictions, or the data (empirical Fisher).",
        ),
    ] = "model",
    examples: Annotated[int, typer.Option(min=1, help="Number of examples drawn.")] = 256,
    max_length: Annotated[
        int, typer.Option(min=2, help="Largest length of an example, in tokens.")
    ] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of the examples and the labels.")] = 0,
    device: options.Device = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Estimate the importance of each weight of an expert, for Fisher-weighted averaging.

    Trains nothing; holds the model twice in memory, in float32. Writes the folder OUT, which a
    recipe names as `fisher` of the expert.

    Example: layerswap fisher math-expert --data gsm8k.jsonl --out math-fisher
    """
    from layerswap.evaluation.fisher import estimate_fisher

    folder = estimate_fisher(
        model,
        data,
        out,
        labels=labels,
        examples=examples,
        max_length=max_length,
        seed=seed,
        device=device,
        overwrite=overwrite,
        progress=output.step_progress,
    )
    output.say(f"wrote {folder}")


def linearity(
    *,
    base: options.Base,
    task_expert: options.TaskExpert,
    language_expert: options.LanguageExpert,
    text: Annotated[
        Path, typer.Option(help="Texts to measure on: one per line, or JSON Lines with `text`.")
    ],
    out: options.OutFolder,
    steps: Annotated[
        int, typer.Option(min=2, help="Number of steps from one expert to the other.")
    ] = 4,
    beyond: Annotated[int, typer.Option(min=0, help="Number of steps past each expert.")] = 0,
    elsewhere: Annotated[
        str,
        typer.Option(
            metavar="task|language|base",
            help="Source of the other layers while one is interpolated.",
        ),
    ] = "task",
    max_length: Annotated[
        int, typer.Option(min=2, help="Largest length of a text, in tokens.")
    ] = 256,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="float32|bfloat16|float16",
            help="Dtype of the arithmetic. Below float32, rounding adds to the result.",
        ),
    ] = "float32",
    device: options.Device = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Measure the loss on the line between two experts, and how far their deltas add up.

    Writes a table and a figure into the folder OUT.

    Example: layerswap linearity --base b --task-expert t --language-expert l --text sw.txt --out o
    """
    from layerswap.checkpoint import refuse_target
    from layerswap.checkpoint.loading import pick_device
    from layerswap.evaluation.linearity import measure_linearity
    from layerswap.report.charts import TABLE, write_linearity

    refuse_target(out, marker=TABLE, overwrite=overwrite)
    found = measure_linearity(
        base, task_expert, language_expert, text, steps=steps, beyond=beyond, elsewhere=elsewhere,
        max_length=max_length, dtype=dtype, device=pick_device(device),
    )  # fmt: skip
    written = write_linearity(found, out, overwrite=overwrite)
    for line in (*found.lines(), f"wrote {written}"):
        output.say(line)


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
    table of rank correlations.

    Example: layerswap composability merges.csv --merged mgsm_sw --figure signals.svg
    """
    from layerswap.cli.tables import predictor_table
    from layerswap.evaluation.composability import predictors, read_merges
    from layerswap.report.charts import draw_intervals

    signals, quality = read_merges(table, merged)
    found = predictors(signals, quality)
    output.say(predictor_table(found, len(quality)))
    if figure is not None:
        rows = [(one.signal, one.spearman) for one in found]
        title = f"Spearman's correlation with {merged}"
        drawn = draw_intervals(rows, measure=title, unit="rho")
        figure.write_text(drawn.svg() + "\n", "utf-8")
        output.say(f"wrote {figure}")


def _note_tokenizers(subjects: Subjects) -> None:
    from layerswap.merge.tokenizers import differences

    found = differences({"base": subjects.base, **subjects.experts})
    if found is not None:
        output.log(f"note: {found}; the changes of embedding and head are between other tokens")
