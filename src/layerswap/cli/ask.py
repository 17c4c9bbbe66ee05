"""`layerswap ask`: a speaker makes a test, or compares the answers of models."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from layerswap.cli import commands, options, output
from layerswap.ground.types import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

app = commands.group("Ask speakers of a language: label a test, write answers, compare models.")
Questions = Annotated[Path, Argument(metavar="FOLDER", help="Folder of questions that ask wrote.")]
Count = Annotated[int, Option(min=1, help="Number of texts or prompts to draw at random.")]
Seed = Annotated[int, Option(help="Seed of the draw.")]


@commands.command(app)
def label(
    text: str,
    *,
    labels: str,
    avoid: list[str] | None = None,
    count: Count = 100,
    seed: Seed = 0,
    out: options.OutFolder,
) -> None:
    """Write a page on which a speaker labels texts for a test.

    Texts that share five words in a row with training text are left out. Writes the folder OUT;
    mail its ask.html.

    Example: layerswap ask label igbo-news.txt --labels sports,health --avoid igbo.txt --out topics

    Options:
        text TEXT: Texts in the language, by lines.
        labels LABEL,...: Labels of the task, 2 to 9.
        avoid FILE: Training text. Repeatable.
    """
    from layerswap.play.questions import label_items, write_questions

    items = label_items(text, count, seed, avoid or [])
    names = options.task_names([labels])
    _wrote(out, write_questions(out, "label", items, title=Path(text).stem, labels=names))


@commands.command(app)
def answer(table: str, *, count: Count = 100, seed: Seed = 0, out: options.OutFolder) -> None:
    """Write a page on which a speaker writes or corrects reference answers.

    Writes the folder OUT; mail its ask.html.

    Example: layerswap ask answer questions-ig.tsv --out references

    Options:
        table TABLE: Column `question`, and `answer` to correct.
    """
    from layerswap.play.questions import answer_items, write_questions

    items = answer_items(table, count, seed)
    _wrote(out, write_questions(out, "answer", items, title=Path(table).stem))


@commands.command(app)
def prefer(
    table: str, *, models: str, count: Count = 50, seed: Seed = 0, out: options.OutFolder
) -> None:
    """Write a page on which a speaker compares the answers of models without their names.

    Order and sides are random. Writes the folder OUT; mail its ask.html.

    Example: layerswap ask prefer answers.tsv --models swap,task,average --out preferences

    Options:
        table TABLE: Column `prompt`, and the answers by model.
        models COLUMN,...: Two or three models.
    """
    from layerswap.play.questions import prefer_items, write_questions

    names = options.task_names([models])
    items, pairs = prefer_items(table, names, count, seed)
    key = {"models": names, "pairs": pairs}
    _wrote(out, write_questions(out, "prefer", items, title=Path(table).stem, key=key))


@commands.command(app, json=True)
def read(folder: Questions, answers: list[Path], *, out: Path | None = None) -> None:
    """Check the answers of speakers, and print their agreement or preferences.

    Writes a test into the file OUT, if it is given. Votes are written as JSON.

    Example: layerswap ask read topics answers-ada.jsonl answers-obi.jsonl --out topics-ig.tsv

    Options:
        answers: Files that speakers sent back.
        out FILE: File to write: a test (TSV or .jsonl), or votes (JSON).
    """
    import json

    from layerswap.cli.tables import vote_table
    from layerswap.evaluation.preferences import judge
    from layerswap.play.questions import (
        as_test,
        read_answers,
        read_key,
        read_questions,
        votes_of,
        write_new,
        write_test,
    )

    asked = read_questions(folder)
    lines, facts = read_answers(folder, answers)
    files = facts["files"]
    number = counted(len(lines), "answer")
    texts: list[object] = [f"{number}, {facts['twice']:,} of them given twice "
                           f"(speakers: {len(files):,}, files: {len(answers):,})"]  # fmt: skip
    texts += [f"{name}: {', '.join(files[name])} differ on {counted(n, 'question')}; the latest "
              "answers count" for name, n in facts["differ"].items()]  # fmt: skip
    if asked["kind"] == "prefer":
        models = read_key(folder)["models"]
        judgement = judge(votes_of(folder, lines), models, asked["title"])
        texts.append(vote_table(judgement))
        if out is not None:
            write_new(out, json.dumps(asdict(judgement), ensure_ascii=False, indent=1))
            texts.append(f"wrote {out}")
        output.finish("ask read", {**facts, **asdict(judgement)}, texts)
        return
    facts["agreement"], more = _agreement(lines) if asked["kind"] == "label" else ([], [])
    texts += more
    if out is not None:
        rows, facts["left_out"] = as_test(asked, lines)
        write_test(out, rows)
        texts.append(
            f"wrote {out}; left out: {counted(facts['left_out'], 'text')} without a majority"
        )
    output.finish("ask read", facts, texts)


def _agreement(lines: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Compute the agreement of every two speakers on the texts of both."""
    from itertools import combinations

    from layerswap.evaluation.preferences import agreement

    by: dict[str, dict[str, str]] = {}
    for line in lines:
        by.setdefault(line["speaker"], {})[line["item"]] = line["answer"]
    facts, texts = [], []
    for first, second in combinations(sorted(by), 2):
        if shared := sorted({*by[first]} & {*by[second]}):
            kappa = agreement([by[first][i] for i in shared], [by[second][i] for i in shared])
            facts.append({"speakers": [first, second], "kappa": asdict(kappa)})
            texts.append(f"{first} and {second}: kappa {kappa.mean:.2f} [{kappa.low:.2f}, "
                         f"{kappa.high:.2f}] on {kappa.n:,} texts")  # fmt: skip
    return facts, texts


def _wrote(folder: Path, questions: str) -> None:
    output.say(f"wrote {folder}, {questions}: mail {folder / 'ask.html'}")
