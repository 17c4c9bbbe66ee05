"""Does a swap write headlines in a language that has no examples of the task?

    python -m research.answers train PUBLISHED OUT --base GEMMA      # inputs and experts, in order
    python -m research.answers evaluate PUBLISHED OUT --base GEMMA   # every model that is trained
    python -m research.answers                                       # prints tables; --write

Fixed before anything ran: the models of `recipes`, the settings below and the documents of
`articles`. Nothing is chosen, so development documents are not asked. PUBLISHED is as in
`research.inputs`. Both commands go on where they were stopped: a finished expert and a recorded
answer are kept. Texts stay in OUT; `research/answers` holds the measures of every answer.

The task expert reads English alone, 480 articles of MasakhaNEWS with their headlines, once. A
language expert reads plain sentences of MAFAND, 41,000 tokens, none of which shares five words in a
row with a test article or its headline. Joint training reads the rows of both. Planned for two
processors that others use too, measured at 28 tokens of text a second; experts are trained in this
order, and what is not reached by the end of the time is left out and named on the page.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import layerswap as ls
from layerswap.training.mix.filters import overlap
from research import languages as design
from research.inputs import table, translations, write_jsonl

HERE = Path(__file__).parent
RECORDED = HERE / "answers"
LANGUAGES = {"sw": "Swahili", "ha": "Hausa", "en": "English"}
CODES = {"sw": "swa", "ha": "hau", "en": "eng"}
ORDER = ("task-1", "sw-1", "ha-1", "joint-sw-1", "joint-ha-1", "middle-1", "task-2")
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
        for row in table(published / "masakhanews" / f"{CODES[code]}.{split}.tsv"):
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
    for code in ("sw", "ha"):
        texts = design.texts(published, CODES[code])
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
    if not (out / "ha-validation.jsonl").is_file():
        write_inputs(published, out, base)
    for name in names:
        if not is_trained(out, name):
            print(f"== {name}", flush=True)
            own = out / name
            ls.train(spec(name, str(base)), own, folder=out, resume=own.is_dir(),
                     log=lambda line: print(line, flush=True))  # fmt: skip


# --- answers ---

BASE, BASE_SHOTS = "base", "base, two English examples"
LANGUAGE, LANGUAGE_SHOTS = "language expert", "language expert, two English examples"
TASK, SWAP, SOUP, TIES = "task expert", "swap, default", "plain average", "TIES"
JOINT = "joint training"
MIDDLE, MIDDLE_SWAP = "task expert of the middle layers", "swap with the middle layers' expert"
SECOND, SECOND_SWAP = "task expert, seed 2", "swap, seed 2"
LEAD, TRUE = "lead: the first sentence", "true headline"
SHOTS = frozenset({BASE_SHOTS, LANGUAGE_SHOTS})
CHUNK = 20
"""Articles that are asked together."""


def recipes(out: Path, base: Path, code: str) -> dict[str, dict[str, Any]]:
    """The compositions whose experts are trained, by name; English is asked with Swahili's."""
    code = "sw" if code == "en" else code
    language = out / f"{code}-1"

    def pair(task: Path, other: Path, **how: Any) -> dict[str, Any]:
        return {"base": str(base), "experts": {"task": str(task), "language": str(other)}, **how}

    def alone(expert: Path, other: Path = base) -> dict[str, Any]:
        return pair(expert, other, swap={"bottom": 0, "top": 0, "outside": "task"})

    both = ["task", "language"]
    task, joint, middle, second = (
        out / name for name in ("task-1", f"joint-{code}-1", "middle-1", "task-2")
    )
    found = {
        BASE: alone(base, language),
        LANGUAGE: alone(language),
        TASK: alone(task),
        SWAP: pair(task, language, swap={}),
        SOUP: pair(task, language, soup={"experts": both}),
        TIES: pair(task, language, merge={"method": "ties", "experts": both, "density": DENSITY}),
        JOINT: alone(joint),
        MIDDLE: alone(middle),
        MIDDLE_SWAP: pair(middle, language, swap={}),
        SECOND: alone(second),
        SECOND_SWAP: pair(second, language, swap={}),
    }
    found |= {BASE_SHOTS: found[BASE], LANGUAGE_SHOTS: found[LANGUAGE]}
    return {
        name: recipe for name, recipe in found.items()
        if all(Path(one) == base or is_trained(out, Path(one).name)
               for one in recipe["experts"].values())
    }  # fmt: skip


def ask(published: Path, out: Path, base: Path, code: str, dtype: str) -> None:
    """Write every model's answers to the articles of a language into OUT, where they lack."""
    from layerswap.compose.recipe import check_recipe
    from layerswap.merge import make_plan

    found = recipes(out, base, code)
    names = list(found)
    plans = [make_plan(check_recipe(recipe, where=name)) for name, recipe in found.items()]
    sweep = ls.Sweep(plans, dtype=dtype)
    shots = "".join(
        f"{one.prompt} {one.headline}\n\n" for one in articles(published, "en", base)[0][:2]
    )
    asked = articles(published, code, base)[1]
    target = out / f"answers-{code}.jsonl"
    known = {(row["model"], row["document"]) for row in read_jsonl(target)}
    for start in range(0, len(asked), CHUNK):
        numbers = range(start, min(start + CHUNK, len(asked)))
        for before in ("", shots):
            members = [
                number for number, name in enumerate(names)
                if (name in SHOTS) == bool(before)
                and any((name, document) not in known for document in numbers)
            ]  # fmt: skip
            if not members:
                continue
            prompts = [tokenizer(base)(before + asked[i].prompt)["input_ids"] for i in numbers]
            written = sweep.generate(prompts, members=members, max_new_tokens=WRITTEN,
                                     stop=["\n"], tokenizer=tokenizer(base))  # fmt: skip
            with target.open("a", encoding="utf-8") as file:
                for member, answers in zip(members, written, strict=True):
                    for document, one in zip(numbers, answers, strict=True):
                        text = tokenizer(base).decode(one.tokens, skip_special_tokens=True)
                        row = {"model": names[member], "document": document,
                               "answer": text.partition("\n")[0].strip(), "ended": one.reason}  # fmt: skip
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
            print(f"{code}: articles {start} to {numbers[-1]}, {len(members)} models", flush=True)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command")
    for name in ("train", "evaluate"):
        command = commands.add_parser(name)
        command.add_argument("published", type=Path, help="folder of the published files")
        command.add_argument("out", type=Path, help="folder of inputs, experts and answers")
        command.add_argument("--base", type=Path, required=True, help="folder of Gemma 3 270M")
        several = {"nargs": "*", "choices": ORDER if name == "train" else [*LANGUAGES]}
        command.add_argument("--names", **several, help="experts or languages; all by default")
        if name == "evaluate":
            command.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args(arguments)
    for folder in (given.published, given.base):
        if not folder.is_dir():
            parser.error(f"{folder}: no such folder")
    base = given.base.absolute()
    if given.command == "train":
        train(given.published, given.out, base, given.names or ORDER)
    elif given.command == "evaluate":
        for code in given.names or LANGUAGES:
            ask(given.published, given.out, base, code, given.dtype)


if __name__ == "__main__":
    main()
