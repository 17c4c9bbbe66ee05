"""Writes the inputs of the studies of docs/real.md from published files.

    python -m research.inputs PUBLISHED OUT --base GEMMA
    LAYERSWAP_DATA=OUT/published layerswap study run OUT/headline-transfer.yaml --out headlines

`PUBLISHED` holds the files of the data sets under their own names:

    masakhanews  {eng,swa,hau,yor}.{dev,test}.tsv, eng.fewshot50.tsv    masakhane-io/masakhane-news
    sib200       eng_Latn.train.tsv, {swh,hau,yor}_Latn.{dev,test}.tsv  Davlan/sib200
    lafand_mt    en-{swa,hau,yor}.train.{en,swa,hau,yor}                masakhane-io/lafand-mt
    afrisenti    {swa,hau,yor}.{dev,test}.tsv, swa.train.tsv            AfriSenti's repository
    tweeteval    val_text.txt, val_labels.txt (sentiment)               cardiffnlp/tweeteval
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
from layerswap.evaluation.suites.suites import write_suite
from layerswap.training.mix.schema import mix_text

HERE = Path(__file__).parent
STUDIES = (
    "headline-transfer", "topic-transfer", "sentiment-transfer", "headline-seeds",
    "headline-middle", "headline-joint", "topic-seeds", "topic-middle",
    "headline-zones", "topic-zones",
    "headline-partial", "topic-partial",
)  # fmt: skip
NEWS = {"swa": "swahili-news", "hau": "hausa-news", "yor": "yoruba-news"}
SENTIMENTS = ("negative", "neutral", "positive")
SEED = 20261122
"""Seed of the drawn tweets."""
TWEETS = {"train": 312, "dev": 33, "test": 150}
"""Tweets of each sentiment and split; English has as many negative ones."""
VALIDATION = 64
PROMPTS = 100
"""Sentences for choosing without labels."""

Row = Mapping[str, Any]


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def texts_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def headlines(published: Path) -> Iterable[Row]:
    """English headlines of the development, test and few-shot splits, without repetition."""
    seen = set()
    for split in ("dev", "test", "fewshot50"):
        for row in table(published / "masakhanews" / f"eng.{split}.tsv"):
            text = row["headline"].strip()
            if text not in seen:
                seen.add(text)
                yield {"headline": text, "category": row["category"]}


def translations(published: Path, code: str, split: str = "train") -> Iterable[Row]:
    """The sentence pairs of a split of MAFAND."""
    folder = published / "lafand_mt"
    sides = [
        (folder / f"en-{code}.{split}.{side}").read_text("utf-8").splitlines()
        for side in ("en", code)
    ]
    for english, other in zip(*sides, strict=True):
        yield {"translation": {"en": english, code: other}}


def prompts(published: Path, code: str) -> Iterable[tuple[Row, Row]]:
    """Prompts from MAFAND's development split, in the form of the task's.

    Yields:
        A sentence in the target language and the same in English, for `without_labels` of a sweep.
    """
    rows = [row["translation"] for row in translations(published, code, "dev")]
    pairs = [row for row in rows if all(map(str.strip, row.values()))]
    for i in range(PROMPTS):
        row = pairs[i * len(pairs) // PROMPTS]
        yield tuple({"text": f"Text: {row[side]}\nTopic:"} for side in (code, "en"))


def tweets(path: Path) -> list[tuple[str, str]]:
    """Tweets and their sentiments, without csv, which misreads quotation marks in tweets."""
    found = []
    for line in path.read_text("utf-8").splitlines()[1:]:
        text, _, label = line.rpartition("\t")
        found.append((text.strip().strip('"').replace('""', '"').strip(), label))
    return found


def drawn(rows: Sequence[tuple[str, str]], each: int, rng: random.Random) -> list[tuple[str, str]]:
    """An equal number of rows of each sentiment, in random order."""
    shuffled = list(rows)
    rng.shuffle(shuffled)
    kept = [row for one in SENTIMENTS for row in [r for r in shuffled if r[1] == one][:each]]
    rng.shuffle(kept)
    return kept


def balanced_tweets(published: Path, code: str) -> dict[str, list[tuple[str, str]]]:
    """Balanced tweets to evaluate on, by split; the Swahili ones come from the training split too.

    Its test split has 80 negative tweets, and no tweet of these languages is trained on.
    """
    rng, folder = random.Random(SEED), published / "afrisenti"
    development, test = (tweets(folder / f"{code}.{split}.tsv") for split in ("dev", "test"))
    more = tweets(folder / f"{code}.train.tsv") if code == "swa" else []
    known = {text for text, _ in development}
    fresh: dict[str, str] = {}
    for text, label in [*test, *more]:
        if text and text not in known:
            fresh.setdefault(text, label)
    return {split: drawn(rows, TWEETS[split], rng)
            for split, rows in (("dev", development), ("test", list(fresh.items())))}  # fmt: skip


def write_tweets(published: Path, out: Path) -> None:
    """Write `balanced_tweets` of all languages."""
    out.mkdir(parents=True, exist_ok=True)
    for code in NEWS:
        for split, rows in balanced_tweets(published, code).items():
            with (out / f"{code}.{split}.tsv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, delimiter="\t").writerows([("tweet", "label"), *rows])


def english_tweets(published: Path) -> Iterable[Row]:
    """An equal number of English tweets of each sentiment."""
    texts, labels = (
        (published / "tweeteval" / f"val_{part}.txt").read_text("utf-8").split("\n")
        for part in ("text", "labels")
    )
    found = {
        text.strip(): SENTIMENTS[int(label)]
        for text, label in zip(texts, labels, strict=False)
        if text.strip() and label
    }
    for text, label in drawn(list(found.items()), TWEETS["train"], random.Random(SEED)):
        yield {"text": text, "label": label}


def local_mix(name: str, file: str, **changes: Any) -> dict[str, Any]:
    """A ready mix with a local file as its source."""
    mix: dict[str, Any] = yaml.safe_load(mix_text(name))
    mix.pop("row_tokens", None)
    for source in mix["sources"].values():
        for key in ("id", "config", "split", "files", "format", "delimiter"):
            source.pop(key, None)
        source["path"] = file
    return {**mix, **changes}


def write_inputs(published: Path, out: Path, base: str) -> None:
    """Write data, mixes, tasks and study files."""
    out.mkdir(parents=True, exist_ok=True)
    mixes: dict[str, dict[str, Any]] = {}
    for code, name in NEWS.items():
        write_jsonl(out / f"{code}.jsonl", translations(published, code))
        target, english = zip(*prompts(published, code), strict=True)
        write_jsonl(out / f"{code}.prompts.jsonl", target)
        write_jsonl(out / f"{code}.prompts.en.jsonl", english)
        mixes[name] = local_mix(name, f"{code}.jsonl", validation=VALIDATION)
    sentences = table(published / "sib200" / "eng_Latn.train.tsv")
    kept = ({name: row[name] for name in ("text", "category")} for row in sentences)
    write_jsonl(out / "sib.jsonl", kept)
    mixes["sib200-english"] = local_mix("sib200-english", "sib.jsonl")
    english = list(headlines(published))
    write_jsonl(out / "news.jsonl", english)
    mixes["masakhanews-english"] = local_mix(
        "masakhanews-english", "news.jsonl", total=len(english), validation=VALIDATION
    )
    some = list(english_tweets(published))
    write_jsonl(out / "tweets.jsonl", some)
    mixes["tweeteval-english"] = local_mix(
        "tweeteval-english", "tweets.jsonl", total=len(some), validation=VALIDATION
    )
    mixes["tweeteval-english"]["sources"]["tweeteval"]["completion"] = " {{ label }}"
    for name, mix in mixes.items():
        text = yaml.safe_dump(mix, allow_unicode=True, sort_keys=False)
        (out / f"{name}.yaml").write_text(text, "utf-8")
    for folder in ("masakhanews", "sib200"):
        shutil.copytree(published / folder, out / "published" / folder, dirs_exist_ok=True)
    write_tweets(published, out / "published" / "afrisenti")
    data, tasks = DataFolder(out / "published"), TaskFolder(out / "tasks")
    write_suite("sib200", ["sw"], tasks, data=data, development=True)
    for name in STUDIES:
        text = (HERE / name / "study.yaml").read_text("utf-8")
        (out / f"{name}.yaml").write_text(
            text.replace("base: gemma-3-270m", f"base: {base}"), "utf-8"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("published", type=Path, help="folder of the published files")
    parser.add_argument("out", type=Path, help="folder of the inputs")
    parser.add_argument("--base", required=True, help="folder of Gemma 3 270M")
    given = parser.parse_args()
    write_inputs(given.published, given.out, str(Path(given.base).absolute()))


if __name__ == "__main__":
    main()
