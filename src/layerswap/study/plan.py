"""The plan of a study: from its YAML to the graph of its steps.

For each kind of expert (`task`, and each language): build the mix, train the runs, and select
from their checkpoints. Additional trainings use LoRA or train one part of a
partition. For each language: train on both data sets, evaluate, and measure the change. At the
end: the tables.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerswap.compose.schema import Where
from layerswap.evaluation.suites.folders import VARIABLE
from layerswap.evaluation.suites.suites import suite_files
from layerswap.experiment.conditions import JOINT, TRANSLATE_TRAIN, Condition
from layerswap.ground.errors import RecipeError, StudyError
from layerswap.ground.system import check_names
from layerswap.study.conditions import REGIMES, Variant
from layerswap.study.english import ENGLISH, EnglishStep, TranslatedStep, has_english
from layerswap.study.evaluating import ChangeStep, EvaluateStep, TablesStep
from layerswap.study.finishing import FinishedStep, FinishStep
from layerswap.study.inputs import (
    existing_path,
    fingerprints,
    folder_fingerprints,
    mix_fingerprints,
    model_of,
    resolve_data,
    task_fingerprints,
)
from layerswap.study.kind import Kind
from layerswap.study.mixes import DataStep
from layerswap.study.spec import (
    TASK,
    Benchmarks,
    Contenders,
    Experts,
    Finish,
    StudySpec,
    TrainingRun,
    Translated,
)
from layerswap.study.steps import Graph, Step
from layerswap.study.trainings import InTurns, Launch, SelectStep, TrainedOn, TrainStep
from layerswap.study.vectors import VectorsStep
from layerswap.training.expert.hyperparameters import launch_configuration
from layerswap.training.expert.spec import Data, Files, Trained
from layerswap.training.mix.schema import mix_text, ready_recipes


def plan_study(spec: StudySpec, folder: Path) -> Graph:
    """Plan the steps of a study, whose paths are relative to a folder."""
    check_names(spec.languages)  # names of files
    graph = Graph(list(_Planner(spec, folder).steps()))
    first: dict[str, str] = {}
    for name, key in graph.keys.items():
        if (other := first.setdefault(key, name)) != name:
            raise StudyError(f"{name} and {other} are the same; change a seed, or leave one out")
    return graph


class _Planner:
    """Makes the steps of one study, whose paths are relative to a folder."""

    def __init__(self, spec: StudySpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self.base = model_of(spec.base, folder, "base")
        self.base_fingerprint = folder_fingerprints(self.base)
        self.selected_alone = spec.keep_checkpoints == "selected"
        self.data = {kind: experts.data for kind, experts in spec.kinds.items()}
        self.data |= {f"{name}/{TASK}": made.task for name, made in spec.translated.items()}
        if spec.finish:
            self.data |= {f"{name}/labels": data for name, data in spec.finish.labels.items()}
        self.regimes: dict[str, dict[str, Any]] = {"": {}}
        if spec.lora:
            self.regimes["LoRA"] = {"lora": spec.lora}

    def steps(self) -> Iterator[Step]:
        """List every step in reading order."""
        spec = self.spec
        variants: dict[str, dict[tuple[str, str], Step]] = {}  # by kind, regime and partition
        yield from (self._data(kind, data) for kind, data in self.data.items()
                    if self._is_mix(data))  # fmt: skip
        for kind, experts in spec.kinds.items():
            runs = [
                self._train(name, [kind], run, selected_from=True)
                for name, run in zip(run_names(kind, experts), experts.trainings, strict=True)
            ]
            yield from runs
            variants[kind] = dict(self._variants(kind, experts))
            yield from variants[kind].values()
            yield self._select(kind, experts, runs)
        last: list[str] = []
        wanted = has_english(spec.evaluate.suite, list(spec.languages))
        for language in spec.languages:
            joints = dict(self._joints(language))
            yield from joints.values()
            steps = [self._evaluate(language, variants[TASK], variants[language], joints)]
            if wanted and not last and "experts" in spec.baselines:
                files = suite_files(str(spec.evaluate.suite), ENGLISH)
                yield self._like(steps[0], EnglishStep, *files)  # no table needs it
            if test := spec.translated.get(language, Translated()).test:
                path = existing_path(self.folder / test)
                steps += [self._like(steps[0], TranslatedStep, path, translated=path)]
            if spec.change:
                step = ChangeStep(language=language, base=self.base)
                kept = self._kept(TASK, language)
                steps.append(self._plan(step, f"change/{language}", kept, self.base_fingerprint))
            if spec.encoder:
                steps.append(self._vectors(language, spec.encoder))
            yield from steps
            if spec.finish and language in spec.finish.labels:
                finished = list(self._finish(language, spec.finish, steps[0]))
                yield from finished
                steps.append(finished[-1])
            last += [step.name for step in steps]
        yield TablesStep(
            languages=list(spec.languages), development=spec.development, name=spec.name,
            description=spec.description, merge=spec.merge,
            **({"cautions": spec.cautions} if spec.cautions else {}),
        ).plan("tables", last)  # fmt: skip

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
        step = DataStep(mix=mix, folder=str(folder))
        return self._plan(step, f"data/{kind}", inputs=mix_fingerprints(mix, folder))

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
        if self.data.get(in_language := f"{language}/{TASK}") is not None:
            run = spec.task.runs[0]
            yield TRANSLATE_TRAIN, self._train(f"train/{in_language}", [in_language], run)
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
                turns = InTurns(
                    partition=spec.simultaneous.partition, outside=spec.simultaneous.outside,
                    every=every, places=places,
                )  # fmt: skip
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
        turns: InTurns | None = None,
        selected_from: bool = False,
    ) -> Step:
        """Make a training on one or two kinds of data, for which a later step may select.

        `turns` has the settings of simultaneous partition SFT, if it is one.
        """
        run = _with_recipe(run, self.folder)
        if run.train and run.train.partition and run.train.part is None and turns is None:
            own = run.train.model_copy(update={"part": _part(kinds[0])})
            run = run.model_copy(update={"train": own})
        sets = [self._trained_on(kind) for kind in kinds]
        data = [data_set for data_set, _ in sets if data_set is not None]
        needs = [data_set.step for data_set in data if data_set.step is not None]
        inputs = self.base_fingerprint | fingerprints(run.train.recipe if run.train else None)
        for _, files in sets:
            inputs |= files
        more = self._launch() | ({} if turns is None else {"turns": turns})
        return self._plan(
            TrainStep(base=self.base, data=data, **dict(run), **more), name, needs, inputs,
            delete_checkpoints=self.selected_alone and not selected_from,
        )  # fmt: skip

    def _launch(self) -> dict[str, Any]:
        """The setting of trainings in several processes."""
        asked = self.spec.resources.train
        if asked.processes == 1:
            return {}
        known = launch_configuration(asked.launch, self.folder)
        configuration = known if self.spec.device != "cpu" else None
        return {"launch": Launch(processes=asked.processes, configuration=configuration)}

    def _select(self, kind: str, experts: Experts, runs: list[Step]) -> Step:
        name, by, spec = f"select/{kind}", experts.by, self.spec
        if experts.experts is not None:
            models = [model_of(model, self.folder, f"{kind}.experts") for model in experts.experts]
            given = SelectStep(experts=models, base=self.base)
            return given.plan(name, inputs=folder_fingerprints(*models))
        needs = [run.name for run in runs]
        if not by.tasks:
            blind = isinstance(experts.data, Files) and experts.data.validation is None
            if blind and (experts.keep > 1 or len(experts.runs) > 1):
                why = "checkpoints are selected by validation loss or tasks; give one"
                raise RecipeError(f"{kind}: {why}")
            by_loss = SelectStep(keep=experts.keep, **dict(by))
            return by_loss.plan(name, needs, delete_checkpoints=self.selected_alone)
        include = [existing_path(self.folder / path) for path in by.include]
        by_tasks = SelectStep(
            keep=experts.keep, **{**dict(by), "include": include}, base=self.base,
            device=spec.device, dtype=spec.dtype,
        )  # fmt: skip
        return self._plan(
            by_tasks, name, needs, task_fingerprints(*include),
            delete_checkpoints=self.selected_alone,
        )  # fmt: skip

    def _evaluate(
        self,
        language: str,
        of_task: dict[tuple[str, str], Step],
        of_language: dict[tuple[str, str], Step],
        joints: dict[Condition, Step],
    ) -> Step:
        spec = self.spec
        grid = None if spec.evaluate.development == "none" else spec.grid
        include = [existing_path(self.folder / path) for path in spec.evaluate.include]
        asked = Benchmarks.model_construct(**{
            **dict(spec.evaluate), "include": include, "development": spec.development or "none",
        })  # fmt: skip
        inputs = self.base_fingerprint | task_fingerprints(*include)
        if spec.evaluate.suite or spec.evaluate.other_languages:
            inputs |= folder_fingerprints(os.environ.get(VARIABLE))
        there = spec.evaluate.other_languages
        for suite in filter(None, [spec.evaluate.suite, *(there.suites if there else ())]):
            for tested in [language, *(there.languages if there else ())]:
                inputs |= fingerprints(*map(str, suite_files(suite, tested)))
        kinds = [TASK, language]
        if "multilingual soup" in spec.baselines:
            kinds += [name for name in spec.languages if name != language]
        languages = {variant: step.name for variant, step in of_language.items()}
        step = EvaluateStep(
            language=language, base=self.base, kinds=kinds, grid=grid, evaluate=asked,
            **{name: getattr(spec, name) for name in Contenders.model_fields},
            both=[{**condition.to_dict(), "step": joint.name}
                  for condition, joint in joints.items()],
            variants=[
                Variant(regime=regime, partition=partition, task=training.name,
                        language=languages.get((regime, partition)))
                for (regime, partition), training in of_task.items()
            ],
        )  # fmt: skip
        trained = [*of_task.values(), *of_language.values(), *joints.values()]
        needs = [*self._kept(*kinds), *(training.name for training in trained)]
        return self._plan(step, f"evaluate/{language}", needs, inputs)

    def _like(
        self, evaluation: Step, kind: type[EvaluateStep], *files: Path | str,
        needs: Sequence[str] = (), **settings: Any,
    ) -> Step:  # fmt: skip
        """Plan an evaluation of other models or documents with the settings of `evaluation`."""
        own = EvaluateStep.of(evaluation).model_copy(update={"grid": None})
        inputs = {**evaluation.inputs, **fingerprints(*map(str, files))}
        step = kind.model_validate({**own.settings(), **settings})
        return self._plan(step, f"{kind.kind}/{own.language}", needs or evaluation.needs, inputs)

    def _vectors(self, language: str, encoder: str) -> Step:
        source = model_of(encoder, self.folder, "encoder")
        task, files = self._trained_on(TASK)
        needs = [f"evaluate/{language}", *([task.step] if task and task.step else [])]
        step = VectorsStep(
            language=language, encoder=source, device=self.spec.device,
            development=self.spec.development, task=task,
        )  # fmt: skip
        inputs = folder_fingerprints(source) | files
        return self._plan(step, f"vectors/{language}", needs, inputs)

    def _finish(self, language: str, finish: Finish, evaluation: Step) -> Iterator[Step]:
        """The training of every start on the labelled rows of a language, then their evaluation."""
        data, files = self._trained_on(f"{language}/labels")
        assert data is not None, "labels are data"
        run = _with_recipe(finish.run, self.folder)
        inputs = self.base_fingerprint | files
        inputs |= fingerprints(run.train.recipe if run.train else None)
        needs = [evaluation.name, *self._kept(TASK, language), *filter(None, [data.step])]
        starts = [f"finish/{language}/{start}" for start in finish.starts]
        for name, start in zip(starts, finish.starts, strict=True):
            step = FinishStep(
                language=language, start=start, folds=finish.folds, base=self.base, data=[data],
                development=self.spec.development, **dict(run), **self._launch(),
            )  # fmt: skip
            yield self._plan(step, name, needs, inputs, delete_checkpoints=self.selected_alone)
        asked = EvaluateStep.of(evaluation).evaluate.model_copy(update={"other_languages": None})
        yield self._like(
            evaluation, FinishedStep, needs=starts, evaluate=asked, both=[], variants=[]
        )

    def _trained_on(self, kind: str) -> tuple[TrainedOn | None, dict[str, str]]:
        """The data of a kind of expert, and fingerprints of its files; None for given experts."""
        data = self.data[kind]
        if data is None:
            return None, {}
        if self._is_mix(data):
            return TrainedOn(step=f"data/{kind}"), {}
        paths = resolve_data(data, self.folder)
        files = paths.values() if isinstance(paths, dict) else [paths]
        return TrainedOn(given=paths), fingerprints(*files)

    def _is_mix(self, data: Data | None) -> bool:
        """True if the data are a recipe of a mix that a step has to build."""
        if data is None or isinstance(data, Files):
            return False
        return data in ready_recipes() or (self.folder / data).suffix in (".yaml", ".yml")

    def _plan(
        self, step: Kind, name: str, needs: Sequence[str] = (),
        inputs: Mapping[str, str] | None = None, *, delete_checkpoints: bool = False,
    ) -> Step:  # fmt: skip
        """Plan a step with the study's resources for its kind."""
        assert step.resources is not None, "the resources of its kind are not fixed"
        resources = self.spec.resources.of(step.resources, device=self.spec.device)
        return step.plan(
            name, needs, inputs, resources=resources, delete_checkpoints=delete_checkpoints
        )


def run_names(kind: str, experts: Experts) -> list[str]:
    """Training steps whose checkpoints are candidates for one kind of expert."""
    return [f"train/{kind}/{i}" for i in range(len(experts.trainings))]


def _with_recipe(run: TrainingRun, folder: Path) -> TrainingRun:
    """The run with the absolute path of its recipe of places, if it has one."""
    if run.train is None or run.train.recipe is None:
        return run
    places = run.train.model_copy(update={"recipe": existing_path(folder / run.train.recipe)})
    return run.model_copy(update={"train": places})


def _places(run: TrainingRun) -> list[Where] | None:
    """The places that a run names; the other trainings of a study stay within them."""
    return run.train.places if run.train else None


def _part(kind: str) -> Any:
    """Return the part of a partition that the experts of a kind train."""
    return TASK if kind.rpartition("/")[2] == TASK else "language"
