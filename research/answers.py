"""Does a swap write headlines in a language that has no examples of the task?

    python -m research.answers train PUBLISHED OUT --base GEMMA      # inputs and experts, in order
    python -m research.answers evaluate PUBLISHED OUT --base GEMMA   # every model that is trained
    python -m research.answers                                       # tables and figure

Fixed before anything ran: the models of `recipes`, the settings below and the documents of
`articles`. Nothing is chosen, so development documents are not asked. PUBLISHED is as in
`research.inputs`. Both commands go on where they were stopped: a finished expert and a recorded
answer are kept. Texts stay in OUT; `research/answers` holds the measures of every answer.

The task expert reads English alone, 480 articles of MasakhaNEWS with their headlines, once. A
language expert reads plain sentences of MAFAND, 41,000 tokens, none of which shares five words in a
row with a test article or its headline. Joint training reads the rows of both. Planned for two
processors that others use too, measured at 28 tokens of text a second; experts are trained in the
order of `ORDER`. Yoruba came last, with the same settings, after the answers in Swahili and Hausa
were known.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import layerswap as ls
from layerswap.compose.recipe import check_recipe
from layerswap.evaluation.identifier import learn_identifier
from layerswap.evaluation.metrics import chrf, normalised, rouge_l
from layerswap.evaluation.statistics import (
    Values,
    mean_over_groups,
    paired_difference,
    paired_over_groups,
)
from layerswap.merge.api import make_plan
from layerswap.merge.plan import Plan
from layerswap.report.charts import draw_intervals
from layerswap.report.drawing import Drawing
from layerswap.training.mix.filters import overlap
from research import languages as design
from research.inputs import table as rows_in
from research.inputs import write_jsonl
from research.markdown import Table, per_cent, points, table

HERE = Path(__file__).parent
RECORDED = HERE / "answers"
FIGURE = HERE.parent / "docs" / "images" / "answers"
LANGUAGES = {"sw": "Swahili", "ha": "Hausa", "yo": "Yoruba", "en": "English"}
CODES = {"sw": "swa", "ha": "hau", "yo": "yor", "en": "eng"}
OTHERS = ("sw", "ha", "yo")
FEWEST = 8
"""Letters below which no language is identified."""
ORDER = ("task-1", "sw-1", "ha-1", "joint-sw-1", "joint-ha-1", "middle-1", "task-2",
         "yo-1", "joint-yo-1")  # fmt: skip
"""Experts in the order of their training."""
SEED = 20261128
ROWS, HELD_OUT = 480, 40
"""English rows that are trained on, and others that are asked."""
TESTS = 80
"""Test articles of a language."""
SHOWN = 80
"""Tokens of an article, from its start."""
TOKENS = 41_000
"""Tokens of a language's text."""
WRITTEN = 40
"""Most tokens of an answer."""
DENSITY = 0.075
"""Of TIES: a fifth of the trained weights, as on the other pages."""
DTYPE = "bfloat16"
"""Of the models that are asked."""
PROMPT = "Article: {text}\nHeadline:"
HYPERPARAMETERS = {"learning_rate": 5e-5, "num_train_epochs": 1, **design.SCHEDULE}
BATCHES = {"task": 4, "language": 2, "joint": 8}
"""Rows of a step; a row of text is packed to 256 tokens, except in joint training."""


class Article(NamedTuple):
    """An article as the models see it, and its headline."""

    text: str
    headline: str

    @property
    def prompt(self) -> str:
        """What a model is asked."""
        return PROMPT.format(text=self.text)


# --- inputs and trainings ---


@cache
def tokenizer(base: Path) -> Any:
    from layerswap.checkpoint.loading import load_tokenizer

    return load_tokenizer(base)


def shown(text: str, base: Path) -> str:
    """The start of an article, in whole words."""
    words = " ".join(text.split())
    offsets = tokenizer(base)(words, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in offsets["offset_mapping"]]
    if len(ends) <= SHOWN:
        return words
    return words[: ends[SHOWN - 1] + 1].rpartition(" ")[0]


