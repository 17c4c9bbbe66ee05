"""What is left of translating when an expert of parallel text is merged with a task expert?

    python -m research.translation train PUBLISHED OUT --base GEMMA      # after research.answers
    python -m research.translation evaluate PUBLISHED OUT --base GEMMA
    python -m research.translation                                       # the table

Fixed before anything ran: one hundred sentences of FLORES-200's devtest in English and Swahili, the
only pair with English of which both sides were at hand, both ways, and the Swahili articles of
`research.answers`. The expert reads pairs of MAFAND as prompts, one way and the other in turn, of
as many tokens as the language experts of `research.answers` read. None shares five words in a row
with what is asked. Its merges are with the task expert that writes headlines. The base and the
language expert of plain text see two pairs. Nothing is chosen. OUT is that of `research.answers`,
and both commands go on where they were stopped.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import layerswap as ls
from layerswap.evaluation.statistics import Interval, Values, mean_interval, paired_difference
from layerswap.training.mix.filters import overlap
from research import answers
from research.answers import BASE_SHOTS, LANGUAGE_SHOTS, SOUP, SWAP, TASK
from research.inputs import write_jsonl
from research.markdown import Table, per_cent, points, table

RECORDED = Path(__file__).parent / "translation"
EXPERT, STEM = "pairs-sw-1", "pairs-sw"
PARALLEL = "expert of parallel text"
SAME = "the sentence as it is"
MODELS = (SAME, BASE_SHOTS, LANGUAGE_SHOTS, TASK, PARALLEL, SWAP, SOUP)
"""Models in the order of the table; `SWAP` and `SOUP` are of the expert of parallel text."""
NAMES = {"en": "English", "sw": "Swahili"}
WAYS = (("en", "sw"), ("sw", "en"))
HEADLINES = "headlines"
"""Tasks: both ways of a translation, and the articles of `research.answers`."""
FLORES = {"en": "eng_Latn", "sw": "swh_Latn"}
TESTS, VALIDATION = 100, 40
WRITTEN = 80
"""Most tokens of a translation."""
LONGEST = 300
"""Characters of a sentence that is trained on."""


class Pair(NamedTuple):
    """A sentence in English and in Swahili."""

    en: str
    sw: str


def prompt(text: str, source: str, target: str) -> str:
    return f"{NAMES[source]}: {text}\n{NAMES[target]}:"


def asked(published: Path) -> list[Pair]:
    """Sentences of FLORES, spread over the documents."""
    sides = [(published / "flores200_devtest" / f"{FLORES[code]}.devtest").read_text("utf-8")
             for code in NAMES]  # fmt: skip
    pairs = [Pair(*(" ".join(side.split()) for side in pair))
             for pair in zip(*(side.splitlines() for side in sides), strict=True)]  # fmt: skip
    return [pairs[i] for i in np.linspace(0, len(pairs) - 1, TESTS).astype(int)]


def known(published: Path, base: Path) -> list[Pair]:
    """Pairs of MAFAND that share nothing with what is asked, in the order of `answers.SEED`."""
    stem = published / "lafand_mt" / "en-swa.train"
    sides = [Path(f"{stem}.{code}").read_text("utf-8").splitlines() for code in ("en", "swa")]
    pairs = [Pair(*(" ".join(side.split()) for side in pair)) for pair in zip(*sides, strict=True)]
    pairs = [
        pair for pair in dict.fromkeys(pairs) if all(20 <= len(one) <= LONGEST for one in pair)
    ]
    order = np.random.default_rng(answers.SEED).permutation(len(pairs))
    pairs = [pairs[i] for i in order[:5000]]
    tests = [side for pair in asked(published) for side in pair]
    tests += [part for one in answers.articles(published, "sw", base)[1] for part in one]
    shared = {*overlap(tests, [pair.en for pair in pairs]),
              *overlap(tests, [pair.sw for pair in pairs])}  # fmt: skip
    return [pair for number, pair in enumerate(pairs) if number not in shared]


def row(number: int, pair: Pair) -> dict[str, str]:
    """A pair as prompt and completion, one way or the other by its number."""
    source, target = WAYS[number % 2]
    text, answer = getattr(pair, source), getattr(pair, target)
    return {"prompt": prompt(text, source, target), "completion": f" {answer}"}


def train(published: Path, out: Path, base: Path, names: Sequence[str]) -> None:
    """Train the expert of parallel text on as many tokens as a language expert reads."""
    read = answers.tokenizer(base)
    rows = [row(*one) for one in enumerate(known(published, base))]
    validation, rows = rows[:VALIDATION], rows[VALIDATION:]
    kept, total = 0, 0
    while total < answers.TOKENS:
        total += len(read("".join(rows[kept].values()))["input_ids"])
        kept += 1
    write_jsonl(out / f"{STEM}.jsonl", rows[:kept])
    write_jsonl(out / f"{STEM}-validation.jsonl", validation)
    print(f"{kept} rows, {total} tokens", flush=True)
    data = {"train": f"{STEM}.jsonl", "validation": f"{STEM}-validation.jsonl"}
    training = answers.spec("joint-sw-1", str(base))  # as many rows a step
    del training["mix"]
    for name in names:
        answers.fit(out, name, {**training, "data": data})


def recipes(out: Path, base: Path) -> dict[str, dict[str, Any]]:
    """Every model by name, as a recipe."""

    def of(task: Path, language: Path, how: Mapping[str, Any]) -> dict[str, Any]:
        return {"base": str(base), "experts": {"task": str(task), "language": str(language)}, **how}

    task, plain, pairs = out / "task-1", out / "sw-1", out / EXPERT
    return {
        BASE_SHOTS: of(base, plain, answers.ALONE),
        LANGUAGE_SHOTS: of(plain, base, answers.ALONE),
        TASK: of(task, base, answers.ALONE),
        PARALLEL: of(pairs, base, answers.ALONE),
        SWAP: of(task, pairs, answers.HOW[SWAP]),
        SOUP: of(task, pairs, answers.HOW[SOUP]),
    }


def ask(published: Path, out: Path, base: Path) -> None:
    """Write every model's answers into OUT, where they lack."""
    found = recipes(out, base)
    plans = [answers.plan(recipe, name) for name, recipe in found.items()]
    sweep = ls.Sweep(plans, dtype=answers.DTYPE)
    shots = known(published, base)[:2]  # held out of the training
    for task, prompts in tasks(published, base).items():
        source, _, to = task.partition("-")
        before = (
            "".join(
                f"{prompt(getattr(one, source), source, to)} {getattr(one, to)}\n\n"
                for one in shots
            )
            if to
            else ""
        )
        answers.write(sweep, list(found), prompts, before, base, out / "translations.jsonl",
                      WRITTEN if to else None, task=task)  # fmt: skip


