"""Writes a built mix with its data card, and reads it back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from os.path import commonprefix
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from layerswap.evaluation.languages import languages_seen
from layerswap.ground.commit import atomic_folder, write_json
from layerswap.ground.errors import DataError
from layerswap.ground.types import counted
from layerswap.ground.yaml_file import dump_yaml
from layerswap.training.mix.examples import shown
from layerswap.training.mix.filters import OVERLAP, overlap
from layerswap.training.mix.schema import Mix, parse_mix
from layerswap.versions import versions

if TYPE_CHECKING:
    from datasets import Dataset

    from layerswap.training.mix.build import BuiltMix

CARD = "data_card.json"
"""The file that marks a folder as written by `save_mix`."""
RECIPE = "mix.yaml"
SPLITS = ("train", "validation")
CHECKED_ROWS = 1000
"""Number of rows that the checks of prompt ends and unknown tokens tokenize."""
MOST_UNKNOWN = 0.1
"""Smallest share of unknown tokens that a training warns of."""
_LIBRARIES = ("layerswap", "datasets", "datasketch", "py3langid")


def save_mix(
    built: BuiltMix,
    out: Path,
    *,
    recipe: str,
    card: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a built mix: parquet, the card in Markdown and JSON, and the recipe.

    The folder is a data set that `datasets.load_dataset` reads, and can be put on the Hub. `recipe`
    is the mix's YAML, `card` the result of `data_card`, computed if not given.
    """
    card = card or data_card(built)
    target = out.expanduser().absolute()
    with atomic_folder(target, marker=CARD, overwrite=overwrite) as folder:
        for split in SPLITS:
            if split == "train" or len(built.validation):
                getattr(built, split).to_parquet(folder / f"{split}.parquet")
        write_json(folder / CARD, card)
        (folder / "README.md").write_bytes(markdown(built.mix, card).encode())
        (folder / RECIPE).write_bytes(recipe.encode())
    return target


def load_saved(folder: Path) -> tuple[Mix, Dataset, Dataset | None]:
    """Load the mix, the training rows and the validation rows in a folder of `save_mix`."""
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


def data_card(built: BuiltMix) -> dict[str, Any]:
    """Collect the facts about a built mix, without those of its recipe."""
    counts, training = built.filters.counts, built.examples[: len(built.train)]
    return {
        "rows": {split: len(getattr(built, split)) for split in SPLITS},
        "mean_characters": round(fmean(len(example.whole) for example in built.examples), 1),
        "sources": {
            name: {
                **asdict(tally),
                "dropped": {key: dropped[name] for key, dropped in counts.items() if dropped[name]},
            }
            for name, tally in built.tallies.items()
        },
        "filters": {
            name: {
                "dropped": dropped.total(),
                "examples": [example._asdict() for example in built.filters.shown[name]],
            }
            for name, dropped in counts.items()
        },
        "evaluation_sets": {
            name: {
                **statistics._asdict(),
                # Items that share a run of words with the training text.
                "shared_runs": len(
                    overlap((example.whole for example in training), built.index.texts[name])
                ),
            }
            for name, statistics in built.index.sets.items()
        }
        if built.index
        else {},
        "identifier": [built.identifier.describe(code) for code in built.identifier.languages]
        if built.identifier
        else [],
        "warnings": [
            f"{name}: {counted(count, 'example')} with an item of the evaluation set {items}"
            for name, tally in built.tallies.items()
            for items, count in tally.contaminated.items()
        ],
        "versions": versions(*_LIBRARIES),
    }


def first_rows(built: BuiltMix) -> list[str]:
    """Show three training rows by their parts, and sources that seem to be in other languages."""
    rows = built.train.select(range(min(3, len(built.train))))
    lines = [f"  {shown(row)}" for row in rows]
    for name, source in built.mix.sources.items():
        texts = [example.completion for example in built.examples if example.source == name]
        seen = source.language and languages_seen(texts[:200], source.language)
        lines += [f"{name}: {seen.words}"] if seen else []
    return lines


def rendered(row: Mapping[str, Any], tokenizer: Any) -> tuple[str, str]:
    """Return the prompt of a row in the form of evaluation, or an empty text, and the whole row."""
    if isinstance(next(iter(row.values())), str):
        return row.get("prompt", ""), "".join(row.values())
    turns = [turn for column in row.values() for turn in column]
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    if not row.get("prompt"):
        return "", whole
    template = tokenizer.apply_chat_template
    return template(row["prompt"], tokenize=False, add_generation_prompt=True), whole


def boundary_warning(rows: Dataset, tokenizer: Any) -> str | None:
    """Warn if a prompt's tokens are not a prefix of the tokens of prompt and completion.

    A space at the end of a prompt usually belongs to the first token of the completion. The prompt
    that is trained then differs from the prompt that is evaluated.
    """
    rows = rows.select(range(min(len(rows), CHECKED_ROWS)))
    if "prompt" not in rows.column_names or not len(rows) or isinstance(rows[0]["prompt"], list):
        return None
    prompts = list(rows["prompt"])
    wholes = [prompt + answer for prompt, answer in zip(prompts, rows["completion"], strict=True)]
    short = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    long = tokenizer(wholes, add_special_tokens=False)["input_ids"]
    count = sum(long[i][: len(ids)] != ids for i, ids in enumerate(short))
    if not count:
        return None
    return (
        f"in {count:,} of {len(rows):,} rows the tokens of the prompt do not begin those of "
        "prompt and completion; end prompts without a space and begin completions with one "
        '(separator: "", completion: " {answer}")'
    )


