"""Measures how a base reads a text: tokens, byte tokens, and bits per byte.

Tokens of different tokenizers do not compare, bytes do. A base reads a language if it predicts a
text better than character trigrams that have seen nothing but other lines of that text.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from layerswap.engine.rows import pad_with_mask
from layerswap.evaluation.statistics import Interval, ratio_interval
from layerswap.ground.errors import DataError
from layerswap.ground.types import counted
from layerswap.reading.files import check_text, evenly_spaced, lines_of

LINES = 100
"""Lines that are read of a text, evenly spaced."""
FEWEST_LINES = 10
GLANCE, CHARACTERS = 50, 400
"""Lines that a glance reads, and characters that are read of a line."""
WINDOW = 512
"""Tokens that a model reads at once; a longer line is read in pieces."""
ORDER = 2
"""Length of the context of the spelling model, in characters."""
FOLDS = 5
LONGEST_WORD = 15.0
"""Mean characters of a word above which a script writes no spaces between words."""
MOST_BYTES = 0.5
"""Share of byte tokens above which a tokenizer spells a language."""


@dataclass(frozen=True)
class Counts:
    """What a base makes of each line, float64 `(lines,)`."""

    tokens: npt.NDArray[np.float64]
    byte_tokens: npt.NDArray[np.float64]
    unknown: int  # tokens that stand for any unknown character
    bits: npt.NDArray[np.float64] | None = None  # None without weights


@dataclass(frozen=True)
class Reading:
    """Tokens per word, bytes and bits of a base on a text, with 95% intervals over lines."""

    base: str
    per_word: Interval | None  # tokens; None for a script without spaces
    per_character: Interval  # tokens
    byte_tokens: Interval  # share of the tokens
    bits_per_byte: Interval | None
    spelling: float | None  # bits per byte of `spelling_bits`
    better_than_spelling: Interval | None  # bits per byte of the spelling model minus the base's
    note: str = ""

    @property
    def verdict(self) -> str:
        """Whether the base reads the text, in words; empty if that was not measured."""
        better = self.better_than_spelling
        if better is None:
            return "spells it in bytes" if self.byte_tokens.mean > MOST_BYTES else ""
        if better.low > 0:
            return "reads it"
        return "does not read it" if better.high < 0 else "unclear"

    def line(self, language: str) -> str:
        """Describe the reading of a language in one line."""
        words = self.per_word or self.per_character
        unit = "word" if self.per_word else "character"
        parts = [f"{words.mean:.2f} tokens per {unit}", f"{self.byte_tokens.mean:.1%} byte tokens"]
        if self.bits_per_byte and self.spelling is not None:
            parts += [f"{self.bits_per_byte.mean:.2f} bits per byte ({self.spelling:.2f} from the "
                      "spelling alone)"]  # fmt: skip
        verdict = {
            "does not read it": f"the base does not read {language}; compare others by `layerswap "
            "bases`",
            "unclear": f"the base hardly reads {language}",
            "reads it": f"the base reads {language}",
            "spells it in bytes": f"the base spells {language} in bytes",
            "": self.note,
        }  # fmt: skip
        said = "; ".join(filter(None, [verdict[self.verdict], ", ".join(parts)]))
        return f"{self.base}: {said}"


# --- texts ---


def read_sample(text: str, count: int = LINES) -> Sequence[str]:
    """Read the beginnings of evenly spaced lines of a text.

    Raises:
        DataError: the file is not plain text, or there are too few lines.
    """
    check_text(text)
    lines = [line.strip() for line in lines_of(text) if line.strip()]
    if len(lines) < FEWEST_LINES:
        raise DataError(
            f"{text}: {counted(len(lines), 'line')}, too few for an interval; give at least "
            f"{FEWEST_LINES}, one sentence each"
        )
    return [line[:CHARACTERS].strip() for line in evenly_spaced(lines, count)]


def is_spaced(lines: Sequence[str]) -> bool:
    """True if the script writes spaces between words."""
    words = sum(len(line.split()) for line in lines)
    return sum(map(len, lines)) <= LONGEST_WORD * words


# --- tokens and bits ---


def count_tokens(tokenizer: Any, lines: Sequence[str]) -> Counts:
    """Count the tokens of lines, and tokens that are a part of a character's bytes."""
    ids = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines]
    spelt = {token: "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([token])
             for token in set().union(*ids)}  # fmt: skip
    unknown = getattr(tokenizer, "unk_token_id", None)
    tokens = np.array([len(line) for line in ids], float)
    parts = np.array([sum(spelt[token] for token in line) for line in ids], float)
    return Counts(tokens, parts, sum(line.count(unknown) for line in ids))


