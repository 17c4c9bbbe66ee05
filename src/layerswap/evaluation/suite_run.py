"""Evaluates models on tasks; those that share experts are swept together."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from math import prod
from pathlib import Path
from typing import Any, Literal

from layerswap._types import Advance, EngineName, Log
from layerswap.checkpoint.read import FLOAT_DTYPES, FLOAT_NAMES
from layerswap.compose.recipe import check_recipe, read_recipe
from layerswap.engine.vllm import NOT_VLLM, open_engine
from layerswap.errors import EvaluationError
from layerswap.evaluation.harness import PromptOptions, evaluate, load_tasks, run_tasks
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.merge import Plan, make_plan
from layerswap.merge.adapters import MANIFEST, open_served
from layerswap.merge.layout import widest
from layerswap.merge.loading import plan_tokenizer
from layerswap.merge.metadata import COPIED, tokenizer_folder

Result = dict[str, Any]


@dataclass(frozen=True)
class EvaluationSettings:
    """How models are evaluated.

    Attributes:
        limit: most documents of a task.
        num_fewshot: examples in a prompt; the task's own number when None.
        prompts: how prompts are written.
        batch_size: rows read together; as many as fit, at most 16, when None.
        device: where models run.
        dtype: of the models; as stored when None, in the widest where they are stored in several.
        engine: `sweep` answers for all compositions of the same experts together; `vllm` starts
            vLLM once and re-points it; `hf` loads each model through transformers.
        engine_args: further arguments of `vllm.LLM`.
        allow_code: let tasks run programs that a model wrote, in the sandbox.
    """

    limit: int | None = None
    batch_size: int | None = None
    device: str = "cpu"
    dtype: str | None = None
    engine: EngineName | Literal["hf"] = "sweep"
    allow_code: bool = False
    num_fewshot: int | None = None
    prompts: PromptOptions = field(default_factory=PromptOptions)
    engine_args: Mapping[str, Any] = field(default_factory=dict)


def open_models(models: Sequence[str]) -> dict[str, Plan]:
    """A plan for each model, by a name of its own.

    Args:
        models: folders, Hub ids, adapters, recipes (`.yaml`), which need not be written, or
            folders of `layerswap adapters`, with all that is in them.

    Raises:
        LayerswapError: one cannot be opened.
    """
    found: dict[str, Plan] = {}
    for model in models:
        path = Path(model)
        if (path / MANIFEST).is_file():
            for name, plan in open_served(path).items():
                found[_unique(name, found)] = plan
            continue
        if path.suffix in (".yaml", ".yml"):
            plan, name = make_plan(read_recipe(path)), path.stem
        else:
            recipe = {
                "experts": {"model": model}, "soup": {"experts": ["model"]}, "bake": True,
            }  # fmt: skip
            plan = make_plan(check_recipe(recipe, where=model))
            name = path.resolve().name if path.is_dir() else model.replace("/", "--")
        found[_unique(name, found)] = plan
    return found


def _unique(name: str, taken: Container[str]) -> str:
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(one for one in names if one not in taken)


def evaluate_models(
    models: Mapping[str, Plan],
    tasks: Sequence[str],
    include: Sequence[Path],
    *,
    settings: EvaluationSettings | None = None,
    store: AnswerStore | None = None,
    log: Log = lambda line: None,
    progress: Advance | None = None,
) -> dict[str, Result]:
    """Evaluate models on tasks.

    Answers are kept as they come, so that a run that was killed, or one with a larger limit,
    computes only what is new (with the engine `sweep`).

    Args:
        models: by name.
        tasks: names of lm-eval tasks or groups.
        include: folders with more task YAMLs.
        settings: how.
        store: keeps answers.
        log: called with the memory that will be needed, before it is.
        progress: called with the number of models just evaluated.

    Returns:
        By model what lm-eval gives, with `samples`.

    Raises:
        EvaluationError: a model cannot be evaluated, or lm-eval is not installed.
    """
    settings = settings or EvaluationSettings()
    if settings.dtype is None:
        settings = replace(settings, dtype=common_dtype(models, log))
    results: dict[str, Result] = {}
    if settings.engine == "hf":
        if settings.engine_args:
            raise EvaluationError(NOT_VLLM)
        for name, plan in models.items():
            results[name] = _alone(plan, tasks, include, settings)
            if progress is not None:
                progress(1)
        return results
    for group in _sharing(models):
        plans = [models[name] for name in group]
        tokenizer = plan_tokenizer(plans[0])
        settings.prompts.tokenizer(tokenizer, log)
        found = evaluate(
            open_engine(
                plans,
                engine=settings.engine,
                device=settings.device,
                dtype=settings.dtype,
                engine_args=settings.engine_args,
            ),
            tokenizer,
            tasks,
            include=include,
            num_fewshot=settings.num_fewshot,
            options=settings.prompts,
            limit=settings.limit,
            batch_size=settings.batch_size,
            store=store,
            allow_code=settings.allow_code,
            log=log,
            progress=progress,
        )
        results |= dict(zip(group, found, strict=True))
    return {name: results[name] for name in models}


def common_dtype(models: Mapping[str, Plan], log: Log = lambda line: None) -> str | None:
    """The dtype to evaluate models in that are stored in several; None where they are not.

    Rounding alone can decide between two answers, and would be taken for what a model knows.

    Args:
        models: by name.
        log: called with a line that says so.
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
    dtype = next((name for name, code in FLOAT_NAMES.items() if code == wide), "float32")
    found = ", ".join(
        f"{code} ({name})" for code, name in {v: k for k, v in stored.items()}.items()
    )
    log(f"models are stored in {found}; all are evaluated in {dtype} (--dtype)")
    return dtype


def _sharing(models: Mapping[str, Plan]) -> Iterator[list[str]]:
    """Models in groups that have an expert in common, and the same tokenizer and dtype."""
    groups: list[tuple[set[str], list[str]]] = []
    for name, plan in models.items():
        kind = f"{_tokenizer_hash(plan)}|{plan.recipe.dtype}"
        mine = {f"{one.folder.resolve()}|{kind}" for one in plan.used.values()}
        joined = [group for group in groups if group[0] & mine]
        groups = [group for group in groups if not group[0] & mine]
        sources = mine.union(*(group[0] for group in joined))
        groups.append((sources, [one for group in joined for one in group[1]] + [name]))
    yield from (names for _, names in groups)


def _tokenizer_hash(plan: Plan) -> str:
    digest = hashlib.sha256()
    for name in COPIED[1]:
        file = tokenizer_folder(plan) / name
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()


def _alone(
    plan: Plan, tasks: Sequence[str], include: Sequence[Path], settings: EvaluationSettings
) -> Result:
    """One model through lm-eval's own classes."""
    options = settings.prompts
    loaded = load_tasks(tasks, include=include, num_fewshot=settings.num_fewshot, options=options)
    model = _transformers(plan, settings)
    return run_tasks(
        model, loaded, options=options, limit=settings.limit, allow_code=settings.allow_code
    )


def _transformers(plan: Plan, settings: EvaluationSettings) -> Any:
    from lm_eval.models.huggingface import HFLM

    model: Any = plan.load()
    return HFLM(
        pretrained=model.to(settings.device),
        tokenizer=settings.prompts.tokenizer(plan_tokenizer(plan)),
        batch_size=settings.batch_size or ("auto" if settings.device != "cpu" else 16),
        device=settings.device,
    )
