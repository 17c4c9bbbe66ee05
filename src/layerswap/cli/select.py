"""`layerswap select`: choose the best checkpoints of several trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from layerswap.cli import options, output


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
        typer.Option(help="Kind of expert, whose published signals replace --task."),
    ] = None,
    language: options.Language = None,
    num_fewshot: options.NumFewshot = None,
    apply_chat_template: options.ApplyChatTemplate = False,
    system_instruction: options.SystemInstruction = None,
    fewshot_as_multiturn: options.FewshotAsMultiturn = None,
    gen_kwargs: options.GenKwargs = None,
    limit: options.Limit = None,
    device: options.Device = None,
    dtype: options.ModelDtype = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write with all scores.")] = None,
) -> None:
    """Score every checkpoint of several runs and keep the best.

    Ranks by validation loss, by --task, or by the published signals of --role. Those are Belebele
    and Global-MMLU for language experts, and English MGSM for task experts. Prints a table.

    Example: layerswap select runs/* --role language --language sw --keep 3
    """
    from layerswap.cli.tables import selection_table
    from layerswap.errors import RecipeError
    from layerswap.training.expert import select as selection

    if task and role:
        raise RecipeError("give --task or --role, not both")
    options.refuse_checkpoint("--task", task, takes="an lm-eval task")
    options.refuse_checkpoint("--language", language, takes="a language code or name")
    names = options.task_names(task)
    if role is not None:
        names = selection.signal_tasks(role, language)
    score = None
    if names:
        score = selection.scorer(
            names, include=include or (), limit=limit, num_fewshot=num_fewshot,
            prompts=options.prompt_options(
                apply_chat_template, system_instruction, fewshot_as_multiturn, gen_kwargs
            ),
            device=device, dtype=dtype,
        )  # fmt: skip
    found = selection.select(runs, keep=keep, of_any_run=of_any_run, score=score)
    output.say(selection_table(found))
    if out is not None:
        out.write_text(found.to_json(), "utf-8")
        output.say(f"wrote {out}")
