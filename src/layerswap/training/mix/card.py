"""The data card of a mix as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.commit import atomic_folder
from layerswap.errors import DataError
from layerswap.training.mix.schema import parse_mix
from layerswap.versions import versions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from datasets import Dataset

    from layerswap.training.mix.build import BuiltMix
    from layerswap.training.mix.mapping import MixExample
    from layerswap.training.mix.schema import Mix


def markdown(card: dict[str, Any]) -> str:
    """The card as Markdown, with the front matter that the Hub and `datasets` read."""
    rows = card["rows"]
    parts = [
        _front_matter(card),
        f"# {card['name']}\n\n{card['description']}".rstrip(),
        f"{rows['train']:,} rows for training and {rows['validation']:,} for validation, as "
        f"`{card['kind']}`, drawn with seed {card['seed']}."
        + (f" {card['wanted']:,} were asked for." if card["wanted"] else "")
        + (f" {card['tokens']:,} tokens of {card['tokenizer']}." if card["tokenizer"] else ""),
        "## Sources",
        _sources_table(card),
        "## Filters",
        _filters_table(card),
    ]
    if card["evaluation_sets"]:
        parts += ["### Evaluation items that were kept out", _evaluation_table(card)]
    for title, key in (("Note", "note"), ("Not verified", "unverified")):
        if card[key]:
            lines = card[key] if isinstance(card[key], list) else [card[key]]
            parts += [f"## {title}", "\n".join(f"- {' '.join(line.split())}" for line in lines)]
    parts += ["## Examples", *_examples(card)]
    made_by = ", ".join(f"{name} {number}" for name, number in card["versions"].items() if number)
    return "\n\n".join([*parts, f"Made with {made_by}."]) + "\n"


def _front_matter(card: dict[str, Any]) -> str:
    files = [("train", "train.parquet")]
    if card["rows"]["validation"]:
        files.append(("validation", "validation.parquet"))
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    lines += [f"  - split: {split}\n    path: {path}" for split, path in files]
    if card["languages"]:
        lines += ["language:", *(f"- {json.dumps(code)}" for code in card["languages"])]
    return "\n".join([*lines, "tags:", "- layerswap", "---"])


def _sources_table(card: dict[str, Any]) -> str:
    tokens = bool(card["tokenizer"])
    lines = [
        "| source | from | licence | rows | looked at | dropped | kept |"
        + (" tokens |" if tokens else ""),
        "|---|---|---|--:|--:|--:|--:|" + ("--:|" if tokens else ""),
    ]
    for name, facts in card["sources"].items():
        dropped = sum(facts["dropped"].values()) + facts["empty"] + facts["left_out_by_where"]
        lines.append(
            f"| {name} | {_cell(facts['origin'])} | {facts['licence'] or 'not stated'} "
            f"| {facts['rows']:,} | {facts['looked_at']:,} | {dropped:,} | {facts['kept']:,} |"
            + (f" {facts['tokens']:,} |" if tokens else "")
        )
    return "\n".join(lines)


def _filters_table(card: dict[str, Any]) -> str:
    columns = ["left_out_by_where", "empty", *card["filters"]]
    titles = [column.replace("_", " ") for column in columns]
    lines = ["| source | " + " | ".join(titles) + " |", "|---|" + "--:|" * len(columns)]
    for name, facts in card["sources"].items():
        counts = Counter({column: facts.get(column, 0) for column in columns[:2]})
        counts.update(facts["dropped"])
        lines.append(f"| {name} | " + " | ".join(f"{counts[c]:,}" for c in columns) + " |")
    for name, facts in card["filters"].items():
        for dropped in facts["examples"]:
            lines.append(
                ("" if lines[-1].startswith("- ") else "\n")
                + f"- {name.replace('_', ' ')}, {dropped['source']}: {dropped['why']}: "
                f"{_cell(dropped['text'])[:160]}"
            )
    return "\n".join(lines)


def _evaluation_table(card: dict[str, Any]) -> str:
    lines = ["| set | items | n-gram | too short to look for |", "|---|--:|---|--:|"]
    for name, facts in card["evaluation_sets"].items():
        lines.append(
            f"| {name} | {facts['items']:,} | {facts['n']} {facts['unit']} "
            f"| {facts['too_short']:,} |"
        )
    return "\n".join(lines)


def _examples(card: dict[str, Any]) -> list[str]:
    return [
        f"### {name}\n\n" + "\n\n".join(
            "```\n" + "\n".join(f"{part}: {text}" for part, text in example.items() if text)
            .replace("```", "'''") + "\n```"
            for example in facts["examples"]
        )
        for name, facts in card["sources"].items() if facts["examples"]
    ]  # fmt: skip


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


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


def _by_source(built: BuiltMix) -> dict[str, list[MixExample]]:
    examples: dict[str, list[MixExample]] = {name: [] for name in built.tallies}
    for example in built.examples:
        examples[example.source].append(example)
    return examples


def _source_facts(built: BuiltMix, name: str, examples: list[MixExample]) -> dict[str, Any]:
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


def _token_counts(
    by_source: dict[str, list[MixExample]], tokenizer: str
) -> dict[str, dict[str, int]]:
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


def _shown(example: MixExample) -> dict[str, str]:
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
