"""lm-evaluation-harness as the judge of a sweep.

Its requests are built once and answered for all compositions together; then its own filters and
metrics score the answers of each. What is asked, how a text is split, and what is right are
lm-eval's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from layerswap._types import Advance
from layerswap.compose.yaml_file import nearest
from layerswap.engine.sampling import Sampling
from layerswap.engine.sweep import Sweep
from layerswap.errors import EvaluationError
from layerswap.evaluation.response_cache import Answer, AnswerStore, ResponseCache

FEWSHOT_SEED = 1234
"""lm-eval's own default for drawing few-shot examples."""
PROMPTS = 256
"""Prompts that lm-eval hands over together."""
Samples = Mapping[str, Sequence[int]]
"""Positions of the documents of each task that are asked."""


def evaluate(
    sweep: Sweep,
    tokenizer: Any,
    tasks: Sequence[str | dict[str, Any]],
    *,
    include: Sequence[Path] = (),
    num_fewshot: int | None = None,
    limit: int | None = None,
    samples: Samples | None = None,
    batch_size: int | None = 16,
    members: Sequence[int] | None = None,
    store: AnswerStore | None = None,
    allow_code: bool = False,
    log: Callable[[str], None] = lambda line: None,
    progress: Advance | None = None,
) -> list[dict[str, Any]]:
    """Judge compositions on lm-eval tasks.

    Args:
        sweep: the compositions.
        tokenizer: a transformers tokenizer.
        tasks: names of lm-eval tasks or groups, or its inline configurations.
        include: folders with task YAMLs of one's own.
        num_fewshot: examples in the prompt; the task's own number when None.
        limit: most documents of a task.
        samples: the documents to ask, instead of `limit`.
        batch_size: rows that the model reads together; when None, 16 or as many as fit.
        members: positions of the compositions; all when None.
        store: keeps answers, so that none is computed twice.
        allow_code: let tasks run code that a model wrote.
        log: told what will be in memory, before it is.
        progress: called with the number of compositions just judged.

    Returns:
        Per composition what `lm_eval.simple_evaluate` returns, with `samples`.

    Raises:
        EvaluationError: lm-eval is not installed, a task is not known, or its data cannot be had.
    """
    chosen = list(range(len(sweep))) if members is None else list(members)
    results = []
    with _quiet():
        loaded = load_tasks(tasks, include=include, num_fewshot=num_fewshot)
        judged = _judge_class()(
            sweep, tokenizer, ResponseCache(sweep, chosen, store, batch_size, log)
        )
        for number in range(len(chosen)):
            judged.number = number
            if number:
                _forget_answers(loaded)
            results.append(_evaluate(judged, loaded, limit, samples, allow_code))
            if progress is not None:
                progress(1)
    return results


def load_tasks(
    tasks: Sequence[str | dict[str, Any]],
    *,
    include: Sequence[Path] = (),
    num_fewshot: int | None = None,
) -> Any:
    """lm-eval's task objects, set up as its command line does.

    Raises:
        EvaluationError: lm-eval is not installed, a task is not known, or its data cannot be had.
    """
    manager = _manager(tuple(map(str, include)), tuple(t for t in tasks if isinstance(t, str)))
    try:
        loaded = manager.load(list(tasks))
    except Exception as error:  # data sets and YAML raise whatever they like
        why = " ".join(str(error).split())[:300]
        raise EvaluationError(f"tasks {_names(tasks)}: {type(error).__name__}: {why}") from None
    for task in loaded["tasks"].values():
        default = task.get_config("num_fewshot")
        if num_fewshot is not None and default != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif default is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return loaded


def check_task_names(names: Sequence[str], include: Sequence[Path] = ()) -> None:
    """Refuse names of tasks that there are not.

    Raises:
        EvaluationError: one is unknown, or lm-eval is not installed.
    """
    known = set(_manager(tuple(map(str, include)), tuple(names)).task_index)
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise EvaluationError(f"no task {unknown!r}{nearest(unknown, sorted(known))}")


def task_names() -> list[str]:
    """Every task, group and tag that lm-eval has; reading its index takes seconds.

    Raises:
        EvaluationError: lm-eval is not installed.
    """
    return list(_manager((), ()).all_tasks)


