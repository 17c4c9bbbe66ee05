"""Evaluates models and compositions on tasks of lm-evaluation-harness.

lm-eval builds the requests once. A sweep answers them for all compositions of the same experts
together, and lm-eval's own filters and metrics score the answers of each. Prompts, tokenisation and
metrics are lm-eval's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain, count
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from layerswap.checkpoint.hub import local_name
from layerswap.checkpoint.loading import pick_device
from layerswap.checkpoint.read import FLOAT_CODES, FLOAT_DTYPES
from layerswap.compose.recipe import check_recipe, read_recipe
from layerswap.engine.split import read_one_token
from layerswap.engine.sweep import Sweep
from layerswap.engine.virtual import VirtualModel
from layerswap.evaluation.languages import answer_of
from layerswap.evaluation.lm_eval_inside import refuse_programs
from layerswap.evaluation.metrics import ADDED, add_labels, add_written, written_metrics
from layerswap.evaluation.response_cache import AnswerStore, ResponseCache, cached_model
from layerswap.evaluation.settings import (
    Asked,
    EvaluationSettings,
    parse_arguments,
    template_error,
)
from layerswap.evaluation.suites.folders import WRITTEN
from layerswap.evaluation.suites.suites import FIELD
from layerswap.evaluation.written import with_folder
from layerswap.ground.errors import EvaluationError, one_line
from layerswap.ground.types import Advance, Log
from layerswap.ground.yaml_file import nearest
from layerswap.merge.api import make_plan
from layerswap.merge.folder import plan_tokenizer
from layerswap.merge.layout import widest
from layerswap.merge.metadata import COPIED, generation_file, tokenizer_folder
from layerswap.merge.plan import Plan

Result = dict[str, Any]
"""The result of `lm_eval.simple_evaluate`, with `samples`."""
Samples = Mapping[str, Sequence[int]]
"""Positions of the documents to evaluate on, by task."""


def evaluate(
    sweep: Sweep,
    tokenizer: Any,
    tasks: Sequence[str | dict[str, Any]],
    *,
    include: Sequence[Path] = (),
    settings: EvaluationSettings | None = None,
    samples: Samples | None = None,
    members: Sequence[int] | None = None,
    store: AnswerStore | None = None,
    log: Log = lambda line: None,
    progress: Advance | None = None,
) -> list[dict[str, Any]]:
    """Evaluate compositions on lm-eval tasks: names of tasks or groups, or inline configurations.

    Of the settings, only prompts, limit and batch size are used; the engine and dtype are the
    sweep's. `samples` replaces the limits. `store` keeps answers for later runs. `log`
    receives lines about truncated prompts. `progress` receives the number of compositions just
    evaluated.

    Returns:
        For each composition the result of `lm_eval.simple_evaluate`, with `samples`.
    """
    settings = settings or EvaluationSettings()
    chosen = list(range(len(sweep))) if members is None else list(members)
    results = []
    with _quiet():
        loaded = load_tasks(tasks, include=include, prompts=settings)
        samples = samples or drawn_samples(loaded, settings.limit)
        loaded = {**loaded, "tasks": {n: _BuiltOnce(task) for n, task in loaded["tasks"].items()}}
        size = None if settings.batch_size == "auto" else settings.batch_size
        responses = ResponseCache(sweep, chosen, store, size)
        model = cached_model(sweep, settings.with_chat_template(tokenizer), responses)
        for number in range(len(chosen)):
            model.number = number
            results.append(run_tasks(model, loaded, settings, samples))
            for note in cut_prompts(model, results[0]) if number == 0 else ():
                log(note)
            if progress is not None:
                progress(1)
    return results


def load_tasks(
    tasks: Sequence[str | dict[str, Any]],
    *,
    include: Sequence[Path] = (),
    prompts: Asked | None = None,
) -> Any:
    """Load lm-eval's task objects, and prepare them as its command line does.

    Task files may name Python functions; a warning says so before they are imported.
    """
    for folder in include:
        _warn_of_functions(folder.resolve())
    names = [task for task in tasks if isinstance(task, str)]
    check_task_names(names, include)
    manager = _manager(tuple(map(str, include)), tuple(names))
    try:
        loaded = manager.load(list(tasks))
    except Exception as error:  # data sets and YAML raise anything
        why = f"{type(error).__name__}: {one_line(error, 300)}"
        asked = ", ".join(t if isinstance(t, str) else str(t.get("task")) for t in tasks)
        raise EvaluationError(f"cannot load the tasks {asked}: {why}") from None
    tasks_by_name = loaded["tasks"].items()
    refuse_programs({name: task.get_config("unsafe_code") for name, task in tasks_by_name})
    prompts = prompts or Asked()
    generation = parse_arguments(prompts.gen_kwargs)
    for name, task in loaded["tasks"].items():
        default = task.get_config("num_fewshot")
        if prompts.num_fewshot is not None and default != 0:
            task.set_config(key="num_fewshot", value=prompts.num_fewshot)
        elif default is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=prompts.fewshot_seed)
        _check_exemplars(name, task)
        _check_answers(name, task)
        written_metrics(name, task)
        if generation and task.get_config("output_type") == "generate_until":
            task.set_config(key="generation_kwargs", value=generation, update=True)
    return loaded


def _check_exemplars(name: str, task: Any) -> None:
    """Refuse more exemplars than documents; warn if a prompt may show its own answer."""
    wanted = task.get_config("num_fewshot")
    if not wanted:
        return
    exemplars = task.get_config("fewshot_config")
    with _quiet():
        known = len(task.fewshot_docs() or ())
    known -= int(exemplars.split == task.get_config("test_split"))
    if wanted > known:
        raise EvaluationError(
            f"{name}: has {known} documents for exemplars, not {wanted}; give --num-fewshot "
            f"{max(known, 0)} or fewer"
        )
    own = exemplars.split is not None or exemplars.samples is not None
    if not (own or task.has_training_docs() or task.has_validation_docs()):
        warnings.warn(
            f"{name}: its exemplars are drawn from the documents that it scores, and a prompt may "
            "show its own answer; name a split for them (fewshot_split in the task's file)",
            stacklevel=3,
        )


def _check_answers(name: str, task: Any) -> None:
    """Refuse digits as right answers where lm-eval reads them as positions of choices."""
    field, choices = FIELD.fullmatch(str(task.config.doc_to_target)), task.config.doc_to_choice
    column = field[1] if field and isinstance(choices, list) else ""
    for answer in task.eval_docs[column] if column in task.features else ():
        if str(answer).isdigit() and answer in choices and choices.index(answer) != int(answer):
            raise EvaluationError(
                f"{name}: lm-eval reads the answer {answer!r} as the position of a choice; write "
                f"doc_to_target: {column}, without braces"
            )


@cache
def _warn_of_functions(folder: Path) -> None:
    """Warn once of Python code that task files of a folder name, except our own suites' files."""
    named = [
        file
        for file in sorted(folder.rglob("*.yaml"))
        if file.resolve() not in WRITTEN and file.is_file() and b"!function" in file.read_bytes()
    ]
    if named:
        warnings.warn(
            f"{folder}: {len(named)} task files name Python functions (!function), such as "
            f"{named[0].name}; lm-eval runs that code for the chosen tasks, outside the sandbox",
            stacklevel=3,
        )


