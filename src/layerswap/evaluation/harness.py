"""Evaluates compositions on tasks of lm-evaluation-harness.

Requests are built once and answered for all compositions together; then lm-eval's own filters and
metrics score the answers of each. Prompts, tokenisation and metrics are lm-eval's, and the options
of prompts and generation have its names.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from layerswap._types import Advance, Log
from layerswap.compose.schema import Strict
from layerswap.compose.yaml_file import nearest
from layerswap.engine.generation import Sampling
from layerswap.engine.rows import eos_tokens, pad
from layerswap.engine.sweep import Sweep
from layerswap.engine.vllm import VllmSweep
from layerswap.errors import EvaluationError
from layerswap.evaluation.calibration import add_calibrated
from layerswap.evaluation.response_cache import AnswerStore, ResponseCache


class PromptOptions(Strict):
    """The prompts and the generation of tasks, in the words and with the meaning of lm-eval.

    Attributes:
        apply_chat_template: write prompts with the tokenizer's chat template; a text names one of
            several templates.
        system_instruction: the system message of a chat; without a template, text before a prompt.
        fewshot_as_multiturn: write examples as turns of the chat; as `apply_chat_template` when
            None.
        gen_kwargs: settings that replace those of the tasks for generation, such as
            `temperature=0.7,do_sample=true` or a mapping.
    """

    apply_chat_template: bool | str = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool | None = None
    gen_kwargs: str | dict[str, Any] | None = None

    @property
    def multiturn(self) -> bool:
        """True if examples are turns of the chat."""
        given = self.fewshot_as_multiturn
        return bool(self.apply_chat_template) if given is None else given

    @property
    def generation(self) -> dict[str, Any]:
        """`gen_kwargs` as a mapping.

        Raises:
            EvaluationError: the text is not `name=value,name=value`.
        """
        return parse_arguments("gen_kwargs", self.gen_kwargs)

    def tokenizer(self, tokenizer: Any, log: Log = lambda line: None) -> Any:
        """The tokenizer with the chat template that is asked for.

        Args:
            tokenizer: a transformers tokenizer.
            log: called with a line where there is a template that is not applied.

        Raises:
            EvaluationError: there is no such chat template.
        """
        templates = getattr(tokenizer, "chat_template", None)
        if not self.apply_chat_template:
            if templates:
                log(
                    "the tokenizer has a chat template, which is not applied: prompts are plain "
                    "text (--apply-chat-template)"
                )
            return tokenizer
        if not templates:
            raise EvaluationError("the tokenizer has no chat template to apply")
        name = "default" if self.apply_chat_template is True else self.apply_chat_template
        named = templates if isinstance(templates, dict) else {"default": templates}
        if name not in named:
            raise EvaluationError(f"no chat template {name!r}; there are {', '.join(named)}")
        chosen = copy.copy(tokenizer)
        chosen.chat_template = named[name]
        return chosen

    def prompt_ids(self, tokenizer: Any, prompt: str) -> list[int]:
        """Token ids of a prompt outside of a task, with the chat template where it is applied.

        Args:
            tokenizer: as `tokenizer` gives it.
            prompt: the text, the user's message in a chat.

        Raises:
            EvaluationError: the chat template cannot be applied.
        """
        if not self.apply_chat_template:
            before = f"{self.system_instruction}\n\n" if self.system_instruction else ""
            return list(tokenizer(before + prompt).input_ids)
        turns = [{"role": "user", "content": prompt}]
        if self.system_instruction:
            turns.insert(0, {"role": "system", "content": self.system_instruction})
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program, and raises whatever it likes
            raise EvaluationError(template_refusal(error)) from None
        # The template writes the special tokens itself.
        return list(tokenizer(text, add_special_tokens=False).input_ids)


def parse_arguments(option: str, given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings by name, from `name=value,name=value` or from a mapping.

    Raises:
        EvaluationError: the text is something else; the message names the option.
    """
    if not isinstance(given, str):
        return dict(given or {})
    from lm_eval.utils import simple_parse_args_string

    if not all("=" in part for part in given.split(",")):
        raise EvaluationError(f"{option}: {given!r} is not name=value,name=value")
    return dict(simple_parse_args_string(given))