def tasks(published: Path, base: Path) -> dict[str, list[str]]:
    """The prompts of each task."""
    pairs = asked(published)
    found = {
        f"{source}-{target}": [prompt(getattr(pair, source), source, target) for pair in pairs]
        for source, target in WAYS
    }
    return {**found, HEADLINES: [one.prompt for one in answers.articles(published, "sw", base)[1]]}


def record(published: Path, out: Path, base: Path) -> None:
    """Measure every answer in OUT, and the sentences themselves as their own translations."""
    RECORDED.mkdir(exist_ok=True)
    tell = answers.identify(published)
    pairs = asked(published)
    given = {HEADLINES: answers.articles(published, "sw", base)[1]}
    for source, target in WAYS:
        given[f"{source}-{target}"] = [
            answers.Article(getattr(pair, source), getattr(pair, target)) for pair in pairs
        ]
    rows = answers.read_jsonl(out / "translations.jsonl")
    rows += [
        {"model": SAME, "task": task, "document": document, "answer": one.text}
        for task, every in given.items() if task != HEADLINES for document, one in enumerate(every)
    ]  # fmt: skip
    with (RECORDED / "sw.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "task", "document", *answers.Measured._fields])
        for one in sorted(rows, key=lambda one: (one["model"], one["task"], one["document"])):
            article = given[one["task"]][one["document"]]
            code = one["task"].rpartition("-")[2] if one["task"] != HEADLINES else "sw"
            of = answers.measure(one["answer"], article, code, tell(one["answer"]))
            named = [one["model"], one["task"], one["document"]]
            writer.writerow([*named, *(f"{value:.4g}" for value in of)])


# --- table ---


@cache
def recorded() -> dict[tuple[str, str], dict[str, Values]]:
    """The measures of every model's answers, by model and task."""
    with (RECORDED / "sw.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for one in rows:
        found.setdefault((one["model"], one["task"]), []).append(one)
    return {
        key: {name: np.array([float(one[name]) for one in of]) for name in answers.Measured._fields}
        for key, of in found.items()
    }


def apart(first: str, second: str, task: str, measure: str = "chrf") -> Interval:
    """A measure of one model's answers minus another's, paired by document."""
    return paired_difference(recorded()[first, task][measure], recorded()[second, task][measure])


def tables() -> dict[str, Table]:
    """The table by name."""
    found, head = recorded(), ["Swahili"]
    columns = [
        (f"{NAMES[source]} to {NAMES[target]}", f"{source}-{target}") for source, target in WAYS
    ]
    for title, _ in columns:
        head += [f"{title}: chrF++", "minus the expert's", "% in the language", "% copied"]
    head += ["headlines: chrF++", "minus the task expert's", "% in English"]
    rows = []
    for model in MODELS:
        cells = [model]
        for task, other in [*((task, PARALLEL) for _, task in columns), (HEADLINES, TASK)]:
            own = found.get((model, task))
            if own is None:
                cells += [""] * (3 if task == HEADLINES else 4)
                continue
            gap = "" if model in (other, SAME) else points(apart(model, other, task))
            shares = ("english",) if task == HEADLINES else ("language", "copied")
            cells += [per_cent(mean_interval(own["chrf"])), gap,
                      *(f"{100 * own[name].mean():.0f}" for name in shares)]  # fmt: skip
        rows.append(cells)
    return {"translations": table(head, rows)}


def main(arguments: Sequence[str] | None = None) -> None:
    names = {"train": [EXPERT], "evaluate": []}
    given = answers.command_line(__doc__, names, arguments)
    if given.command is None:
        print(*tables().values(), sep="\n\n")
        return
    base = given.base.absolute()
    if given.command == "train":
        train(given.published, given.out, base, given.names)
    else:
        ask(given.published, given.out, base)
        record(given.published, given.out, base)


if __name__ == "__main__":
    main()