class _BuiltOnce:
    """A task of lm-eval that builds its requests once, and asks each composition the same ones."""

    def __init__(self, task: Any) -> None:
        self._task, self._built = task, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def build_all_requests(self, **settings: Any) -> None:
        """Build the requests the first time; later, remove the previous composition's answers."""
        if not self._built:
            self._task.build_all_requests(**settings)
            self._built = True
        for instance in self._task.instances:
            instance.resps, instance.filtered_resps = [], {}


def drawn_samples(loaded: Any, limit: int | None) -> Samples | None:
    """Draw at most `limit` documents of each task, in proportion to their labels.

    A larger limit extends the draw of a smaller one. None without a limit.
    """
    if limit is None:
        return None
    return {
        name: sorted(stratified_order(labels_of(task), 0)[:limit])
        for name, task in loaded["tasks"].items()
    }


def labels_of(task: Any) -> list[str]:
    """Return the right choice of each document; one label for all without choices."""
    documents = task.eval_docs
    if task.get_config("output_type") != "multiple_choice":
        return [""] * len(documents)
    return [str(task.doc_to_target(document)) for document in documents]


def stratified_order(labels: Sequence[str], seed: int) -> list[int]:
    """Shuffle positions so that every prefix has the labels in proportion."""
    order = np.random.default_rng(seed).permutation(len(labels)).tolist()
    totals, seen = Counter(labels), Counter[str]()

    def place(position: int) -> float:
        label = labels[position]
        seen[label] += 1
        return (seen[label] - 0.5) / totals[label]

    return sorted(order, key=place)


