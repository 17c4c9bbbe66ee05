"""Merges of every method, dtype and kind of source, and the hashes of their outputs.

Run as a script it makes all of them and compares; with `--write` it writes `output_bytes.json`
anew, which only a change that is meant to change the result of a merge may do. Imports neither
torch nor pytest: the core alone gives these bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plain_checkpoints import (
    random_fisher,
    shapes,
    weights,
    write_adapter,
    write_checkpoint,
    write_family,
    write_fisher,
    write_tokenizer,
)

from layerswap.compose.recipe import check_recipe
from layerswap.merge.api import make_plan

KEPT = Path(__file__).with_name("output_bytes.json")
UNEVEN = {"task": 1, "language": 0.3}
METHODS: dict[str, dict[str, Any]] = {
    "task_arithmetic": {"experts": UNEVEN, "scale": 0.7},
    "ties": {"experts": ["task", "language", "third"], "density": 0.3},
    "ties per tensor": {"experts": UNEVEN, "scope": "tensor", "disjoint": "sum", "scale": 1.3},
    "dare_linear": {"experts": UNEVEN, "density": 0.6, "seed": 7},
    "dare_ties": {"experts": ["task", "language"], "density": 0.4},
    "breadcrumbs": {"experts": UNEVEN, "density": 0.5, "outliers": 0.1},
    "slerp": {"experts": UNEVEN},
    "model_stock": {"experts": ["task", "language", "third"]},
    "revert": {"experts": ["task"], "keep": 0.4},
    "revert by model": {"experts": ["task"], "keep": 0.3, "axis": "output", "scope": "model"},
    "fisher": {"experts": UNEVEN},
    "fisher normalised": {"experts": UNEVEN, "normalise": "model"},
}
SWAP = {"bottom": 1, "top": 0, "top_transition": 1}
TREES: dict[str, dict[str, Any]] = {
    "swap": {"swap": SWAP},
    "swap weighted": {"swap": SWAP, "weights": {"task": 0.3, "language": 0.7}},
    "swap by magnitude": {"swap": SWAP, "weights": "magnitude"},
    "soup": {"soup": {"experts": ["task", "language", "third"]}},
    "shards": {"soup": {"experts": ["task", "language"]}, "max_shard_size": "1MB"},
    "partition": {"partition": {"name": "C"}},
    **{
        name: {"merge": {"method": name.split()[0], **settings}}
        for name, settings in METHODS.items()
    },
}
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

Case = Callable[[Path], dict[str, Any]]
"""Writes the sources of a merge into a folder, and gives its recipe."""


def family(root: Path, dtype: str) -> dict[str, Path]:
    return (
        {n: root / n for n in ("base", "task", "language", "third")}
        if (root / "base").is_dir()
        else write_family(root, dtype)
    )


def tree(dtype: str, settings: dict[str, Any], out: str | None = None) -> Case:
    def recipe(root: Path) -> dict[str, Any]:
        folders = family(root / dtype, DTYPES[dtype])
        experts: dict[str, Any] = {n: {"source": str(f)} for n, f in folders.items() if n != "base"}
        if settings.get("merge", {}).get("method") == "fisher":
            for seed, name in enumerate(("task", "language")):
                fisher = root / dtype / f"fisher-{name}"
                if not fisher.is_dir():
                    write_fisher(fisher, folders[name], random_fisher(shapes(), seed))
                experts[name]["fisher"] = str(fisher)
        return {"base": str(folders["base"]), "experts": experts, "dtype": out, **settings}

    return recipe


def nested(root: Path) -> dict[str, Any]:
    """A soup and a TIES where a swap has its experts, and float64 among the sources."""
    folders = dict(family(root / "float32", "F32"))
    if not (wide := root / "wide").is_dir():
        write_checkpoint(wide, weights(9, 0.04), "F64")
    experts = {name: str(folders[name]) for name in ("task", "language", "third")}
    return {
        "base": str(folders["base"]),
        "experts": {
            **experts,
            "wide": str(wide),
            "tied": {"merge": {"method": "ties", "experts": ["task", "third"], "density": 0.4}},
            "both": {"soup": {"language": 3, "wide": 1}},
        },
        "swap": {"task": "tied", "language": "both", **SWAP},
    }


def mixed(root: Path) -> dict[str, Any]:
    """Experts of two 16-bit dtypes, which only float32 can hold."""
    task, language = (family(root / d, DTYPES[d]) for d in ("bfloat16", "float16"))
    experts = {"task": str(task["task"]), "language": str(language["language"])}
    return {"experts": experts, "swap": SWAP}


def aligned(choice: str) -> Case:
    def recipe(root: Path) -> dict[str, Any]:
        sizes = {"base": 90, "task": 90, "language": 70}
        words = {
            "base": [f"w{i}" for i in range(88)],
            "task": [f"w{i}" for i in range(88)],
            "language": [f"w{i}" for i in range(0, 100, 2)] + [f"x{i}" for i in range(20)],
        }
        for seed, (name, size) in enumerate(sizes.items()):
            if not (folder := root / "aligned" / name).is_dir():
                write_tokenizer(write_checkpoint(folder, weights(seed, 0.05, size)), words[name])
        experts = {name: str(root / "aligned" / name) for name in ("task", "language")}
        spec = {"method": "ties", "experts": ["task", "language"], "scope": "tensor"}
        method = {"swap": SWAP} if choice != "union of deltas" else {"merge": spec}
        base = {"base": str(root / "aligned" / "base")}
        return {**base, "experts": experts, "tokenizer": choice.split(maxsplit=1)[0], **method}

    return recipe


def adapters(**settings: Any) -> Case:
    def recipe(root: Path) -> dict[str, Any]:
        base = family(root / "bfloat16", "BF16")["base"]
        for seed, (name, more) in enumerate(
            {"task": {}, "language": {"use_rslora": True, "lora_alpha": 3}}.items()
        ):
            if not (folder := root / "adapters" / name).is_dir():
                write_adapter(folder, base, seed, 3 + seed, **more)
        experts = {name: str(root / "adapters" / name) for name in ("task", "language")}
        return {"base": str(base), "experts": experts, "swap": SWAP, **settings}

    return recipe


CASES: dict[str, Case] = {
    **{
        f"{name}, {dtype}": tree(dtype, settings)
        for name, settings in TREES.items()
        for dtype in DTYPES
    },
    **{
        f"{name}, {dtype} to {out}": tree(dtype, TREES[name], out)
        for name in ("swap", "ties")
        for dtype, out in (
            ("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32"),
            ("float16", "bfloat16"),
        )
    },
    "nested": nested,
    "two 16-bit dtypes": mixed,
    **{f"tokenizer {c}": aligned(c) for c in ("task", "language", "union", "union of deltas")},
    "adapters": adapters(),
    "adapters to bfloat16": adapters(dtype="bfloat16"),
    "adapters baked": adapters(bake=True),
    "adapters baked to float32": adapters(bake=True, dtype="float32"),
    "adapters baked to bfloat16": adapters(bake=True, dtype="bfloat16"),
}  # fmt: skip


def digest(folder: Path) -> str:
    """SHA-256 over the weight files, by name."""
    result = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        result.update(file.name.encode() + file.read_bytes())
    return result.hexdigest()


def merged(case: str, root: Path, out: Path, threads: int) -> str:
    plan = make_plan(check_recipe(CASES[case](root), where=case))
    return digest(plan.save(out, threads=threads, layout="plain"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        result = {case: merged(case, root / "sources", root / case, 2) for case in CASES}
    if sys.argv[1:] == ["--write"]:
        KEPT.write_text(json.dumps(result, indent=2) + "\n")
    differing = [
        case for case, kept in json.loads(KEPT.read_text()).items() if result[case] != kept
    ]
    sys.exit(f"other bytes than before: {differing}" if differing else 0)
