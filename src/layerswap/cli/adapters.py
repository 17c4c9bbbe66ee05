"""`layerswap adapters`: write every task x language composition as an adapter over one base."""

from __future__ import annotations

from typing import Annotated

import typer

from layerswap.cli import options, output

ZONES = ("bottom", "top", "bottom_transition", "top_transition", "outside")


@options.takes("base", *ZONES, "weights", "rank")
def adapters(
    *,
    task_experts: Annotated[
        list[str],
        typer.Option(
            "--task-experts", "--tasks", metavar="[NAME=]FOLDER", help="Task adapter. Repeatable."
        ),
    ],
    language_experts: Annotated[
        list[str],
        typer.Option(
            "--language-experts", "--languages", metavar="[NAME=]FOLDER",
            help="Language adapter. Repeatable.",
        ),
    ],
    out: options.OutFolder,
    base: str | None = None,
    bottom: int | None = None,
    top: int | None = None,
    bottom_transition: int | None = None,
    top_transition: int | None = None,
    outside: str | None = None,
    weights: str | None = None,
    rank: int | None = None,
    dtype: options.Dtype = None,
    overwrite: options.Overwrite = False,
) -> None:  # fmt: skip
    """Write the swap of every task adapter with every language adapter as a PEFT adapter.

    A server such as vLLM holds all of them over one base. Writes the folder OUT with one adapter
    in each subfolder, a card, `serve.json` and `serve.sh`. `layerswap eval OUT` evaluates them.

    Example: layerswap adapters --tasks math --languages sw --languages te --out served
    """
    from layerswap.cli.progress import step_progress
    from layerswap.merge.adapters import SCRIPT, write_adapters

    sizes = (bottom, top, bottom_transition, top_transition, outside)
    zones = {name: size for name, size in zip(ZONES, sizes, strict=True) if size is not None}
    tasks = options.named_folders("--task-experts", task_experts)
    languages = options.named_folders("--language-experts", language_experts)
    with step_progress("composing adapters", len(tasks) * len(languages)) as progress:
        served = write_adapters(
            tasks, languages, out, base=base, method=zones,
            weights=options.read_weights(weights or "uniform"), rank=rank, dtype=dtype,
            overwrite=overwrite, progress=progress,
        )  # fmt: skip
    facts = {
        "adapters": list(served.plans), "base": served.base, "rank": served.rank,
        "folder": str(served.folder),
    }  # fmt: skip
    notes = (f"note: {name}: {note}" for name, plan in served.plans.items() for note in plan.notes)
    lines = [
        *notes,
        f"{len(served.plans)} adapters of {served.base}, rank {served.rank} at most",
        f"wrote {served.folder}",
        f"serve them: sh {served.folder / SCRIPT}",
    ]
    output.finish("adapters", facts, lines)
