"""Fit and measure the detector of mathematics (`layerswap.training.mix.mathematics`).

    python bench/math_filter.py DATA          # the numbers of docs/training.md
    python bench/math_filter.py DATA --fit    # the weights, from the other half of the data

DATA holds folders of public data sets as their repositories publish them: gsm8k, mgsm, afriqa_sw,
xcopa_sw, tico19, flores200_devtest, tatoeba_v20210807, ud_telugu_mtg, megagon_instruction_ja,
ja_vicuna_qa, jglue, jmmlu, mmlu_en, belebele, mbpp. Rows with an even index are for fitting and
those with an odd one for measuring; of MGSM the first 125 and the last 125; of GSM8K the train
split and the test split without its first 250 rows, which are MGSM's.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
from collections.abc import Iterator
from pathlib import Path

from layerswap.training.mix.mathematics import (
    MATH_THRESHOLD,
    MathFeatures,
    math_features,
    math_probability,
)

Rows = list[tuple[str, str]]
LANGUAGES = ("en", "sw", "bn", "te", "ja")
OTHERS = ("de", "es", "fr", "ru", "zh", "th")
FLORES = {"sw": "swh_Latn", "bn": "ben_Beng", "te": "tel_Telu", "ja": "jpn_Jpan"}
TATOEBA = {"sw": "eng-swa.swa", "bn": "ben-eng.ben", "te": "eng-tel.tel", "ja": "eng-jpn.jpn"}
QUANTITATIVE = (
    "mathematics", "abstract_algebra", "statistics", "econometrics", "physics", "chemistry",
    "engineering", "formal_logic", "astronomy", "accounting", "machine_learning",
    "computer_science",
)  # fmt: skip
"""Subjects of MMLU that calculate; neither mathematics nor generic, so left out of both."""
NEGATIVE_WEIGHT = 4
"""All generic sets together weigh so many times as much as all sets of problems."""


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


def mgsm(data: Path, language: str) -> Rows:
    text = lines(data / f"mgsm/mgsm_{language}.tsv")
    return [(q, a) for q, a in csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)]


def gsm8k(data: Path, split: str) -> Rows:
    rows = [(row["question"], row["answer"]) for row in jsonl(data / f"gsm8k/{split}.jsonl")]
    return rows[250:] if split == "test" else rows


def questions(rows: Rows) -> Rows:
    return [(question, "") for question, _ in rows]


def numbers(rows: Rows) -> Rows:
    return [(question, answer.rsplit("####", 1)[-1].strip()) for question, answer in rows]


def generic(data: Path) -> Iterator[tuple[str, str, Rows]]:
    """Language, name and rows of every generic set."""
    yield from swahili(data)
    yield from japanese(data)
    yield from english(data)
    english_lines = lines(data / "flores200_devtest/eng_Latn.devtest")
    for language, code in FLORES.items():
        target = lines(data / f"flores200_devtest/{code}.devtest")
        yield from both_ways(language, "FLORES", english_lines, target)
        name = TATOEBA[language]
        source = lines(data / f"tatoeba_v20210807/{name.split('.')[0]}.eng")[:2500]
        target = lines(data / f"tatoeba_v20210807/{name}")[:2500]
        yield from both_ways(language, "Tatoeba", source, target)
    for language, code in (("sw", "swa"), ("bn", "ben")):
        stem = data / f"tico19/tico19-test.eng-{code}"
        yield from both_ways(language, "TICO-19", lines(Path(f"{stem}.eng")),
                             lines(Path(f"{stem}.{code}")))  # fmt: skip
    treebank = [
        (line.removeprefix("# text = "), "")
        for split in ("train", "dev", "test")
        for line in lines(data / f"ud_telugu_mtg/te_mtg-ud-{split}.conllu")
        if line.startswith("# text = ")
    ]
    yield "te", "UD MTG, sentences", treebank


def both_ways(
    language: str, name: str, english: list[str], target: list[str]
) -> Iterator[tuple[str, str, Rows]]:
    yield language, f"{name}, from English", list(zip(english, target, strict=True))
    yield language, f"{name}, into English", list(zip(target, english, strict=True))
    yield language, f"{name}, text alone", [(text, "") for text in target]


def swahili(data: Path) -> Iterator[tuple[str, str, Rows]]:
    rows = [
        row
        for split in ("train", "dev", "test")
        for row in jsonl(data / f"afriqa_sw/queries.afriqa.swa.en.{split}.json")
    ]
    yield "sw", "AfriQA", [(row["question"], first(row["answers"])) for row in rows]
    yield "en", "AfriQA", [(r["translated_question"], first(r["translated_answer"])) for r in rows]
    yield "sw", "XCOPA", [
        (f"{r['premise']} {r['question']}? {r['choice1']} / {r['choice2']}",
         r[f"choice{r['label'] + 1}"])
        for split in ("val", "test") for r in jsonl(data / f"xcopa_sw/{split}.sw.jsonl")
    ]  # fmt: skip


def first(answers: str) -> str:
    try:
        return str(next(iter(ast.literal_eval(answers)), ""))
    except (SyntaxError, ValueError):
        return answers


def japanese(data: Path) -> Iterator[tuple[str, str, Rows]]:
    said = [row["utterances"] for row in jsonl(data / "megagon_instruction_ja/data.jsonl")]
    yield (
        "ja",
        "instruction_ja",
        [(spoken(turns, "user"), spoken(turns, "agent")) for turns in said],
    )
    yield "ja", "Vicuna QA", [
        (row["turns"][0], "") for row in jsonl(data / "ja_vicuna_qa/question.jsonl")
        if row["category"] not in ("math", "fermi")
    ]  # fmt: skip
    common = jsonl(data / "jglue/jcommonsenseqa/jcommonsenseqa-train-v1.3.json")[:3000]
    yield "ja", "JCommonsenseQA", [(r["question"], r[f"choice{r['label']}"]) for r in common]
    squad = json.loads((data / "jglue/jsquad/jsquad-valid-v1.3.json").read_text("utf-8"))
    yield "ja", "JSQuAD, with passage", [
        (f"{p['context']}\n{qa['question']}", qa["answers"][0]["text"])
        for article in squad["data"] for p in article["paragraphs"] for qa in p["qas"]
    ]  # fmt: skip
    yield "ja", "JMMLU, other subjects", choices(
        row
        for path in sorted((data / "jmmlu").glob("*.csv")) if not quantitative(path)
        for row in csv.reader(path.open(encoding="utf-8-sig", newline=""))
    )  # fmt: skip


def spoken(turns: list[dict], name: str) -> str:
    return "\n".join(turn["text"] for turn in turns if turn["name"] == name)


def english(data: Path) -> Iterator[tuple[str, str, Rows]]:
    yield "en", "MMLU, other subjects", mmlu(data, lambda path: not quantitative(path))
    yield "en", "Belebele, with passage", [
        (f"{row['text']}\n{item['question']}",
         next(answer["text"] for answer in item["answers"] if answer["correct"]))
        for row in jsonl(data / "belebele/eng_Latn.item-evaluation.jsonl") for item in row["items"]
    ]  # fmt: skip
    yield (
        "en",
        "MBPP, code",
        [(row["text"], row["code"]) for row in jsonl(data / "mbpp/mbpp.jsonl")],
    )


def quantitative(path: Path) -> bool:
    return any(subject in path.stem for subject in QUANTITATIVE)


def mmlu(data: Path, wanted) -> Rows:
    return choices(
        [row["question"], *(row[f"choice{i}"] for i in range(4)), "ABCD"[int(row["answer"])]]
        for path in sorted((data / "mmlu_en/test").glob("*.csv")) if wanted(path)
        for row in csv.DictReader(path.open(encoding="utf-8", newline=""))
    )  # fmt: skip


def choices(rows) -> Rows:
    return [
        (row[0] + "".join(f"\n{'ABCD'[i]}. {text}" for i, text in enumerate(row[1:5])), row[5])
        for row in rows
    ]


def exams(data: Path) -> Iterator[tuple[str, str, Rows]]:
    for name in ("elementary_mathematics", "high_school_mathematics"):
        yield "en", f"MMLU {name}", mmlu(data, lambda path, name=name: name in path.stem)
        path = data / f"jmmlu/{name}.csv"
        yield (
            "ja",
            f"JMMLU {name}",
            choices(csv.reader(path.open(encoding="utf-8-sig", newline=""))),
        )


def problems(data: Path, *, fit: bool) -> Iterator[tuple[str, str, Rows]]:
    """Language, name and rows of every set of mathematics, to fit on or to measure on."""
    part = slice(0, 125) if fit else slice(125, 250)
    if fit:
        train = gsm8k(data, "train")
        yield "en", "GSM8K", train[:2000]
        yield "en", "GSM8K, question alone", questions(train[2000:4000])
        yield "en", "GSM8K, number alone", numbers(train[4000:6000])
    else:
        test = gsm8k(data, "test")
        yield "en", "GSM8K, with solution", test
        yield "en", "GSM8K, question alone", questions(test)
        yield "en", "GSM8K, with number", numbers(test)
    for language in LANGUAGES if not fit else LANGUAGES[1:]:
        rows = mgsm(data, language)[part]
        yield language, "MGSM, with number", rows
        yield language, "MGSM, question alone", questions(rows)
    for language, name, rows in exams(data):
        yield language, name, rows[0 if fit else 1 :: 2]
    for language in () if fit else OTHERS:
        yield language, "MGSM, with number", mgsm(data, language)[part]
        yield language, "MGSM, question alone", questions(mgsm(data, language)[part])


def measure(data: Path) -> None:
    found: dict[str, list[int]] = {}
    print("| language | mathematics | rows | recall |\n|---|---|--:|--:|")
    for language, name, rows in problems(data, fit=False):
        hits = sum(math_probability(*row) >= MATH_THRESHOLD for row in rows)
        print(f"| {language} | {name} | {len(rows):,} | {hits / len(rows):.1%} |")
        if name.startswith(("GSM8K", "MGSM")):
            totals = found.setdefault(language, [0, 0, 0, 0])
            totals[0] += hits
            totals[1] += len(rows)
    print("\n| language | generic | rows | dropped |\n|---|---|--:|--:|")
    for language, name, every in generic(data):
        rows = every[1::2]
        hits = sum(math_probability(*row) >= MATH_THRESHOLD for row in rows)
        print(f"| {language} | {name} | {len(rows):,} | {hits / len(rows):.2%} |")
        found[language][2] += hits
        found[language][3] += len(rows)
    print("\n| language | recall | generic rows dropped | precision, 1 in 2 | precision, 1 in 20 |")
    print("|---|--:|--:|--:|--:|")
    for language in LANGUAGES:
        hit, positive, wrong, negative = found[language]
        recall, rate = hit / positive, wrong / negative
        precisions = " | ".join(f"{precision(recall, rate, prior):.1%}" for prior in (0.5, 0.05))
        print(f"| {language} | {recall:.1%} | {rate:.2%} | {precisions} |")


def precision(recall: float, rate: float, prior: float) -> float:
    """Of what is dropped, the share that is mathematics, if `prior` of all rows is."""
    return prior * recall / (prior * recall + (1 - prior) * rate)


def fit(data: Path) -> None:
    import numpy as np
    from sklearn.linear_model import LogisticRegression

    features, labels, weights = [], [], []
    sets = [(1, rows) for _, _, rows in problems(data, fit=True)]
    negative = [(0, rows[0::2]) for _, _, rows in generic(data)]
    share = NEGATIVE_WEIGHT * len(sets) / len(negative)
    for label, rows in sets + negative:
        features += [math_features(*row) for row in rows]
        labels += [label] * len(rows)
        weights += [(1 if label else share) / len(rows)] * len(rows)
    scale = len(weights) / sum(weights)
    model = LogisticRegression(C=1.0, max_iter=5000)
    model.fit(np.array(features), labels, sample_weight=np.array(weights) * scale)
    for name, weight in zip(MathFeatures._fields, model.coef_[0], strict=True):
        print(f"  {name}: {weight:.2f}")
    print(f"bias: {model.intercept_[0]:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--fit", action="store_true")
    chosen = parser.parse_args()
    (fit if chosen.fit else measure)(chosen.data)