def articles(published: Path, code: str, base: Path) -> tuple[list[Article], list[Article]]:
    """English: rows to train on and others to ask. Other languages: none, and test articles."""
    splits = ("dev", "test", "fewshot50") if code == "en" else ("test",)
    found: dict[str, str] = {}
    for split in splits:
        for row in rows_in(published / "masakhanews" / f"{CODES[code]}.{split}.tsv"):
            headline, text = (" ".join(row[name].split()) for name in ("headline", "text"))
            # Some articles begin with their headline, or have no text.
            if headline and len(text) >= 200 and headline.casefold() not in text.casefold():
                found.setdefault(headline, text)
    chosen = random.Random(SEED).sample(sorted(found), (ROWS + HELD_OUT) if code == "en" else TESTS)
    every = [Article(shown(found[headline], base), headline) for headline in chosen]
    return (every[:ROWS], every[ROWS:]) if code == "en" else ([], every)


def write_inputs(published: Path, out: Path, base: Path) -> None:
    """Write the rows of the task and of each language."""
    out.mkdir(parents=True, exist_ok=True)
    rows, held_out = (
        [{"prompt": one.prompt, "completion": f" {one.headline}"} for one in half]
        for half in articles(published, "en", base)
    )
    write_jsonl(out / "task.jsonl", rows)
    write_jsonl(out / "task-validation.jsonl", held_out)
    for code in OTHERS:
        texts = design.sentences(published, CODES[code])
        asked = [part for one in articles(published, code, base)[1] for part in one]
        shared = set(overlap(asked, texts))
        texts = [text for number, text in enumerate(texts) if number not in shared]
        validation, texts = texts[: design.VALIDATION], texts[design.VALIDATION :]
        kept, total = 0, 0
        while total < TOKENS:
            total += len(tokenizer(base)(texts[kept], add_special_tokens=False)["input_ids"])
            kept += 1
        write_jsonl(out / f"{code}.jsonl", ({"text": text} for text in texts[:kept]))
        write_jsonl(out / f"{code}-validation.jsonl", ({"text": text} for text in validation))
        print(f"{code}: {kept} rows, {total} tokens; {len(shared)} that the test shares left out")


def spec(name: str, base: str) -> dict[str, Any]:
    """The training of an expert, as EXPERT.yaml beside the inputs."""
    kind, seed = name.rsplit("-", 1)
    kind, _, code = kind.partition("-")

    def files(stem: str) -> dict[str, str]:
        return {"train": f"{stem}.jsonl", "validation": f"{stem}-validation.jsonl"}

    data: dict[str, Any] = {"data": files("task")}
    trained: dict[str, Any] = {"places": design.ALL_LAYERS}
    batch = BATCHES["task"]
    if kind == "joint":
        data, batch = {"mix": [files("task"), files(code)]}, BATCHES["joint"]
    elif kind in LANGUAGES:
        data, batch = {"data": files(kind)}, BATCHES["language"]
    elif kind == "middle":
        trained = {"partition": "C", "part": "task", "places": design.ALL_LAYERS}
    return {
        "base": base, **data, "train": trained,
        "hyperparameters": {**HYPERPARAMETERS, "per_device_train_batch_size": batch},
        "save_every": 10_000, "seed": int(seed),
    }  # fmt: skip


def is_trained(out: Path, name: str) -> bool:
    path = out / name / "layerswap-training.json"
    return path.is_file() and bool(json.loads(path.read_text("utf-8"))["finished"])


def train(published: Path, out: Path, base: Path, names: Sequence[str]) -> None:
    """Train the experts that are not finished yet, one after the other."""
    if not (out / f"{OTHERS[-1]}-validation.jsonl").is_file():
        write_inputs(published, out, base)
    for name in names:
        fit(out, name, spec(name, str(base)))


def fit(out: Path, name: str, training: Mapping[str, Any]) -> Path:
    """Train an expert of OUT, or go on with it; returns its folder."""
    folder = out / name
    if not is_trained(out, name):
        print(f"== {name}", flush=True)
        ls.train(training, folder, folder=out, resume=folder.is_dir(),
                 log=lambda line: print(line, flush=True))  # fmt: skip
    return folder


# --- answers ---


def plan(recipe: Mapping[str, Any], name: str) -> Plan:
    """Plan a recipe; errors have its name."""
    return make_plan(check_recipe(recipe, where=name))


