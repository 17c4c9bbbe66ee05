"""Analyses of experts and merges: `layerswap delta` and the papers' under `layerswap analyse`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from layerswap.cli import options, output
from layerswap.ground.errors import RecipeError


def delta(
    *,
    base: options.Base,
    experts: options.Experts,
    out: options.OutFolder,
    axis: options.Axis = "input",
    threshold: Annotated[float | None, Option(min=0)] = None,
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
) -> None:
    """Map the rows that fine-tuning changed, by layer and matrix.

    Also measures how much of a delta bfloat16 loses. Writes tables and figures into the
    folder OUT.

    Example: layerswap delta --base llama --task math-expert --language swahili-expert --out map

    Options:
        threshold: Smallest MAV of a row that counts. (default: each expert's top 15%)
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
    lines = write_atlas(atlas, out, threshold=threshold, overwrite=overwrite)
    facts = {**atlas_facts(atlas, threshold), "folder": str(out.expanduser().absolute())}
    output.finish("delta", facts, lines)


def linearity(
    *,
    base: options.Base,
    task_expert: options.TaskExpert,
    language_expert: options.LanguageExpert,
    text: Path,
    out: options.OutFolder,
    steps: Annotated[int, Option(min=2)] = 4,
    max_length: Annotated[int, Option(min=2)] = 256,
    dtype: str = "float32",
    device: options.Device = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Measure the loss on the line between two experts, and how far their deltas add up.

    Writes a table and a figure into the folder OUT.

    Example: layerswap analyse linearity --base b --task t --language l --text sw.txt --out line

    Options:
        text: Texts to measure on: one per line, or JSON Lines with `text`.
        steps: Number of steps from one expert to the other.
        max_length: Largest length of a text, in tokens.
        dtype float32|bfloat16|float16: Dtype of the arithmetic. Below float32, rounding adds to the
            result.
    """
    from layerswap.checkpoint import refuse_target
    from layerswap.checkpoint.loading import pick_device
    from layerswap.evaluation.linearity import measure_linearity
    from layerswap.report.charts import TABLE, write_linearity

    refuse_target(out, marker=TABLE, overwrite=overwrite)
    measured = measure_linearity(
        base, task_expert, language_expert, text, device=pick_device(device), steps=steps,
        max_length=max_length, dtype=dtype
    )  # fmt: skip
    written = write_linearity(measured, out, overwrite=overwrite)
    for row in (*measured.lines(), f"wrote {written}"):
        output.say(row)


def composability(table: Path, *, merged: str) -> None:
    """Correlate the scores of experts with the scores of their merges (paper 2, section 5).

    Every other numeric column is a signal, such as the task expert's English score. Prints a
    table of rank correlations; nothing is written.

    Example: layerswap analyse composability merges.csv --merged mgsm_sw

    Options:
        table MERGES.csv: One row per merge: CSV, TSV or JSON Lines.
        merged: Column with the scores of the merges.
    """
    from layerswap.evaluation.statistics import predictors, read_merges
    from layerswap.report.tables import Table

    signals, quality = read_merges(table, merged)
    output.say(Table(
        ["signal", "Spearman", "p"],
        [[row.signal, row.spearman, row.p_spearman] for row in predictors(signals, quality)],
        f"over {len(quality)} merges, with 95% bootstrap intervals", unit="",
    ))  # fmt: skip


def fisher(
    model: str,
    *,
    data: Path,
    out: options.OutFolder,
    examples: Annotated[int, Option(min=1)] = 256,
    max_length: Annotated[int, Option(min=2)] = 1024,
    seed: int = 0,
    device: options.Device = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Estimate the importance of each weight of an expert, for Fisher-weighted averaging.

    Trains nothing; holds the model twice in memory, in float32. Writes the folder OUT, which a
    recipe names as `fisher` of the expert.

    Example: layerswap analyse fisher math-expert --data gsm8k.jsonl --out math-fisher

    Options:
        model MODEL: Checkpoint or Hub id.
        data: Texts: .jsonl with text, or prompt and completion, or .txt by line.
        examples: Number of examples drawn.
        max_length: Largest length of an example, in tokens.
        seed: Seed of the examples and the labels.
    """
    from layerswap.evaluation.fisher import estimate_fisher

    folder = estimate_fisher(
        model, data, out, examples=examples, max_length=max_length, seed=seed, device=device,
        overwrite=overwrite, progress=output.step_progress
    )  # fmt: skip
    output.say(f"wrote {folder}")


def freeze_or_revert(
    spec: Path,
    *,
    out: Path,
    part: Literal["task", "language"],
    partitions: str = "A,B,C,Z",
    evaluation: options.EvaluationOptions,
) -> None:
    """Compare training a part alone with training all and reverting the rest, per partition.

    Reproduces table 2 of the second paper. Writes the trainings into the folder OUT, and prints the
    scores as a table.

    Example: layerswap analyse freeze-or-revert math.yaml --out runs --part task --task gsm8k

    Options:
        spec EXPERT.yaml: Expert, trained in full.
        out: Folder of the trainings. Finished ones are kept.
        part: Part of a partition that the expert keeps.
        partitions: Partitions to compare, separated by commas.
    """
    from layerswap.checkpoint.loading import open_device, pick_device
    from layerswap.cli.tables import places_table
    from layerswap.training.expert.select import freeze_or_revert as both_ways
    from layerswap.training.expert.select import scorer
    from layerswap.training.expert.spec import read_expert

    settings = evaluation.settings()
    if not settings.tasks:
        raise RecipeError("give an lm-eval task with --task")
    open_device(pick_device(settings.device))
    score = scorer(settings)
    rows = both_ways(
        read_expert(spec), out, part=part, score=score, folder=spec.parent, log=output.log,
        partitions=[name.strip() for name in partitions.split(",")]
    )  # fmt: skip
    output.say(places_table(rows))


def select(
    runs: list[Path],
    *,
    keep: Annotated[int, Option(min=1)] = 3,
    role: Literal["task", "language"] | None = None,
    language: str | None = None,
    out: Path | None = None,
    overwrite: options.Overwrite = False,
    evaluation: options.EvaluationOptions,
) -> None:
    """Score every checkpoint of several runs and keep the best.

    Ranks by validation loss, by --task, or by the published signals of --role. Those are Belebele
    and Global-MMLU for language experts, and English MGSM for task experts. Prints a table; only
    --out writes a file.

    Example: layerswap analyse select runs/* --role language --language sw --keep 3

    Options:
        runs: Folders that `layerswap train` wrote.
        keep: Number of checkpoints to keep.
        role: Kind of expert. Its published signals replace --task.
        language: Language code or name (sw, swh_Latn, Swahili).
        out: JSON file to write with all scores.
    """
    from layerswap.cli.tables import selection_table
    from layerswap.ground.commit import atomic_file, refuse_file, write_json
    from layerswap.training.expert import select as selection

    settings = evaluation.settings()
    if out is not None:
        refuse_file(out, is_ours=lambda file: True, overwrite=overwrite)
    if settings.tasks and role:
        raise RecipeError("give --task or --role, not both")
    if role is not None:
        signals = selection.signal_tasks(role, language)
        settings = settings.model_copy(update={"tasks": signals})
    score = selection.scorer(settings) if settings.tasks else None
    selected = selection.select(runs, keep=keep, score=score)
    output.say(selection_table(selected))
    if out is not None:
        with atomic_file(out, is_ours=lambda file: True, overwrite=overwrite) as draft:
            write_json(draft, asdict(selected))
        output.say(f"wrote {out}")
