"""Writes the files of a study: every choice with its reason and its alternative."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import yaml

from layerswap.compose.presets import default_zones
from layerswap.new.inputs import LARGE, Inputs, LanguageInput
from layerswap.new.tasks import Document, Task, target

ENGLISH = "-english"
"""Ends the name of the benchmark for languages without a test."""
RATES = ((0.05, 6e-4, 1e-4, "the lab's, for a model this small"),
         (LARGE, 2e-5, 5e-5, "those of docs/real.md, found on a model of 0.27 billion"),
         (float("inf"), 2e-6, 2e-6, "usual for models of this size; try 1e-6 and 5e-6"))  # fmt: skip
"""Largest base in billions, rates of the task and of a language in full, and where from."""
ADAPTER_RATE = 1e-4
FEW_ROWS = 1500
"""Rows of a task below which it trains for three epochs, as in docs/real.md."""
TRIAL = 0.01
NONE_ON_THE_WAY = 1_000_000


@dataclass(frozen=True)
class Settings:
    """What depends on the machine."""

    seeds: int
    lora: bool


def expert(inputs: Inputs, settings: Settings) -> dict[str, Any]:
    """The task expert's keys of an `EXPERT.yaml`, without data."""
    return {
        "base": str(inputs.base.folder),
        "train": {"places": [{"layers": _layers(inputs)}]},
        "hyperparameters": _hyperparameters(inputs, settings)[0],
        **({"lora": {"r": 64, "lora_alpha": 64}} if settings.lora else {}),
    }


def write_files(inputs: Inputs, settings: Settings, folder: Path) -> None:
    """Write study.yaml, mixes, benchmarks and data into a folder beside the final one."""
    for name in ("mixes", "benchmarks", "data"):
        (folder / name).mkdir(exist_ok=True)
    if isinstance(inputs.task, Task):
        _write_task(inputs, inputs.task, folder)
    for language in inputs.languages:
        if not language.ready:
            text = _language_mix(inputs, language, folder)
            (folder / "mixes" / f"{language.code}.yaml").write_text(text, "utf-8")
    (folder / "study.yaml").write_text(_study(inputs, settings, folder), "utf-8")
    if inputs.request.trial:
        (folder / "trial.yaml").write_text(_trial(inputs, settings), "utf-8")


def suite_of(inputs: Inputs) -> str:
    """The suite of the study: ready, a benchmark, or the file of two benchmarks."""
    if not isinstance(inputs.task, Task):
        return inputs.suite or ""
    if inputs.suite:
        return inputs.suite
    proved = {one.proved for one in inputs.languages}
    ends = {frozenset([True]): "", frozenset([False]): ENGLISH}.get(frozenset(proved), "-all")
    return f"benchmarks/{inputs.task.name}{ends}.yaml"


# --- the task ---


