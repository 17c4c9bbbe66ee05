"""Writes the files of a study: every choice with its reason and its alternative."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources
from itertools import chain
from math import inf
from os.path import relpath
from pathlib import Path
from typing import Any, NamedTuple

from layerswap.compose.presets import default_zones
from layerswap.evaluation.metrics import WRITTEN
from layerswap.ground.yaml_file import dump_yaml
from layerswap.new.inputs import SAMPLE, TASK_LANGUAGE, Inputs, LanguageInput
from layerswap.new.tasks import Task, target
from layerswap.study.estimate import BATCH

ENGLISH = "-english"
"""Ends the name of the benchmark for languages without a test."""
RATES = ((0.05, 6e-4, 1e-4, "the lab's, for a model this small"),
         (2.0, 2e-5, 5e-5, "those of docs/real.md, found on a model of 0.27 billion parameters"),
         (inf, 2e-6, 2e-6, "usual for models of this size; try 1e-6 and 5e-6"))  # fmt: skip
"""Largest base in billions, rates of the task and of a language in full, and where from."""
ADAPTER_RATE = 1e-4
SPLITS = ("test", "dev", "translated")
FEW_ROWS = 1500
"""Rows of a task below which it trains for three epochs, as in docs/real.md."""


class Settings(NamedTuple):
    """Settings that depend on the machine."""

    seeds: int
    lora: bool
    rows: int = BATCH  # of the task, computed at a time


def expert(inputs: Inputs, settings: Settings) -> dict[str, Any]:
    """The task expert's keys of an `EXPERT.yaml`, without data."""
    adapter = {"lora": {"r": 64, "lora_alpha": 64}} if settings.lora else {}
    places = {"places": [{"layers": f"0-{inputs.base.layers - 1}"}]}
    return {"base": str(inputs.base.folder), "train": places, **adapter,
            "hyperparameters": _hyperparameters(inputs, settings)[0]}  # fmt: skip


def write_data(inputs: Inputs, folder: Path) -> None:
    """Write the mixes, the benchmarks and the documents, which depend on no setting."""
    for name in ("mixes", "benchmarks", "data"):
        (folder / name).mkdir(exist_ok=True)
    if isinstance(inputs.task, Task):
        _write_task(inputs, inputs.task, folder, inputs.task.name, inputs.held_out)
        _write_benchmarks(inputs, inputs.task, folder)
    for language in inputs.languages:
        if not language.ready:
            _write_language(inputs, language, folder)
        if language.task:
            _write_task(inputs, language.task, folder, f"{inputs.task_name}-{language.code}")
        if language.labelled:
            name = f"{inputs.task_name}-{language.code}-labels"
            _write_task(inputs, language.labelled, folder, name, labels=True)


def write_study(inputs: Inputs, settings: Settings, folder: Path) -> dict[str, Any]:
    """Write the study and its trial; returns the words of its README."""
    words = _words(inputs, settings, folder)
    (folder / "study.yaml").write_bytes(render("study.yaml", {**words, "few": None}).encode())
    if inputs.request.trial:
        trial = {**words, "name": f"{words['name']}-trial", "seeds": 1, "few": words["trial"]}
        (folder / "trial.yaml").write_bytes(render("study.yaml", trial).encode())
    return words


def render(name: str, words: Mapping[str, Any]) -> str:
    """Fill a template of the package."""
    from jinja2 import Environment, StrictUndefined

    text = (resources.files("layerswap.new") / "templates" / f"{name}.j2").read_text("utf-8")
    whole = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    whole.filters |= {"yaml": _flow, "block": _block}
    return whole.from_string(text).render(words)


