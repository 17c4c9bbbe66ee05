"""`layerswap verify`: compare an output with what its record says it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli import options


def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that merge wrote.")],
    *,
    full: Annotated[
        bool, typer.Option("--full", help="Compute every tensor again, not a sample.")
    ] = False,
    sample: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of each computed tensor to compute again.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="Where a source is now; may be given many times."),
    ] = None,
    record: Annotated[
        bool,
        typer.Option("--record", help="If all is well, keep the SHA-256 of every file."),
    ] = False,
    allow_pickle: options.AllowPickle = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Workers. Default: the usable processors.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Check a merged checkpoint against its sources; exit code 0 says that all is well.

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
    facts = json.dumps(report.to_dict(), indent=2, ensure_ascii=False)
    typer.echo(facts if as_json else str(report))
    if not report.passed:
        raise MergeError("\n".join(report.problems))
