"""Questions to speakers as a folder: one page to mail, and the answers that come back.

`ask.json` has the questions; models of `prefer` are named in `key.json` alone, which no page holds.
Every answer is a line of JSON in a file that a speaker sends back.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from layerswap.checkpoint import atomic_folder, read_json_object
from layerswap.evaluation.preferences import Vote, latest
from layerswap.ground.commit import atomic_file
from layerswap.ground.errors import DataError
from layerswap.ground.strict import Strict
from layerswap.ground.types import counted
from layerswap.ground.yaml_file import validate
from layerswap.play.serve import colours
from layerswap.reading.files import check_text, lines_of, objects, rows_of
from layerswap.report.tables import is_formula
from layerswap.training.mix.filters import overlap

TESTS = (".tsv", ".csv", ".jsonl")
"""Endings of the files of a test."""
QUESTIONS, KEY, PAGE = "ask.json", "key.json", "ask.html"
PAGE_VERSION = 1
MOST_LABELS = 9
"""Labels of a question: each is one key."""
LONGEST_NAME = 60
"""Characters of a speaker's name, as on the page."""
Kind = Literal["label", "answer", "prefer"]
Item = dict[str, Any]


def _past(time: datetime) -> datetime:
    try:
        time = (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)
    except OverflowError:
        raise ValueError("is in no calendar; correct it, or delete the line") from None
    if time > datetime.now(UTC) + timedelta(days=1):  # a clock may be wrong by hours
        raise ValueError("is in the future; correct it, or delete the line")
    return time


def _named(name: str) -> str:
    name = " ".join(name.casefold().split())
    if not 1 <= len(name) <= LONGEST_NAME:
        raise ValueError(f"needs 1 to {LONGEST_NAME} characters")
    return name


class Answer(Strict):
    """A line of answers; `answer` is None where the speaker took it back."""

    study: str
    page: int
    speaker: Annotated[str, AfterValidator(_named)]
    item: str
    answer: str | int | None
    time: Annotated[datetime, Field(strict=False), AfterValidator(_past)]
    skipped: bool = False


# --- writing ---


def label_items(file: str, count: int, seed: int, avoid: Sequence[str] = ()) -> list[Item]:
    """Draw lines of a text at random, without lines that share a run of words with others."""
    check_text(file)
    texts = [*dict.fromkeys(line.strip() for line in lines_of(file) if line.strip())]
    random.Random(seed).shuffle(texts)
    known = {*overlap((line for path in avoid for line in lines_of(path)), texts)}
    kept = [text for i, text in enumerate(texts) if i not in known]
    if len(kept) < count:
        shared = " without five words in a row of the training text" if avoid else ""
        raise DataError(f"{file}: has {counted(len(kept), 'different line')}{shared}; {count:,} "
                        f"are to be asked: give more text, or --count {len(kept)}")  # fmt: skip
    return [{"id": _id(text), "text": text} for text in kept[:count]]


def answer_items(file: str, count: int, seed: int) -> list[Item]:
    """Draw questions of a table at random, with the answers to correct if it has any."""
    rows = _rows(file, ["question"])
    drawn = random.Random(seed).sample(rows, min(count, len(rows)))
    return [{"id": _id(row["question"]), "text": row["question"],
             "reference": row.get("answer") or ""} for row in drawn]  # fmt: skip


def prefer_items(
    file: str, models: Sequence[str], count: int, seed: int
) -> tuple[list[Item], dict[str, list[str]]]:
    """Pair the models' answers to prompts, in a random order; return the pairs and their models."""
    if not 2 <= len(models) <= 3 or len({*models}) < len(models):
        raise DataError("--models: give two or three different columns")
    rows, rng = _rows(file, ["prompt", *models]), random.Random(seed)
    items, key = [], {}
    for row in rng.sample(rows, min(count, len(rows))):
        for pair in combinations(models, 2):
            first, second = rng.sample(pair, 2)
            item = _id(f"{row['prompt']}\0{first}\0{second}\0{seed}")
            key[item] = [first, second]
            items.append({"id": item, "text": row["prompt"], "flip": rng.randrange(2),
                          "answers": [row[first], row[second]]})  # fmt: skip
    rng.shuffle(items)
    return items, key


