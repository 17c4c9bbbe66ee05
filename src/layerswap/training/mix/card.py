"""Writes a built mix with its data card, and reads it back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.commit import atomic_folder
from layerswap.checkpoint.loading import load_tokenizer
from layerswap.errors import DataError
from layerswap.training.mix.schema import parse_mix
from layerswap.versions import versions

if TYPE_CHECKING:
    from datasets import Dataset

    from layerswap.training.mix.build import BuiltMix
    from layerswap.training.mix.mapping import MixExample
    from layerswap.training.mix.schema import EvaluationSet, Mix, MixSource

CARD = "data_card.json"
"""The file that marks a folder as written by `save_mix`."""
RECIPE = "mix.yaml"
SPLITS = ("train", "validation")
CHECKED_ROWS = 1000
"""Number of rows that are tokenized to check where prompts end."""
EXAMPLES = 2
"""Number of examples of each source that the card shows."""
SHOWN_CHARACTERS = 400
_LIBRARIES = ("layerswap", "datasets", "datasketch", "py3langid")


def data_card(built: BuiltMix, tokenizer: str | None = None) -> dict[str, Any]:
    """The facts about a built mix, as plain data.

    Args:
        built: the mix.
        tokenizer: folder or Hub id of a tokenizer; its tokens are counted if given, in the texts
            themselves, without those that a chat template adds.

    Raises:
        DataError: the tokenizer cannot be loaded.
    """
    mix = built.mix
    by_source: dict[str, list[MixExample]] = {name: [] for name in built.tallies}
    for example in built.examples:
        by_source[example.source].append(example)
    sources = {name: _source_facts(built, name, found) for name, found in by_source.items()}
    tokens = {}
    encoder = load_tokenizer(tokenizer, named=f"--tokenizer {tokenizer}") if tokenizer else None
    if encoder is not None:
        for name, found in by_source.items():
            prompt, completion = (
                _count_tokens(encoder, (getattr(example, part) for example in found))
                for part in ("prompt", "completion")
            )
            sources[name] |= {"tokens": prompt + completion, "completion_tokens": completion}
        tokens = {
            "tokens": sum(facts["tokens"] for facts in sources.values()),
            "rows_split_within_a_token": _split_within_a_token(encoder, built.train),
        }
    evaluation = mix.filters.evaluation
    described: dict[str, MixSource | EvaluationSet] = {
        **mix.sources, **(evaluation.against if evaluation else {})
    }  # fmt: skip
    return {
        "name": mix.name,
        "description": mix.description,
        "kind": mix.kind,
        "languages": mix.languages,
        "seed": mix.seed,
        "rows": {split: len(getattr(built, split)) for split in SPLITS},
        "wanted": mix.total,
        "tokenizer": tokenizer,
        **tokens,
        "sources": sources,
        "filters": _filter_facts(built),
        "evaluation_sets": (
            {name: indexed._asdict() for name, indexed in built.index.sets.items()}
            if built.index
            else {}
        ),
        "warnings": [
            *(
                f"{name}: {count:,} examples contain an item of the evaluation set {of}"
                for name, tally in built.tallies.items()
                for of, count in tally.contaminated.items()
            ),
            *filter(None, [boundary_warning(built.train, encoder)]),
        ],
        "note": mix.note,
        "unverified": [
            *mix.unverified,
            *(f"{name}: {fact}" for name, one in described.items() for fact in one.unverified),
        ],
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
        recipe: its YAML.
        card: the result of `data_card`; computed if not given.
        overwrite: replace a folder that this function wrote.

    Raises:
        MergeError: the folder exists and may not be replaced, or the disk refuses.
    """
    card = card or data_card(built)
    target = out.expanduser().absolute()
    with atomic_folder(target, marker=CARD, overwrite=overwrite) as folder:
        for split in SPLITS:
            if split == "train" or len(built.validation):
                getattr(built, split).to_parquet(folder / f"{split}.parquet")
        (folder / CARD).write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", "utf-8")
        (folder / "README.md").write_text(markdown(card), "utf-8")
        (folder / RECIPE).write_text(recipe, "utf-8")
    return target


