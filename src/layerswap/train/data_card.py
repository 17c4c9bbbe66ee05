"""The data card of a mix, in JSON and Markdown, and the folder that a built mix is written to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.commit import atomic_folder
from layerswap.checkpoint.versions import versions
from layerswap.errors import DataError
from layerswap.train.card_text import markdown
from layerswap.train.mix_file import parse_mix

if TYPE_CHECKING:
    from collections.abc import Iterable

    from datasets import Dataset

    from layerswap.train.mapping import Example
    from layerswap.train.mix_schema import Mix
    from layerswap.train.mixes import BuiltMix

CARD = "data_card.json"
"""The file that marks a folder as written by `save_mix`."""
EXAMPLES = 2
"""How many examples of each source the card shows."""
SHOWN_CHARACTERS = 400
_LIBRARIES = ("layerswap", "datasets", "datasketch", "py3langid")


def data_card(built: BuiltMix, tokenizer: str | None = None) -> dict[str, Any]:
    """Everything a reader should know of a built mix, as plain data.

    Args:
        built: the mix.
        tokenizer: a folder or Hub id; its tokens are counted if given, in the texts themselves,
            without what a chat template adds.

    Raises:
        DataError: the tokenizer cannot be loaded.
    """
    mix, by_source = built.mix, _by_source(built)
    tokens = _token_counts(by_source, tokenizer) if tokenizer else {}
    sources = {
        name: _source_facts(built, name, examples) | tokens.get(name, {})
        for name, examples in by_source.items()
    }
    return {
        "name": mix.name,
        "description": mix.description,
        "kind": mix.kind,
        "languages": mix.languages,
        "seed": mix.seed,
        "rows": {"train": len(built.train), "validation": len(built.validation)},
        "wanted": mix.total,
        "tokenizer": tokenizer,
        **({"tokens": sum(facts["tokens"] for facts in sources.values())} if tokenizer else {}),
        "sources": sources,
        "filters": _filter_facts(built),
        "evaluation_sets": (
            {name: indexed._asdict() for name, indexed in built.index.sets.items()}
            if built.index
            else {}
        ),
        "note": mix.note,
        "unverified": _unverified(mix),
        "versions": versions(*_LIBRARIES),
    }


def save_mix(
    built: BuiltMix,
    out: Path,
    *,
    recipe: str,
    card: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a built mix: parquet, the card in Markdown and JSON, and the recipe.

    The folder is a data set that `datasets.load_dataset` reads, and can be put on the Hub.

    Args:
        built: the mix.
        out: the folder to create.
        recipe: the YAML that it was built from.
        card: what `data_card` says of it; made if not given.
        overwrite: replace a folder that was written by this function.

    Raises:
        MergeError: the folder exists and may not be replaced, or the disk refuses.
    """
    card = card or data_card(built)
    target = out.expanduser().absolute()
    with atomic_folder(target, marker=CARD, overwrite=overwrite) as folder:
        built.train.to_parquet(folder / "train.parquet")
        if len(built.validation):
            built.validation.to_parquet(folder / "validation.parquet")
        (folder / CARD).write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", "utf-8")
        (folder / "README.md").write_text(markdown(card), "utf-8")
        (folder / "mix.yaml").write_text(recipe, "utf-8")
    return target


def load_saved(folder: Path) -> tuple[Mix, Dataset, Dataset | None]:
    """The recipe, the training rows and the validation rows in a folder of `save_mix`.

    Raises:
        DataError: the folder does not hold a mix.
    """
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    for name in (CARD, "mix.yaml", "train.parquet"):
        if not (folder / name).is_file():
            raise DataError(f"{folder}: no {name}; give a folder that `layerswap data` wrote")
    mix = parse_mix((folder / "mix.yaml").read_text("utf-8"), where=str(folder / "mix.yaml"))
    validation = folder / "validation.parquet"
    return (
        mix,
        Dataset.from_parquet(str(folder / "train.parquet")),
        Dataset.from_parquet(str(validation)) if validation.is_file() else None,
    )


def _by_source(built: BuiltMix) -> dict[str, list[Example]]:
    examples: dict[str, list[Example]] = {name: [] for name in built.tallies}
    for example in built.examples:
        examples[example.source].append(example)
    return examples


def _source_facts(built: BuiltMix, name: str, examples: list[Example]) -> dict[str, Any]:
    source, tally = built.mix.sources[name], built.tallies[name]
    prompts = [len(example.prompt) for example in examples]
    completions = [len(example.completion) for example in examples]
    return {
        "origin": tally.origin,
        "config": source.config,
        "split": source.split,
        "licence": source.licence,
        "language": source.language,
        "rows": tally.rows,
        "looked_at": tally.looked_at,
        "left_out_by_where": tally.not_wanted,
        "empty": tally.empty,
        "dropped": {f: counts[name] for f, counts in built.sieve.counts.items() if counts[name]},
        "kept": tally.kept,
        "mean_prompt_characters": _mean(prompts),
        "mean_completion_characters": _mean(completions),
        "examples": [_shown(example) for example in examples[:EXAMPLES]],
        "note": source.note,
    }


def _filter_facts(built: BuiltMix) -> dict[str, Any]:
    settings = built.mix.filters.model_dump(exclude={"evaluation": {"against"}})
    return {
        name: {
            "settings": settings[name] if isinstance(settings[name], dict) else {},
            "dropped": sum(counts.values()),
            "examples": [
                {"source": d.source, "why": d.why, "text": _cut(d.text)}
                for d in built.sieve.shown[name]
            ],
        }
        for name, counts in built.sieve.counts.items()
    }


def load_tokenizer(name: str) -> Any:
    """The tokenizer in a folder or on the Hub.

    Raises:
        DataError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # what the Hub and the tokenizers raise shares no class
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"--tokenizer {name}: cannot be loaded ({reason})") from None


def _token_counts(by_source: dict[str, list[Example]], tokenizer: str) -> dict[str, dict[str, int]]:
    encoder = load_tokenizer(tokenizer)

    def count(texts: Iterable[str]) -> int:
        kept = [text for text in texts if text]
        if not kept:
            return 0
        return sum(map(len, encoder(kept, add_special_tokens=False, verbose=False)["input_ids"]))

    counts = {}
    for name, examples in by_source.items():
        completion = count(example.completion for example in examples)
        prompt = count(example.prompt for example in examples)
        counts[name] = {"tokens": prompt + completion, "completion_tokens": completion}
    return counts


def _shown(example: Example) -> dict[str, str]:
    return {"prompt": _cut(example.prompt), "completion": _cut(example.completion)}


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " [...]"


def _mean(lengths: list[int]) -> float:
    return round(sum(lengths) / len(lengths), 1) if lengths else 0.0


def _unverified(mix: Mix) -> list[str]:
    found = list(mix.unverified)
    for name, source in mix.sources.items():
        found += [f"{name}: {text}" for text in source.unverified]
    evaluation = mix.filters.evaluation
    for name, origin in (evaluation.against if evaluation else {}).items():
        found += [f"{name}: {text}" for text in origin.unverified]
    return found