def write_questions(
    folder: Path,
    kind: Kind,
    items: Sequence[Item],
    *,
    title: str,
    labels: Sequence[str] = (),
    key: Mapping[str, Any] | None = None,
) -> str:
    """Write a folder of questions with its page; return their number, in words.

    Raises:
        LayerswapError: the folder exists, there is nothing to ask, or the labels are too many.
    """
    if not items:
        raise DataError(f"{title}: nothing to ask")
    if kind == "label" and not 2 <= len({*labels}) == len(labels) <= MOST_LABELS:
        raise DataError(f"--labels: give 2 to {MOST_LABELS} different labels, not "
                        f"{', '.join(labels) or 'none'}")  # fmt: skip
    number = counted(len(items), "question")
    about = {
        "label": "Choose the label that fits each text: press its number, or tap it.",
        "answer": "Write or correct the answer to each question. Ctrl+Enter keeps it.",
        "prefer": "Choose the better of two answers: press its number, or tap it.",
    }[kind]
    body = {"kind": kind, "title": title, "labels": [*labels], "items": [*items],
            "page": PAGE_VERSION, "about": f"{about} {number}."}  # fmt: skip
    asked = {"study": _id(json.dumps(body, sort_keys=True)), **body}
    if folder.exists():
        raise DataError(f"{folder}: exists already; choose another name, or delete it")
    with atomic_folder(folder, marker=QUESTIONS) as made:
        texts = {QUESTIONS: json.dumps(asked, ensure_ascii=False, indent=1), PAGE: page_of(asked)}
        if key is not None:
            texts[KEY] = json.dumps(key, ensure_ascii=False, indent=1)
        for name, text in texts.items():
            (made / name).write_bytes(text.encode())
    return number


def page_of(asked: Mapping[str, Any]) -> str:
    """Return the page of questions, with its script inside and all network refused."""
    folder = resources.files("layerswap.play") / "asking"
    html, script, style = ((folder / f"ask.{kind}").read_text("utf-8")
                           for kind in ("html", "js", "css"))  # fmt: skip
    style = colours() + style  # those of the reports
    # A closing tag in a text must not end the block.
    data = json.dumps(asked, ensure_ascii=False).replace("<", "\\u003c")
    policy = (f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
              "base-uri 'none'; form-action 'none'")  # fmt: skip
    meta = '<meta http-equiv="Content-Security-Policy" content="{}">'
    parts = {"policy": meta.format(policy), "style": f"<style>{style}</style>",
             "script": f"<script>{script}</script>"}  # fmt: skip
    for name, text in parts.items():
        html = html.replace(f"<!--{name}-->", text, 1)
    return html.replace("<!--asked-->", data, 1)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _rows(file: str, columns: Sequence[str]) -> list[dict[str, str]]:
    rows = [{name: "" if value is None else str(value) for name, value in row.items()}
            for row in rows_of(file)]  # fmt: skip
    if missing := [name for name in columns if rows and name not in rows[0]]:
        raise DataError(f"{file}: has no column {missing[0]!r}; it has {', '.join(rows[0])}")
    full = [row for row in rows if all(row[name].strip() for name in columns)]
    return list({tuple(row[name] for name in columns): row for row in full}.values())


