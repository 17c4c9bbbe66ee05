"""Measure how well evaluation items are found (`layerswap.training.mix.filters`).

    python bench/contamination.py DATA

DATA as for `bench/math_filter.py`. Prints, for FLORES devtest and MGSM in five languages, how many
items are found inside a longer text, as they stand and with one word (in Japanese one character)
replaced at random; and how many rows of the generic sets and of GSM8K's train split are taken for
items although they hold none.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from layerswap.training.mix.filters import ItemIndex
from math_filter import FLORES, LANGUAGES, generic, gsm8k, lines, mgsm


def replaced(text: str, language: str, generator: random.Random) -> str:
    parts = list(text) if language == "ja" else text.split()
    parts[generator.randrange(len(parts))] = "々" if language == "ja" else "qqq"
    return "".join(parts) if language == "ja" else " ".join(parts)


def main() -> None:
    data, generator, index = Path(sys.argv[1]), random.Random(0), ItemIndex()
    print("| set | n | items found | with one word replaced |\n|---|---|--:|--:|")
    for language in LANGUAGES:
        code = FLORES.get(language, "eng_Latn")
        sets = {
            f"FLORES, {language}": lines(data / f"flores200_devtest/{code}.devtest"),
            f"MGSM, {language}": [question for question, _ in mgsm(data, language)],
        }
        for name, items in sets.items():
            indexed = index.add(name, items)
            whole = sum(index.find(f"Translate: {item} Thanks.") is not None for item in items)
            other = sum(
                index.find(replaced(item, language, generator)) is not None for item in items
            )
            print(
                f"| {name} | {indexed.n} {indexed.unit} | {whole / len(items):.1%} "
                f"| {other / len(items):.1%} |"
            )
    rows = [
        row for _, name, every in generic(data)
        if not name.startswith(("FLORES", "Belebele"))  # Belebele's passages are FLORES's
        for row in every
    ]  # fmt: skip
    rows += gsm8k(data, "train")
    wrong = [row for row in rows if index.find("\n".join(row))]
    print(f"\n{len(wrong)} of {len(rows):,} other rows taken for items")
    for row in wrong[:5]:
        print("   ", index.find("\n".join(row)), "in", row)


if __name__ == "__main__":
    main()