def load_saved(folder: Path) -> tuple[Mix, Dataset, Dataset | None]:
    """The recipe, the training rows and the validation rows in a folder of `save_mix`.

    Raises:
        DataError: the folder does not hold a mix.
    """
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    for name in (CARD, RECIPE, "train.parquet"):
        if not (folder / name).is_file():
            raise DataError(f"{folder}: no {name}; give a folder that `layerswap data` wrote")
    mix = parse_mix((folder / RECIPE).read_text("utf-8"), where=str(folder / RECIPE))
    validation = folder / "validation.parquet"
    return (
        mix,
        Dataset.from_parquet(str(folder / "train.parquet")),
        Dataset.from_parquet(str(validation)) if validation.is_file() else None,
    )


def boundary_warning(rows: Dataset, tokenizer: Any | None = None) -> str | None:
    """A warning if the tokens of prompts do not begin those of prompt and completion.

    A space at the end of a prompt usually belongs to the first token of the completion. The prompt
    that is trained then differs from the prompt that is evaluated.

    Args:
        rows: rows of a trainer; those without a prompt of text give no warning.
        tokenizer: counts the rows; without it, prompts that end with a space count.
    """
    rows = rows.select(range(min(len(rows), CHECKED_ROWS)))
    if "prompt" not in rows.column_names or not len(rows) or isinstance(rows[0]["prompt"], list):
        return None
    prompts, completions = rows["prompt"], rows["completion"]
    if tokenizer is None:
        wrong = [prompt.endswith(" ") for prompt in prompts]
    else:
        wholes = [prompt + answer for prompt, answer in zip(prompts, completions, strict=True)]
        alone, whole = (
            tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
            for texts in (prompts, wholes)
        )
        wrong = [long[: len(short)] != short for short, long in zip(alone, whole, strict=True)]
    if not any(wrong):
        return None
    return (
        f"in {sum(wrong):,} of {len(rows):,} rows the tokens of the prompt do not begin those of "
        "prompt and completion; end prompts without a space and begin completions with one "
        '(separator: "", completion: " {answer}")'
    )


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
        header = ("set", "items", "n-gram", "too short to look for")
        body = [
            (name, f"{one['items']:,}", f"{one['n']} {one['unit']}", f"{one['too_short']:,}")
            for name, one in card["evaluation_sets"].items()
        ]
        parts += ["### Evaluation items that were kept out", _table(header, body, "lrlr")]
    sections = (("Warnings", "warnings"), ("Note", "note"), ("Not verified", "unverified"))
    for title, key in sections:
        if card[key]:
            lines = card[key] if isinstance(card[key], list) else [card[key]]
            parts += [f"## {title}", "\n".join(f"- {' '.join(line.split())}" for line in lines)]
    parts += ["## Examples", *_examples(card)]
    made_by = ", ".join(f"{name} {number}" for name, number in card["versions"].items() if number)
    return "\n\n".join([*parts, f"Made with {made_by}."]) + "\n"


def _front_matter(card: dict[str, Any]) -> str:
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    lines += [
        f"  - split: {split}\n    path: {split}.parquet" for split in SPLITS if card["rows"][split]
    ]
    if card["languages"]:
        lines += ["language:", *(f"- {json.dumps(code)}" for code in card["languages"])]
    return "\n".join([*lines, "tags:", "- layerswap", "---"])


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    rule = "".join("|--:" if side == "r" else "|---" for side in align) + "|"
    return "\n".join([f"| {' | '.join(header)} |", rule, *(f"| {' | '.join(r)} |" for r in rows)])


