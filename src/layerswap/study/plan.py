"""The plan of a study: from its YAML to the graph of its steps.

For each kind of expert (`task`, and each language): build the mix, train the runs, and select
from their checkpoints. Beside the runs stand further trainings, such as with LoRA or of a part of
a partition. For each language: train on both data sets, evaluate, and measure the change. At the
end: the tables.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from layerswap.checkpoint import fingerprint
from layerswap.compose.schema import Where
from layerswap.evaluation.suites.folders import VARIABLE
from layerswap.evaluation.suites.suites import suite_files
from layerswap.experiment.conditions import JOINT, Condition
from layerswap.ground.errors import RecipeError, StudyError
from layerswap.ground.system import check_names
from layerswap.study.conditions import REGIMES
from layerswap.study.spec import TASK, Experts, StepKind, StudySpec, TrainingRun
from layerswap.study.steps import Graph, Resources, Step
from layerswap.training.expert.hyperparameters import launch_configuration
from layerswap.training.expert.spec import Data, Files, Trained
from layerswap.training.mix.schema import mix_text, ready_recipes

COPIED = {
    "pairs", "partitions", "outside", "baselines", "ties", "soup_shares", "scales", "device",
    "dtype",
}  # fmt: skip
"""Keys that an evaluation's settings copy from the study."""
VERSIONS = {"evaluate": 5, "tables": 6}
"""Versions of the kinds of step whose output changed for the same settings."""
PATTERN = frozenset("*?[")
TOKEN = re.compile(r"[^\s'\"\[\]{},]+")
"""A possible path in a YAML, which may have tags of lm-eval."""


def plan_study(spec: StudySpec, folder: Path) -> Graph:
    """Plan the steps of a study, whose paths are relative to a folder."""
    check_names(spec.languages)  # names of files
    graph = Graph(list(_Planner(spec, folder).steps()))
    first: dict[str, str] = {}
    for name, key in graph.keys.items():
        if key in first:
            raise StudyError(
                f"{name} and {first[key]} are the same; change a seed, or leave one out"
            )
        first[key] = name
    return graph


