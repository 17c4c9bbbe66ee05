"""The plan of a study: from its YAML to the graph of its steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from layerswap.compose.schema import Where
from layerswap.errors import RecipeError, StudyError
from layerswap.evaluation.suites.folders import VARIABLE
from layerswap.search.conditions import JOINT, Condition
from layerswap.study.conditions import REGIMES, models_to_run
from layerswap.study.estimate import (
    OTHER,
    USUAL,
    Costs,
    Documents,
    size_of,
    speed_of,
)
from layerswap.study.inputs import (
    DataSize,
    data_size,
    existing_path,
    fingerprints,
    folder_fingerprint,
    lines_of,
    mix_fingerprints,
    mix_size,
    model_of,
    resolve_data,
    task_files,
    task_fingerprints,
    with_recipe,
)
from layerswap.study.spec import TASK, EvaluationSpec, Experts, StepKind, StudySpec, TrainingRun
from layerswap.study.steps import Estimate, Graph, Resources, Step
from layerswap.training.expert.distributed import launch_configuration
from layerswap.training.expert.spec import Data, Files, Lora, Trained
from layerswap.training.mix.schema import mix_text, ready_recipes

CHOSEN_OF_GRID = 2
"""Of a pair's grid, evaluated in other languages: the chosen composition and the best."""
COPIED = {
    "pairs", "partitions", "outside", "baselines", "ties", "soup_shares", "scales", "device",
    "dtype",
}  # fmt: skip
"""Keys of a study that an evaluation's settings have too."""
VERSIONS = {"evaluate": 4, "tables": 5}
"""Of the kinds of step that have come to write something else for the same settings."""


def plan_study(spec: StudySpec, folder: Path) -> Graph:
    """The steps of a study.

    Args:
        spec: the study.
        folder: what its paths are relative to.

    Raises:
        StudyError: steps that do not fit together.
        RecipeError: a mix that cannot be read, or a base, data or tasks that are not there.
    """
    graph = Graph(list(_Planner(spec, folder).steps()))
    first: dict[str, str] = {}
    for name, key in graph.keys.items():
        if key in first:
            what = f"{name} and {first[key]} are the same"
            raise StudyError(f"{what}; change a seed, or leave one out")
        first[key] = name
    return graph


def costs_of(spec: StudySpec, folder: Path) -> Costs:
    """What the estimates of a study's steps are made of; arguments as of `plan_study`."""
    return _Planner(spec, folder).costs


def disk_gb(graph: Graph) -> tuple[float, float]:
    """Disk of a study: when it has ended, and more of it while it runs, GB."""
    passing: dict[str, float] = {}
    for step in graph:
        kind = step.name.rpartition("/")[0] if step.name.startswith("train/") else step.name
        passing[kind] = passing.get(kind, 0.0) + step.estimate.passing_gb
    return sum(step.estimate.disk_gb for step in graph), max(passing.values(), default=0.0)


def smaller_plans(spec: StudySpec, folder: Path) -> dict[str, Graph]:
    """Plans of the same study that need less disk, by what to change for them."""
    selected = spec.model_copy(update={"keep_checkpoints": "selected"})
    found = {} if spec == selected else {"keep_checkpoints: selected": selected}

    def adapted(experts: Experts) -> Experts:
        runs = [run.model_copy(update={"lora": run.lora or Lora()}) for run in experts.runs]
        return experts.model_copy(update={"runs": runs})

    languages = {name: adapted(experts) for name, experts in selected.languages.items()}
    both = selected.both and selected.both.model_copy(update={"lora": Lora()})
    kinds = {"task": adapted(selected.task), "languages": languages, "both": both, "lora": None}
    found["keep_checkpoints: selected, and lora: {} in every run"] = selected.model_copy(
        update=kinds
    )
    plans = {}
    for change, one in found.items():
        with suppress(StudyError):  # two runs that differ by their seed alone become one
            plans[change] = plan_study(one, folder)
    return plans