def _write_task(inputs: Inputs, task: Task, folder: Path) -> None:
    source = task.source(folder / "mixes")
    count = len(task.table.rows)
    if inputs.held_out:
        held = {*inputs.held_out}
        path = folder / "data" / f"{task.name}.train.jsonl"
        _write_rows(path, [row for i, row in enumerate(task.table.rows) if i not in held])
        origin = ("path", "id", "config", "split", "delimiter")
        source = {key: value for key, value in source.items() if key not in origin}
        source, count = {"path": f"../data/{path.name}", **source}, count - len(held)
    held_back = min(100, max(1, count // 10))
    tokens = max(1, round(sum(sum(map(inputs.tokens, row)) for row in inputs.task_rows)
                          / len(inputs.task_rows)))  # fmt: skip
    text = _commented(f"""
        # The task: {count:,} rows of {task.table.name}.
        # The prompt is that of benchmarks/{task.name}.yaml; change both together.
        name: {_quoted(task.name)}
        kind: prompt-completion  # chat: with the base's chat template, if it has one
        separator: ""
        total: {count}  # every row; a smaller number takes a fair sample
        validation: {held_back}
        row_tokens: {tokens}
        sources:
          {task.name}:
        """, source, 4) + _against(inputs, task, folder)  # fmt: skip
    (folder / "mixes" / f"{task.name}.yaml").write_text(text, "utf-8")
    tested = [one for one in inputs.languages if one.tests]
    for language in tested:
        for split, documents in language.tests.items():
            rows = [target(task, one, language.code) for one in documents]
            _write_rows(folder / "data" / f"{language.code}.{split}.jsonl", rows)
    if tested:
        most = max(len(one.tests["test"]) for one in tested)
        _write_benchmark(inputs, task, folder, task.name, [one.code for one in tested], most)
    unproved = [one for one in inputs.languages if not one.proved]
    if unproved:
        documents = task.documents(task.table)
        rows = [target(task, documents[i], "en") for i in inputs.held_out if i < len(documents)]
        for language in unproved:
            _write_rows(folder / "data" / f"{language.code}.test.jsonl", rows)
        codes = [one.code for one in unproved]
        _write_benchmark(inputs, task, folder, task.name + ENGLISH, codes, len(rows))
    if tested and unproved:
        names = f"{{{task.name}.yaml: 0, {task.name}{ENGLISH}.yaml: 0}}"
        all_ = f"title: {_quoted(task.name)}\nbenchmarks: {names}\n"
        (folder / suite_of(inputs)).write_text(all_, "utf-8")


def _write_benchmark(
    inputs: Inputs, task: Task, folder: Path, name: str, languages: Sequence[str], count: int
) -> None:
    prompts, answers = zip(*inputs.task_rows, strict=True)
    tokens = round(sum(map(inputs.tokens, prompts)) / len(prompts))
    longest = max(map(inputs.tokens, answers))
    written = min(512, max(16, 1 << (longest - 1).bit_length()))
    keys = task.benchmark(languages, count=max(1, count), tokens=tokens, answer_tokens=written)
    keys |= {"title": name, "task_name": keys["task_name"].replace(task.name, name, 1)}
    what = "each language" if name == task.name else (
        f"{', '.join(languages)}: without a test there, these are held-out documents of\n"
        f"# {task.table.name}. They show whether the model still does the task, and prove nothing "
        "in the language"
    )  # fmt: skip
    head = (
        f"# The documents to evaluate on in {what}.\n"
        "# Data: ../data; the development split is `CODE.dev.jsonl`. Labels and answers can be "
        "edited there.\n"
    )
    (folder / "benchmarks" / f"{name}.yaml").write_text(head + _dump(keys), "utf-8")


def _against(inputs: Inputs, task: Task | None, folder: Path, code: str | None = None) -> str:
    """The filter that keeps test documents out of a mix."""
    files = {
        f"{one.code}-{split}": f"{one.code}.{split}.jsonl"
        for one in inputs.languages
        if code in (None, one.code)
        for split in one.tests
    }
    if not files or task is None:
        return ""
    document = next(one.tests["test"][0] for one in inputs.languages if one.tests)
    column = next(role for role in document if role not in ("label", "answer"))
    sets = "".join(
        f"      {name}: {{path: ../data/{file}, columns: [{column}]}}\n"
        for name, file in files.items()
    )
    return f"filters:\n  # Rows that share a run of words with a test document are left out.\n" \
           f"  evaluation:\n    against:\n{sets}"  # fmt: skip


# --- the languages ---


def _language_mix(inputs: Inputs, language: LanguageInput, folder: Path) -> str:
    total, tokens = inputs.rows_of(language)
    why = (
        "every text" if inputs.billions >= LARGE
        else "some 73,000 tokens: more made language experts worse in docs/real.md; all: every text"
    )  # fmt: skip
    text = _commented(f"""
        # {language.name}: plain text{" and its translation" if language.parallel else ""}.
        # The weights, three fifths plain and a fifth each way, are those of docs/real.md.
        name: {_quoted(language.code)}
        languages: [{language.code}]
        kind: text
        total: {total}  # {why}
        validation: {min(100, max(1, total // 10))}
        row_tokens: {tokens}
        sources:
        """)  # fmt: skip
    for seed, (name, table, template, weight) in enumerate(language.templates(), start=1):
        source = table.source(folder / "mixes")
        if "parallel" in source:
            paths = source["parallel"].items()
            source["parallel"] = {key: os.path.relpath(path, folder / "mixes")
                                  for key, path in paths}  # fmt: skip
        keys = {**source, "text": template, "language": language.code, "weight": weight,
                "seed": seed}  # fmt: skip
        text += indent(_dump({name: keys}), "  ")
    task = inputs.task if isinstance(inputs.task, Task) else None
    filters = _against(inputs, task, folder, language.code)
    return text + (filters or "filters:\n") + "  exact_duplicates: true\n"


# --- the study ---


def _study(inputs: Inputs, settings: Settings, folder: Path) -> str:
    request, name = inputs.request, inputs.request.folder.name
    codes = ", ".join(one.code for one in inputs.languages)
    task, language = _hyperparameters(inputs, settings)
    zones = default_zones(inputs.base.layers)
    rates = next(row for row in RATES if inputs.billions <= row[0])
    data = f"mixes/{inputs.task.name}.yaml" if isinstance(inputs.task, Task) else inputs.task
    chosen = any("dev" in one.tests for one in inputs.languages)
    grid = (
        "# Zones to try beside the default; the development split chooses. Without the line: the\n"
        "# default alone.\n"
        f"grid: {{bottom: 1-{min(zones.bottom + 1, inputs.base.layers - zones.top)}, "
        f"top: 0-{zones.top}}}"
        if chosen else
        "# Nothing is chosen, because there is no development split: the default zones, "
        f"{zones.bottom} layers at the\n# bottom and {zones.top} at the top. To choose, give "
        "--development and write grid: {bottom: 1-4, top: 0-1}"
    )  # fmt: skip
    method = (
        "lora: {r: 64, lora_alpha: 64}  # memory is short; without the line: full fine-tuning"
        if settings.lora
        else "# Full fine-tuning; where memory is short: lora: {r: 64, lora_alpha: 64} and 1e-4"
    )
    of_rates = "usual for LoRA" if settings.lora else rates[3]
    unproved = [one.code for one in inputs.languages if not one.proved]
    nothing = "" if not unproved else (
        f"# {', '.join(unproved)}: no test in the language, so the study can prove nothing there. "
        "It makes the\n# model, and asks whether it still does the task in the task's own "
        "language.\n"
    )  # fmt: skip
    seeds = range(2, settings.seeds + 1)
    text = f"""\
# {name}: one task expert, composed with a language expert for {codes}.
#   layerswap study run {request.folder}/study.yaml --out {request.folder}/results
{nothing}name: {_quoted(name)}
base: {_base(inputs, folder)}
device: {inputs.device}  # of the evaluation: cpu, cuda or mps; a training takes a GPU if there is one
task:
  data: {data}
  keep: {settings.seeds}  # experts, one for each run
  runs:
    # One run for each seed: seeds differ by several points, as much as methods do (docs/real.md).
    - &task
      # The layers alone: no composition needs the embedding. To train it too, remove the line.
      train: {{places: [{{layers: {_layers(inputs)}}}]}}
      {method}
      # Rates: {of_rates}.
      hyperparameters: {_flow(task)}
      save_every: {NONE_ON_THE_WAY}  # none on the way: the checkpoint of the lowest loss transfers less
      seed: 1
{"".join(f"    - {{<<: *task, seed: {seed}}}{chr(10)}" for seed in seeds)}\
languages:
"""
    first = inputs.languages[0]
    lora = "\n        lora: {r: 64, lora_alpha: 64}" if settings.lora else ""
    text += f"""\
  {first.code}:
    data: {first.ready or f"mixes/{first.code}.yaml"}
    keep: {settings.seeds}
    runs: &language
      - &run
        train: {{places: [{{layers: {_layers(inputs)}}}]}}{lora}
        hyperparameters: {_flow(language)}
        save_every: {NONE_ON_THE_WAY}
        seed: 1
{"".join(f"      - {{<<: *run, seed: {seed}}}{chr(10)}" for seed in seeds)}"""
    for one in inputs.languages[1:]:
        text += (f"  {one.code}: {{data: {one.ready or f'mixes/{one.code}.yaml'}, "
                 f"keep: {settings.seeds}, runs: *language}}\n")  # fmt: skip
    return (
        text
        + f"""\
pairs: same  # the first task expert with the first language expert, and so on
{grid}
# A second candidate: the task expert that trains in its middle layers alone (partition C), which
# beat the swap on one of three tasks (docs/real.md). It costs one training of each kind.
partitions: [C]
baselines: [base, experts, soup, partial]  # also: weighted soup, task arithmetic, ties, joint
change: false  # true: maps of the weights that fine-tuning changed
# Where there is no development split, all documents are for the report: nothing is chosen.
evaluate: {{suite: {suite_of(inputs)}, development: none}}
keep_checkpoints: selected  # all: keeps what --resume and `analyse select` need
merge: true  # writes the model of each language into results/merged
"""
    )


def _trial(inputs: Inputs, settings: Settings) -> str:
    """The study on one percent of the data, with every step."""
    runs, batches = {}, {"task": 16, "language": 2}
    task, language = _hyperparameters(inputs, settings)
    rows = {"task": _task_count(inputs), "language": max(
        [inputs.rows_of(one)[0] for one in inputs.languages if not one.ready] or [1000])}  # fmt: skip
    for kind, hyperparameters in (("task", task), ("language", language)):
        limit = max(2 * batches[kind], round(TRIAL * rows[kind]))
        runs[kind] = {**{k: v for k, v in expert(inputs, settings).items() if k != "base"},
                      "hyperparameters": hyperparameters, "limit": limit, "seed": 1}  # fmt: skip
    languages = "".join(
        f"  {one.code}: {{keep: 1, runs: *language}}\n" for one in inputs.languages[1:]
    )
    return (
        "# All steps of study.yaml on 1% of its data, in minutes: every mistake shows before hours "
        "are spent.\n# Its scores mean nothing.\n"
        f"like: study.yaml\nname: {_quoted(inputs.request.folder.name + '-trial')}\n"
        f"task:\n  keep: 1\n  runs: {_flow([runs['task']])}\n"
        f"languages:\n  {inputs.languages[0].code}:\n    keep: 1\n"
        f"    runs: &language {_flow([runs['language']])}\n{languages}"
        "evaluate: {limit: 20}\n"
    )


def _task_count(inputs: Inputs) -> int:
    return len(inputs.task.table.rows) if isinstance(inputs.task, Task) else 1000


def _hyperparameters(inputs: Inputs, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    _, of_task, of_language, _ = next(row for row in RATES if inputs.billions <= row[0])
    if settings.lora:
        of_task = of_language = ADAPTER_RATE
    lengths = sorted(inputs.tokens(prompt + answer) for prompt, answer in inputs.task_rows)
    wanted = lengths[len(lengths) * 99 // 100] + 1
    length = min(inputs.longest, max(64, 1 << (wanted - 1).bit_length()))
    shared = {"lr_scheduler_type": "linear", "weight_decay": 0.01}
    task = {"learning_rate": of_task, "num_train_epochs": 2 if _task_count(inputs) >= FEW_ROWS else 3,
            "per_device_train_batch_size": 16, **shared, "max_length": length}  # fmt: skip
    language = {"learning_rate": of_language, "num_train_epochs": 1,
                "per_device_train_batch_size": 2, **shared,
                "max_length": min(inputs.longest, 256)}  # fmt: skip
    return task, language


def _layers(inputs: Inputs) -> str:
    return f"0-{inputs.base.layers - 1}"


def _base(inputs: Inputs, folder: Path) -> str:
    given = inputs.request.base
    if given != "lab" and Path(given).expanduser().is_dir():
        return _quoted(os.path.relpath(Path(given).expanduser(), folder))
    return _quoted(str(inputs.base.folder) if given == "lab" else given)


def _commented(head: str, source: Mapping[str, Any] | None = None, spaces: int = 0) -> str:
    text = dedent(head).strip("\n") + "\n"
    return text + (indent(_dump(source), " " * spaces) if source else "")


def _dump(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.strip()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _write_rows(path: Path, rows: Sequence[Document]) -> None:
    lines = (json.dumps(row, ensure_ascii=False, default=str) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