class _Planner:
    """Makes the steps of one study, whose paths are relative to a folder."""

    def __init__(self, spec: StudySpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self.base = model_of(spec.base, folder, "base")
        self.base_fingerprint = folder_fingerprints(self.base)
        self.selected_alone = spec.keep_checkpoints == "selected"
        self.regimes: dict[str, dict[str, Any]] = {"": {}}
        if spec.lora:
            self.regimes["LoRA"] = {"lora": spec.lora}

    def steps(self) -> Iterator[Step]:
        """List every step in reading order."""
        spec = self.spec
        variants: dict[str, dict[tuple[str, str], Step]] = {}  # by kind, regime and partition
        for kind, experts in spec.kinds.items():
            if self._is_mix(experts.data):
                yield self._data(kind, experts.data)
            runs = [
                self._train(name, [kind], run, selected_from=True)
                for name, run in zip(run_names(kind, experts), experts.trainings, strict=True)
            ]
            yield from runs
            variants[kind] = dict(self._variants(kind, experts))
            yield from variants[kind].values()
            yield self._select(kind, experts, runs)
        last: list[str] = []
        for language in spec.languages:
            joints = dict(self._joints(language))
            yield from joints.values()
            steps = [self._evaluate(language, variants[TASK], variants[language], joints)]
            if spec.change:
                steps.append(self._change(language))
            yield from steps
            last += [step.name for step in steps]
        settings: dict[str, Any] = {
            "languages": list(spec.languages), "development": spec.development,
            **spec.model_dump(include={"name", "description", "merge"}),
        }  # fmt: skip
        yield Step("tables", "tables", settings, tuple(last), version=VERSIONS["tables"])

    def _kept(self, *kinds: str) -> list[str]:
        """Names of the selections, each with the trainings to whose folders it points."""
        return [
            name
            for kind in kinds
            for name in (f"select/{kind}", *run_names(kind, self.spec.kinds[kind]))
        ]

    def _data(self, kind: str, data: Any) -> Step:
        where = data if data in ready_recipes() else str(self.folder / data)
        mix, folder = mix_text(where), Path(where).parent
        settings = {"mix": mix, "folder": str(folder)}
        return Step(
            f"data/{kind}", "data", settings, inputs=mix_fingerprints(mix, folder),
            resources=self._resources("data"),
        )  # fmt: skip

    def _variants(self, kind: str, experts: Experts) -> Iterator[tuple[tuple[str, str], Step]]:
        """The trainings with LoRA, and those of one part of a partition alone."""
        spec = self.spec
        for regime, changes in self.regimes.items():
            run, prefix = experts.runs[0].model_copy(update=changes), REGIMES[regime]
            if regime:
                yield (regime, ""), self._train(f"{prefix}train/{kind}", [kind], run)
            wanted = {"partial", "partial task"} if kind == TASK else {"partial"}
            for name in spec.partitions if wanted & {*spec.baselines} else ():
                trained = Trained(
                    partition=name, part=_part(kind), outside=spec.outside, places=_places(run)
                )
                part = run.model_copy(update={"train": trained})
                step = self._train(f"{prefix}partial/{kind}/{name}", [kind], part)
                yield (regime, name), step

    def _joints(self, language: str) -> Iterator[tuple[Condition, Step]]:
        """The trainings on the data of the task and of a language, by their model's condition."""
        spec, first = self.spec, self.spec.languages[language].runs[0]
        several = len(spec.simultaneous.every) > 1
        given = spec.both or first
        places = _places(given if given.train else first)
        train = Trained(places=places) if places else None
        for regime, changes in self.regimes.items():
            run = given.model_copy(update={"train": train, **changes})
            where = f"{REGIMES[regime]}both/{language}"
            if "joint" in spec.baselines:
                step = self._train(f"{where}/joint", [TASK, language], run)
                yield replace(JOINT, regime=regime), step
            for every in spec.simultaneous.every if "simultaneous" in spec.baselines else ():
                turns = {**spec.simultaneous.model_dump(exclude_none=True), "every": every}
                if train is not None:
                    turns["places"] = train.model_dump(mode="json")["places"]
                variant = f"{every} steps" if several else ""
                name = f"{where}/simultaneous" + f" ({variant})" * several
                step = self._train(name, [TASK, language], run, turns=turns)
                yield Condition("simultaneous", variant, regime=regime), step

    def _train(
        self,
        name: str,
        kinds: list[str],
        run: TrainingRun,
        *,
        turns: dict[str, Any] | None = None,
        selected_from: bool = False,
    ) -> Step:
        """Make a training on one or two kinds of data, for which a later step may select.

        `turns` has the settings of simultaneous partition SFT, if it is one.
        """
        run = _with_recipe(run, self.folder)
        if run.train and run.train.partition and run.train.part is None and turns is None:
            own = run.train.model_copy(update={"part": _part(kinds[0])})
            run = run.model_copy(update={"train": own})
        needs: list[str] = []
        data: list[dict[str, Any]] = []
        inputs = self.base_fingerprint | fingerprints(run.train.recipe if run.train else None)
        for kind in kinds:
            given = self.spec.kinds[kind].data
            assert given is not None  # nothing is trained for experts that exist
            if self._is_mix(given):
                needs.append(f"data/{kind}")
                data.append({"step": f"data/{kind}"})
            else:
                paths = resolve_data(given, self.folder)
                data.append({"given": paths})
                inputs |= fingerprints(*(paths.values() if isinstance(paths, dict) else [paths]))
        settings = {"base": self.base, "data": data, **run.model_dump(mode="json")}
        if turns is not None:
            settings["turns"] = turns
        processes = self.spec.resources.train.processes
        if processes > 1:
            known = launch_configuration(self.spec.resources.train.launch, self.folder)
            configuration = known if self.spec.device != "cpu" else None
            settings["launch"] = {"processes": processes, "configuration": configuration}
        return Step(
            name, "train", settings, tuple(needs), inputs, self._resources("train"),
            delete_checkpoints=self.selected_alone and not selected_from,
        )  # fmt: skip

    def _select(self, kind: str, experts: Experts, runs: list[Step]) -> Step:
        name, by, spec = f"select/{kind}", experts.by, self.spec
        if experts.experts is not None:
            models = [model_of(one, self.folder, f"{kind}.experts") for one in experts.experts]
            inputs = folder_fingerprints(*models)
            return Step(name, "select", {"experts": models, "base": self.base}, inputs=inputs)
        settings = {"keep": experts.keep, **by.model_dump(mode="json")}
        needs = tuple(run.name for run in runs)
        if not by.tasks:
            blind = isinstance(experts.data, Files) and experts.data.validation is None
            if blind and (experts.keep > 1 or len(experts.runs) > 1):
                why = "checkpoints are selected by validation loss or tasks; give one"
                raise RecipeError(f"{kind}: {why}")
            return Step(name, "select", settings, needs, delete_checkpoints=self.selected_alone)
        include = [existing_path(self.folder / one) for one in by.include]
        settings |= {
            "include": include, "device": spec.device, "dtype": spec.dtype, "base": self.base,
        }  # fmt: skip
        return Step(
            name, "select", settings, needs, task_fingerprints(*include),
            self._resources("select"), delete_checkpoints=self.selected_alone,
        )  # fmt: skip

    def _evaluate(
        self,
        language: str,
        of_task: dict[tuple[str, str], Step],
        of_language: dict[tuple[str, str], Step],
        joints: dict[Condition, Step],
    ) -> Step:
        spec, asked = self.spec, self.spec.evaluate.model_dump(mode="json")
        asked["development"] = spec.development
        grid = None if spec.evaluate.development == "none" else spec.grid
        asked["include"] = [existing_path(self.folder / one) for one in spec.evaluate.include]
        inputs = self.base_fingerprint | task_fingerprints(*asked["include"])
        if spec.evaluate.suite or spec.evaluate.other_languages:
            inputs |= folder_fingerprints(os.environ.get(VARIABLE))
        there = spec.evaluate.other_languages
        for suite in filter(None, [spec.evaluate.suite, *(there.suites if there else ())]):
            for one in [language, *(there.languages if there else ())]:
                inputs |= fingerprints(*map(str, suite_files(suite, one)))
        kinds = [TASK, language]
        if "multilingual soup" in spec.baselines:
            kinds += [one for one in spec.languages if one != language]
        languages = {variant: step.name for variant, step in of_language.items()}
        settings = {
            "language": language,
            "base": self.base,
            "kinds": kinds,
            "grid": grid.model_dump(exclude_none=True) if grid else None,
            **spec.model_dump(mode="json", include=COPIED),
            "evaluate": asked,
            "both": [
                {**condition.to_dict(), "step": step.name} for condition, step in joints.items()
            ],
            "variants": [
                {"regime": regime, "partition": partition, "task": step.name,
                 "language": languages.get((regime, partition))}
                for (regime, partition), step in of_task.items()
            ],
        }  # fmt: skip
        trained = [*of_task.values(), *of_language.values(), *joints.values()]
        needs = (*self._kept(*kinds), *(step.name for step in trained))
        return Step(
            f"evaluate/{language}", "evaluate", settings, needs, inputs,
            self._resources("evaluate"), VERSIONS["evaluate"],
        )  # fmt: skip

    def _change(self, language: str) -> Step:
        return Step(
            f"change/{language}", "change", {"language": language, "base": self.base},
            tuple(self._kept(TASK, language)), self.base_fingerprint, self._resources("change"),
        )  # fmt: skip

    def _is_mix(self, data: Data | None) -> bool:
        """True if the data are a recipe of a mix that a step has to build."""
        if data is None or isinstance(data, Files):
            return False
        return data in ready_recipes() or (self.folder / data).suffix in (".yaml", ".yml")

    def _resources(self, kind: StepKind) -> Resources:
        return self.spec.resources.of(kind, device=self.spec.device)


def run_names(kind: str, experts: Experts) -> list[str]:
    """The names of the trainings from whose checkpoints the experts of a kind are selected."""
    return [f"train/{kind}/{i}" for i in range(len(experts.trainings))]


def model_of(source: str, folder: Path, key: str) -> str:
    """Resolve a model to an absolute folder or a Hub id; errors name `key`."""
    local = folder / Path(source).expanduser()
    there = _exists(local) and local.is_dir()
    if source.startswith((".", "/", "~")) and not there:
        raise RecipeError(f"{key}: {local}: no such folder")
    return str(local.absolute()) if there else source


def resolve_data(data: Data, folder: Path) -> Any:
    """Resolve existing data to absolute paths: a folder, or files by their part."""
    if isinstance(data, Files):
        names = data.model_dump(exclude_none=True)
        return {part: existing_path(folder / name) for part, name in names.items()}
    if not (_exists(folder / data) and (folder / data).is_dir()):
        raise RecipeError(f"data: {folder / data}: no such folder or ready mix")
    return existing_path(folder / data)


def existing_path(path: Path) -> str:
    """Resolve a file, a folder or a pattern to an absolute path; refuse a missing one."""
    path = path.expanduser()
    found = any(files_of(path)) if PATTERN & set(path.name) else _exists(path)
    if not found:
        raise RecipeError(f"{path}: no such {'file' if path.suffix else 'folder'}")
    return str(path.absolute())


def _exists(path: Path) -> bool:
    """True if a path exists; False for a path that the file system cannot hold."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _with_recipe(run: TrainingRun, folder: Path) -> TrainingRun:
    """The run with the absolute path of its recipe of places, if it has one."""
    if run.train is None or run.train.recipe is None:
        return run
    places = run.train.model_copy(update={"recipe": existing_path(folder / run.train.recipe)})
    return run.model_copy(update={"train": places})


def fingerprints(*paths: str | None) -> dict[str, str]:
    """Fingerprints of every file of these paths, folders or patterns; a Hub id has none."""
    return {
        str(file): _fingerprint(file, file.stat().st_size, file.stat().st_mtime_ns)
        for path in paths
        if path is not None
        for file in files_of(Path(path))
    }


def folder_fingerprints(*paths: str | None) -> dict[str, str]:
    """Compute one fingerprint per folder, from names and files; missing folders have none."""
    found = {}
    for path in paths:
        if path is not None and Path(path).is_dir():
            files = fingerprints(path).items()
            lines = "\n".join(
                f"{Path(name).relative_to(path).as_posix()} {one}" for name, one in files
            )
            found[path] = hashlib.sha256(lines.encode()).hexdigest()
    return found


def task_fingerprints(*folders: str) -> dict[str, str]:
    """Fingerprints of folders of lm-eval tasks, and of other files that their YAMLs name."""
    named = {
        token
        for folder in folders
        for path in files_of(Path(folder))
        if path.suffix in (".yaml", ".yml")
        for token in TOKEN.findall(path.read_text("utf-8", errors="replace"))
        if "/" in token and Path(token).is_file()
    }
    return folder_fingerprints(*folders) | fingerprints(*sorted(named))


def mix_fingerprints(text: str, folder: Path) -> dict[str, str]:
    """Fingerprints of the local files that a mix reads."""
    return fingerprints(*(str(folder / one) for one in _paths(yaml.safe_load(text))))


def _paths(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        if isinstance(data.get("path"), str):
            yield data["path"]
        if isinstance(data.get("parallel"), dict):
            yield from map(str, data["parallel"].values())
        data = list(data.values())
    if isinstance(data, list):
        for one in data:
            yield from _paths(one)


@cache
def _fingerprint(file: Path, size: int, changed: int) -> str:
    """Cached, since most steps of a plan read the same files."""
    return fingerprint(file)


def files_of(path: Path) -> Iterator[Path]:
    """List the files of a path, a folder or a pattern, in order."""
    if PATTERN & set(path.name):
        found = list(path.parent.glob(path.name))
    elif path.is_dir():
        found = [one for one in path.rglob("*") if "__pycache__" not in one.parts]
    else:
        found = [path]
    yield from sorted(one for one in found if one.is_file())


def _places(run: TrainingRun) -> list[Where] | None:
    """The places that a run names; the other trainings of a study stay within them."""
    return run.train.places if run.train else None


def _part(kind: str) -> Any:
    """Return the part of a partition that the experts of a kind train."""
    return TASK if kind == TASK else "language"
