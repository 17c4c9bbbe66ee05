"""Writes every composition of task and language adapters, for serving over one base."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerswap.checkpoint import atomic_folder, refuse_target
from layerswap.compose.recipe import check_recipe
from layerswap.ground import system
from layerswap.ground.errors import RecipeError
from layerswap.ground.strict_json import read_json_object
from layerswap.ground.types import Advance, PathLike
from layerswap.merge.api import make_plan
from layerswap.merge.lora import ranks_of
from layerswap.merge.metadata import in_code
from layerswap.merge.plan import Plan
from layerswap.versions import __version__

MANIFEST, SCRIPT = "serve.json", "serve.sh"
SERVED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`."""


@dataclass(frozen=True)
class ServedAdapters:
    """Adapters of one base in a folder that `write_adapters` wrote, with their largest rank."""

    folder: Path
    base: str
    rank: int
    plans: Mapping[str, Plan]


def write_adapters(
    tasks: Mapping[str, PathLike],
    languages: Mapping[str, PathLike],
    out: PathLike,
    *,
    base: PathLike | None = None,
    method: Mapping[str, Any] | None = None,
    weights: str | Mapping[str, float] = "uniform",
    rank: int | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Advance | None = None,
) -> ServedAdapters:
    """Write the swap of every task adapter with every language adapter as an adapter.

    Verbatim places keep the rank of their adapter; blended places have the sum of both ranks.
    `out` gets an adapter in each `TASK--LANGUAGE`, `serve.json`, `serve.sh` with the command for
    vLLM, and one card. `method` holds zones and `outside` of the swap, as in a recipe; when None,
    the partition that the adapters were trained on if recorded, otherwise the defaults.
    """
    target = Path(out).expanduser().absolute()
    refuse_target(target, marker=MANIFEST, overwrite=overwrite)
    if not tasks or not languages:
        raise RecipeError("give at least one task adapter and one language adapter")
    plans: dict[str, Plan] = {}
    for task, source in tasks.items():
        for language, language_source in languages.items():
            data = {
                "experts": {"task": os.fspath(source), "language": os.fspath(language_source)},
                "base": None if base is None else os.fspath(base),
                "swap": dict(method or {}),
                "weights": weights if isinstance(weights, str) else dict(weights),
                "rank": rank,
                "dtype": dtype,
            }
            recipe = check_recipe(data, where=f"{task}, {language}")
            plan = make_plan(recipe, follow_training=True)
            if plan.format.name != "adapter":
                raise RecipeError(f"{task}, {language}: both must be adapters")
            plans[f"{task}--{language}"] = plan
    system.check_names([*plans])
    bases = {plan.base.source for plan in plans.values() if plan.base is not None}
    if len({os.path.normpath(base) for base in bases}) != 1:
        raise RecipeError(f"the adapters have different bases: {', '.join(sorted(bases))}")
    largest = max((rank for plan in plans.values() for rank in ranks_of(plan)), default=1)
    served = ServedAdapters(target, min(bases), largest, plans)
    with atomic_folder(target, marker=MANIFEST, overwrite=overwrite) as folder:
        for name, plan in plans.items():
            plan.save(folder / name)
            (folder / name / "README.md").unlink(missing_ok=True)
            if progress is not None:
                progress(1)
        _write_documents(folder, served)
    return served


def open_served(folder: Path) -> dict[str, Plan]:
    """Plan full weights for each adapter in a folder that `write_adapters` wrote.

    The plans use the original adapters, so that an engine computes shared parts once; or the
    composed adapters, if the originals are gone.
    """
    plans: dict[str, Plan] = {}
    for name, entry in read_json_object(folder / MANIFEST)["adapters"].items():
        recipe = entry
        if not all(Path(source).is_dir() for source in entry["experts"].values()):
            soup = {"experts": ["model"]}
            recipe = {"experts": {"model": str(folder / name)}, "soup": soup}
        plans[name] = make_plan(check_recipe({**recipe, "bake": True}, where=f"{folder}: {name}"))
    return plans


def served_rank(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM for adapters of this rank."""
    return next((limit for limit in SERVED_RANKS if limit >= rank), rank)


def _write_documents(folder: Path, served: ServedAdapters) -> None:
    rank = served_rank(served.rank)
    manifest = {
        "layerswap_version": __version__,
        "base": served.base,
        "max_lora_rank": rank,
        "adapters": {name: _recipe(plan) for name, plan in served.plans.items()},
    }
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_bytes((text + "\n").encode())
    names = list(served.plans)
    modules = [f'{shlex.quote(name)}="$here/"{shlex.quote(name)}' for name in names]
    base, local = shlex.quote(served.base), Path(served.base).expanduser()
    if local.is_dir() and not local.is_absolute():  # from the script, wherever it is called
        base = f'"$here/"{shlex.quote(os.path.relpath(local, served.folder))}'
    lines = [
        f"vllm serve {base} --enable-lora --max-lora-rank {rank}",
        "--lora-modules",
        *modules,
        '"$@"',
    ]
    script = 'here="$(cd "$(dirname "$0")" && pwd)"\n' + " \\\n  ".join(lines) + "\n"
    (folder / SCRIPT).write_bytes(script.encode())
    card = f"""# Composed adapters

Adapters of {in_code(served.base)}, each a layer swap of a task adapter with a language adapter
(`TASK--LANGUAGE`), with layerswap {__version__}. The largest rank is {served.rank}.

{chr(10).join(f"- {in_code(name)}" for name in names)}

Serve all of them over one base with vLLM: `sh {SCRIPT}`. PEFT loads each folder by itself.
`layerswap eval` on this folder evaluates all of them together. `layerswap.json` in each folder
holds its whole record.
"""
    (folder / "README.md").write_bytes(card.encode())


def _recipe(plan: Plan) -> dict[str, Any]:
    """The recipe as JSON, with sources that do not depend on the working directory."""
    data = plan.recipe.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    sources: dict[str, Any] = {"experts": {}}
    for name, checkpoint in plan.used.items():
        sources["experts"][name] = str(checkpoint.folder)
    if plan.base is not None:
        local = Path(plan.base.source).expanduser()
        sources["base"] = str(local.absolute()) if local.is_dir() else plan.base.identity
    return {**{key: value for key, value in data.items() if key not in sources}, **sources}
