"""`layerswap bases`: which base reads a language."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from layerswap.cli import options, output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from layerswap.evaluation.bases import Reading
    from layerswap.report.tables import Table


def bases(
    text: str,
    base: list[str],
    *,
    lines: Annotated[int, Option(min=10)] = 100,
    tokenizer_only: bool = False,
    device: options.Device = None,
) -> None:
    """Compare how bases read a language: tokens, byte tokens and bits per byte of a text.

    Prints a table with 95% intervals over lines; nothing is written. The best base is marked only
    if its interval to every other one allows it.

    Example: layerswap bases wolof.txt google/gemma-3-270m HuggingFaceTB/SmolLM2-135M

    Options:
        text TEXT: Text in the language, line by line.
        base BASE...: Folders, GGUF files or Hub ids.
        lines: Lines to read, evenly spaced over TEXT, 400 characters of each.
        tokenizer_only: Count tokens alone, without weights.
    """
    from layerswap.evaluation.bases import CHARACTERS, count_base, describe, find_best, read_sample
    from layerswap.ground.errors import RecipeError

    if twice := next((source for source in base if base.count(source) > 1), None):
        raise RecipeError(f"{twice}: is given twice; name each base once")
    sample = read_sample(text, lines)
    output.log(f"reading {len(sample)} lines of {text}, at most {CHARACTERS} characters of each")
    counts = []
    with output.step_progress("reading", len(base), "bases") as step:
        for source in base:
            counts.append(count_base(source, sample, weights=not tokenizer_only, device=device))
            step(1)
    readings = [
        describe(source, sample, counted) for source, counted in zip(base, counts, strict=True)
    ]
    best = find_best(sample, counts)
    facts = {
        "lines": len(sample),
        "best": None if best is None else base[best],
        "bases": [{**asdict(reading), "verdict": reading.verdict} for reading in readings],
    }
    notes = [f"note: {reading.base}: {reading.note}" for reading in readings if reading.note]
    lead = [] if best is None else [f"fewest bits: {base[best]}"]
    output.finish("bases", facts, [base_table(readings, best), *notes, *lead])


def base_table(readings: Sequence[Reading], best: int | None = None) -> Table:
    """Bases down, measures across; columns without a value are left out."""
    from layerswap.report.tables import Number, Table, words_of

    measures = {
        "tokens per word": ("per_word", ""),
        "tokens per character": ("per_character", ""),
        "byte tokens": ("byte_tokens", "%"),
        "bits per byte": ("bits_per_byte", ""),
        "spelling alone": ("spelling", ""),
        "verdict": ("verdict", ""),
    }
    kept = {name: measure for name, measure in measures.items()
            if any(getattr(reading, measure[0]) not in (None, "")
                   for reading in readings)}  # fmt: skip

    def cell(reading: Reading, field: str, unit: str) -> Any:
        value = getattr(reading, field)
        if value is None or isinstance(value, str):
            return value
        return Number(value, ".3f") if isinstance(value, float) else words_of(value, unit)

    rows = [
        [reading.base, *(cell(reading, *measure) for measure in kept.values())]
        for reading in readings
    ]
    caption = (
        "with 95% bootstrap intervals over lines; byte tokens in %. A base reads the text if it "
        "needs fewer bits than character trigrams of the text's other lines (spelling alone)"
    )
    bold = set() if best is None else {(best, 1 + list(kept).index("bits per byte"))}
    return Table(["base", *kept], rows, caption, bold=bold)
