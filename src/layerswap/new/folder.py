"""Makes the folder of a new study: checks, measures this machine, and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from layerswap._types import Log
from layerswap.checkpoint import atomic_folder
from layerswap.errors import StudyError
from layerswap.new.inputs import Inputs, Request, check_request
from layerswap.new.machine import Measured, check_disk, measure, memory_gb
from layerswap.new.study import Settings, expert, suite_of, write_files
from layerswap.new.tasks import Task, found_in
from layerswap.study.estimate import STARTING, Costs, StudyCosts, cost_study
from layerswap.study.plan import plan_study
from layerswap.study.preflight import check_plan
from layerswap.study.spec import read_study
from layerswap.training.expert.hyperparameters import autocast_pays
from layerswap.versions import need_extras

HOUR = 1.0
"""Longest study that trains three seeds by default."""
SEEDS = 3
ROOM = 1.3
"""Memory for activations and libraries, as a factor."""


@dataclass(frozen=True)
class NewStudy:
    """A study that was written."""

    folder: Path
    seeds: int
    hours: Mapping[str, float]  # by step, measured on this machine
    disk_gb: float
    memory_gb: float


def create(request: Request, log: Log = lambda line: None) -> NewStudy:
    """Check everything, measure the base on this machine, and write the folder of the study.

    Raises:
        LayerswapError: a mistake in what was given; nothing was written.
    """
    need_extras("a new study", "train", "eval")
    inputs = check_request(request)
    if isinstance(inputs.task, Task):
        for line in found_in(inputs.task):
            log(line)
    target = request.folder.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(target, marker="study.yaml") as folder:
        settings, costs = _fitting(inputs, folder)
        check_disk(target, costs.disk_gb + costs.passing_gb)
        log(f"measuring {request.base} on this machine ({inputs.device})")
        speed = measure(expert(inputs, settings), inputs.task_rows, inputs.device)
        hours = _hours(costs, speed)
        if request.seeds is None and sum(hours.values()) > HOUR:
            settings = Settings(1, settings.lora)
            costs = _planned(inputs, settings, folder)
            hours = _hours(costs, speed)
        made = NewStudy(request.folder, settings.seeds, hours, costs.disk_gb + costs.passing_gb,
                        _memory(costs))  # fmt: skip
        (folder / "README.md").write_text(_readme(inputs, settings, made, speed), "utf-8")
    return made


def _fitting(inputs: Inputs, folder: Path) -> tuple[Settings, StudyCosts]:
    """Full fine-tuning if memory allows it, else LoRA."""
    free, seeds = memory_gb(inputs.device), inputs.request.seeds or SEEDS
    for lora in (False, True):
        settings = Settings(seeds, lora)
        costs = _planned(inputs, settings, folder)
        if _memory(costs) <= free:
            return settings, costs
    raise StudyError(
        f"--base {inputs.request.base}: needs {_memory(costs):,.1f} GB of memory with LoRA and "
        f"{free:,.1f} GB are free; choose a smaller base or another machine"
    )


def _planned(inputs: Inputs, settings: Settings, folder: Path) -> StudyCosts:
    """Write the study, check it as `study run` does, and estimate its costs."""
    write_files(inputs, settings, folder)
    for name in ("study", "trial") if inputs.request.trial else ("study",):
        spec = read_study(folder / f"{name}.yaml")
        graph = plan_study(spec, folder)
        check_plan(graph)
        if name == "study":
            costs = cost_study(spec, graph)
    return costs


def _memory(costs: StudyCosts) -> float:
    return ROOM * max(one.memory_gb for one in costs.steps.values())


def _hours(costs: StudyCosts, speed: Measured) -> dict[str, float]:
    """Hours of each step: the estimate's work at the measured speed."""
    guessed = _guessed(costs.costs)
    factors = {"train": guessed.train / speed.train, "evaluate": guessed.read / speed.read}
    hours = {}
    for name, one in costs.steps.items():
        kind = name.partition("/")[0]
        factor = factors["evaluate" if kind == "evaluate" else "train"]
        work = max(0.0, one.hours - STARTING / 3600)
        hours[name] = (STARTING / 3600 if one.hours else 0.0) + work * factor
    return hours