def _id(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# --- reading ---


def read_questions(folder: Path) -> dict[str, Any]:
    """Read the questions of a folder."""
    if not (folder / QUESTIONS).is_file():
        raise DataError(f"{folder}: has no {QUESTIONS}; give a folder that `layerswap ask` wrote")
    return dict(read_json_object(folder / QUESTIONS))


def check_answer(asked: Mapping[str, Any], line: Any, where: str) -> dict[str, Any]:
    """Check a line of answers against the questions."""
    answer = validate(Answer, line, where=where, expected="a line of answers")
    if answer.study != asked["study"]:
        raise DataError(f"{where}: answers the study {answer.study}, not {asked['study']}")
    if answer.item not in {item["id"] for item in asked["items"]}:
        raise DataError(f"{where}: the study has no question {answer.item!r}")
    allowed = {"label": asked["labels"], "prefer": [0, 1, "equal", "bad"]}.get(asked["kind"])
    fits = answer.answer in (allowed or []) if allowed else isinstance(answer.answer, str)
    if answer.answer is not None and not answer.skipped and not fits:
        raise DataError(f"{where}: {answer.answer!r} is no answer to its question")
    return answer.model_dump()


def read_answers(
    folder: Path, files: Sequence[Path]
) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Read the answers of the files that came back, each of one speaker; return them, and facts.

    The last answer of a speaker to a question counts; skipped questions are left out. Speakers
    whose names differ in case and spaces alone are one. The facts are the number of answers and of
    lines given `twice`, the `files` of each speaker, and how many answers `differ` between them.
    """
    asked, lines = read_questions(folder), []
    names: dict[str, list[str]] = {}
    given: dict[tuple[object, object], set[object]] = {}
    for file in files:
        rows = [check_answer(asked, row, f"{file}, answer {number}")
                for number, row in enumerate(_answers(file), start=1)]  # fmt: skip
        speaker, *others = sorted({row["speaker"] for row in rows})
        if others:
            raise DataError(f"{file}: a file has one speaker, and this one has {1 + len(others)}, "
                            f"{speaker} and {others[0]}; split it")  # fmt: skip
        names.setdefault(speaker, []).append(str(file))
        for line in latest(rows):
            given.setdefault((line["speaker"], line["item"]), set()).add(line["answer"])
        lines += rows
    different = {tuple(line.values()): line for line in lines}
    kept = [line for line in latest([*different.values()]) if not line["skipped"]]
    differ = Counter(speaker for (speaker, _), answers in given.items() if len(answers) > 1)
    return kept, {"kind": asked["kind"], "answers": len(kept), "twice": len(lines) - len(different),
                  "files": names, "differ": dict(differ)}  # fmt: skip


def _answers(file: Path) -> list[dict[str, Any]]:
    try:
        return list(objects([str(file)]))
    except DataError as error:
        if not file.is_file():
            raise
        raise DataError(
            f"{error}; the file was cut or changed on its way: ask for it again as an attachment, "
            "or delete the damaged lines to keep the others"
        ) from None


def as_test(
    asked: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, str]], int]:
    """Return the rows of the test, and the number of texts that speakers disagree on.

    Of several speakers, most votes count; a text without a majority is left out.
    """
    texts = {item["id"]: item["text"] for item in asked["items"]}
    votes: dict[str, Counter[Any]] = {}
    for line in answers:
        votes.setdefault(line["item"], Counter())[line["answer"]] += 1
    columns = ("text", "label") if asked["kind"] == "label" else ("question", "answer")
    rows, left_out = [], 0
    for item, text in texts.items():
        if item in votes:
            (best, count), *others = votes[item].most_common(2)
            if others and others[0][1] == count:
                left_out += 1
            else:
                rows.append(dict(zip(columns, (text, best), strict=True)))
    return rows, left_out


def write_test(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write a test as JSON Lines by its name, or as TSV unless a spreadsheet would run a cell."""
    out = io.StringIO()
    if path.suffix.lower() not in TESTS:
        raise DataError(f"{path}: a test is one of {', '.join(TESTS)}; give it such a name")
    if not rows:
        raise DataError("no text has a majority of answers, so no test is written")
    if path.suffix.lower() == ".jsonl":
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    elif formulas := [cell for row in rows for cell in row.values() if is_formula(cell)]:
        raise DataError(f"{path}: a spreadsheet would run cells ({len(formulas):,}), such as "
                        f"{formulas[0]!r:.60}; write {path.with_suffix('.jsonl')}")  # fmt: skip
    else:
        writer = csv.writer(out, delimiter="\t", lineterminator="\n")
        writer.writerows([*rows[:1], *(row.values() for row in rows)])
    write_new(path, out.getvalue())


def write_new(path: Path, text: str) -> None:
    """Write a file that must not exist yet."""
    if path.exists():
        raise DataError(f"{path}: exists already; choose another name, or delete it")
    with atomic_file(path, is_ours=lambda file: False) as partial:
        partial.write_bytes(text.encode())


def read_key(folder: Path) -> dict[str, Any]:
    """Read the models behind the answers of `prefer`."""
    if not (folder / KEY).is_file():
        raise DataError(f"{folder}: has no {KEY}, which names the models behind the answers")
    return dict(read_json_object(folder / KEY))


def votes_of(folder: Path, answers: Sequence[Mapping[str, Any]]) -> list[Vote]:
    """Return the votes on models."""
    asked, key = read_questions(folder), read_key(folder)["pairs"]
    prompts = {item["id"]: item["text"] for item in asked["items"]}
    made = []
    for line in answers:
        (first, second), answer = key[line["item"]], line["answer"]
        winner = (first, second)[answer] if isinstance(answer, int) else str(answer)
        made.append(Vote(line["speaker"], prompts[line["item"]], (first, second), winner))
    return made