BASE, BASE_SHOTS = "base", "base, two English examples"
LANGUAGE, LANGUAGE_SHOTS = "language expert", "language expert, two English examples"
TASK, SWAP, SOUP, TIES = "task expert", "swap, default", "plain average", "TIES"
JOINT = "joint training"
MIDDLE, MIDDLE_SWAP = "task expert of the middle layers", "swap with the middle layers' expert"
SECOND, SECOND_SWAP = "task expert, seed 2", "swap, seed 2"
LEAD, TRUE = "lead: the first sentence", "true headline"
SHOTS = frozenset({BASE_SHOTS, LANGUAGE_SHOTS})
MODELS = (TRUE, LEAD, BASE, BASE_SHOTS, LANGUAGE, LANGUAGE_SHOTS, TASK, SWAP, SOUP, TIES, JOINT,
          MIDDLE, MIDDLE_SWAP, SECOND, SECOND_SWAP)  # fmt: skip
"""Models in the order of the tables."""
HOW: Mapping[str, dict[str, Any]] = {
    SWAP: {"swap": {}},
    SOUP: {"soup": {"experts": ["task", "language"]}},
}
"""Merges of two experts, as parts of a recipe."""
ALONE: dict[str, Any] = {"swap": {"bottom": 0, "top": 0, "outside": "task"}}
"""The task expert whole."""
DRAWN = (LEAD, BASE, LANGUAGE, SWAP, SOUP, TIES, JOINT)
CHUNK = 20
"""Articles that are asked together."""


def recipes(out: Path, base: Path, code: str) -> dict[str, dict[str, Any]]:
    """The compositions whose experts are trained, by name; English is asked with Swahili's."""
    code = "sw" if code == "en" else code
    language = out / f"{code}-1"

    def pair(task: Path, other: Path, how: dict[str, Any]) -> dict[str, Any]:
        return {"base": str(base), "experts": {"task": str(task), "language": str(other)}, **how}

    def alone(expert: Path, other: Path = base) -> dict[str, Any]:
        return pair(expert, other, ALONE)

    ties = {"method": "ties", "experts": ["task", "language"], "density": DENSITY}
    task, joint, middle, second = (
        out / name for name in ("task-1", f"joint-{code}-1", "middle-1", "task-2")
    )
    found = {
        BASE: alone(base, language),
        LANGUAGE: alone(language),
        TASK: alone(task),
        SWAP: pair(task, language, HOW[SWAP]),
        SOUP: pair(task, language, HOW[SOUP]),
        TIES: pair(task, language, {"merge": ties}),
        JOINT: alone(joint),
        MIDDLE: alone(middle),
        MIDDLE_SWAP: pair(middle, language, HOW[SWAP]),
        SECOND: alone(second),
        SECOND_SWAP: pair(second, language, HOW[SWAP]),
    }
    found |= {BASE_SHOTS: found[BASE], LANGUAGE_SHOTS: found[LANGUAGE]}
    return {
        name: recipe for name, recipe in found.items()
        if all(Path(one) == base or is_trained(out, Path(one).name)
               for one in recipe["experts"].values())
    }  # fmt: skip


def ask(published: Path, out: Path, base: Path, code: str) -> None:
    """Write every model's answers to the articles of a language into OUT, where they lack."""
    found = recipes(out, base, code)
    sweep = ls.Sweep([plan(recipe, name) for name, recipe in found.items()], dtype=DTYPE)
    shots = "".join(
        f"{one.prompt} {one.headline}\n\n" for one in articles(published, "en", base)[0][:2]
    )
    prompts = [one.prompt for one in articles(published, code, base)[1]]
    write(sweep, list(found), prompts, shots, base, out / f"answers-{code}.jsonl")