def _evaluate(
    judged: Any, loaded: Any, limit: int | None, samples: Samples | None, allow_code: bool
) -> dict[str, Any]:
    from lm_eval.evaluator import evaluate as lm_evaluate

    try:
        found = lm_evaluate(
            lm=judged,
            task_dict=loaded,
            limit=limit,
            samples=None if samples is None else {n: list(rows) for n, rows in samples.items()},
            bootstrap_iters=0,
            log_samples=True,
            confirm_run_unsafe_code=allow_code,
        )
    except ValueError as error:
        if "unsafe" in str(error):
            raise EvaluationError(
                f"{' '.join(str(error).split())[:200]} (--allow-code lets it)"
            ) from None
        raise
    except AssertionError as error:
        if "maximum sequence length" not in str(error):
            raise
        raise EvaluationError(f"the model's context is too short: {error}") from None
    return dict(found)


@contextmanager
def _quiet() -> Iterator[None]:
    """Only the errors of lm-eval's log: its warnings are about how a person would call it."""
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _forget_answers(loaded: Any) -> None:
    """Keep a task's requests, and drop what the composition before answered."""
    for task in loaded["tasks"].values():
        for instance in task.instances:
            instance.resps, instance.filtered_resps = [], {}
        task.build_all_requests = lambda **settings: None


@cache
def _manager(include: tuple[str, ...], names: tuple[str, ...]) -> Any:
    """The index of tasks; lm-eval's own only where it is needed."""
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
    """lm-eval's own tasks; to read their 14,000 files takes some 15 s."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _names(tasks: Sequence[str | dict[str, Any]]) -> str:
    return ", ".join(task if isinstance(task, str) else str(task.get("task")) for task in tasks)


@cache
def _judge_class() -> type[Any]:
    """lm-eval's model class, with the two places where it asks a model answered by a sweep."""
    import torch
    from lm_eval.models.huggingface import HFLM

    class Judged(HFLM):  # type: ignore[misc]
        """One composition after the other, answering from what was computed for all."""

        def __init__(self, sweep: Sweep, tokenizer: Any, book: ResponseCache) -> None:
            # How many prompts come at once; how many are read at once is the book's to decide.
            super().__init__(
                pretrained=sweep.model(book.members[0]), tokenizer=tokenizer, batch_size=PROMPTS
            )
            self.number = 0
            self._book = book

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            asked = [(tuple(context), tuple(rest)) for _, context, rest in requests]
            dtype = str(self.model.dtype).removeprefix("torch.")
            found = self._book.scores(self.number, asked, bound=self.max_length, dtype=dtype)
            return [(float(logprob), bool(greedy)) for logprob, greedy in found]

        def _model_generate(
            self, context: Any, max_length: int, stop: list[str], **settings: Any
        ) -> Any:
            new, mask = max_length - context.shape[1], settings.pop("attention_mask")
            asked = {"max_new_tokens": new, "stop": list(stop), "sampling": _sampling(settings)}
            prompts = [
                tuple(row[kept.bool()].tolist()) for row, kept in zip(context, mask, strict=True)
            ]
            written = self._book.texts(self.number, prompts, asked, self.tokenizer)
            return torch.cat([context, _padded(written, new, self.tokenizer, context)], dim=1)

    return Judged


def _padded(written: Sequence[Answer], width: int, tokenizer: Any, like: Any) -> Any:
    """What was written as one tensor `(rows, width)`, padded on the right."""
    rows = like.new_full((len(written), width), tokenizer.pad_token_id)
    for row, tokens in zip(rows, written, strict=True):
        row[: len(tokens)] = like.new_tensor(tokens)
    return rows


def _sampling(settings: Mapping[str, Any]) -> Sampling | None:
    """lm-eval's generation settings as the engine takes them; greedy is None."""
    temperature = settings.get("temperature")
    draws = settings.get("do_sample")
    if draws is None:
        draws = bool(temperature)
    extra = set(settings) - {"temperature", "do_sample", "top_k", "top_p"}
    if extra:
        raise EvaluationError(f"the sweep cannot generate with {', '.join(sorted(extra))}")
    if not draws:
        return None
    return Sampling(
        temperature=temperature or 1.0,
        top_k=settings.get("top_k", 0),
        top_p=settings.get("top_p", 1.0),
    )
