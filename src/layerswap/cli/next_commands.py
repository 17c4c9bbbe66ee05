"""The command that comes after each command, with names of outputs that are free."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

Given = Mapping[str, Any]
"""The options of a command, by name."""
PLAN = "plan --base {base} --task-expert {task_expert} --language-expert {language_expert}"


def _arguments(skip: int, flag: str = "") -> str:
    """The words of the command line after the first ones, without an option."""
    words = shlex.join(word for word in sys.argv[skip:] if word != flag)
    return words.replace("{", "{{").replace("}", "}}")


def _plan(given: Given) -> str | None:
    if given["check"]:
        return "plan {file}" if given["file"] else None
    return f"merge {_arguments(2)} --out {{merged}}"


def _merge(given: Given) -> str:
    return f"merge {_arguments(2, '--dry-run')}" if given["dry_run"] else "verify {out}"


def _data(given: Given) -> str:
    if given["list_recipes"]:
        return "data swahili --show"
    return "data {mix} --out {data}" if given["show"] else "train EXPERT.yaml --out {expert}"


def _delta(given: Given) -> str:
    if given["task_expert"] and given["language_expert"]:
        return PLAN
    name = next((one for one in ("task_expert", "language_expert") if given[one]), "expert")
    return f"revert --base {{base}} --expert {{{name}}} --keep 0.2 --out {{sparse}}"


def _study_run(given: Given) -> str | None:
    if given["dry_run"]:
        return f"study run {_arguments(3, '--dry-run')}"
    return _merged(given["out"]) or "study merge {out}"


def _merged(study: str) -> str | None:
    """The check of a merged model of a study, if there is one."""
    folder = next(iter(sorted(Path(study).glob("merged/*"))), None)
    return None if folder is None else f"verify {shlex.quote(str(folder))}"


EVALUATE = "--tasks gsm8k --limit 100 --out {results}"
NEXT: Mapping[str, str | Callable[[Given], str | None]] = {
    "quickstart": "verify {out}/merged",
    "new": lambda given: (
        "study run {name}/trial.yaml --out {name}/trial"
        if given["trial"]
        else "study run {name}/study.yaml --out {name}/results"
    ),
    "plan": _plan,
    "merge": _merge,
    "adapters": f"eval {{out}} {EVALUATE}",
    "instruct": "verify {out}",
    "revert": "verify {out}",
    "verify": f"eval {{folder}} {EVALUATE}",
    "data": _data,
    "train": lambda given: f"eval {{out}} {EVALUATE}" if given["out"] else None,
    "sweep": "merge {out}/best.yaml --out {merged}",
    "eval": lambda given: "compare {out}" + " OTHER_RESULTS" * (len(given["models"]) == 1),
    "compare": "compare {runs} --to latex",
    "delta": _delta,
    "study run": _study_run,
    "study list": "study show topic-transfer",
    "study show": "study run {name} --out {study} --dry-run",
    "study merge": lambda given: _merged(given["folder"]),
    "study status": "study report {folder}",
    "study report": "study merge {folder}",
    "lab build": "lab score {out}",
    "lab score": "lab export --out {tasks}",
    "lab export": "eval MODEL --tasks lab_problem_furo --include {out} --out {results}",
    "lab models": "merge --task-expert {out}/task-1 --language-expert {out}/language-furo-1 "
    "--out {merged}",
    "lab study": "study merge {out}/study",
    "analyse linearity": PLAN,
    "analyse composability": "sweep SWEEP.yaml --out {swept}",
    "analyse fisher": "merge RECIPE.yaml --out {merged}",
    "analyse freeze-or-revert": "plan --task-expert TASK --language-expert LANGUAGE",
    "analyse select": "plan --task-expert TASK --language-expert LANGUAGE",
}
"""By command; a word in braces is an option of that command, or a free name for an output."""


class _Words(dict[str, str]):
    """The options of a command as words for a shell; another name is a free path."""

    def __missing__(self, name: str) -> str:
        numbered = (f"{name}-{number}" for number in count(2))
        return next(one for one in chain([name], numbered) if not Path(one).exists())


def next_command(name: str, given: Given) -> str | None:
    """Return the command that comes after a command with these options."""
    following = NEXT[name]
    text = following if isinstance(following, str) else following(given)
    words = {
        option: " ".join(shlex.quote(str(one)) for one in value)
        if isinstance(value, list | tuple) else shlex.quote(str(value))
        for option, value in given.items() if value is not None
    }  # fmt: skip
    return None if text is None else text.format_map(_Words(words))
