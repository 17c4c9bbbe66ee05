"""Evaluates compositions on tasks of lm-evaluation-harness.

lm-eval builds the requests once. A sweep answers them for all compositions together, and lm-eval's
own filters and metrics score the answers of each. Prompts, tokenisation and metrics are lm-eval's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from layerswap._types import Advance, Log
from layerswap.checkpoint.loading import pick_device
from layerswap.compose.yaml_file import nearest
from layerswap.engine.sweep import Sweep
from layerswap.engine.vllm import VllmSweep, open_engine
from layerswap.errors import EvaluationError
from layerswap.evaluation.calibration import add_calibrated
from layerswap.evaluation.response_cache import AnswerStore, ResponseCache
from layerswap.evaluation.settings import (
    EvaluationSettings,
    PromptOptions,
    parse_arguments,
    template_error,
)
from layerswap.merge import Plan

FEWSHOT_SEED = 1234
"""lm-eval's own default for drawing few-shot examples."""
Samples = Mapping[str, Sequence[int]]
"""Positions of the documents to evaluate on, by task."""


def open_sweep(plans: Sequence[Plan], settings: EvaluationSettings) -> Sweep | VllmSweep:
    """Open compositions with the engine of the settings."""
    return open_engine(
        plans,
        engine="vllm" if settings.engine == "vllm" else "sweep",
        device=pick_device(settings.device),
        dtype=settings.dtype,
        engine_args=parse_arguments(settings.engine_args),
    )


def evaluate(
    sweep: Sweep | VllmSweep,
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
    """Evaluate compositions on lm-eval tasks.

    Args:
        sweep: the compositions.
        tokenizer: a transformers tokenizer.
        tasks: names of lm-eval tasks or groups, or inline configurations.
        include: folders with more task YAMLs.
        settings: prompts, limit, batch size and leave to run programs; the rest is the sweep's.
        samples: the documents, in place of the limit.
        members: positions of the compositions; all when None.
        store: keeps answers for later runs.
        log: called with the memory that a batch needs, and with a warning about the limit.
        progress: called with the number of compositions just evaluated.

    Returns:
        For each composition the result of `lm_eval.simple_evaluate`, with `samples`.
    """
    settings = settings or EvaluationSettings()
    chosen = list(range(len(sweep))) if members is None else list(members)
    results = []
    with _quiet():
        loaded = load_tasks(tasks, include=include, prompts=settings)
        if settings.limit is not None and samples is None:
            for note in _missing_answers(loaded, settings.limit):
                log(note)
        loaded = {**loaded, "tasks": {n: _BuiltOnce(task) for n, task in loaded["tasks"].items()}}
        from layerswap.evaluation.cached_model import CachedModel

        size = None if settings.batch_size == "auto" else settings.batch_size
        responses = ResponseCache(sweep, chosen, store, size, log)
        model = CachedModel(sweep, settings.with_chat_template(tokenizer), responses)
        for number in range(len(chosen)):
            model.number = number
            results.append(run_tasks(model, loaded, settings, samples))
            if progress is not None:
                progress(1)
    return results


def load_tasks(
    tasks: Sequence[str | dict[str, Any]],
    *,
    include: Sequence[Path] = (),
    prompts: PromptOptions | None = None,
) -> Any:
    """Load lm-eval's task objects, and prepare them as its command line does."""
    manager = _manager(tuple(map(str, include)), tuple(t for t in tasks if isinstance(t, str)))
    try:
        loaded = manager.load(list(tasks))
    except Exception as error:  # data sets and YAML raise anything
        why = " ".join(str(error).split())[:300]
        names = ", ".join(t if isinstance(t, str) else str(t.get("task")) for t in tasks)
        raise EvaluationError(f"tasks {names}: {type(error).__name__}: {why}") from None
    prompts = prompts or PromptOptions()
    generation = parse_arguments(prompts.gen_kwargs)
    for task in loaded["tasks"].values():
        default = task.get_config("num_fewshot")
        if prompts.num_fewshot is not None and default != 0:
            task.set_config(key="num_fewshot", value=prompts.num_fewshot)
        elif default is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        if generation and task.get_config("output_type") == "generate_until":
            task.set_config(key="generation_kwargs", value=generation, update=True)
    return loaded


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


def _missing_answers(loaded: Any, limit: int) -> Iterator[str]:
    """Warn about tasks whose first documents lack some right answers, as in a sorted file."""
    for name, task in loaded["tasks"].items():
        if task.get_config("output_type") != "multiple_choice":
            continue
        answers = [str(task.doc_to_target(doc)) for doc in task.eval_docs]
        within, every = set(answers[:limit]), set(answers)
        if len(within) < len(every):
            yield (
                f"{name}: a limit of {limit} takes the first documents, which have {len(within)} "
                f"of the {len(every)} right answers; their score is not that of the task"
            )


def check_task_names(names: Sequence[str], include: Sequence[Path] = ()) -> None:
    """Refuse unknown names of tasks."""
    known = set(_manager(tuple(map(str, include)), tuple(names)).task_index)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise EvaluationError(f"no task {unknown!r}{nearest(unknown, sorted(known))}")


def task_names() -> list[str]:
    """List every task, group and tag of lm-eval; reading its index takes seconds."""
    return list(_manager((), ()).all_tasks)


def run_tasks(
    model: Any, loaded: Any, settings: EvaluationSettings, samples: Samples | None = None
) -> dict[str, Any]:
    """Evaluate one of lm-eval's models on loaded tasks."""
    from jinja2 import TemplateError
    from lm_eval.evaluator import evaluate as lm_evaluate

    try:
        result = lm_evaluate(
            lm=model,
            task_dict=loaded,
            limit=settings.limit if samples is None else None,
            samples=None if samples is None else {n: list(rows) for n, rows in samples.items()},
            bootstrap_iters=0,
            log_samples=True,
            confirm_run_unsafe_code=settings.allow_code,
            system_instruction=settings.system_instruction,
            apply_chat_template=bool(settings.apply_chat_template),
            fewshot_as_multiturn=settings.multiturn,
        )
    except ValueError as error:
        if "unsafe" not in str(error):
            raise
        why = " ".join(str(error).split())[:200]
        raise EvaluationError(f"{why} (allow it with --allow-code)") from None
    except TemplateError as error:
        raise template_error(error) from None
    except AssertionError as error:
        if "maximum sequence length" not in str(error):
            raise
        raise EvaluationError(f"the model's context is too short: {error}") from None
    add_calibrated(result)
    return dict(result)


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
    """Read the index of tasks; lm-eval's own only if a name is not in the folders."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise EvaluationError('tasks need lm-eval: pip install "layerswap[eval]"') from None
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
