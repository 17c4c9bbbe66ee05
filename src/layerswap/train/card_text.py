"""The data card of a mix as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


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
