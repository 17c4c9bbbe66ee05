"""The steps that map changes, evaluate the models of a language, and write the tables."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import field_serializer, field_validator

from layerswap.checkpoint import open_checkpoint
from layerswap.compose.presets import zone_grid
from layerswap.compose.recipe import check_recipe
from layerswap.evaluation.languages import same_language
from layerswap.evaluation.metrics import ADDED, written_metrics
from layerswap.evaluation.sandbox import programs_allowed
from layerswap.evaluation.settings import EvaluationSettings
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
from layerswap.evaluation.suites.suites import WrittenTask, check_askable, write_suite
from layerswap.experiment.answers import read_answers, write_results
from layerswap.experiment.benchmarks import (
    OTHER_LANGUAGES,
    RESULTS,
    benchmark_result,
    condition_scores,
    study_results,
)
from layerswap.experiment.conditions import Condition
from layerswap.ground.commit import write_json
from layerswap.ground.errors import EvaluationError, StudyError
from layerswap.ground.types import Log, duration
from layerswap.merge.api import make_plan
from layerswap.merge.plan import Plan
from layerswap.merge.trained import base_notes
from layerswap.report.tables import write_tables
from layerswap.study.conditions import LanguageModels, RecipeData, recipes
from layerswap.study.inputs import layers_of, own_readers
from layerswap.study.kind import Kind
from layerswap.study.mixes import EVERY
from layerswap.study.runner import Context
from layerswap.study.spec import TASK, Benchmarks, StepKind
from layerswap.study.trainings import EXPERT, check_device, check_prompts, selected
from layerswap.versions import versions

if TYPE_CHECKING:
    from layerswap.evaluation.response_cache import AnswerStore

MAP_FOLDER = "map"
ANSWERS, ANSWERED_BY = "answers.sqlite", "answered_by.json"
TABLES, NUMBERS = "tables", "tables.json"


class ChangeStep(Kind):
    """Maps the weights that the kept experts changed (paper 1, figures 2 and 4 to 9)."""

    kind: ClassVar[str] = "change"
    resources: ClassVar[StepKind] = "change"
    language: str
    base: str

    def run(self, context: Context) -> None:
        """Measure, and write the map."""
        from layerswap.deltas.atlas import measure_delta
        from layerswap.report.delta_map import write_atlas

        named = {
            f"{kind}-{i}": path
            for kind in (TASK, self.language)
            for i, path in enumerate(selected(context.inputs, kind), 1)
        }
        atlas = measure_delta(self.base, named)
        write_atlas(atlas, context.folder / MAP_FOLDER, overwrite=True)


class EvaluateStep(Kind, LanguageModels):
    """Evaluates the compositions and the baselines of every pair of experts of one language.

    In other languages it evaluates the baselines and the chosen compositions.
    """

    kind: ClassVar[str] = "evaluate"
    resources: ClassVar[StepKind] = "evaluate"
    version: ClassVar[int] = 5
    kinds: list[str]  # of the experts
    evaluate: Benchmarks

    @field_serializer("evaluate")
    def _nothing_is_chosen(self, evaluate: Benchmarks) -> dict[str, Any]:
        # The keys of finished steps have a setting that is gone.
        more = {"development": self.development, "limit_first": None}
        return evaluate.model_dump(mode="json") | more

    @field_validator("evaluate", mode="before")
    @classmethod
    def _read_development(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        given = {k: v for k, v in data.items() if (k, v) != ("limit_first", None)}
        if "development" in given and given["development"] is None:
            given["development"] = "none"
        return given

    @property
    def development(self) -> float | None:
        """The share of drawn development documents; None if nothing is chosen on any."""
        share = self.evaluate.development
        return None if share == "none" else share

    @property
    def suites(self) -> Iterator[tuple[list[str], list[str]]]:
        """The suites and languages to ask: the own language's, then the others'.

        Without a suite the study's own tasks are asked.
        """
        own = [self.evaluate.suite] if self.evaluate.suite else []
        yield own, [self.language]
        there = self.evaluate.other_languages
        others = [
            language for language in (there.languages if there else ())
            if not same_language(language, self.language)
        ]  # fmt: skip
        if there and others:
            yield there.suites or own, others

    def tasks(self, languages: Iterable[str]) -> dict[str, WrittenTask]:
        """The study's own tasks in some languages, by name."""
        metric = (self.evaluate.metric[0], self.evaluate.metric[1])
        return {
            # The name in all languages: `mgsm_{language}` is `mgsm`.
            name: WrittenTask(
                name, task.replace("{language}", "").strip("_-") or task, language, metric
            )
            for task in self.evaluate.tasks
            for language in languages
            for name in [task.format(language=language)]
        }

    @property
    def own_tasks(self) -> list[str]:
        """The names of the study's own tasks in all languages that they are asked in."""
        languages = [language for suites, asked in self.suites if not suites for language in asked]
        return list(self.tasks(languages))

    @property
    def include(self) -> list[Path]:
        """The folders of the study's own tasks."""
        return [Path(folder) for folder in self.evaluate.include]

    def check(self, name: str) -> None:
        """Check the grid, the chat template, the suites and the names of the tasks."""
        from layerswap.evaluation.harness import check_task_names

        if self.grid and Path(self.base).is_dir():
            layers = layers_of(self.base)
            if not any(zone_grid(layers, **self.grid.sizes)):
                raise StudyError(f"grid: no composition fits into the {layers} layers of the base")
        check_prompts(self.evaluate, self.base)
        for suite, language in self._asked():
            check_askable(suite, language, allow_code=self.evaluate.allow_code)
        if self.own_tasks:
            check_task_names(self.own_tasks, self.include)

    def check_here(self, name: str, *, device: bool) -> None:
        """Check that this machine has the device, if the step runs here."""
        if device:
            check_device(self.device)

    def check_data(self, name: str, *, fetch: bool, log: Log, seen: set[tuple[str, str]]) -> None:
        """Load the tasks of the study, and write those of suites into a temporary folder."""
        if fetch or own_readers(self.include):
            self._check_metric()
        for suite, language in sorted({*self._asked()} - seen):
            with TemporaryDirectory() as folder:
                self._write_suite(suite, [language], TaskFolder(Path(folder)),
                                  self._data(fetch=fetch), log)  # fmt: skip
            seen.add((suite, language))

    def run(self, context: Context) -> None:
        """Evaluate, and write the answers of every model."""
        check_device(self.device)
        plans = {
            condition: make_plan(
                check_recipe({**recipe, "bake": True}, where=f"study, {condition}")
            )
            for condition, recipe in self.recipes(context.inputs)
        }
        experts = {
            expert.source: expert for plan in plans.values() for expert in plan.experts.values()
        }
        for note in base_notes(experts, open_checkpoint(self.base)):
            context.log(f"note: {note}")
        own, *others = self.suites
        folder, asked = self._written(context, *own)
        self._evaluate(context, plans, asked, folder, RESULTS)
        for suites, languages in others:
            folder, asked = self._written(context, suites, languages)
            kept = self._without_losers(context, plans)
            self._evaluate(context, kept, asked, folder, OTHER_LANGUAGES)

    def recipes(self, inputs: Mapping[str, Path]) -> Iterator[tuple[Condition, RecipeData]]:
        """The recipe of every condition; `inputs` has the folders of the needed steps, by name."""
        kept = {kind: selected(inputs, kind) for kind in self.kinds}
        trained = {step: str(folder / EXPERT) for step, folder in inputs.items()}
        return recipes(self, kept, trained, layers_of(self.base))

    def _asked(self) -> list[tuple[str, str]]:
        """The suites, each with a language."""
        return [pair for asked in self.suites for pair in product(*asked)]

    def _check_metric(self) -> None:
        """Load the tasks that the study names, and check that they have the metric."""
        from layerswap.evaluation.harness import load_tasks

        if not self.own_tasks:
            return
        metric, filter_name = self.evaluate.metric
        for name, task in load_tasks(self.own_tasks, include=self.include)["tasks"].items():
            metrics = list(task.aggregation())
            metrics += [name for name, added in ADDED.items() if added.needs in metrics]
            metrics += written_metrics(name, task) or []
            filters = [
                entry["name"] for entry in task.get_config("filter_list") or [{"name": "none"}]
            ]
            if metric not in metrics or filter_name not in filters:
                raise EvaluationError(
                    f"evaluate.metric: {name} has no [{metric}, {filter_name}]; its metrics are "
                    f"{', '.join(metrics)}, its filters {', '.join(filters)}"
                )

    def _data(self, *, fetch: bool = True) -> DataFolder:
        return DataFolder.given(None, fetch=fetch)

    def _write_suite(
        self, suite: str, languages: Sequence[str], folder: TaskFolder, data: DataFolder, log: Log
    ) -> list[WrittenTask]:
        return write_suite(
            suite, languages, folder, data=data, shots=self.evaluate.num_fewshot,
            allow_code=self.evaluate.allow_code, skip=log, needed=True,
            development=self.development is not None,
        )  # fmt: skip

    def _written(
        self, context: Context, suites: Sequence[str], languages: Sequence[str]
    ) -> tuple[Path, list[WrittenTask]]:
        """The tasks in some languages, and their folder; without suites, the study's own tasks."""
        if not suites:
            return self.include[0], list(self.tasks(languages).values())
        folder, data = TaskFolder(context.folder / "tasks"), self._data()
        written = (self._write_suite(suite, languages, folder, data, context.log)
                   for suite in suites)  # fmt: skip
        return folder.root, [task for of_suite in written for task in of_suite]

    def _evaluate(
        self,
        context: Context,
        plans: Mapping[Condition, Plan],
        asked: Sequence[WrittenTask],
        tasks: Path,
        name: str,
    ) -> None:
        """Evaluate conditions on tasks, and write the results into a folder of the step."""
        from layerswap.evaluation.harness import common_dtype, evaluate_models
        from layerswap.evaluation.response_cache import AnswerStore, composition_key

        named = {str(condition): plan for condition, plan in plans.items()}
        dtype = self.dtype or common_dtype(named, context.log)
        how = EvaluationSettings.taken_from(
            self.evaluate.model_dump(mode="json"), device=self.device, dtype=dtype
        )
        results: dict[str, Any] = {}
        done = 0

        def count(models: int) -> None:
            nonlocal done
            done += models
            context.log(f"{context.step.name}: {done:,} of {len(plans):,} models")

        started = shown = time.monotonic()

        def answered(total: int, count: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if count and now - shown >= EVERY:
                shown, rate = now, count / (now - started)
                context.log(
                    f"{count:,} of {total:,} answers of these models, {rate:,.0f}/s, "
                    f"{duration((total - count) / rate)} left for them"
                )

        context.log(f"loading {len(plans):,} models and the tasks")
        store_of_step = closing(AnswerStore(context.folder / ANSWERS, answered))
        with store_of_step as store, programs_allowed(self.evaluate.allow_code):
            self._adopt_answers(context, store, plans.values())
            # Pairs share no layers. Swept one by one, they allow larger batches.
            for _, group in groupby(plans.items(), key=lambda item: item[0].pair):
                models = {str(condition): plan for condition, plan in group}
                results |= evaluate_models(
                    models, [task.name for task in asked], [tasks], settings=how, store=store,
                    log=context.log, progress=count, scratch=context.folder,
                )  # fmt: skip
        of_model = {
            str(condition): {"condition": condition, "weights": composition_key(plan)}
            for condition, plan in plans.items()
        }
        write_results(context.folder / name, results, asked, of_model=of_model)

    def _adopt_answers(self, context: Context, store: AnswerStore, plans: Iterable[Plan]) -> None:
        """Copy the answers of these models from earlier versions of this step.

        So a study with a new baseline or seed evaluates the new models alone. The keys of answers
        cover a model's weights and the tokens of a request. The engine and the versions of its
        packages must be the same.
        """
        from layerswap.evaluation.response_cache import composition_key

        keys = None
        how = {
            "step": context.step.name,
            "device": self.device,
            "dtype": self.dtype,
            "engine": self.evaluate.engine,
            "engine_args": self.evaluate.engine_args,
            "versions": versions("torch", "transformers", "vllm"),
        }
        write_json(context.folder / ANSWERED_BY, how)
        for folder in sorted(context.folder.parent.glob(f"{context.step.kind}-*")):
            if folder == context.folder or not (folder / ANSWERS).is_file():
                continue
            try:
                if json.loads((folder / ANSWERED_BY).read_text("utf-8")) != how:
                    continue
                # Keys read parts of every expert, and most evaluations have no earlier version.
                keys = keys or [composition_key(plan) for plan in plans]
                known = store.adopt(folder / ANSWERS, keys)
            except (OSError, ValueError, EvaluationError):
                continue  # the answers are computed again
            if known:
                context.log(f"{context.step.name}: {known:,} answers are known from an earlier run")

    def _without_losers(
        self, context: Context, plans: Mapping[Condition, Plan]
    ) -> dict[Condition, Plan]:
        """Drop the compositions of the grid that no benchmark of the language chose."""
        scores = condition_scores(read_answers(context.folder / RESULTS))
        own = [benchmark_result(language, name, benchmark_scores, self.development)
               for (name, language), benchmark_scores in scores.items()]  # fmt: skip
        return {
            condition: plan
            for condition, plan in plans.items()
            if any(by.choice.names_of(condition) for by in own)
        }


def further(folders: Mapping[str, Path]) -> dict[str, list[Path]]:
    """Return the folders of the baseline steps by language, from folders by step."""
    found: dict[str, list[Path]] = {}
    for name, folder in folders.items():
        kind, _, language = name.partition("/")
        if kind in ("vectors", "translated", "finished"):
            found.setdefault(language, []).append(folder)
    return found


class TablesStep(Kind):
    """Writes `tables.json`, `tables.md` and `tables.tex` from the results of all languages."""

    kind: ClassVar[str] = "tables"
    version: ClassVar[int] = 7
    languages: list[str]
    development: float | None = None
    name: str  # of the study
    description: str = ""
    merge: bool = False
    cautions: list[str] = []

    def run(self, context: Context) -> None:
        """Write the tables."""
        folders = {language: context.inputs[f"evaluate/{language}"] for language in self.languages}
        results = study_results(folders, self.development, further(context.inputs))
        if not results.benchmarks:
            raise StudyError("nothing was evaluated")
        write_json(context.folder / NUMBERS, {"name": self.name, **results.to_dict()})
        write_tables(context.folder / TABLES, results.tables)