def _words(inputs: Inputs, settings: Settings, folder: Path) -> dict[str, Any]:
    request, billions, languages = inputs.request, inputs.billions, inputs.languages
    for_task, for_language = _hyperparameters(inputs, settings)
    data = [{"code": language.code, "data": language.ready or f"mixes/{language.code}.yaml"}
            for language in languages]  # fmt: skip
    most = max([language.rows for language in languages if not language.ready] or [1400])
    return {
        "name": request.folder.name,
        "folder": request.folder,
        "codes": ", ".join(language.code for language in languages),
        "base": str(inputs.base.folder)
        if request.base == "lab"
        else _relative(request.base, folder),
        "given_base": request.base,
        "encoder": request.encoder and _relative(request.encoder, folder),
        "translated": _translated(inputs),
        "finish": _finish(inputs, settings),
        "cautions": inputs.cautions,
        "device": inputs.device,
        "task_data": inputs.task
        if isinstance(inputs.task, str)
        else f"mixes/{inputs.task_name}.yaml",
        "layers": f"0-{inputs.base.layers - 1}",
        "rates": "usual for LoRA" if settings.lora else _rates(billions)[3],
        "task": _flow(for_task),
        "language": _flow(for_language),
        "first": data[0],
        "others": data[1:],
        "chosen": any("dev" in language.tests for language in languages),
        "zones": default_zones(inputs.base.layers),
        "suite": _suite(inputs),
        "trial": request.trial
        and {"task": max(32, inputs.task_count // 100), "language": max(8, most // 100)},
        **settings._asdict(),
    }


def _relative(given: str, folder: Path) -> str:
    """A model as the study names it: a folder relative to it, or a Hub id."""
    path = Path(given).expanduser()
    return relpath(path, folder) if path.is_dir() else given


def _translated(inputs: Inputs) -> dict[str, dict[str, str]]:
    """Return the translator's files, by language."""
    tests = {
        language.code: {"test": f"data/{language.code}.translated.jsonl"}
        for language in inputs.languages
        if "translated" in language.tests
    }
    tasks = {language.code: {"task": f"mixes/{inputs.task_name}-{language.code}.yaml"}
             for language in inputs.languages if language.task}  # fmt: skip
    return {code: tests.get(code, {}) | tasks.get(code, {}) for code in tests | tasks}


def _finish(inputs: Inputs, settings: Settings) -> dict[str, Any]:
    """Return the trainings on labelled rows, with the settings of the task expert."""
    labels = {language.code: f"mixes/{inputs.task_name}-{language.code}-labels.yaml"
              for language in inputs.languages if language.labelled}  # fmt: skip
    if not labels:
        return {}
    run = {key: value for key, value in expert(inputs, settings).items() if key != "base"}
    run["hyperparameters"] |= {"num_train_epochs": 3}
    return {"labels": labels, "run": run}


def _suite(inputs: Inputs) -> str:
    """The suite of the study: ready, a benchmark, or the file of two benchmarks."""
    if inputs.suite:
        return inputs.suite
    proved = {language.proved for language in inputs.languages}
    end = "-all" if len(proved) > 1 else "" if True in proved else ENGLISH
    return f"benchmarks/{inputs.task_name}{end}.yaml"


def _write_task(
    inputs: Inputs,
    task: Task,
    folder: Path,
    name: str,
    held_out: Sequence[Sequence[int]] = (),
    *,
    labels: bool = False,
) -> None:
    end = "" if any(language.tests for language in inputs.languages) else ENGLISH
    benchmark = None if inputs.suite else f"../benchmarks/{inputs.task_name}{end}.yaml"
    held = {*chain.from_iterable(held_out)}
    rows = task.documents([row for i, row in enumerate(task.table.rows) if i not in held])
    file, count = folder / "data" / f"{name}.train.jsonl", len(rows)
    _write_rows(file, rows)
    lengths = [sum(map(inputs.tokens, row)) for row in task.rows(SAMPLE)]
    _write_mix(folder, {
        "name": name,
        "about": f"The task: {count:,} rows of {task.table.name}.",
        "task": True,
        "total": count,
        "validation": 0 if labels else min(100, max(1, count // 10)),
        "row_tokens": max(1, round(sum(lengths) / len(lengths))),
        "sources": {name: task.source(f"../data/{file.name}", benchmark)},
        "against": _against(inputs, splits=("test",) if labels else SPLITS),
    })  # fmt: skip


def _write_language(inputs: Inputs, language: LanguageInput, folder: Path) -> None:
    total = language.rows
    sources = {
        name: {**table.source(folder / "mixes"), "text": table.template(template),
               "language": language.code, "weight": weight, "seed": seed}
        for seed, (name, table, template, weight) in enumerate(language.templates(), start=1)
    }  # fmt: skip
    texts = ("plain text and its translation, three fifths and a fifth each way as in docs/real.md"
            if language.parallel else "plain text")  # fmt: skip
    _write_mix(folder, {
        "name": language.code,
        "about": f"{language.name}: {texts}.",
        "task": False,
        "total": total,
        "validation": min(100, max(1, total // 10)),
        "row_tokens": inputs.mean_tokens(language),
        "sources": sources,
        "against": _against(inputs, language.code),
    })  # fmt: skip


def _write_mix(folder: Path, words: Mapping[str, Any]) -> None:
    (folder / "mixes" / f"{words['name']}.yaml").write_bytes(render("mix.yaml", words).encode())


def _write_benchmarks(inputs: Inputs, task: Task, folder: Path) -> None:
    """Write the test documents and the benchmarks, also for languages without a test."""
    data = folder / "data"
    tested = [language for language in inputs.languages if language.tests]
    unproved = [language.code for language in inputs.languages if not language.proved]
    for language in tested:
        for split, documents in language.tests.items():
            written = TASK_LANGUAGE if split == "translated" else language.code
            rows = (target(task, document, written) for document in documents)
            _write_rows(data / f"{language.code}.{split}.jsonl", rows)
    held = task.documents([task.table.rows[first] for first, *_ in inputs.held_out])
    # The task expert is asked in English too: the score with a perfect translator.
    asked = tested and held and TASK_LANGUAGE not in inputs.request.languages
    english = [TASK_LANGUAGE] if asked else []
    for code in (*unproved, *english):
        rows = (target(task, document, "en") for document in held)
        _write_rows(data / f"{code}.test.jsonl", rows)
    prompts = [prompt for prompt, _ in inputs.task_rows]
    tokens = max(1, round(sum(map(inputs.tokens, prompts)) / len(prompts)))
    codes_of = {task.name: [*(language.code for language in tested), *english],
                task.name + ENGLISH: unproved}  # fmt: skip
    why = {
        task.name: "# The test documents of each language, in ../data with the development split;\n"
        "# in English, held-out rows of the task.",
        task.name + ENGLISH: "# No test in these languages. The documents are held-out rows of "
        f"{task.table.name}:\n# they show whether the model still does the task, and prove "
        "nothing in the language.",
    }
    for name, codes in codes_of.items():
        if codes:
            count = max([len(language.tests["test"]) for language in tested] if name == task.name
                        else [len(held)])  # fmt: skip
            size = {"documents": count, "read": tokens, "written": inputs.most_written}
            choice = "# The metric is one of metadata.written, or exact_match.\n"
            text = f"{why[name]}\n{choice * (task.metric in WRITTEN)}"
            text += _block(task.benchmark(name, codes, size))
            (folder / "benchmarks" / f"{name}.yaml").write_bytes(text.encode())
    if tested and unproved:
        suite = {"title": task.name, "benchmarks": {f"{name}.yaml": 0 for name in codes_of}}
        (folder / _suite(inputs)).write_bytes(_block(suite).encode())


def _against(
    inputs: Inputs, code: str | None = None, splits: Collection[str] = SPLITS
) -> dict[str, Any]:
    """The sets of test documents that stay out of a mix."""
    sets = {
        f"{language.code}-{split}": {
            "path": f"../data/{language.code}.{split}.jsonl",
            "columns": inputs.task.own_texts(documents),
        }
        for language in inputs.languages
        if code in (None, language.code) and isinstance(inputs.task, Task)
        for split, documents in language.tests.items()
        if split in splits
    }
    if code and inputs.held_out and isinstance(inputs.task, Task):
        asked = next((one.code for one in inputs.languages if not one.proved), TASK_LANGUAGE)
        columns = inputs.task.own_texts(inputs.task.complete)
        sets["held-out"] = {"path": f"../data/{asked}.test.jsonl", "columns": columns}
    return sets


def _hyperparameters(inputs: Inputs, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    _, of_task, of_language, _ = _rates(inputs.billions)
    lengths = sorted(inputs.tokens(prompt + answer) for prompt, answer in inputs.task_rows)
    longest = max(64, 1 << lengths[len(lengths) * 99 // 100].bit_length())
    shared = {"lr_scheduler_type": "linear", "weight_decay": 0.01}
    task = {
        "learning_rate": ADAPTER_RATE if settings.lora else of_task,
        "num_train_epochs": 3 if inputs.task_count < FEW_ROWS else 2,
        **_batch(BATCH, settings.rows), **shared, "max_length": min(inputs.longest, longest),
    }  # fmt: skip
    language = {
        "learning_rate": ADAPTER_RATE if settings.lora else of_language, "num_train_epochs": 1,
        **_batch(2, 2 * settings.rows // BATCH or 1), **shared,
        "max_length": min(inputs.longest, 256),
    }  # fmt: skip
    return task, language


def _batch(rows: int, at_once: int) -> dict[str, int]:
    """Return the batch size and the gradient accumulation of a step on `rows` rows."""
    parts = {"gradient_accumulation_steps": rows // at_once} if at_once < rows else {}
    return {"per_device_train_batch_size": at_once, **parts}


def _rates(billions: float) -> tuple[float, float, float, str]:
    return next(row for row in RATES if billions <= row[0])


def _block(value: Any) -> str:
    """YAML with a line for each key, and innermost collections on one line."""
    return dump_yaml(value, width=1000, default_flow_style=None)


def _flow(value: Any) -> str:
    return dump_yaml([value], default_flow_style=True, width=1000).strip()[1:-1]


def _write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