def _guessed(costs: Costs) -> Measured:
    """The speed that the estimate assumes."""
    parameters = costs.size.billions * 1e9
    inside = sum(share for (layer, _), share in costs.size.shares.items() if layer is not None)
    able = costs.speed.name != "on an A100" and autocast_pays(round(parameters))
    read = costs.speed.read / parameters
    return Measured(read * (3 if able else 1) / (4 + 2 * inside), read / 2)


def _readme(inputs: Inputs, settings: Settings, made: NewStudy, speed: Measured) -> str:
    where, request = inputs.request.folder, inputs.request
    total = sum(made.hours.values())
    kinds: dict[str, float] = {}
    for name, hours in made.hours.items():
        kind = name.partition("/")[0]
        kinds[kind] = kinds.get(kind, 0.0) + hours
    rows = "\n".join(f"| {kind} | {_duration(hours)} |" for kind, hours in kinds.items() if hours)
    found = "\n".join(f"    {line}" for line in found_in(inputs.task)) \
        if isinstance(inputs.task, Task) else f"    {inputs.task}: a ready mix"  # fmt: skip
    lines = []
    for one in inputs.languages:
        tested = f"{len(one.tests['test']):,} test documents" if "test" in one.tests else (
            f"the suite {inputs.suite}" if one.proved
            else "**no test: the study can prove nothing there.** The model is made with the "
            "default zones, and asked whether it still does the task in the task's own language"
        )  # fmt: skip
        chosen = "" if not one.proved else (
            "; zones are chosen on the development split" if "dev" in one.tests or inputs.suite
            else "; no development split, so nothing is chosen: default zones"
        )  # fmt: skip
        lines.append(f"- **{one.name}** (`{one.code}`): {tested}{chosen}.")
    trial = (f"layerswap study run {where}/trial.yaml --out {where}/trial      # 1% of the data\n"
             if request.trial else "")  # fmt: skip
    first = inputs.languages[0].code
    method = "LoRA adapters, because memory is short" if settings.lora else "the layers in full"
    return f"""\
# {where.name}

```bash
{trial}layerswap study run {where}/study.yaml --out {where}/results
```

trains {settings.seeds} task expert{"s" * (settings.seeds > 1)} and as many language experts for each
language from `{request.base}` ({method}), composes them layer by layer, compares the composition
with the base, each expert, their average and a task expert that trains in its middle layers alone,
writes `results/report.html`, and the model of each language into `results/merged/`.

What was recognised:

{found}

{chr(10).join(lines)}

On this machine, measured with the real base ({speed.train:,.0f} tokens/s in training,
{speed.read:,.0f} tokens/s in reading on `{inputs.device}`): about **{_duration(total)}**,
{made.disk_gb:,.1f} GB of disk and {made.memory_gb:,.1f} GB of memory.

| step | time |
|---|---:|
{rows}

- `study.yaml` has every setting with its reason and the alternative.
- `mixes/` has the training data's recipes; `{suite_of(inputs)}` the prompt and the scoring.
- A run that is stopped resumes by the same command.

Then:

```bash
layerswap verify {where}/results/merged/{first}
layerswap eval {where}/results/merged/{first} --suite {_suite_path(inputs)} --language {first}
```

The report compares two candidates: the swap, which is merged, and the task expert of the middle
layers. If the second is clearly better, take it: its folder is named in `results/report.html`.
"""


def _suite_path(inputs: Inputs) -> str:
    suite = suite_of(inputs)
    return f"{inputs.request.folder}/{suite}" if suite.endswith(".yaml") else suite


def _duration(hours: float) -> str:
    minutes = hours * 60
    if minutes < 2:
        return f"{max(1, round(minutes * 60))} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h"
