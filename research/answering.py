"""The tables of an open question: its settings with intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from layerswap.evaluation.statistics import mean_interval, paired_difference
from layerswap.experiment.conditions import DEFAULT as DEFAULT_SWAP
from layerswap.report.tables import Difference, Table, write_tables
from layerswap.study.runner import Context
from research.pairs import BASE_NAMES, RESULT

ANSWER = "answer"
DEFAULT, CHOSEN = str(DEFAULT_SWAP), "swap, chosen"
Right = npt.NDArray[np.float64]


def write_answer(context: Context) -> None:
    """Write the tables of a question, as Markdown and LaTeX."""
    by_setting: dict[str, list[Path]] = {}
    for step in context.step.settings["pairs"]:
        by_setting.setdefault(step.split("/")[1], []).append(context.inputs[step])
    read = {name: [_read(folder) for folder in folders] for name, folders in by_setting.items()}
    languages = list(next(iter(read.values()))[0])
    tables = {}
    for language in languages:
        tables[f"{language}: the models"] = (
            _models(read, language)
            if len(read) > 1
            else _pairs(next(iter(read.values())), language)
        )
        tables[f"{language}: the compositions"] = _compositions(read, language)
        tables[f"{language}: layers from the language expert"] = _depths(read, language)
    write_tables(context.folder / ANSWER, tables, title=context.step.settings["question"])


def _models(read: Mapping[str, list[Any]], language: str) -> Table:
    """Settings down, models across."""
    columns = ["setting", *BASE_NAMES, DEFAULT, CHOSEN, "chosen minus best expert",
               "chosen minus soup"]  # fmt: skip
    rows: list[list[Any]] = []
    for name, runs in read.items():
        test = {
            model: _mean(runs, language, lambda one, m=model: m) for model in (*BASE_NAMES, DEFAULT)
        }
        chosen = _mean(runs, language, lambda one: one["chosen"])
        best = max(
            ("task expert", "language expert"), key=lambda one: _development(runs, language, one)
        )
        cells = [mean_interval(values) for values in (*test.values(), chosen)]
        rows.append([name, *cells, _apart(chosen, test[best]), _apart(chosen, test["soup"])])
    n = rows[0][1].n
    seeds = len(next(iter(read.values())))
    caption = (
        f"Per cent right of {n} test problems, mean over {seeds} seeds of experts. The best expert "
        "is the better one on development problems."
    )
    return Table(columns, rows, caption=caption)


def _pairs(runs: list[Any], language: str) -> Table:
    """Models down: mean and range over the pairs, and the paired differences to the swaps."""
    picks: dict[str, Any] = {name: lambda _, m=name: m for name in (*BASE_NAMES, DEFAULT)}
    picks[CHOSEN] = lambda one: one["chosen"]
    right = {name: _mean(runs, language, pick) for name, pick in picks.items()}
    swaps = (DEFAULT, CHOSEN)
    columns = ["model", "score, %", "lowest pair", "highest pair",
               *(f"{swap}, minus it" for swap in swaps)]  # fmt: skip
    rows: list[list[Any]] = []
    for name, pick in picks.items():
        each = [100 * float(_mean([run], language, pick).mean()) for run in runs]
        apart = [_apart(right[swap], right[name]) if swap != name else "" for swap in swaps]
        rows.append([name, mean_interval(right[name]), f"{min(each):.1f}", f"{max(each):.1f}",
                     *apart])  # fmt: skip
    chosen = "; ".join(run[language]["chosen"].removeprefix("swap ") for run in runs)
    caption = (
        f"{len(runs)} pairs of experts with a seed each, {rows[0][1].n} test problems. Chosen on "
        f"development problems (bottom, top, transition, outside): {chosen}."
    )
    return Table(columns, rows, caption=caption)


def _compositions(read: Mapping[str, list[Any]], language: str) -> Table:
    """Settings down: the chosen composition, and the scores with its parts changed."""
    columns = ["setting", "chosen (bottom, top, transition, outside)", "with a transition",
               "without", "outside blended", "outside language", "outside task"]  # fmt: skip
    rows: list[list[Any]] = []
    for name, runs in read.items():
        chosen = "; ".join(run[language]["chosen"].removeprefix("swap ") for run in runs)
        cells: list[Any] = [chosen]
        for zone in (1, 0):
            cells.append(mean_interval(_mean(runs, language, lambda one, z=zone: _best(one, z))))
        for outside in ("blend", "language", "task"):
            cells.append(mean_interval(_mean(runs, language, lambda one, o=outside: _own(one, o))))
        rows.append([name, *cells])
    caption = (
        "The composition is chosen on development problems, among those with a blended layer "
        "above the bottom zone and those without; the last three at the partition's own zones."
    )
    return Table(columns, rows, caption=caption)


def _depths(read: Mapping[str, list[Any]], language: str) -> Table:
    """Settings down, layers at the bottom across, with no and one layer at the top."""
    numbers = max(_bottoms(run[language]) for runs in read.values() for run in runs)
    rows: list[list[Any]] = []
    for name, runs in read.items():
        for top in (0, 1):
            cells: list[Any] = []
            for bottom in numbers:
                like = f"swap {bottom},{top},0,blend"
                there = all(like in run[language]["scores"] for run in runs)
                cells.append(
                    mean_interval(_mean(runs, language, lambda _, at=like: at)) if there else "-"
                )
            rows.append([name, top, *cells])
    columns = ["setting", "top", *(f"bottom {bottom}" for bottom in numbers)]
    caption = (
        "How many layers at the bottom and at the top come from the language expert; without a "
        "transition, the outside blended."
    )
    return Table(columns, rows, caption=caption)


def _bottoms(one: Any) -> list[int]:
    names = [name.removeprefix("swap ").split(",") for name in one["scores"] if ",blend" in name]
    return sorted({int(bottom) for bottom, *_ in names})


def _best(one: Any, transition: int) -> str:
    names = [name for name in one["scores"] if name.startswith("swap ")
             and name.endswith(f",{transition},blend")]  # fmt: skip
    best: str = max(names, key=lambda name: float(np.mean(one["scores"][name]["development"])))
    return best


def _own(one: Any, outside: str) -> str:
    """The zones of the partition with another source outside the layers."""
    end = ",language"
    (like,) = (name for name in one["scores"] if name.endswith(end))
    return f"{like.removesuffix(end)},{outside}"


def _mean(runs: list[Any], language: str, pick: Any) -> Right:
    """Mean over seeds of the right answers to each test problem, of one model per seed."""
    found = [run[language]["scores"][pick(run[language])]["test"] for run in runs]
    mean: Right = np.mean(np.array(found, dtype=np.float64), axis=0)
    return mean


def _development(runs: list[Any], language: str, model: str) -> float:
    """The share of development problems that a model answers right, the mean over seeds."""
    return float(np.mean([run[language]["scores"][model]["development"] for run in runs]))


def _apart(one: Right, other: Right) -> Difference:
    return Difference(paired_difference(one, other))


def _read(folder: Path) -> Any:
    return json.loads((folder / RESULT).read_text("utf-8"))