def _sources_table(card: dict[str, Any]) -> str:
    numbers = ["rows", "looked_at", "dropped", "kept", *(["tokens"] if card["tokenizer"] else [])]
    rows = []
    for name, facts in card["sources"].items():
        dropped = sum(facts["dropped"].values()) + facts["empty"] + facts["left_out_by_where"]
        counts = [f"{(facts | {'dropped': dropped})[key]:,}" for key in numbers]
        rows.append([name, _cell(facts["origin"]), facts["licence"] or "not stated", *counts])
    header = ["source", "from", "licence", *(key.replace("_", " ") for key in numbers)]
    return _table(header, rows, "lll" + "r" * len(numbers))


def _filters_table(card: dict[str, Any]) -> str:
    always = ("left_out_by_where", "empty")
    columns = [*always, *card["filters"]]
    rows = []
    for name, facts in card["sources"].items():
        counts = {key: facts[key] for key in always} | facts["dropped"]
        rows.append([name, *(f"{counts.get(column, 0):,}" for column in columns)])
    header = ["source", *(column.replace("_", " ") for column in columns)]
    dropped = [
        f"- {name.replace('_', ' ')}, {one['source']}: {one['why']}: {_cell(one['text'])[:160]}"
        for name, facts in card["filters"].items()
        for one in facts["examples"]
    ]
    table = _table(header, rows, "l" + "r" * len(columns))
    return "\n".join([table, *([""] if dropped else []), *dropped])


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


def _source_facts(built: BuiltMix, name: str, examples: list[MixExample]) -> dict[str, Any]:
    source, tally = built.mix.sources[name], built.tallies[name]
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
        "dropped": {f: counts[name] for f, counts in built.filters.counts.items() if counts[name]},
        "kept": tally.kept,
        "contaminated": tally.contaminated,
        "mean_prompt_characters": _mean([len(example.prompt) for example in examples]),
        "mean_completion_characters": _mean([len(example.completion) for example in examples]),
        "examples": [
            {"prompt": _cut(example.prompt), "completion": _cut(example.completion)}
            for example in examples[:EXAMPLES]
        ],
        "note": source.note,
    }


def _filter_facts(built: BuiltMix) -> dict[str, Any]:
    settings = built.mix.filters.model_dump(exclude={"evaluation": {"against"}})
    return {
        name: {
            "settings": settings[name] if isinstance(settings[name], dict) else {},
            "dropped": sum(counts.values()),
            "examples": [
                one._asdict() | {"text": _cut(one.text)} for one in built.filters.shown[name]
            ],
        }
        for name, counts in built.filters.counts.items()
    }


def separator_warning(card: dict[str, Any], separator: str) -> str | None:
    """A line where prompts do not end between two tokens; None where they do.

    Training then sees other tokens at the end of a prompt than generation does.
    """
    if card["kind"] != "prompt-completion":
        return None
    rows, cure = card["rows"]["train"], 'set `separator: ""` and begin the completion with it'
    if not card["tokenizer"]:
        return (
            f"a separator that ends with a space seldom ends a token: {cure}, or check with "
            "--tokenizer"
            if separator.endswith(" ")
            else None
        )
    split = card["rows_split_within_a_token"]
    return f"in {split} of {rows} rows the prompt ends within a token: {cure}" if split else None


def _split_within_a_token(encoder: Any, rows: Dataset) -> int:
    """Rows whose prompt's tokens are not the first ones of prompt and completion together."""
    if "prompt" not in rows.column_names or not isinstance(rows[0]["prompt"], str):
        return 0
    prompts = list(rows["prompt"])
    whole = [row["prompt"] + row["completion"] for row in rows]
    settings = {"add_special_tokens": False, "verbose": False}
    apart, joined = (encoder(texts, **settings)["input_ids"] for texts in (prompts, whole))
    return sum(a != b[: len(a)] for a, b in zip(apart, joined, strict=True))


def _count_tokens(encoder: Any, texts: Iterable[str]) -> int:
    kept = [text for text in texts if text]
    if not kept:
        return 0
    return sum(map(len, encoder(kept, add_special_tokens=False, verbose=False)["input_ids"]))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " [...]"


def _mean(lengths: list[int]) -> float:
    return round(sum(lengths) / len(lengths), 1) if lengths else 0.0
