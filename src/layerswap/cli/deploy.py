"""`layerswap deploy`: a GGUF file for Ollama and llama.cpp that provably answers as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from layerswap.cli import options, output
from layerswap.ground.errors import MergeError, RecipeError

SHOWN = 8
"""Most differences that are printed."""


def deploy(
    merged: str,
    *,
    like: str | None = None,
    out: Path | None = None,
    kind: Annotated[list[str] | None, Option("--type")] = None,
    text: list[str] | None = None,
    positions: Annotated[int, Option(min=0)] = 200,
    check: Path | None = None,
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
) -> None:
    """Write a merged model as GGUF, and prove that it answers as the folder does.

    Compares tensors, tokens, the chat template, the end of a turn, and likelihoods by language.
    Writes the file, a Modelfile and deploy.json into the folder DIR. Exits with code 2 if
    the file answers otherwise.

    Example: layerswap deploy merged --like base.gguf --text sw=lines.txt --out deployed

    Options:
        merged MERGED: Folder or Hub id to deploy.
        like FILE: GGUF file of the base: a path or Hub id.
        out DIR: Folder to write.
        kind TYPE: Type of the weights, such as Q8_0. Repeatable.
            (default: as in --like)
        text CODE=FILE: Lines of a language to compare. Repeatable.
        positions: Positions of each language to compare likelihoods in.
        check FILE: Compare this GGUF file and write nothing.
    """
    from layerswap.deploy import api
    from layerswap.deploy.convert import LIKE
    from layerswap.deploy.proof import prove
    from layerswap.merge.target import MergeOptions
    from layerswap.versions import need_extras

    texts = options.read_pairs("--text", text, "CODE=FILE")
    lines = {name: api.read_lines(Path(path)) for name, path in texts.items()}
    if check is not None:
        if like or out or kind:
            raise RecipeError(
                "--check compares a file that exists; leave out --like, --out, --type"
            )
        proof = prove(merged, check, lines, positions=positions, log=output.log)
        done = api.Deployed([proof], [], [])
    elif like is None:
        if out or kind:
            raise RecipeError("a GGUF file needs --like BASE.gguf, the base in the same format")
        need_extras("the check of a folder", "models")
        done = api.check_folder(merged)
    else:
        if out is None:
            raise RecipeError("give the folder to write, --out DIR")
        need_extras("a GGUF file", "gguf", "models", "report")
        if lines:
            need_extras("the proof", "deploy")
        done = api.deploy(
            merged, out, like=like, kinds=kind or (LIKE,), lines=lines or None,
            positions=positions, log=output.log,
            options=MergeOptions(overwrite=overwrite, threads=threads),
        )  # fmt: skip
    shown: list[object] = [*done.notes]
    if done.proofs:
        shown.append(api.checks_table(done.proofs))
    if any(proof.agreements for proof in done.proofs):
        shown.append(api.agreement_table(done.proofs))
    output.finish("deploy", done.to_dict(), [*shown, *done.commands])
    if done.problems:
        more = len(done.problems) - SHOWN
        raise MergeError(*done.problems[:SHOWN], *[f"and {more} more (--json)"] * (more > 0))
