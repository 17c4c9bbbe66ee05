"""Commands that use a model: ask it, deploy it, upload it, compare its answers."""

from __future__ import annotations

import shlex
from pathlib import Path

PREFER = ["ask", "prefer", "ANSWERS.tsv", "--models", "A,B", "--out", "asked"]
"""Speakers compare answers in a table."""


def uses(
    model: Path,
    play: list[str],
    *,
    push: list[str] | None = None,
    language: str = "LANG",
    gguf: bool = True,
) -> list[str]:
    """List commands without `layerswap`, in which a user replaces the words in capitals.

    Args:
        model: the folder of the merged model.
        play: arguments of `play` for its composition.
        push: the command that writes the model, for its upload; None for no upload.
        language: code of its language.
        gguf: its base exists as GGUF; otherwise `deploy` checks the folder.
    """
    text = f"{language}=lines.txt"
    written = ["--like", "BASE.gguf", "--text", text, "--out", "deployed"]
    deploy = ["deploy", str(model), *(written if gguf else [])]
    upload = [[*push, "--push", "OWNER/NAME"]] if push else []
    return [shlex.join(words) for words in (["play", *play], deploy, *upload, PREFER)]


def study_uses(root: Path, language: str) -> list[str]:
    """The uses of the selected model of a study in a language."""
    best = root / "best" / f"{language}.yaml"
    return uses(root / "merged" / language, [str(root)],
                push=["merge", str(best), "--out", "best"], language=language)  # fmt: skip


def command_lines(commands: list[str]) -> str:
    """The commands as lines for a shell."""
    return "\n".join(f"layerswap {command}" for command in commands)
