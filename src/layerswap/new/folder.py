"""Makes the folder of a new study: checks, measures this machine, and writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from layerswap.checkpoint import atomic_folder
from layerswap.evaluation.bases import glance
from layerswap.ground.commit import write_json
from layerswap.ground.errors import StudyError
from layerswap.ground.types import Log
from layerswap.new.inputs import Inputs, LanguageInput, Request, check_request
from layerswap.new.machine import check_disk, measure, memory_gb
from layerswap.new.study import Settings, expert, render, write_data, write_study
from layerswap.new.tasks import Task, found_in, found_in_test
from layerswap.study.estimate import BATCH, SPEED, Measured, StudyCosts, cost_study
from layerswap.study.plan import plan_study
from layerswap.study.preflight import check_plan
from layerswap.study.spec import StudySpec, read_study
from layerswap.study.steps import Graph
from layerswap.versions import need_extras

Planned = tuple[StudySpec, Graph]
"""A study, and its steps."""
HOUR = 1.0
"""Longest study that trains three seeds by default."""
SEEDS = 3
ROOM = 1.3
"""Memory for activations and libraries, as a factor."""


def create(request: Request, log: Log = lambda line: None) -> tuple[Settings, StudyCosts]:
    """Check everything, measure the base on this machine, and write the folder of the study.

    Returns its settings, and its costs on this machine.

    Raises:
        LayerswapError: a mistake in the request; nothing was written.
    """
    need_extras("a new study", "train", "eval")
    inputs = check_request(request)
    found = [f"{inputs.task}: a ready mix"]
    if isinstance(inputs.task, Task):
        found = found_in(inputs.task)
        inputs.cautions.extend(inputs.task.doubts())
    for language in inputs.languages:
        found += language.found()
        for split, documents in language.tests.items():
            given = request.documents[split][language.code]
            found += found_in_test(given, split, documents, language.remarks[split], language.name)
            assert isinstance(inputs.task, Task)  # other tasks have no files of tests
            inputs.cautions.extend(inputs.task.contradictions(documents, Path(given).name))
        for rows in filter(None, [language.task, language.labelled]):
            found += found_in(rows)
            inputs.cautions.extend(rows.doubts())
        inputs.cautions.extend([*language.cautions(inputs.task), *inputs.unwritable(language)])
    inputs.cautions[:] = dict.fromkeys(inputs.cautions)  # --labels are development documents too
    found += inputs.cautions
    for line in found:
        log(line)
    target = request.folder.absolute()
    with atomic_folder(target, marker="study.yaml") as folder:
        write_data(inputs, folder)
        settings, planned, costs = _fitting(inputs, folder)
        check_disk(target, costs.disk_gb)
        log(f"measuring {request.base} on {inputs.device}: some training steps on your data")
        before = settings
        settings, speed = _measured(inputs, settings, partial(_look, inputs, found, log))
        ways = ["the experts are LoRA adapters"] * settings.lora
        if settings.rows < BATCH:
            ways.append(f"a step's {BATCH} rows are computed {settings.rows} at a time, with an "
                        "equal result")  # fmt: skip
        if ways:
            log(f"memory is short: {'; '.join(ways)}")
        write_json(folder / SPEED, asdict(speed))
        if settings != before:
            planned = _planned(inputs, settings, folder)
        costs = cost_study(*planned, speed)
        if request.seeds is None and sum(costs.hours.values()) > HOUR:
            settings = settings._replace(seeds=1)
            costs = cost_study(*_planned(inputs, settings, folder), speed)
        words = write_study(inputs, settings, folder)  # with the cautions of the measurement
        proofs = [{"code": language.code, "name": language.name,
                   "proof": _proof(inputs, language)}
                  for language in inputs.languages]  # fmt: skip
        words |= {
            "found": found, "languages": proofs, "speed": speed, "costs": costs,
        }  # fmt: skip
        (folder / "README.md").write_bytes(render("README.md", words).encode())
    return settings, costs


def _measured(
    inputs: Inputs, settings: Settings, look: Callable[[Any, Any], None]
) -> tuple[Settings, Measured]:
    """Measure full fine-tuning, then LoRA if the memory holds only one row."""
    tried = expert(inputs, settings)
    row = inputs.longest_row(tried["hyperparameters"]["max_length"])
    speed = measure(tried, row, inputs.device, look)
    if speed.rows == 1 and not settings.lora:
        settings = settings._replace(lora=True)
        speed = measure(expert(inputs, settings), row, inputs.device)
    return settings._replace(rows=speed.rows), speed


def _look(inputs: Inputs, found: list[str], log: Log, model: Any, tokenizer: Any) -> None:
    """Say how the base reads each language."""
    for language in inputs.languages:
        reading = glance(inputs.request.base, model, tokenizer, language.own_texts())
        if reading is not None:
            found.append(reading.line(language.name))
            log(found[-1])
            if reading.verdict != "reads it":
                inputs.cautions.append(f"{found[-1]}.")


def _fitting(inputs: Inputs, folder: Path) -> tuple[Settings, Planned, StudyCosts]:
    """Full fine-tuning if memory allows it, else LoRA."""
    free, seeds = memory_gb(inputs.device), inputs.request.seeds or SEEDS
    for settings in (Settings(seeds, lora=False), Settings(seeds, lora=True)):
        planned = _planned(inputs, settings, folder)
        costs = cost_study(*planned)
        if ROOM * costs.memory_gb <= free:
            return settings, planned, costs
    raise StudyError(
        f"--base {inputs.request.base}: needs {ROOM * costs.memory_gb:,.1f} GB of memory with LoRA "
        f"and {free:,.1f} GB are free; choose a smaller base or another machine"
    )


def _planned(inputs: Inputs, settings: Settings, folder: Path) -> Planned:
    """Write the study, and check it as `study run` does."""
    write_study(inputs, settings, folder)
    for name in ("trial", "study") if inputs.request.trial else ("study",):
        spec = read_study(folder / f"{name}.yaml")
        graph = plan_study(spec, folder)
        check_plan(graph)
    return spec, graph


def _proof(inputs: Inputs, language: LanguageInput) -> str:
    if not language.proved:
        return ("**no test, so the study can prove nothing there.** It makes the model with the "
                "default zones, and asks whether it still does the task in the task's own "
                "language")  # fmt: skip
    if inputs.suite:
        return f"the suite {inputs.suite}"
    tested = f"{len(language.tests['test']):,} test documents"
    if language.labelled:
        tested += (f"; at the end the base, the task expert, the swap and the soup are trained on "
                   f"{len(language.labelled.complete):,} labelled rows")  # fmt: skip
    if "dev" in language.tests:
        return f"{tested}; zones are chosen on {len(language.tests['dev']):,} development documents"
    return f"{tested}; no development split, so nothing is chosen: the default zones"