class _Planner:
    """Makes the steps of one study.

    Args:
        spec: the study.
        folder: what its paths are relative to.
    """

    def __init__(self, spec: StudySpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self.base = model_of(spec.base, folder, "base")
        self.base_fingerprint = folder_fingerprint(self.base)
        whole = spec.dtype == "float32" or (spec.dtype is None and spec.device == "cpu")
        self.costs = Costs(
            size_of(spec, self.base), speed_of(spec.device), 4 if whole else 2,
            dict(self._documents()),
        )  # fmt: skip
        self.selected = spec.keep_checkpoints == "selected"
        self.regimes: dict[str, dict[str, Any]] = {"": {}}
        if spec.lora:
            self.regimes["LoRA"] = {"lora": spec.lora}

    def steps(self) -> Iterator[Step]:
        """Every step, in the order in which a reader expects them."""
        spec, last = self.spec, []
        for kind, experts in spec.kinds.items():
            if experts.data is not None and self._is_mix(experts.data):
                yield self._data(kind, str(experts.data))
            for i, run in enumerate(experts.trainings):
                yield self._train(f"train/{kind}/{i}", [kind], run)
            yield from self._variants[kind].values()
            yield self._select(kind, experts)
        for language in spec.languages:
            yield from self._both[language].values()
            yield self._evaluate(language)
            last.append(f"evaluate/{language}")
            if spec.change:
                about = {"language": language, "base": self.base}
                yield Step(
                    f"change/{language}", "change", about, self._kept(TASK, language),
                    self.base_fingerprint, self._resources("change"), Estimate(disk_gb=0.1),
                )  # fmt: skip
                last.append(f"change/{language}")
        settings: dict[str, Any] = {
            "languages": list(spec.languages), "development": spec.evaluate.development,
            **spec.model_dump(include={"name", "description", "merge"}),
        }  # fmt: skip
        yield Step("tables", "tables", settings, tuple(last), version=VERSIONS["tables"])

    @cached_property
    def _variants(self) -> dict[str, dict[tuple[str, str], Step]]:
        """By kind, the trainings beside the runs, by regime and partition.

        With LoRA, and of one part of a partition alone.
        """
        spec = self.spec
        found: dict[str, dict[tuple[str, str], Step]] = {}
        for kind, experts in spec.kinds.items():
            steps = found.setdefault(kind, {})
            for regime, changes in self.regimes.items():
                run, start = experts.runs[0].model_copy(update=changes), REGIMES[regime]
                if regime:
                    steps[regime, ""] = self._train(f"{start}train/{kind}", [kind], run)
                for name in spec.partitions if "partial" in spec.baselines else ():
                    trained = Trained(
                        partition=name, part=_part(kind), outside=spec.outside,
                        places=_places(run),
                    )  # fmt: skip
                    only = run.model_copy(update={"train": trained})
                    where = f"{start}partial/{kind}/{name}"
                    steps[regime, name] = self._train(where, [kind], only)
        return found

    @cached_property
    def _both(self) -> dict[str, dict[Condition, Step]]:
        """By language, the trainings on the data of the task and of the language."""
        spec = self.spec
        found: dict[str, dict[Condition, Step]] = {}
        several = len(spec.simultaneous.every) > 1
        for language, experts in spec.languages.items():
            sets, steps = [TASK, language], found.setdefault(language, {})
            for regime, changes in self.regimes.items():
                run = spec.both or experts.runs[0]
                places = _places(run if run.train else experts.runs[0])
                train = Trained(places=places) if places else None
                run = run.model_copy(update={"train": train, **changes})
                where = f"{REGIMES[regime]}both/{language}"
                if "joint" in spec.baselines:
                    joint = replace(JOINT, regime=regime)
                    steps[joint] = self._train(f"{where}/joint", sets, run)
                for every in spec.simultaneous.every if "simultaneous" in spec.baselines else ():
                    turns = {**spec.simultaneous.model_dump(exclude_none=True), "every": every}
                    if train is not None:
                        turns["places"] = train.model_dump(mode="json")["places"]
                    variant = f"{every} steps" if several else ""
                    name = f"{where}/simultaneous" + f" ({variant})" * several
                    condition = Condition("simultaneous", variant, regime=regime)
                    steps[condition] = self._train(name, sets, run, turns=turns)
        return found

    def _data(self, kind: str, data: str) -> Step:
        where = data if data in ready_recipes() else str(self.folder / data)
        settings = {"mix": mix_text(where), "folder": str(Path(where).parent)}
        return Step(
            f"data/{kind}", "data", settings,
            inputs=mix_fingerprints(settings["mix"], Path(where).parent),
            resources=self._resources("data"), estimate=Estimate(disk_gb=0.2),
        )  # fmt: skip

    def _train(
        self, name: str, kinds: list[str], run: TrainingRun, *, turns: dict[str, Any] | None = None
    ) -> Step:
        """A training on the data of one kind or of two."""
        spec, folder, run = self.spec, self.folder, with_recipe(run, self.folder)
        if run.train and run.train.partition and run.train.part is None and turns is None:
            own = run.train.model_copy(update={"part": _part(kinds[0])})
            run = run.model_copy(update={"train": own})
        needs: list[str] = []
        data: list[dict[str, Any]] = []
        recipe = run.train.recipe if run.train else None
        inputs = self.base_fingerprint | fingerprints(recipe)
        for kind in kinds:
            given = self._given(kind)
            if self._is_mix(given):
                needs.append(f"data/{kind}")
                data.append({"step": f"data/{kind}"})
            else:
                paths = resolve_data(given, folder)
                data.append({"given": paths})
                inputs |= fingerprints(*(paths.values() if isinstance(paths, dict) else [paths]))
        settings = {"base": self.base, "data": data, **run.model_dump(mode="json")}
        if turns is not None:
            settings["turns"] = turns
        processes = spec.resources.train.processes
        if processes > 1:
            known = launch_configuration(spec.resources.train.launch, folder)
            configuration = known if spec.device != "cpu" else None
            settings["launch"] = {"processes": processes, "configuration": configuration}
        selected_from = name.startswith("train/")
        return Step(
            name, "train", settings, tuple(needs), inputs, self._resources("train"),
            self._training_cost(kinds, run, selected_from),
            delete_checkpoints=self.selected and not selected_from,
        )  # fmt: skip

    def _training_cost(self, kinds: list[str], run: TrainingRun, selected_from: bool) -> Estimate:
        costs, sets = self.costs, [self._size(kind) for kind in kinds]
        disk = kept = costs.training_disk_gb(run, sets)
        if self.selected:
            experts = self.spec.kinds[kinds[0]]
            kept = costs.checkpoint_gb(run)
            kept *= experts.keep / len(experts.runs) if selected_from else 1
        hours = costs.training_hours(run, sets)
        memory = costs.training_memory_gb(run)
        return Estimate(hours, min(kept, disk), memory, max(0.0, disk - kept))

    def _given(self, kind: str) -> Data:
        """The data of a kind that is trained on."""
        data = self.spec.kinds[kind].data
        assert data is not None  # nothing is trained for experts that exist
        return data

    def _size(self, kind: str) -> DataSize:
        """The size of the training data of a kind."""
        given = self._given(kind)
        if self._is_mix(given):
            where = given if given in ready_recipes() else str(self.folder / str(given))
            return mix_size(mix_text(str(where)), Path(str(where)).parent, USUAL)
        return data_size(resolve_data(given, self.folder), USUAL)

    def _documents(self) -> Iterator[tuple[str, Documents]]:
        """The documents of the study's own tasks, where their YAML names a file of JSON Lines."""
        asked = [(self.spec.evaluate.tasks, self.spec.evaluate.include)]
        asked += [(experts.by.tasks, experts.by.include) for experts in self.spec.kinds.values()]
        for tasks, folders in asked:
            for task in tasks:
                name = task.format(language=next(iter(self.spec.languages)))
                paths = (str(self.folder / one) for one in folders)
                found = next(filter(None, (task_files(path, name) for path in paths)), {})
                files = (found.get("dataset_kwargs") or {}).get("data_files") or {}
                split = found.get("test_split") or found.get("validation_split")
                file = files.get(split) if isinstance(files, dict) else files
                if not (isinstance(file, str) and Path(file).is_file() and file.endswith("jsonl")):
                    continue
                settings = found.get("generation_kwargs") or {}
                writes = found.get("output_type") == "generate_until"
                yield task, Documents(
                    lines_of(Path(file)), OTHER.read,
                    settings.get("max_gen_toks", OTHER.written) if writes else 0,
                )  # fmt: skip

    def _select(self, kind: str, experts: Experts) -> Step:
        by, spec = experts.by, self.spec
        if experts.experts is not None:
            models = [model_of(one, self.folder, f"{kind}.experts") for one in experts.experts]
            inputs = {
                name: one for path in models for name, one in folder_fingerprint(path).items()
            }
            given = {"experts": models, "base": self.base}
            return Step(f"select/{kind}", "select", given, inputs=inputs)
        settings = {"keep": experts.keep, **by.model_dump(mode="json")}
        needs = tuple(f"train/{kind}/{i}" for i in range(len(experts.runs)))
        if not by.tasks:
            blind = isinstance(experts.data, Files) and experts.data.validation is None
            if blind and (experts.keep > 1 or len(experts.runs) > 1):
                why = "checkpoints are selected by validation loss or tasks; give one"
                raise RecipeError(f"{kind}: {why}")
            return Step(
                f"select/{kind}", "select", settings, needs, delete_checkpoints=self.selected
            )
        include = [existing_path(self.folder / one) for one in by.include]
        settings |= {"include": include, "device": spec.device, "dtype": spec.dtype}
        settings["base"] = self.base
        tasks = EvaluationSpec(tasks=by.tasks, include=["."], limit=by.limit)
        checkpoints = sum(self.costs.checkpoints(run, [self._size(kind)]) for run in experts.runs)
        return Step(
            f"select/{kind}", "select", settings, needs,
            {name: one for path in include for name, one in task_fingerprints(path).items()},
            self._resources("select"),
            Estimate(
                self.costs.evaluation_hours(tasks, checkpoints),
                memory_gb=self.costs.evaluation_memory_gb() / 2.5,
            ),
            delete_checkpoints=self.selected,
        )  # fmt: skip

    def _evaluate(self, language: str) -> Step:
        spec, asked = self.spec, self.spec.evaluate.model_dump(mode="json")
        asked["include"] = [existing_path(self.folder / one) for one in spec.evaluate.include]
        inputs = dict(self.base_fingerprint)
        for one in asked["include"]:
            inputs |= task_fingerprints(one)
        if spec.evaluate.suite or spec.evaluate.other_languages:
            inputs |= folder_fingerprint(os.environ.get(VARIABLE))
        kinds = [TASK, language]
        if "multilingual soup" in spec.baselines:
            kinds += [one for one in spec.languages if one != language]
        both, variants = self._both[language], self._variants
        settings = {
            "language": language,
            "base": self.base,
            "kinds": kinds,
            "grid": spec.grid.model_dump(exclude_none=True) if spec.grid else None,
            **spec.model_dump(mode="json", include=COPIED),
            "evaluate": asked,
            "both": [{**one.to_dict(), "step": step.name} for one, step in both.items()],
            "variants": [
                {"regime": regime, "partition": partition, "task": step.name,
                 "language": variants[language][regime, partition].name}
                for (regime, partition), step in variants[TASK].items()
            ],
        }  # fmt: skip
        beside = [*variants[TASK].values(), *variants[language].values(), *both.values()]
        needs = (*self._kept(*kinds), *(step.name for step in beside))
        return Step(
            f"evaluate/{language}", "evaluate", settings, needs, inputs,
            self._resources("evaluate"),
            Estimate(self._language_hours(settings), 0.1, self.costs.evaluation_memory_gb()),
            VERSIONS["evaluate"],
        )  # fmt: skip

    def _language_hours(self, settings: Mapping[str, Any]) -> float:
        """Device hours of evaluating a language's models, in it and in the other languages."""
        spec = self.spec.evaluate
        kept = {kind: self.spec.kinds[kind].keep for kind in settings["kinds"]}
        hours = self.costs.evaluation_hours(spec, models_to_run(settings, kept))
        if (there := spec.other_languages) is not None:
            models = models_to_run({**settings, "grid": None}, kept, more=CHOSEN_OF_GRID)
            suites: list[str | None] = [*there.suites]
            for suite in suites or [spec.suite]:
                same = spec.model_copy(update={"suite": suite})
                others = [one for one in there.languages if one != settings["language"]]
                hours += len(others) * self.costs.evaluation_hours(same, models)
        return hours

    def _is_mix(self, data: Data) -> bool:
        """True if the data are a recipe of a mix that a step has to build."""
        if isinstance(data, Files):
            return False
        return data in ready_recipes() or (self.folder / data).suffix in (".yaml", ".yml")

    def _resources(self, kind: StepKind) -> Resources:
        return self.spec.resources.of(kind, device=self.spec.device)

    def _kept(self, *kinds: str) -> tuple[str, ...]:
        """The selections of some experts, and the trainings whose folders they point to."""
        found: list[str] = []
        for kind in kinds:
            runs = range(len(self.spec.kinds[kind].trainings))
            found += [f"select/{kind}", *(f"train/{kind}/{i}" for i in runs)]
        return tuple(found)


def _places(run: TrainingRun) -> list[Where] | None:
    """The places that a run names, in whose bounds the other trainings of a study stay."""
    return run.train.places if run.train else None


def _part(kind: str) -> Any:
    """The part of a partition that the experts of a kind train."""
    return TASK if kind == TASK else "language"