def template_refusal(error: Exception) -> str:
    """One line for what a chat template raised."""
    return f"the chat template cannot be applied ({' '.join(str(error).split())[:160]})"


FEWSHOT_SEED = 1234
"""lm-eval's own default for drawing few-shot examples."""
PROMPTS = 256
"""Prompts that lm-eval hands over together."""
Samples = Mapping[str, Sequence[int]]
"""Positions of the documents of each task that are asked."""


def evaluate(
    sweep: Sweep | VllmSweep,
    tokenizer: Any,
    tasks: Sequence[str | dict[str, Any]],
    *,
    include: Sequence[Path] = (),
    num_fewshot: int | None = None,
    options: PromptOptions | None = None,
    limit: int | None = None,
    samples: Samples | None = None,
    batch_size: int | None = 16,
    members: Sequence[int] | None = None,
    store: AnswerStore | None = None,
    allow_code: bool = False,
    log: Log = lambda line: None,
    progress: Advance | None = None,
) -> list[dict[str, Any]]:
    """Evaluate compositions on lm-eval tasks.

    Args:
        sweep: the compositions.
        tokenizer: a transformers tokenizer.
        tasks: names of lm-eval tasks or groups, or its inline configurations.
        include: folders with more task YAMLs.
        num_fewshot: examples in the prompt; the task's own number when None.
        options: how prompts are written; plain text when None.
        limit: most documents of a task.
        samples: the documents to ask, instead of `limit`.
        batch_size: rows that the model reads together; when None, 16 or as many as fit.
        members: positions of the compositions; all when None.
        store: keeps answers, so that none is computed twice.
        allow_code: let tasks run code that a model wrote.
        log: called with the memory that will be needed, before it is, and with what a limit hides.
        progress: called with the number of compositions just evaluated.

    Returns:
        Per composition what `lm_eval.simple_evaluate` returns, with `samples`.

    Raises:
        EvaluationError: lm-eval is not installed, a task is unknown, or its data is not available.
    """
    chosen = list(range(len(sweep))) if members is None else list(members)
    results = []
    with _quiet():
        options = options or PromptOptions()
        loaded = load_tasks(tasks, include=include, num_fewshot=num_fewshot, options=options)
        for note in one_sided(loaded, limit) if limit is not None and samples is None else ():
            log(note)
        tokenizer = options.tokenizer(tokenizer)
        model = _model_class()(
            sweep, tokenizer, ResponseCache(sweep, chosen, store, batch_size, log)
        )
        for number in range(len(chosen)):
            model.number = number
            if number:
                _forget_answers(loaded)
            results.append(
                run_tasks(
                    model, loaded, options=options, limit=limit, samples=samples,
                    allow_code=allow_code,
                )
            )  # fmt: skip
            if progress is not None:
                progress(1)
    return results


def load_tasks(
    tasks: Sequence[str | dict[str, Any]],
    *,
    include: Sequence[Path] = (),
    num_fewshot: int | None = None,
    options: PromptOptions | None = None,
) -> Any:
    """lm-eval's task objects, set up as its command line does.

    Raises:
        EvaluationError: lm-eval is not installed, a task is unknown, or its data is not available.
    """
    manager = _manager(tuple(map(str, include)), tuple(t for t in tasks if isinstance(t, str)))
    try:
        loaded = manager.load(list(tasks))
    except Exception as error:  # data sets and YAML raise whatever they like
        why = " ".join(str(error).split())[:300]
        raise EvaluationError(f"tasks {_names(tasks)}: {type(error).__name__}: {why}") from None
    generation = options.generation if options else {}
    for task in loaded["tasks"].values():
        default = task.get_config("num_fewshot")
        if num_fewshot is not None and default != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif default is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        if generation and task.get_config("output_type") == "generate_until":
            task.set_config(key="generation_kwargs", value=generation, update=True)
    return loaded