def template_warning(rows: Dataset, tokenizer: Any) -> str | None:
    """Warn if a chat template opens an answer in evaluation otherwise than in training rows."""
    if "prompt" not in rows.column_names or not len(rows) or isinstance(rows[0]["prompt"], str):
        return None
    asked, whole = rendered(rows[0], tokenizer)
    if whole.startswith(asked):
        short, long = tokenizer([asked, whole], add_special_tokens=False)["input_ids"]
        if long[: len(short)] == short:
            return None
        return (
            f"the end of {asked[-12:]!r}, which the chat template writes before an answer, and the "
            "first letters of the answer are one token; give the base a template without this space"
        )
    added = asked[len(commonprefix([asked, whole])) :]  # noqa: RUF071  # of texts, not paths
    return (
        f"in evaluation the chat template writes {added!r} before an answer, in training rows it "
        "does not; set think, or give the base a template that writes the same in both"
    )


def ending_warning(rows: Dataset, tokenizer: Any, ends: Collection[str]) -> str | None:
    """Warn if a chat template writes none of the tokens that end a text after an answer."""
    form = "messages" if "messages" in rows.column_names else "completion"
    if form not in rows.column_names or not len(rows) or isinstance(rows[0][form], str):
        return None
    *turns, last = [turn for value in rows[0].values() for turn in value]
    turns.append({**last, "content": "An answer."})
    after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("An answer.")[2]
    if last["role"] != "assistant" or any(end in after for end in ends):
        return None
    return (
        f"after an answer the chat template writes {after!r} and no token that ends a text "
        f"({', '.join(ends)}), so the expert does not learn to stop; give a base whose template "
        "writes one, or add the token to eos_token_id in the base's generation_config.json"
    )


def unknown_warning(rows: Iterable[Mapping[str, Any]], tokenizer: Any) -> str | None:
    """Warn if the tokenizer does not know many tokens of the first rows."""
    if tokenizer.unk_token_id is None:
        return None
    texts: list[str] = []
    for row in islice(rows, CHECKED_ROWS):
        for value in row.values():
            texts += [value] if isinstance(value, str) else [turn["content"] for turn in value]
    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    unknown = sum(ids.count(tokenizer.unk_token_id) for ids in tokens)
    share = unknown / max(1, sum(map(len, tokens)))
    if share < MOST_UNKNOWN:
        return None
    return (
        f"{share:.0%} of the tokens are {tokenizer.unk_token!r}, because the base's tokenizer does "
        "not know these texts; compare bases by `layerswap bases`"
    )


def length_warning(
    rows: Dataset, tokenizer: Any, longest: int | None, positions: int | None = None
) -> str | None:
    """Warn of rows with more than `longest` tokens, whose rest a trainer cuts off.

    Without such rows, warn of those with more tokens than the base has `positions`.
    """
    if longest is None:
        return None
    sizes = list(_sizes(rows, tokenizer))
    beyond = sum(whole > positions for _, whole in sizes) if positions else 0
    if positions and beyond and longest > positions:
        return (
            f"{beyond:,} of {len(sizes):,} rows are longer than the {positions:,} tokens that the "
            f"base reads; set hyperparameters.max_length: {positions}"
        )
    cut = sum(prompt < longest < whole for prompt, whole in sizes)
    lost = sum(longest <= prompt for prompt, _ in sizes)
    if not cut + lost:
        return None
    return (
        f"{cut + lost:,} of {len(sizes):,} rows are longer than max_length ({longest:,} tokens): "
        f"{cut:,} lose their end, and {lost:,} are left out, as their prompt alone fills it; "
        f"hyperparameters.max_length: {max(whole for _, whole in sizes):,} keeps all"
    )


def _sizes(rows: Dataset, tokenizer: Any) -> Iterator[tuple[int, int]]:
    """Yield the tokens of each row's prompt, and of the whole row with its end."""
    for row in rows:
        plain = isinstance(next(iter(row.values())), str)
        texts = [*rendered(row, tokenizer)]
        prompt, whole = tokenizer(texts, add_special_tokens=plain)["input_ids"]
        yield len(prompt), len(whole) + plain  # a chat template writes the end itself


def markdown(mix: Mix, card: dict[str, Any]) -> str:
    """Write the card as Markdown, with the front matter that the Hub and `datasets` read."""
    rows = card["rows"]
    files = [{"split": split, "path": f"{split}.parquet"} for split in SPLITS if rows[split]]
    head = {
        "configs": [{"config_name": "default", "data_files": files}],
        **({"language": mix.languages} if mix.languages else {}),
        "tags": ["layerswap"],
    }
    sources = [
        f"| {name} | {_cell(facts['origin'])} | {mix.sources[name].licence or 'not stated'} | "
        f"{facts['looked_at']:,} | {facts['kept']:,} |"
        for name, facts in card["sources"].items()
    ]
    header = ["| source | from | licence | rows read | kept |", "|---|---|---|--:|--:|"]
    excluded = [
        f"- {name}: {facts['items']:,} evaluation items are left out; {facts['shared_runs']:,} "
        f"share {OVERLAP} words in a row with the training text"
        for name, facts in card["evaluation_sets"].items()
    ]
    unverified = [*mix.unverified, *(
        f"{name}: {fact}" for name, source in mix.sources.items() for fact in source.unverified
    )]  # fmt: skip
    notes = [*card["warnings"], mix.note, *(f"not verified: {fact}" for fact in unverified)]
    said = [f"- {' '.join(line.split())}" for line in notes if line]
    parts = [
        f"---\n{dump_yaml(head)}---",
        f"# {mix.name}\n\n{mix.description}".rstrip(),
        f"{rows['train']:,} rows for training and {rows['validation']:,} for validation, as "
        f"`{mix.kind}`. `{CARD}` has the counts and examples of what each filter dropped.",
        "\n".join([*header, *sources]),
        "\n".join([*excluded, *said]),
        f"Made with layerswap {card['versions']['layerswap']}.",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
