"""Templates of a mix's source from a benchmark, so that a prompt stands once.

`task: sib200` names a benchmark or its file; `columns` names the columns of the rows that differ
from the benchmark's. A source without an origin reads the benchmark's own data in its `language`
and `split`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerswap.evaluation.languages import match, standard_tag
from layerswap.evaluation.suites.folders import FUNCTION, DataFolder
from layerswap.evaluation.suites.suites import FIELD, Benchmark, Data, filled, parts_of, table_files
from layerswap.ground.errors import RecipeError, error_context
from layerswap.ground.strict import Strict
from layerswap.ground.yaml_file import nearest, validate
from layerswap.reading.origins import NonEmpty

_OWN = "write prompt and completion instead of task"


class TaskKeys(Strict):
    """The keys of a source that name a benchmark; `fill_tasks` puts templates in their place."""

    task: NonEmpty | None = None  # a benchmark, or its file
    columns: dict[NonEmpty, NonEmpty] = {}  # of the rows, by their names in the benchmark


def fill_tasks(data: Any, folder: Path, *, where: str) -> Any:
    """Replace `task` and `columns` in a parsed mix by templates, and by an origin if it has none.

    Returns the same object if no source has a task. Files are relative to `folder`; errors name
    `where`.
    """
    sources = data.get("sources") if isinstance(data, dict) else None
    named = {
        name: source
        for name, source in (sources.items() if isinstance(sources, dict) else ())
        if isinstance(source, dict) and source.keys() & TaskKeys.model_fields.keys()
    }
    if not named:
        return data
    filled = dict(sources or {})
    for name, source in named.items():
        filled[name] = _filled(source, folder, f"{where}, source {name!r}")
    return {**data, "sources": filled}


def _filled(source: Mapping[str, Any], folder: Path, where: str) -> dict[str, Any]:
    keys = {key: source[key] for key in TaskKeys.model_fields if key in source}
    asked = validate(TaskKeys, keys, where=where, expected="")
    if asked.task is None:
        raise RecipeError(f"{where}: columns rename those of a benchmark; name it in task")
    kept = {key: value for key, value in source.items() if key not in keys}
    with error_context(f"{where}: task"):
        file = folder / asked.task if asked.task.endswith(".yaml") else None
        parts = parts_of(str(file or asked.task))
        if len(parts) != 1:
            names = ", ".join(part.benchmark.name for part in parts)
            raise RecipeError(f"{asked.task} is a suite; name one of its benchmarks ({names})")
        benchmark = parts[0].benchmark
        table, code = _table(benchmark, kept.get("language"))
        if not any(kept.get(key) for key in ("id", "path", "parallel")):
            kept |= _origin(benchmark, table, code, kept.get("split", "train"), file)
        return {**templates(benchmark, table, code, asked.columns, kept), **kept}


def _table(benchmark: Benchmark, language: Any) -> tuple[Data | None, str | None]:
    """The table of the benchmark in a language, or that of its exemplars, and the code there."""
    if not isinstance(language, str):
        return benchmark.data, None
    if benchmark.languages == "any":
        return benchmark.data, standard_tag(language)
    exemplars = benchmark.exemplars
    taught = exemplars and (exemplars.language or exemplars.code)
    # Equal codes are found without langcodes, so that ready mixes are listed by the core alone.
    code = None if language == taught else match(language, benchmark.languages)
    if exemplars and taught and code is None and (language == taught or match(language, [taught])):
        return exemplars.data or benchmark.data, exemplars.code
    if code is None:
        raise RecipeError(f"{benchmark.name} does not have {language}")
    return benchmark.data, code


def _origin(
    benchmark: Benchmark, table: Data | None, code: str | None, split: Any, file: Path | None
) -> dict[str, Any]:
    """The keys of the rows that the benchmark publishes for training."""
    if table is None:
        raise RecipeError(f"a function reads the rows of {benchmark.name}; give id or path")
    if code is None:
        raise RecipeError("the source names no rows; give language, id or path")
    exemplars = benchmark.exemplars
    known = [name for name in (exemplars and exemplars.split, benchmark.development) if name]
    if split not in known:
        there = f"; there are {', '.join(known)}" if known else ""
        raise RecipeError(f"{benchmark.name} has no split {split!r} to train on{there}")
    path = DataFolder(None).of(file).find(*table_files(table, code, split))
    if path is not None:
        return {"path": str(path.absolute())}
    if not table.hub:
        raise RecipeError(f"{benchmark.name} is not on the Hub; give path, its {split} rows")
    return {"id": table.hub[0], "config": code, "split": table.hub_splits.get(split, split)}


def templates(
    benchmark: Benchmark, table: Data | None, code: str | None, given: Mapping[str, str],
    source: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The templates and answers of a benchmark, with the rows' columns and the language's code.

    `source` may have a completion and `template: jinja` of its own.
    """
    columns = {name: fields[0] for name, fields in table.sources.items()} if table else {}
    for name in given:
        if columns and name not in columns:
            raise RecipeError(f"columns: no {name!r} in the data{nearest(name, [*columns])}")
    columns |= given
    values = {"labels": benchmark.labels, **({"code": code} if code else {})}
    task = filled(benchmark.task, values)
    prompt, target, choices = (task.get(f"doc_to_{key}") for key in ("text", "target", "choice"))
    if not _is_text(prompt) or len(benchmark.variants) > 1:
        raise RecipeError(f"{benchmark.name} has no single prompt in its file; {_OWN}")
    if code is None and "{code" in prompt:
        raise RecipeError("the prompt names the language; give the source's language")
    texts: dict[str, str] = {"prompt": prompt}
    answers: dict[str, Any] = {}
    if "completion" not in source:
        if not _is_text(target) or (choices and choices != benchmark.labels):
            raise RecipeError(f"{benchmark.name} has no template of its answers; write completion")
        before = task.get("target_delimiter", " ")
        texts["completion"] = f"{before}{target}"
        if benchmark.labels:
            answers["answers"] = [f"{before}{label}".strip() for label in benchmark.labels]
    # A column that the mix names holds texts; the numbers are those of the benchmark's own data.
    numbers = table.label_numbers if table and "label" not in given else []
    plain = {key: _plain(text, columns) for key, text in texts.items()}
    if source.get("template") != "jinja" and not numbers and None not in plain.values():
        return {**plain, **answers}
    if numbers and (label := columns["label"]):
        named = f"{numbers}[{label}] if {label} is integer else {label}"
        texts = {key: re.sub(r"\{\{\s*label\s*\}\}", f"{{{{ {named} }}}}", text)
                 for key, text in texts.items()}  # fmt: skip
    read = {key: _jinja(text, columns) for key, text in texts.items()}
    return {"template": "jinja", **read, **answers}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not value.startswith(FUNCTION)


def _plain(text: str, columns: Mapping[str, str]) -> str | None:
    """Translate a template that only inserts columns; None if it does more."""
    parts = FIELD.split(text)
    if any(mark in part for part in parts[::2] for mark in ("{{", "{%", "{#")):
        return None
    parts[::2] = [part.replace("{", "{{").replace("}", "}}") for part in parts[::2]]
    parts[1::2] = [f"{{{columns.get(name, name)}}}" for name in parts[1::2]]
    return "".join(parts)


def _jinja(text: str, columns: Mapping[str, str]) -> str:
    """Let a Jinja template read columns with other names."""
    renamed = [f"{{% set {name} = {column} %}}" for name, column in columns.items()
               if name != column and re.search(rf"\b{name}\b", text)]  # fmt: skip
    return "".join(renamed) + text