def check_task_names(names: Sequence[str], include: Sequence[Path] = ()) -> None:
    """Refuse unknown tasks, and those whose answers lm-eval would run."""
    index = _manager(tuple(map(str, include)), tuple(names)).task_index
    unknown = next((name for name in names if name not in index), None)
    if unknown is not None:
        raise EvaluationError(f"no task {unknown!r}{nearest(unknown, sorted(index))}")
    configs = {name: getattr(index[name], "cfg", None) or {} for name in names}
    refuse_programs({n: config.get("unsafe_code", False) for n, config in configs.items()})
    for name, choice in ((n, c) for n, config in configs.items()
                         for c in config.get("doc_to_choice") or ()):  # fmt: skip
        if not isinstance(choice, str):
            raise EvaluationError(f"{name}: doc_to_choice: write texts in quotes; found {choice!r}")


def task_names() -> list[str]:
    """List every task, group and tag of lm-eval; reading its index takes seconds."""
    return list(_manager((), ()).all_tasks)


def run_tasks(
    model: Any, loaded: Any, settings: EvaluationSettings, samples: Samples | None = None
) -> dict[str, Any]:
    """Evaluate one of lm-eval's models on loaded tasks."""
    from jinja2 import TemplateError
    from lm_eval.evaluator import evaluate as lm_evaluate

    samples = samples or drawn_samples(loaded, settings.limit)
    generate, turns = model.generate_until, settings.fewshot_as_multiturn
    if settings.think == "cut":
        model.generate_until = lambda *given, **named: [*map(answer_of, generate(*given, **named))]
    try:
        result = lm_evaluate(
            lm=model,
            task_dict=loaded,
            samples=None if samples is None else {n: list(rows) for n, rows in samples.items()},
            bootstrap_iters=0,
            log_samples=True,
            system_instruction=settings.system_instruction,
            apply_chat_template=bool(settings.apply_chat_template),
            fewshot_as_multiturn=bool(settings.apply_chat_template) if turns is None else turns,
        )
    except TemplateError as error:
        raise template_error(error) from None
    except AssertionError as error:
        if "maximum sequence length" not in str(error):  # it has no error class of its own
            raise
        raise EvaluationError(f"the model's context is too short: {error}") from None
    finally:
        if settings.think == "cut":
            model.generate_until = generate
    add_labels(result)
    for metric in ADDED.values():
        metric.add(result)
    add_written(result, loaded["tasks"], model)
    template = str(model.tokenizer.chat_template) if settings.apply_chat_template else ""
    for name, samples in result["samples"].items():
        _add_questions(samples, loaded["tasks"][name], settings, template)
    return dict(result)


