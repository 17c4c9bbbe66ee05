"""The inputs of the studies of ten languages and of the dose of text, from published files.

    python -m research.languages PUBLISHED OUT --base GEMMA
    LAYERSWAP_DATA=PUBLISHED layerswap study run OUT/ten-languages.yaml --out ten

`PUBLISHED` is as in `research.inputs`, with the training splits of MasakhaNEWS. Rows are plain text
of a language: articles of the training split, without headline and topic, cut at sentence ends into
pieces of at most 400 characters. Swahili and Hausa take the sentences of MAFAND's training split.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

import yaml
from tokenizers import Tokenizer

from research.inputs import headlines, local_mix, table, write_jsonl

HERE = Path(__file__).parent
STUDIES = ("ten-languages/study", "ten-languages/middle")
LANGUAGES = ("swa", "hau", "yor", "pcm", "sna", "som", "run", "orm", "xho", "lin")
MAFAND = ("swa", "hau")
DOSES = {"73k": 80_000, "290k": 310_000, "all": None}
"""Tokens of the training rows, a little more than the steps of the smaller doses read."""
LONGEST = 400
"""Characters of a row, unless one sentence is longer."""
SEED = 20261123
VALIDATION = 64


def pieces(text: str) -> list[str]:
    """A text cut at ends of sentences."""
    found = [""]
    for sentence in re.split(r"(?<=[.!?])\s+|\s{3,}|\n+", text.strip()):
        joined = f"{found[-1]} {sentence}".strip()
        found[-1:] = [joined] if len(joined) <= LONGEST else [found[-1], sentence]
    return found


def texts(published: Path, code: str) -> list[str]:
    """All rows of a language, once each, in a random order."""
    if code in MAFAND:
        path = published / "lafand_mt" / f"en-{code}.train.{code}"
        rows = [line.strip() for line in path.read_text("utf-8").splitlines()]
    else:
        articles = table(published / "masakhanews" / f"{code}.train.tsv")
        rows = [piece for article in articles for piece in pieces(article["text"])]
    unique = sorted({row for row in rows if len(row) >= 20})
    random.Random(SEED).shuffle(unique)
    return unique


def write_texts(published: Path, out: Path, tokenizer: Tokenizer) -> None:
    """The rows of each language and dose; a larger dose holds the rows of the smaller ones."""
    for code in LANGUAGES:
        rows = texts(published, code)
        validation, rows = rows[:VALIDATION], rows[VALIDATION:]
        write_jsonl(out / f"{code}-validation.jsonl", ({"text": row} for row in validation))
        lengths = [len(found.ids) for found in tokenizer.encode_batch(rows)]
        for dose, tokens in DOSES.items():
            kept, total = 0, 0
            while kept < len(rows) and (tokens is None or total < tokens):
                total += lengths[kept]
                kept += 1
            if tokens is not None and total < tokens:
                continue
            name = f"{code}-{dose}"
            write_jsonl(out / f"{name}.jsonl", ({"text": row} for row in rows[:kept]))
            print(f"{name}: {kept} rows, {total} tokens")


def write_study(name: str, out: Path, base: str) -> None:
    """A study's file with the base's folder in place of its name."""
    text = (HERE / f"{name}.yaml").read_text("utf-8")
    target = out / f"{name.removesuffix('/study').replace('/', '-')}.yaml"
    target.write_text(text.replace("base: gemma-3-270m", f"base: {base}"), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("published", type=Path, help="folder of the published files")
    parser.add_argument("out", type=Path, help="folder of the inputs")
    parser.add_argument("--base", required=True, help="folder of Gemma 3 270M")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    base = str(Path(given.base).absolute())
    write_texts(given.published, given.out, Tokenizer.from_file(f"{base}/tokenizer.json"))
    english = list(headlines(given.published))
    write_jsonl(given.out / "news.jsonl", english)
    mix = local_mix("masakhanews-english", "news.jsonl", total=len(english), validation=VALIDATION)
    text = yaml.safe_dump(mix, allow_unicode=True, sort_keys=False)
    (given.out / "masakhanews-english.yaml").write_text(text, "utf-8")
    for name in STUDIES:
        write_study(name, given.out, base)


if __name__ == "__main__":
    main()
