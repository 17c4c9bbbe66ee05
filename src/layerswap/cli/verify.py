"""`layerswap verify`: compare an output with its record and its sources."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli import options, output


def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder or GGUF file that merge wrote.")
    ],
    *,
    full: Annotated[
        bool, typer.Option("--full", help="Recompute every tensor in place of a sample.")
    ] = False,
    sample: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of each computed tensor to recompute.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="Present folder of a source. Repeatable."),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Record the SHA-256 of every file if all is well.")
    ] = False,
    allow_pickle: options.AllowPickle = False,
    threads: options.Threads = None,
) -> None:
    """Verify a merged checkpoint against its sources.

    Compares copied tensors bit for bit and recomputes a sample of the others. Exits with code 0
    if all is well, and 2 if not.

    Example: layerswap verify merged --full
    """
    from layerswap.cli.progress import byte_progress
    from layerswap.errors import MergeError
    from layerswap.merge import verify as check

    report = check(
        folder,
        full=full,
        share=sample,
        seed=seed,
        sources=options.read_pairs("--source", source or []),
        record=record,
        allow_pickle=allow_pickle,
        threads=threads,
        progress=byte_progress,
    )
    output.finish("verify", report.to_dict(), [report])
    if not report.passed:
        raise MergeError(*report.problems)
