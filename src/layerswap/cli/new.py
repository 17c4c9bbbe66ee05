"""`layerswap new`: a study from a person's files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from layerswap.cli import options, output
from layerswap.ground.errors import RecipeError
from layerswap.ground.types import Scoring


def new(
    name: Path,
    *,
    base: str | None = None,
    language: list[str] | None = None,
    text: str | None = None,
    parallel: tuple[str, str] | None = None,
    task: str | None = None,
    test: list[str] | None = None,
    development: list[str] | None = None,
    translated_test: list[str] | None = None,
    translated_task: list[str] | None = None,
    labels: list[str] | None = None,
    columns: str | None = None,
    leave_out: list[str] | None = None,
    metric: Scoring | None = None,
    seeds: Annotated[int | None, Option(min=1)] = None,
    trial: bool = False,
    encoder: str | None = None,
    device: options.Device = None,
) -> None:
    """Write a study from your files: text in a language, and examples of a task.

    Writes study.yaml, data mixes, a benchmark and README.md into the folder NAME. Asks for what is
    missing in a terminal, and fails in a script.

    Example: layerswap new igbo --base ./gemma-3-270m --language ig --text igbo.txt
    --task headlines-en.tsv --test headlines-ig.tsv

    Options:
        name NAME: Folder to create.
        base MODEL: Base: a folder or a Hub id (owner/name@revision).
        language CODE[=FILE]: Language, and its text. Repeatable.
        text FILE: Text in the first language, or a ready mix.
        parallel FILE FILE: Translated lines: a file in the first language, one in English. Or a
            table twice.
        task FILE: Examples of the task, mostly English, or a ready mix.
        test [CODE=]FILE: Test in a language, or a suite. Repeatable.
        development [CODE=]FILE: Labelled examples in a language. They choose zones and train a
            linear classifier. Repeatable.
        translated_test [CODE=]FILE: Test with its texts in English, by a translator: the same
            table, row by row. Repeatable.
        translated_task [CODE=]FILE: Task with its texts in a language, by a translator. Repeatable.
        labels [CODE=]FILE: Labelled examples for --development, and to train on at the end.
            Repeatable.
        columns ROLE=COLUMN,...: Columns of the task, such as text=headline,label=topic, and of
            texts by language, such as sw=sentence.
        leave_out LABEL: Label whose test rows are left out. Repeatable.
        metric METRIC: Score of written answers. (default: chosen by the answers)
        seeds: Experts of each kind. (default: 3, or 1 if that takes over an hour)
        encoder MODEL: Encoder for sentence vectors to compare with: folder or Hub id that
            sentence-transformers loads.
        trial: Write trial.yaml too: every step on a few rows of the data.
    """
    from layerswap.new.folder import create
    from layerswap.new.inputs import Request, read_languages

    base = base or _ask("--base", "Base: a folder or a Hub id", "google/gemma-3-270m")
    files = read_languages(language or [_ask("--language", "Language code, such as sw", None)])
    codes = [*files]
    first = codes[0]
    texts = {code: file for code, file in files.items() if file}
    if text is None and parallel is None and first not in texts:
        text = _ask("--text", f"Text in {first}: a file", f"{first}.txt")
    if text and first in texts:
        raise RecipeError(f"--text: {first} has two files, {texts[first]} and {text}")
    texts |= {first: text} if text else {}
    task = task or _ask("--task", "Examples of the task: a file", "task.tsv")
    if not test and sys.stdin.isatty():
        asked = _ask("--test", f"Test in {first}: a file (- for none)", "-")
        test = [asked] if asked != "-" else None
    _, costs = create(
        Request(
            folder=name, base=base, languages=codes, task=task,
            texts=texts, parallel={first: parallel} if parallel else {},
            tests=_files("--test", test, codes),
            developments=_files("--development", development, codes),
            translated_tests=_files("--translated-test", translated_test, codes),
            translated_tasks=_files("--translated-task", translated_task, codes),
            labels=_files("--labels", labels, codes),
            columns=options.read_pairs(
                "--columns", options.task_names([columns or ""]), "ROLE=COLUMN"
            ),
            leave_out=leave_out or (), metric=metric, seeds=seeds, trial=trial,
            encoder=encoder, device=device,
        ),
        output.log,
    )  # fmt: skip
    output.say(f"wrote {name}: {costs}; {name}/README.md has more")
    file, results = ("trial.yaml", "trial") if trial else ("study.yaml", "results")
    output.suggest("study", "run", name / file, "--out", name / results)


def _ask(option: str, question: str, default: str | None) -> str:
    """Ask in a terminal; in a script, say which option is missing."""
    if not sys.stdin.isatty():
        raise RecipeError(f"give {option}; in a terminal, `layerswap new` asks for it")
    return str(typer.prompt(question, default=default))


def _files(option: str, given: list[str] | None, codes: list[str]) -> dict[str, str]:
    """Files by language; one without a language is the first's, and a suite is everyone's."""
    from layerswap.evaluation.suites import suite_names
    from layerswap.new.tables import tag_of

    files: dict[str, str] = {}
    for text in given or ():
        name, equals, file = text.partition("=")
        code = tag_of(name) if equals else None
        if code is None or code not in codes:
            if code and not Path(text).exists():
                raise RecipeError(f"{option} {text}: the study has no language {code}; add "
                                  f"--language {code}")  # fmt: skip
            code, file = codes[0], text
        elif not file.strip():
            raise RecipeError(f"{option} {text}: names no file; write {name}=FILE")
        if code in files:
            raise RecipeError(f"{option}: {code} has two files, {files[code]} and {file}")
        files[code] = file
        if file in suite_names() and not Path(file).exists():
            files |= dict.fromkeys(codes, file)
    return files