def bits_of(model: Any, tokenizer: Any, lines: Sequence[str]) -> npt.NDArray[np.float64]:
    """Compute the bits of each line under a model, as lm-eval's rolling log-likelihood.

    A line begins after the beginning-of-sequence token, or after the end-of-sequence token if the
    tokenizer has no other. Pieces of a long line are independent.
    """
    import torch

    first = tokenizer.bos_token_id
    first = tokenizer.eos_token_id if first is None else first
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or WINDOW
    pieces = list(_pieces(tokenizer, lines, first, min(WINDOW, longest)))
    bits = np.zeros(len(lines))
    with torch.inference_mode():
        for batch in _batches(pieces):
            ids, mask = (part.to(model.device) for part in pad_with_mask([row for _, row in batch]))
            logits = model(ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            for (line, tokens), scores, target in zip(batch, logits, ids[:, 1:], strict=True):
                own = slice(len(tokens) - 1)
                loss = torch.nn.functional.cross_entropy(
                    scores[own].float(), target[own], reduction="sum"
                )
                bits[line] += float(loss) / math.log(2)
    return bits


def _pieces(
    tokenizer: Any, lines: Sequence[str], first: int, longest: int
) -> Iterator[tuple[int, list[int]]]:
    for number, line in enumerate(lines):
        ids = tokenizer(line, add_special_tokens=False)["input_ids"]
        for start in range(0, len(ids), longest - 1):
            yield number, [first, *ids[start : start + longest - 1]]


def _batches(pieces: list[tuple[int, list[int]]]) -> Iterator[list[tuple[int, list[int]]]]:
    """Group pieces of similar length. Logits of a large vocabulary take a megabyte a token."""
    batch: list[tuple[int, list[int]]] = []
    for piece in sorted(pieces, key=lambda piece: len(piece[1])):
        if batch and (len(batch) + 1) * len(piece[1]) > WINDOW:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def spelling_bits(lines: Sequence[str]) -> npt.NDArray[np.float64]:
    """Compute the bits of each line under character trigrams of the other lines.

    Trigrams are smoothed by Witten & Bell (1991); an unseen character costs its UTF-8 bytes. Lines
    are predicted in `FOLDS` parts, each from the lines of the other parts.
    """
    texts = ["\n" * ORDER + line for line in lines]
    bits = np.zeros(len(texts))
    for fold in range(FOLDS):
        seen: dict[str, Counter[str]] = defaultdict(Counter)
        for text in (text for i, text in enumerate(texts) if i % FOLDS != fold):
            for at in range(ORDER, len(text)):
                for order in range(ORDER + 1):
                    seen[text[at - order : at]][text[at]] += 1
        totals = {context: counter.total() for context, counter in seen.items()}
        for i in range(fold, len(texts), FOLDS):
            for at in range(ORDER, len(texts[i])):
                bits[i] -= math.log2(_share(seen, totals, texts[i][at - ORDER : at], texts[i][at]))
    return bits


def _share(
    seen: dict[str, Counter[str]], totals: dict[str, int], before: str, character: str
) -> float:
    """Mix the shares of a character after longer and longer contexts."""
    share = 256.0 ** -len(character.encode())
    for order in range(ORDER + 1):
        counter = seen.get(before[ORDER - order :])
        if counter is None:
            break
        total = totals[before[ORDER - order :]]
        share = (counter[character] + len(counter) * share) / (total + len(counter))
    return share


# --- bases ---


def count_base(
    source: str, lines: Sequence[str], *, weights: bool = True, device: str | None = None
) -> Counts:
    """Count the tokens of lines under a base, and with `weights` their bits.

    Args:
        source: folder, GGUF file or Hub id; without `weights` no weights are downloaded or read.
        lines: lines of a text.
        weights: load the model.
        device: device of the model; a GPU if there is one.

    Raises:
        CheckpointError: the base or its tokenizer cannot be loaded.
    """
    from layerswap.checkpoint.loading import (
        load_causal_lm,
        load_tokenizer,
        open_device,
        pick_device,
    )

    folder, gguf = _located(source, weights=weights)
    tokenizer = load_tokenizer(folder, named=source, gguf=gguf)
    if not weights:
        return count_tokens(tokenizer, lines)
    on = open_device(pick_device(device))
    dtype = "float32" if on.type == "cpu" else "auto"
    model: Any = load_causal_lm(folder, dtype=dtype, named=source, gguf=gguf)
    return measured(model.to(on), tokenizer, lines)


def measured(model: Any, tokenizer: Any, lines: Sequence[str]) -> Counts:
    """Count tokens and bits of lines under a model in memory."""
    counts = count_tokens(tokenizer, lines)
    # An unknown token stands for many characters, so its bits are too few.
    return counts if counts.unknown else replace(counts, bits=bits_of(model, tokenizer, lines))


def _located(source: str, *, weights: bool) -> tuple[str, str | None]:
    """Return a base's local folder, and the name of its GGUF file."""
    from pathlib import Path

    from layerswap.checkpoint import open_checkpoint
    from layerswap.checkpoint.given import fetch_checkpoint
    from layerswap.checkpoint.header import is_gguf

    if not is_gguf(source):
        return str(fetch_checkpoint(source, weights=weights)[0]), None
    file = Path(str(next(iter(open_checkpoint(source).tensors.values())).file))
    return str(file.parent), file.name


def describe(base: str, lines: Sequence[str], counts: Counts) -> Reading:
    """Compute the ratios of a base, and their intervals, from its counts by line."""
    words = np.array([len(line.split()) for line in lines], float)
    size, bits = _bytes(lines), counts.bits
    floor = None if bits is None else spelling_bits(lines)
    return Reading(
        base=base,
        per_word=ratio_interval(counts.tokens, words) if is_spaced(lines) else None,
        per_character=ratio_interval(counts.tokens, np.array([*map(len, lines)], float)),
        byte_tokens=ratio_interval(counts.byte_tokens, counts.tokens),
        bits_per_byte=None if bits is None else ratio_interval(bits, size),
        spelling=None if floor is None else float(floor.sum() / size.sum()),
        better_than_spelling=None
        if floor is None or bits is None
        else ratio_interval(floor - bits, size),
        note=f"{counts.unknown:,} tokens stand for unknown characters, so it has no bits per byte"
        if counts.unknown
        else "",
    )


def find_best(lines: Sequence[str], counts: Sequence[Counts]) -> int | None:
    """Find the base with the fewest bits; None unless it is below each other one with 95%.

    All bases are compared on the same resampled lines.
    """
    if len(counts) < 2 or any(base.bits is None for base in counts):
        return None
    size, bits = _bytes(lines), [np.asarray(base.bits) for base in counts]
    best = min(range(len(bits)), key=lambda i: float(bits[i].sum()))
    others = [bits[i] for i in range(len(bits)) if i != best]
    return best if all(ratio_interval(bits[best] - row, size).high < 0 for row in others) else None


def glance(base: str, model: Any, tokenizer: Any, texts: Sequence[str]) -> Reading | None:
    """Describe how a model in memory reads a few texts; None for fewer than ten."""
    full = [" ".join(text.split())[:CHARACTERS].strip() for text in texts if text.strip()]
    if len(full) < FEWEST_LINES:
        return None
    lines = evenly_spaced(full, GLANCE)
    return describe(base, lines, measured(model, tokenizer, lines))


def _bytes(lines: Sequence[str]) -> npt.NDArray[np.float64]:
    return np.array([len(line.encode()) for line in lines], float)