def _add_questions(samples: Any, task: Any, settings: Asked, template: str) -> None:
    """Add the prompt settings and the document hash to samples, and the text if few-shot."""
    shots = task.get_config("num_fewshot")
    texts = vars(task).setdefault("texts_of_documents", {})  # lm-eval compiles templates each time
    for sample in samples:
        if sample["doc_id"] not in texts:
            texts[sample["doc_id"]] = task.doc_to_text(sample["doc"])
        text, choices = texts[sample["doc_id"]], [str(given[-1]) for given in sample["arguments"]]
        if shots and isinstance(text, str):
            sample["text"] = text
        asked = [text if isinstance(text, str) and text.strip() else sample["doc_hash"]]
        if len(choices) > 1:  # the delimiter before them depends on the chat template
            asked += map(str.strip, choices)
        sample["document_hash"] = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
        sample["prompts"] = settings.described(shots, template, task.get_config("description"))


def cut_prompts(model: Any, result: Mapping[str, Any]) -> Iterator[str]:
    """Count the prompts of each task that a model cannot read whole; lm-eval cuts their beginning.

    `model` is one of lm-eval's, and `result` its evaluation with samples.
    """
    for task, samples in result["samples"].items():
        lengths = [max(map(partial(_excess, model), sample["arguments"])) for sample in samples]
        longest = max(lengths, default=0)
        if longest > 0:
            yield (
                f"warning: {task}: {sum(excess > 0 for excess in lengths):,} of {len(samples):,} "
                f"prompts are longer than the {model.max_length:,} tokens that the model reads and "
                f"lose their beginning, up to {longest:,} tokens; keep them by fewer exemplars "
                "(--num-fewshot) or a model with a longer context"
            )


def _excess(model: Any, request: Sequence[Any]) -> int:
    """Number of tokens of a request beyond the model's context."""
    prompt, rest = (*request, None)[:2]
    if isinstance(rest, Mapping):
        room = model.max_length - int(rest.get("max_gen_toks", model.max_gen_toks))
        return int(len(model.tok_encode(prompt)) - room)
    if rest is None:
        return 0  # a rolling window reads every token
    return int(len(model.tok_encode(prompt + rest)) - 1 - model.max_length)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence lm-eval's warnings, which are about its command line; errors stay."""
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@cache
def _manager(include: tuple[str, ...], names: tuple[str, ...]) -> Any:
    """Read the task index; lm-eval's own tasks only for names that the folders lack."""
    from lm_eval.tasks import TaskManager

    if not include:
        return _lm_eval_manager()
    own = TaskManager(include_path=list(include), include_defaults=False)
    if not set(names) <= own.task_index.keys():
        own.task_index.update({**_lm_eval_manager().task_index, **own.task_index})
    return own