def write(
    sweep: ls.Sweep, names: Sequence[str], prompts: Sequence[str], shots: str, base: Path,
    target: Path, most: int | None = None, **fields: str,
) -> None:  # fmt: skip
    """Write the models' answers to prompts into a file, with these fields, where they lack.

    The models of `SHOTS` read `shots` before each prompt, and are left out without shots. An answer
    has at most `most` tokens, `WRITTEN` by default.
    """
    read = tokenizer(base)
    known = {(row["model"], row["document"]) for row in read_jsonl(target)
             if fields.items() <= row.items()}  # fmt: skip
    for start in range(0, len(prompts), CHUNK):
        numbers = range(start, min(start + CHUNK, len(prompts)))
        for before in dict.fromkeys(("", shots)):
            members = [
                number for number, name in enumerate(names)
                if (name in SHOTS) == bool(before)
                and any((name, document) not in known for document in numbers)
            ]  # fmt: skip
            if not members:
                continue
            ids = [read(before + prompts[i])["input_ids"] for i in numbers]
            written = sweep.generate(ids, members=members, max_new_tokens=most or WRITTEN,
                                     stop=["\n"], tokenizer=read)  # fmt: skip
            with target.open("a", encoding="utf-8") as file:
                for member, answers in zip(members, written, strict=True):
                    for document, one in zip(numbers, answers, strict=True):
                        text = read.decode(one.tokens, skip_special_tokens=True)
                        answer = text.partition("\n")[0].strip()
                        row = {"model": names[member], **fields, "document": document,
                               "answer": answer}  # fmt: skip
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
            print(f"{target.stem}: {start} to {numbers[-1]}, {len(members)} models", flush=True)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


# --- measures ---


class Measured(NamedTuple):
    """An answer's measures in 0..1, but for its words."""

    chrf: float  # chrF++ of the sentence (Popović, 2017)
    rouge: float  # F of ROUGE-L on words
    language: float  # 1 if it is identified as the article's language
    english: float
    copied: float  # 1 if it stands in the article, word for word
    words: float


def words_of(text: str) -> list[str]:
    return normalised(text).split()


def first_sentence(text: str) -> str:
    """The first sentence of five words or more; the whole text if none ends."""
    ends = [found.start() for found in re.finditer(r"(?<=[.!?])(?=\s|[^\W\d_a-z])", text)]
    return next((text[:end] for end in ends if len(words_of(text[:end])) >= 5), text)


def stands_in(answer: str, text: str) -> bool:
    """True for an answer of three words or more that is a run of the text's words."""
    own, words = (f" {' '.join(words_of(one))} " for one in (answer, text))
    return len(words_of(answer)) >= 3 and own in words


def measure(answer: str, article: Article, code: str, found: str) -> Measured:
    """Measure an answer to an article in `code`; `found` is the language identified in it."""
    return Measured(
        chrf(answer, article.headline) / 100,
        rouge_l(answer, article.headline),
        float(found == code),
        float(found == "en"),
        float(stands_in(answer, article.text)),
        float(len(words_of(answer))),
    )


def identify(published: Path) -> Callable[[str], str]:
    """Return what tells a text's language; nothing for a few letters.

    It is learned from MAFAND's training sentences in English, Swahili, Hausa and Yoruba.
    """
    folder = published / "lafand_mt"
    files = {own: folder / f"en-{CODES[own]}.train.{CODES[own]}" for own in OTHERS}
    made = learn_identifier({"en": folder / "en-swa.train.en", **files})
    print(*(made.describe(own) for own in made.languages), sep="\n")

    def tell(text: str) -> str:
        if sum(map(str.isalpha, text)) < FEWEST:
            return ""
        return made.languages[int(made.probabilities([text])[0].argmax())]

    return tell