def one_sided(loaded: Any, limit: int) -> Iterator[str]:
    """Tasks of which the first documents have not every right answer, as where they are sorted.

    Args:
        loaded: from `load_tasks`.
        limit: the number of documents that are asked.
    """
    for name, task in loaded["tasks"].items():
        if task.get_config("output_type") != "multiple_choice":
            continue
        answers = [str(task.doc_to_target(doc)) for doc in task.eval_docs]
        asked, every = set(answers[:limit]), set(answers)
        if len(asked) < len(every):
            yield (
                f"{name}: a limit of {limit} takes its first documents, which have {len(asked)} of "
                f"its {len(every)} right answers; the score says little of the task"
            )


def check_task_names(names: Sequence[str], include: Sequence[Path] = ()) -> None:
    """Refuse unknown task names.

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


def run_tasks(
    model: Any,
    loaded: Any,
    *,
    options: PromptOptions,
    limit: int | None = None,
    samples: Samples | None = None,
    allow_code: bool = False,
) -> dict[str, Any]:
    """Let lm-eval evaluate one of its models on loaded tasks.

    Raises:
        EvaluationError: a task runs code without leave, the model reads too few tokens, or the
            chat template cannot be applied.
    """
    from jinja2 import TemplateError
    from lm_eval.evaluator import evaluate as lm_evaluate

    try:
        found = lm_evaluate(
            lm=model,
            task_dict=loaded,
            limit=limit,
            samples=None if samples is None else {n: list(rows) for n, rows in samples.items()},
            bootstrap_iters=0,
            log_samples=True,
            confirm_run_unsafe_code=allow_code,
            system_instruction=options.system_instruction,
            apply_chat_template=bool(options.apply_chat_template),
            fewshot_as_multiturn=options.multiturn,
        )
    except ValueError as error:
        if "unsafe" in str(error):
            raise EvaluationError(
                f"{' '.join(str(error).split())[:200]} (--allow-code lets it)"
            ) from None
        raise
    except TemplateError as error:
        raise EvaluationError(template_refusal(error)) from None
    except AssertionError as error:
        if "maximum sequence length" not in str(error):
            raise
        raise EvaluationError(f"the model's context is too short: {error}") from None
    add_calibrated(found)
    return dict(found)


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


def _forget_answers(loaded: Any) -> None:
    """Keep the tasks' requests, and drop the answers of the previous composition."""
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
def _model_class() -> type[Any]:
    """lm-eval's model class, whose answers come from a sweep."""
    import torch
    from lm_eval.models.huggingface import HFLM

    class CachedModel(HFLM):  # type: ignore[misc]
        """One composition after the other, each answering from what was computed for all."""

        def __init__(self, sweep: Sweep | VllmSweep, tokenizer: Any, cache: ResponseCache) -> None:
            # Prompts that lm-eval hands over; the cache decides how many are run together.
            super().__init__(
                pretrained=sweep.switch(cache.members[0]), tokenizer=tokenizer, batch_size=PROMPTS
            )
            if self.model.device.type == "meta":  # vLLM answers; tokens stay on the CPU
                self._device = torch.device("cpu")
            self.number = 0
            self._responses = cache

        # lm-eval's bars count one composition of many, so none is shown.
        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().generate_until(requests, disable_tqdm=True)

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            asked = [(tuple(context), tuple(rest)) for _, context, rest in requests]
            dtype = str(self.model.dtype).removeprefix("torch.")
            found = self._responses.scores(self.number, asked, bound=self.max_length, dtype=dtype)
            return [(float(logprob), bool(greedy)) for logprob, greedy in found]

        def _model_generate(
            self, context: Any, max_length: int, stop: list[str], **settings: Any
        ) -> Any:
            new, mask = max_length - context.shape[1], settings.pop("attention_mask")
            ends = eos_tokens(self.model)
            asked = {"max_new_tokens": new, "stop": list(stop), "sampling": _sampling(settings)}
            prompts = [
                tuple(row[kept.bool()].tolist()) for row, kept in zip(context, mask, strict=True)
            ]
            written = self._responses.texts(self.number, prompts, asked, self.tokenizer)
            # Not every token that ends a text is a special one, which decoding would leave out.
            written = [tokens[:-1] if tokens[-1:] and tokens[-1] in ends else tokens
                       for tokens in written]  # fmt: skip
            texts = pad(written, fill=self.tokenizer.pad_token_id, width=new).to(context.device)
            return torch.cat([context, texts], dim=1)

    return CachedModel


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
