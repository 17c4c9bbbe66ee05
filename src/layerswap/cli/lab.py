"""`layerswap lab` and `layerswap quickstart`: the small world that ships with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from layerswap.cli import commands, options, output

app = commands.group("Work with the lab, the small multilingual world inside the package.")
Target = Annotated[
    str | None, Option(show_default="the farthest", help="Target language of the lab.")
]


@commands.command(app)
def models(*, out: Path, overwrite: options.Overwrite = False) -> None:
    """Copy the base, the task expert and the language experts of the package into the folder OUT.

    Its folder `tasks` has 1,000 test questions of each skill and language as lm-eval tasks, such
    as `lab_problem_furo`.

    Example: layerswap lab models --out lab

    Options:
        out: Folder of the models and tasks.
    """
    from layerswap.lab.assets import copy_models

    output.say(", ".join(copy_models(out, overwrite=overwrite)))
    output.say(f"wrote {out}")


def quickstart(
    *,
    out: Path = Path("layerswap-quickstart"),
    language: Target = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Compose, search, write, score and report on the small world that ships with layerswap.

    Takes under two minutes on two processor cores. Writes report.html, results.json and the
    selected merged checkpoint into the folder OUT.

    Example: layerswap quickstart --out first-steps

    Options:
        out: Folder of the results.
    """
    from layerswap.lab.quickstart import measures_table, run
    from layerswap.merge.metadata import uses

    folder, outcome = run(
        out, language=language, overwrite=overwrite, log=output.say, progress=output.step_progress
    )
    output.say(measures_table(outcome))
    for name in ("report.html", "results.json", "merged"):
        output.say(f"wrote {folder / name}")
    output.suggest("verify", out / "merged")
    for words in uses(out / "merged", [], gguf=False):  # there is no GGUF file of the lab's base
        output.suggest(*words)