def record(published: Path, out: Path, base: Path) -> None:
    """Measure every answer in OUT, the true headlines and the first sentences."""
    RECORDED.mkdir(exist_ok=True)
    tell = identify(published)
    for code in LANGUAGES:
        rows = [(row["model"], row["document"], row["answer"])
                for row in read_jsonl(out / f"answers-{code}.jsonl")]  # fmt: skip
        if not rows:
            continue
        asked = articles(published, code, base)[1]
        for document, article in enumerate(asked):
            rows.append((LEAD, document, first_sentence(article.text)))
            rows.append((TRUE, document, article.headline))
        with (RECORDED / f"{code}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["model", "document", *Measured._fields])
            for model, document, answer in sorted(rows):
                of = measure(answer, asked[document], code, tell(answer))
                writer.writerow([model, document, *(f"{value:.4g}" for value in of)])


# --- tables ---


@cache
def recorded(code: str) -> dict[str, dict[str, Values]]:
    """Every model's measures, by name, of the articles of a language that all models answered."""
    with (RECORDED / f"{code}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found: dict[str, dict[int, dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row["model"], {})[int(row["document"])] = row
    return {
        model: {name: np.array([float(by[i][name]) for i in sorted(by)])
                for name in Measured._fields}
        for model in MODELS if len(by := found.get(model, {})) == len(found[TRUE])
    }  # fmt: skip


def asked_languages() -> list[str]:
    """The languages with recorded answers, without English."""
    return [code for code in LANGUAGES if code != "en" and (RECORDED / f"{code}.csv").is_file()]


def values(codes: Sequence[str], model: str, measure: str) -> list[Values]:
    return [recorded(code)[model][measure] for code in codes]


def rows_of(codes: Sequence[str]) -> list[list[str]]:
    """Every model's measures, means over languages, with the swap's chrF++ minus its own."""
    rows = []
    for model in MODELS:
        if not all(model in recorded(code) for code in codes):
            continue
        own, swap = (values(codes, one, "chrf") for one in (model, SWAP))
        apart = points(paired_over_groups(swap, own))
        score = [per_cent(mean_over_groups(own)), "" if model == SWAP else apart]
        means = {name: mean_over_groups(values(codes, model, name)).mean
                 for name in Measured._fields}  # fmt: skip
        shares = [f"{100 * means[name]:.1f}" for name in ("rouge", *SHARES)]
        words = f"{means['words']:.1f}"
        if model == TRUE:  # compared with itself
            score, shares[0] = ["", ""], ""
        rows.append([model, *score, *shares, words])
    return rows


SHARES = ("language", "english", "copied")
HEAD = ("chrF++", "the swap minus it", "ROUGE-L", "% in the language", "% in English",
        "% copied", "words")  # fmt: skip


def tables() -> dict[str, Table]:
    """The tables by name."""
    codes = asked_languages()
    found = {f"answers in {LANGUAGES[code]}": table([LANGUAGES[code], *HEAD], rows_of([code]))
             for code in (*codes, "en")}  # fmt: skip
    names = ", ".join(LANGUAGES[code] for code in codes)
    return {"answers": table([f"mean of {names}", *HEAD], rows_of(codes)), **found}


def draw() -> Drawing:
    """Draw every model's chrF++ minus the task expert's, by language."""
    rows = []
    for code in asked_languages():
        found = recorded(code)
        for model in DRAWN:
            if model in found:
                apart = paired_difference(found[model]["chrf"], found[TASK]["chrf"])
                rows.append((f"{LANGUAGES[code]}: {model}", apart))
    return draw_intervals(rows, measure="chrF++ minus the task expert", differences=True)


def command_line(
    described: str | None, names: Mapping[str, Sequence[str]], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse the command line of an experiment; `names` are what each command can be limited to."""
    parser = argparse.ArgumentParser(description=described)
    commands = parser.add_subparsers(dest="command")
    for name, every in names.items():
        command = commands.add_parser(name)
        command.add_argument("published", type=Path, help="folder of the published files")
        command.add_argument("out", type=Path, help="folder of inputs, experts and answers")
        command.add_argument("--base", type=Path, required=True, help="folder of Gemma 3 270M")
        command.add_argument("--names", nargs="*", choices=every, default=every,
                             help="experts or languages; all by default")  # fmt: skip
    given = parser.parse_args(arguments)
    for folder in (given.published, given.base) if given.command else ():
        if not folder.is_dir():
            parser.error(f"{folder}: no such folder")
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    from research.figures import save_svg

    given = command_line(__doc__, {"train": ORDER, "evaluate": [*LANGUAGES]}, arguments)
    if given.command is None:
        print(*tables().values(), sep="\n\n")
        save_svg(draw(), FIGURE)
        return
    base = given.base.absolute()
    if given.command == "train":
        train(given.published, given.out, base, given.names)
    else:
        for code in given.names:
            ask(given.published, given.out, base, code)
        record(given.published, given.out, base)


if __name__ == "__main__":
    main()
