"""Evaluates models on tasks; models that share experts are swept together."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain, count
from math import prod
from pathlib import Path
from typing import Any

from layerswap._types import Advance, Log
from layerswap.checkpoint.loading import pick_device
from layerswap.checkpoint.read import FLOAT_DTYPES, FLOAT_NAMES
from layerswap.compose.recipe import check_recipe, read_recipe
from layerswap.evaluation.harness import evaluate, load_tasks, open_sweep, run_tasks
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.evaluation.settings import EvaluationSettings
from layerswap.merge import Plan, make_plan
from layerswap.merge.adapters import MANIFEST, open_served
from layerswap.merge.folder import plan_tokenizer
from layerswap.merge.layout import widest
from layerswap.merge.metadata import COPIED, tokenizer_folder

Result = dict[str, Any]
"""The result of `lm_eval.simple_evaluate`, with `samples`."""


def open_models(models: Sequence[str]) -> dict[str, Plan]:
    """Open a plan for each model, by a unique name.

    Args:
        models: folders, Hub ids, adapters, recipes (`.yaml`), which need not be written, or
            folders of `layerswap adapters`, each with several models.
    """
    plans: dict[str, Plan] = {}
    for model in models:
        path = Path(model)
        if (path / MANIFEST).is_file():
            for name, plan in open_served(path).items():
                plans[_unique(name, plans)] = plan
            continue
        if path.suffix in (".yaml", ".yml"):
            plan, name = make_plan(read_recipe(path)), path.stem
        else:
            recipe = {
                "experts": {"model": model}, "soup": {"experts": ["model"]}, "bake": True,
            }  # fmt: skip
            plan = make_plan(check_recipe(recipe, where=model))
            name = path.resolve().name if path.is_dir() else model.replace("/", "--")
        plans[_unique(name, plans)] = plan
    return plans


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

    With the engine `sweep`, answers are stored as they come. A run that resumes, or one with a
    larger limit, computes only the others.

    Args:
        models: plans by name.
        tasks: names of lm-eval tasks or groups.
        include: folders with more task YAMLs.
        settings: settings of the evaluation.
        store: keeps answers for later runs.
        log: called with the memory that a batch needs, and with warnings.
        progress: called with the number of models just evaluated.
    """
    settings = settings or EvaluationSettings()
    dtype = settings.dtype or common_dtype(models, log)
    settings = settings.model_copy(update={"dtype": dtype})
    results: dict[str, Result] = {}
    if settings.engine == "hf":
        for name, plan in models.items():
            loaded = load_tasks(tasks, include=include, prompts=settings)
            results[name] = run_tasks(_transformers(plan, settings), loaded, settings)
            if progress is not None:
                progress(1)
        return results
    for group in _sharing(models):
        plans = [models[name] for name in group]
        tokenizer = plan_tokenizer(plans[0])
        settings.with_chat_template(tokenizer, log)
        evaluated = evaluate(
            open_sweep(plans, settings), tokenizer, tasks, include=include, settings=settings,
            store=store, log=log, progress=progress,
        )  # fmt: skip
        results |= dict(zip(group, evaluated, strict=True))
    return {name: results[name] for name in models}


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
    dtype = next((name for name, code in FLOAT_NAMES.items() if code == wide), "float32")
    examples = {code: name for name, code in stored.items()}
    kinds = ", ".join(f"{code} ({name})" for code, name in examples.items())
    log(f"models are stored in {kinds}; all are evaluated in {dtype} (--dtype)")
    return dtype


def _sharing(models: Mapping[str, Plan]) -> Iterator[list[str]]:
    """Group models of the same tokenizer and dtype that common experts link."""
    groups: list[tuple[set[str], list[str]]] = []
    for name, plan in models.items():
        kind = f"{_tokenizer_hash(plan)}|{plan.recipe.dtype}"
        sources = {f"{one.folder.resolve()}|{kind}" for one in plan.used.values()}
        joined = [group for group in groups if group[0] & sources]
        groups = [group for group in groups if not group[0] & sources]
        names = [one for group in joined for one in group[1]] + [name]
        groups.append((sources.union(*(group[0] for group in joined)), names))
    yield from (names for _, names in groups)


def _tokenizer_hash(plan: Plan) -> str:
    digest = hashlib.sha256()
    for name in COPIED[1]:
        file = tokenizer_folder(plan) / name
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()


def _transformers(plan: Plan, settings: EvaluationSettings) -> Any:
    """Load one model as lm-eval's own class."""
    from lm_eval.models.huggingface import HFLM

    size, device = settings.batch_size, pick_device(settings.device)
    model: Any = plan.load()
    return HFLM(
        pretrained=model.to(device),
        tokenizer=settings.with_chat_template(plan_tokenizer(plan)),
        batch_size=16 if size == "auto" and device == "cpu" else size,
        device=device,
    )
