"""Commands that measure experts, and propose or learn a composition from what they find."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerswap.cli import options, output
from layerswap.errors import RecipeError

if TYPE_CHECKING:
    from layerswap.deltas.atlas import Atlas, Subjects


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
    from layerswap.deltas.atlas import measure, open_subjects
    from layerswap.merge.target import check_apart
    from layerswap.report.measurements import atlas_facts, refuse_atlas, write_atlas

    if axis not in ("input", "output"):
        raise RecipeError(f"--axis: {axis!r} is neither input nor output")
    refuse_atlas(out, overwrite=overwrite)
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
    from layerswap.checkpoint.loading import pick_device
    from layerswap.evaluation.linearity import measure_linearity
    from layerswap.report.measurements import refuse_linearity, write_linearity

    refuse_linearity(out, overwrite=overwrite)
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
    from layerswap.report.drawing import draw_intervals

    signals, quality = read_merges(table, merged)
    found = predictors(signals, quality)
    output.say(predictor_table(found, len(quality)))
    if figure is not None:
        rows = [(one.signal, one.spearman) for one in found]
        title = f"Spearman's correlation with {merged}"
        drawn = draw_intervals(rows, measure=title, unit="rho")
        figure.write_text(drawn.svg() + "\n", "utf-8")
        output.say(f"wrote {figure}")


def suggest(
    *,
    base: Annotated[
        str | None, typer.Option(help="Checkpoint that both experts were fine-tuned from.")
    ] = None,
    task_expert: Annotated[
        str, typer.Option(help="Task expert: a folder or a Hub id, or its name with --atlas.")
    ],
    language_expert: Annotated[
        str, typer.Option(help="Language expert: a folder or a Hub id, or its name with --atlas.")
    ],
    atlas: Annotated[
        Path | None,
        typer.Option(help="Folder that `layerswap delta` wrote. Replaces --base."),
    ] = None,
    first: Annotated[int, typer.Option(min=1, help="Number of compositions to list.")] = 10,
    third_expert: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Third expert, such as one for safety, taken or blended in where it changed more.",
        ),
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0, help="Difference of shares from which one expert is taken.")
    ] = 0.001,
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe file to write with the proposal.")
    ] = None,
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
) -> None:
    """Propose bottom, top and transition layers from what fine-tuning changed.

    Evaluates nothing. Prints the evidence of each layer and the best compositions.

    Example: layerswap suggest --base b --task-expert math-expert --language-expert swahili-expert
    """
    from layerswap.cli.tables import evidence_table
    from layerswap.compose import swap
    from layerswap.compose.yaml_file import refuse_text
    from layerswap.deltas.atlas import Atlas as Opened
    from layerswap.deltas.suggestion import suggest as propose
    from layerswap.deltas.suggestion import with_third, write_proposal

    if base is None and atlas is None:
        raise RecipeError("give --base, or --atlas with a folder that layerswap delta wrote")
    if base is not None and atlas is not None:
        raise RecipeError("give --base or --atlas, not both")
    if recipe is not None and base is None:
        raise RecipeError("--recipe needs the checkpoints: give --base in place of --atlas")
    if recipe is not None:
        refuse_text(recipe, overwrite=overwrite)
    names = [task_expert, language_expert, *filter(None, [third_expert])]
    if base is not None:
        opened = _measured(base, names, threads)
        names = ["task", "language", "third"][: len(names)]
    else:
        assert atlas is not None
        opened = Opened.load(atlas)
    found = propose(opened, *names[:2])
    composition = None
    if third_expert is not None:
        plain = swap(opened.layers, task=names[0], language=names[1], zones=found.zones)
        composition = with_third(plain, opened, names[2], threshold=threshold)
    if recipe is not None and base is not None:
        third = None
        if third_expert is not None and composition is not None:
            third = third_expert, composition
        write_proposal(
            recipe, found.zones, base=base, task=task_expert, language=language_expert,
            third=third, overwrite=overwrite,
        )  # fmt: skip
    lines: list[object] = [evidence_table(found.evidence), f"proposal: {found.zones}"]
    if not (found.zones.bottom or found.zones.top):
        lines.append(
            "the language expert changed no outer layer by a larger share than the task expert; "
            "the deltas alone speak for the task expert"
        )
    lines += [f"  {zones}  (score {score:+.4f})" for zones, score in found.ranked[:first]]
    facts = found.to_dict()
    if composition is not None:
        lines += ["", composition]
        facts["composition"] = composition.to_dict()
    output.finish("suggest", facts, lines)


def _measured(base: str, experts: list[str], threads: int | None) -> Atlas:
    from layerswap.deltas.atlas import measure, open_subjects

    subjects = open_subjects(base, dict(zip(("task", "language", "third"), experts, strict=False)))
    _note_tokenizers(subjects)
    with output.byte_progress("reading", subjects.nbytes) as progress:
        return measure(subjects, threads=threads, progress=progress)


def _note_tokenizers(subjects: Subjects) -> None:
    from layerswap.merge.tokenizers import differences

    found = differences({"base": subjects.base, **subjects.experts})
    if found is not None:
        output.log(f"note: {found}; the changes of embedding and head are between other tokens")


def learn(
    *,
    base: options.Base,
    task_expert: options.TaskExpert,
    language_expert: options.LanguageExpert,
    task_prompts: Annotated[
        Path, typer.Option(help="Prompts for the task expert: .jsonl, or a text on each line.")
    ],
    language_prompts: Annotated[
        Path, typer.Option(help="Texts for the language expert: .jsonl, or a text on each line.")
    ],
    recipe: Annotated[Path, typer.Option(help="Recipe file to write.")],
    overwrite: options.Overwrite = False,
    limit: Annotated[int, typer.Option(min=1, help="Number of texts per file.")] = 16,
    max_length: Annotated[int, typer.Option(min=2, help="Number of tokens per text.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Number of updates.")] = 60,
    learning_rate: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 0.1,
    regularise: Annotated[
        float, typer.Option(min=0, help="Weight of the distance to the start, 0.5.")
    ] = 0.1,
    layer: Annotated[
        int | None, typer.Option(min=0, help="Layer to match, from 0. Default: the middle one.")
    ] = None,
    device: options.Device = None,
) -> None:
    """Learn how much of each expert every place takes, from a few unlabelled prompts.

    The merge is made to behave as each expert does on that expert's own prompts. Holds the base,
    both experts and the merge in memory. Writes the file RECIPE for `layerswap merge`.

    Example: layerswap learn --base b --task-expert math --language-expert swahili
    --task-prompts gsm8k.jsonl --language-prompts sw.txt --recipe learned.yaml
    """
    import yaml

    from layerswap.checkpoint.loading import open_device, pick_device
    from layerswap.compose.recipe import check_recipe
    from layerswap.compose.yaml_file import refuse_text, write_text
    from layerswap.evaluation.examples import read_examples, tokenize
    from layerswap.merge import make_plan
    from layerswap.merge.loading import plan_tokenizer
    from layerswap.search.coefficients import LearningSettings, learn_coefficients
    from layerswap.versions import need_extras

    need_extras("learning", "models")
    place = pick_device(device)
    open_device(place)
    refuse_text(recipe, overwrite=overwrite)
    texts = {"task": read_examples(task_prompts), "language": read_examples(language_prompts)}
    experts = {"task": task_expert, "language": language_expert}
    alone = {"experts": {"task": task_expert}, "soup": {"experts": ["task"]}, "bake": True}
    tokenizer = plan_tokenizer(make_plan(check_recipe(alone, where="--task-expert")))
    prompts = {
        name: [list(tokenize(one, tokenizer, max_length).ids) for one in found[:limit]]
        for name, found in texts.items()
    }
    settings = LearningSettings(
        steps=steps, learning_rate=learning_rate, regularise=regularise, layer=layer, device=place
    )
    with output.step_progress("learning", steps) as progress:
        found = learn_coefficients(base, experts, prompts, settings=settings, progress=progress)
    data = found.recipe()
    write_text(recipe, yaml.safe_dump(data, sort_keys=False), overwrite=overwrite)
    plan = make_plan(check_recipe(data, where=str(recipe)))
    lines = [
        plan,
        f"loss {found.losses[0]:.4f} before, {found.losses[-1]:.4f} after {steps} steps",
        f"wrote {recipe}; write the model: layerswap merge {recipe} --out merged",
    ]
    facts = {
        "losses": found.losses,
        "coefficients": [
            {**place._asdict(), **weights} for place, weights in found.coefficients.items()
        ],
        "recipe": str(recipe),
    }
    output.finish("learn", facts, lines)
