"""The plan of a study: from its YAML to the graph of its steps.

For each kind of expert (`task`, and each language): build the mix, train the runs, and select
from their checkpoints. Beside the runs stand further trainings, such as with LoRA or of a part of
a partition. For each language: train on both data sets, evaluate, and measure the change. At the
end: the tables.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from layerswap.compose.schema import Where
from layerswap.errors import RecipeError, StudyError
from layerswap.evaluation.suites.folders import VARIABLE
from layerswap.search.conditions import JOINT, Condition
from layerswap.study.conditions import REGIMES
from layerswap.study.inputs import (
    existing_path,
    fingerprints,
    folder_fingerprint,
    mix_fingerprints,
    model_of,
    resolve_data,
    task_fingerprints,
    with_recipe,
)
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
VERSIONS = {"evaluate": 4, "tables": 5}
"""Versions of the kinds of step whose output changed for the same settings."""


def plan_study(spec: StudySpec, folder: Path) -> Graph:
    """The steps of a study.

    Args:
        spec: the study.
        folder: its paths are relative to this folder.
    """
    graph = Graph(list(_Planner(spec, folder).steps()))
    first: dict[str, str] = {}
    for name, key in graph.keys.items():
        if key in first:
            what = f"{name} and {first[key]} are the same"
            raise StudyError(f"{what}; change a seed, or leave one out")
        first[key] = name
    return graph


class _Variant(NamedTuple):
    """A training of one expert beside its runs; its partition may be empty."""

    regime: str
    partition: str
    step: Step


class _Joint(NamedTuple):
    """A training on the data of the task and of a language, and the condition of its model."""

    condition: Condition
    step: Step


@dataclass(frozen=True)
class _ExpertSteps:
    """The steps that make the experts of one kind.

    Attributes:
        data: builds the mix; None for data that exist.
        runs: trainings from whose checkpoints the experts are selected.
        variants: trainings beside the runs.
        select: selects the experts.
    """

    data: Step | None
    runs: tuple[Step, ...]
    variants: tuple[_Variant, ...]
    select: Step

    @property
    def in_order(self) -> list[Step]:
        """All of them, in the order in which a reader expects them."""
        data = [self.data] if self.data else []
        return [*data, *self.runs, *(one.step for one in self.variants), self.select]

    @property
    def kept(self) -> list[str]:
        """Names of the selection, and of the trainings to whose folders it points."""
        return [self.select.name, *(run.name for run in self.runs)]


class _Planner:
    """Makes the steps of one study.

    Args:
        spec: the study.
        folder: its paths are relative to this folder.
    """

    def __init__(self, spec: StudySpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self.base = model_of(spec.base, folder, "base")
        self.base_fingerprint = folder_fingerprint(self.base)
        self.selected_alone = spec.keep_checkpoints == "selected"
        self.regimes: dict[str, dict[str, Any]] = {"": {}}
        if spec.lora:
            self.regimes["LoRA"] = {"lora": spec.lora}

    def steps(self) -> Iterator[Step]:
        """Every step, in the order in which a reader expects them."""
        spec = self.spec
        experts = {kind: self._expert_steps(kind, one) for kind, one in spec.kinds.items()}
        for of_kind in experts.values():
            yield from of_kind.in_order
        last: list[str] = []
        for language in spec.languages:
            joints = list(self._joints(language))
            yield from (joint.step for joint in joints)
            steps = [self._evaluate(language, experts, joints)]
            if spec.change:
                steps.append(self._change(language, experts))
            yield from steps
            last += [step.name for step in steps]
        settings: dict[str, Any] = {
            "languages": list(spec.languages), "development": spec.evaluate.development,
            **spec.model_dump(include={"name", "description", "merge"}),
        }  # fmt: skip
        yield Step("tables", "tables", settings, tuple(last), version=VERSIONS["tables"])

    def _expert_steps(self, kind: str, experts: Experts) -> _ExpertSteps:
        data = self._data(kind, experts.data) if self._is_mix(experts.data) else None
        runs = tuple(
            self._train(f"train/{kind}/{i}", [kind], run, selected_from=True)
            for i, run in enumerate(experts.trainings)
        )
        select = self._select(kind, experts, runs)
        return _ExpertSteps(data, runs, tuple(self._variants(kind, experts)), select)

    def _data(self, kind: str, data: Any) -> Step:
        where = data if data in ready_recipes() else str(self.folder / data)
        mix, folder = mix_text(where), Path(where).parent
        settings = {"mix": mix, "folder": str(folder)}
        return Step(
            f"data/{kind}", "data", settings, inputs=mix_fingerprints(mix, folder),
            resources=self._resources("data"),
        )  # fmt: skip

    def _variants(self, kind: str, experts: Experts) -> Iterator[_Variant]:
        """The trainings with LoRA, and those of one part of a partition alone."""
        spec = self.spec
        for regime, changes in self.regimes.items():
            run, prefix = experts.runs[0].model_copy(update=changes), REGIMES[regime]
            if regime:
                yield _Variant(regime, "", self._train(f"{prefix}train/{kind}", [kind], run))
            for name in spec.partitions if "partial" in spec.baselines else ():
                trained = Trained(
                    partition=name, part=_part(kind), outside=spec.outside, places=_places(run)
                )
                part = run.model_copy(update={"train": trained})
                yield _Variant(
                    regime, name, self._train(f"{prefix}partial/{kind}/{name}", [kind], part)
                )

    def _joints(self, language: str) -> Iterator[_Joint]:
        """The trainings on the data of the task and of a language."""
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
                yield _Joint(replace(JOINT, regime=regime), step)
            for every in spec.simultaneous.every if "simultaneous" in spec.baselines else ():
                turns = {**spec.simultaneous.model_dump(exclude_none=True), "every": every}
                if train is not None:
                    turns["places"] = train.model_dump(mode="json")["places"]
                variant = f"{every} steps" if several else ""
                name = f"{where}/simultaneous" + f" ({variant})" * several
                step = self._train(name, [TASK, language], run, turns=turns)
                yield _Joint(Condition("simultaneous", variant, regime=regime), step)

    def _train(
        self,
        name: str,
        kinds: list[str],
        run: TrainingRun,
        *,
        turns: dict[str, Any] | None = None,
        selected_from: bool = False,
    ) -> Step:
        """A training on the data of one kind or of two.

        Args:
            name: of the step.
            kinds: whose data.
            run: its settings.
            turns: settings of simultaneous partition SFT, if it is one.
            selected_from: a later step selects from its checkpoints.
        """
        run = with_recipe(run, self.folder)
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

    def _select(self, kind: str, experts: Experts, runs: tuple[Step, ...]) -> Step:
        name, by, spec = f"select/{kind}", experts.by, self.spec
        if experts.experts is not None:
            models = [model_of(one, self.folder, f"{kind}.experts") for one in experts.experts]
            inputs = {
                name: one for path in models for name, one in folder_fingerprint(path).items()
            }
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
        settings |= {"include": include, "device": spec.device, "dtype": spec.dtype}
        settings["base"] = self.base
        inputs = {name: one for path in include for name, one in task_fingerprints(path).items()}
        return Step(
            name, "select", settings, needs, inputs, self._resources("select"),
            delete_checkpoints=self.selected_alone,
        )  # fmt: skip

    def _evaluate(
        self, language: str, experts: dict[str, _ExpertSteps], joints: list[_Joint]
    ) -> Step:
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
        variants = experts[TASK].variants, experts[language].variants
        settings = {
            "language": language,
            "base": self.base,
            "kinds": kinds,
            "grid": spec.grid.model_dump(exclude_none=True) if spec.grid else None,
            **spec.model_dump(mode="json", include=COPIED),
            "evaluate": asked,
            "both": [
                {**condition.to_dict(), "step": step.name} for condition, step in joints
            ],
            "variants": [
                {"regime": regime, "partition": partition, "task": step.name,
                 "language": of_language.step.name}
                for (regime, partition, step), of_language in zip(*variants, strict=True)
            ],
        }  # fmt: skip
        beside = [one.step.name for of_kind in variants for one in of_kind]
        beside += [joint.step.name for joint in joints]
        kept = [name for kind in kinds for name in experts[kind].kept]
        return Step(
            f"evaluate/{language}", "evaluate", settings, (*kept, *beside), inputs,
            self._resources("evaluate"), VERSIONS["evaluate"],
        )  # fmt: skip

    def _change(self, language: str, experts: dict[str, _ExpertSteps]) -> Step:
        return Step(
            f"change/{language}", "change", {"language": language, "base": self.base},
            (*experts[TASK].kept, *experts[language].kept), self.base_fingerprint,
            self._resources("change"),
        )  # fmt: skip

    def _is_mix(self, data: Data | None) -> bool:
        """True if the data are a recipe of a mix that a step has to build."""
        if data is None or isinstance(data, Files):
            return False
        return data in ready_recipes() or (self.folder / data).suffix in (".yaml", ".yml")

    def _resources(self, kind: StepKind) -> Resources:
        return self.spec.resources.of(kind, device=self.spec.device)


def _places(run: TrainingRun) -> list[Where] | None:
    """The places that a run names; the other trainings of a study stay within them."""
    return run.train.places if run.train else None


def _part(kind: str) -> Any:
    """The part of a partition that the experts of a kind train."""
    return TASK if kind == TASK else "language"