@cache
def _lm_eval_manager() -> Any:
    """Read lm-eval's own tasks; their 14,000 files take some 15 s."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


# --- models ---


def open_models(models: Sequence[str]) -> dict[str, Plan]:
    """Open a plan for each model, by a unique name.

    A model is a folder, a Hub id, an adapter, or a recipe (`.yaml`), which need not be written.
    """
    plans: dict[str, Plan] = {}
    for model in models:
        path = Path(model)
        if path.suffix in (".yaml", ".yml"):
            plan, name = make_plan(read_recipe(path)), path.stem
        else:
            recipe = {
                "experts": {"model": model}, "soup": {"experts": ["model"]}, "bake": True,
            }  # fmt: skip
            plan = make_plan(check_recipe(recipe, where=model))
            name = local_name(path) if path.is_dir() else model.replace("/", "--")
        plans[_unique(name, plans)] = plan
    return plans


def _unique(name: str, taken: Container[str]) -> str:
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(candidate for candidate in names if candidate not in taken)


def evaluate_models(
    models: Mapping[str, Plan],
    tasks: Sequence[str],
    include: Sequence[Path],
    *,
    settings: EvaluationSettings | None = None,
    store: AnswerStore | None = None,
    log: Log = lambda line: None,
    progress: Advance | None = None,
    scratch: Path | None = None,
) -> dict[str, Result]:
    """Evaluate models on tasks of lm-eval; models that share experts are swept together.

    With the engine `sweep`, answers are stored as they come. A run that resumes, or one with a
    larger limit, computes only the others. The engine `vllm` writes each model into `scratch`.
    """
    settings = settings or EvaluationSettings()
    dtype = settings.dtype or common_dtype(models, log)
    settings = settings.model_copy(update={"dtype": dtype})
    results: dict[str, Result] = {}
    if settings.engine != "sweep":
        for name, plan in models.items():
            loaded = load_tasks(tasks, include=include, prompts=settings)
            run = partial(_run_alone, name, loaded, settings, log)
            if settings.engine == "hf":
                results[name] = run(_transformers(plan, settings))
            else:
                results[name] = with_folder("vllm", plan, settings, scratch, run)
            if progress is not None:
                progress(1)
        return results
    log_once = cache(log)  # the same line of every group is one line
    for group in _sharing(models):
        plans = [models[name] for name in group]
        tokenizer = plan_tokenizer(plans[0])
        settings.with_chat_template(tokenizer, log_once)
        sweep = Sweep(plans, device=pick_device(settings.device), dtype=settings.dtype)
        evaluated = evaluate(
            sweep, tokenizer, tasks, include=include, settings=settings, store=store, log=log,
            progress=progress,
        )  # fmt: skip
        results |= dict(zip(group, evaluated, strict=True))
    return {name: results[name] for name in models}


def _run_alone(
    name: str, loaded: Any, settings: EvaluationSettings, log: Log, model: Any
) -> Result:
    """Evaluate one lm-eval model, and log its truncated prompts."""
    result = run_tasks(model, loaded, settings)
    for note in cut_prompts(model, result):
        log(f"{name}: {note}")
    return result


def common_dtype(models: Mapping[str, Plan], log: Log = lambda line: None) -> str | None:
    """Find the widest dtype of models that are stored in several; None if there is only one.

    Rounding alone can decide between two answers, and would look like a difference of models.
    """
    stored: dict[str, str] = {}
    for name, plan in models.items():
        elements: Counter[str] = Counter()
        for tensor in plan.tensors:
            if tensor.dtype in FLOAT_DTYPES:
                elements[tensor.dtype] += prod(tensor.shape)
        if elements:
            stored[name] = elements.most_common(1)[0][0]
    if len(set(stored.values())) < 2:
        return None
    wide = widest(set(stored.values()))
    dtype = FLOAT_CODES.get(wide, "float32")
    examples = {code: name for name, code in stored.items()}
    kinds = ", ".join(f"{code} ({name})" for code, name in examples.items())
    log(f"models are stored in {kinds}; all are evaluated in {dtype} (--dtype)")
    return dtype


def _sharing(models: Mapping[str, Plan]) -> Iterator[list[str]]:
    """Group models that share experts and have the same files beside the weights."""
    groups: list[tuple[set[str], list[str]]] = []
    for name, plan in models.items():
        kind = f"{_files_hash(plan)}|{plan.recipe.dtype}"
        sources = {f"{expert.folder.resolve()}|{kind}" for expert in plan.used.values()}
        joined = [group for group in groups if group[0] & sources]
        groups = [group for group in groups if not group[0] & sources]
        names = [other for group in joined for other in group[1]] + [name]
        groups.append((sources.union(*(group[0] for group in joined)), names))
    yield from (names for _, names in groups)


def _files_hash(plan: Plan) -> str:
    digest = hashlib.sha256()
    files = [tokenizer_folder(plan) / name for name in COPIED[1]]
    for file in (generation_file(plan), *files):
        digest.update(file.read_bytes() if file is not None and file.is_file() else b"")
    return digest.hexdigest()


def _transformers(plan: Plan, settings: EvaluationSettings) -> Any:
    from lm_eval.models.huggingface import HFLM

    size, device = settings.batch_size, pick_device(settings.device)
    if settings.dtype is None:
        model: Any = plan.load().to(device)  # type: ignore[arg-type]
    else:
        model = VirtualModel([plan], device=device, dtype=settings.dtype).model
    read_one_token(model, model.device)
    return HFLM(
        pretrained=model,
        tokenizer=settings.with_chat_template(plan_tokenizer(plan)),
        batch_size=16 if size == "auto" and device == "cpu" else size,
        device=device,
    )
