"""The house rules that a test can hold: imports cheap, one way, no circles, all in reach."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from lm_eval_world import write_sweep
from plain_checkpoints import write_family
from processes import run
from typer.main import get_command

SOURCE = Path(__file__).parent.parent / "src" / "layerswap"
ORDER = (
    "ground", "versions", "reading", "checkpoint", "methods", "compose", "deltas", "merge",
    "engine", "evaluation", "training", "report", "deploy", "experiment", "study",
    "play", "lab", "new", "cli",
)  # fmt: skip
FILES = {
    ".".join(("layerswap", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(SOURCE.rglob("*.py"))
}
STARTED_BY_PATH = {"layerswap.__main__", "layerswap.evaluation._sandbox_child"}
NAMED_IN_YAML = {
    name
    for path in SOURCE.rglob("*.yaml")
    for name in re.findall(r"layerswap\.[\w.]+", path.read_text())
    if name in FILES
}
HEAVY = (
    "torch", "transformers", "accelerate", "numpy", "huggingface_hub", "jinja2", "matplotlib",
    "pyarrow", "pandas", "scipy", "lm_eval", "trl", "peft", "datasets", "langcodes",
)  # fmt: skip

WALK = """
import sys, threading
from layerswap.cli import main

ran = set()

def profile(frame, event, _):
    name = str(frame.f_globals.get("__name__"))
    code, caller = frame.f_code, frame.f_back and frame.f_back.f_code.co_name
    # Functions of the files, which the flag tells from class bodies; not what builds tables.
    if event == "call" and code.co_flags & 1 and "layerswap" in code.co_filename:
        if not code.co_name.startswith("<") and caller != "<module>":
            ran.add(name)

sys.argv = {arguments}
threading.setprofile(profile)
sys.setprofile(profile)
try:
    main()
finally:
    sys.setprofile(None)
    print(*sorted(ran), sep="\\n")
"""


def imports_of(path: Path) -> Iterator[str]:
    """Every module of the package that a file imports: at its top, lazily, or for types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("layerswap"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("layerswap"))


IMPORTS = {name: set(imports_of(path)) for name, path in FILES.items()}


@pytest.mark.parametrize("statement", ["import layerswap", "import layerswap.cli"])
def test_importing_the_package_loads_nothing_heavy(statement):
    loaded = run(f"{statement}\nimport sys; print(*sys.modules)").split()
    assert not set(HEAVY) & set(loaded)


@pytest.mark.parametrize("command", ["", "merge"])
def test_help_loads_nothing_heavy(command):
    arguments = ["layerswap", *command.split(), "--help"]
    code = (
        f"import sys\nfrom layerswap.cli import main\nsys.argv = {arguments}\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nprint(*sys.modules)"
    )
    loaded = run(code).splitlines()[-1].split()
    assert "layerswap.cli.merge" in loaded
    assert not set(HEAVY) & set(loaded)
    # Slower to import than all the rest of the help of a command.
    assert not {"rich", "layerswap.compose", *(["pydantic"] if command else [])} & set(loaded)


def test_imports_go_one_way():
    wrong = [
        f"{name} imports {other}"
        for name, others in IMPORTS.items()
        for other in others
        if name.count(".") and name != "layerswap.__main__"
        if other == "layerswap" or ORDER.index(room_of(other)) > ORDER.index(room_of(name))
    ]
    assert not wrong


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_no_imports_in_a_circle():
    """Lazy imports and those for types count too."""
    graph = {
        name: {o for o in others if not FILES[o].match("__init__.py") or o.startswith(f"{name}.")}
        for name, others in IMPORTS.items()
    }
    check_no_circle(graph)


def check_no_circle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("folder", ["bench", "research", "research/lab", "tests/research"])
def test_scripts_import_nothing_in_a_circle_and_no_inside_of_the_package(folder):
    graph = {}
    for path in (SOURCE.parents[1] / folder).glob("*.py"):
        imported = [
            (node.module or "", alias.name)
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]
        ours = [(module, name) for module, name in imported if module.startswith("layerswap")]
        assert not [name for _, name in ours if name.startswith("_")]
        theirs = {*imported} - {*ours}
        names = {part for module, name in theirs for part in (module.split(".")[-1], name)}
        graph[path.stem] = {name for name in names if path.with_stem(name).is_file()}
    assert len(graph) > 5
    check_no_circle(graph)


def modules_run(*arguments: object) -> list[str]:
    """The modules of which a function runs, from the command line to the bytes."""
    lines = run(WALK.format(arguments=["layerswap", *map(str, arguments)])).split("\n")
    return [line for line in lines if line.startswith("layerswap.")]


def test_a_merge_passes_through_few_modules(tmp_path):
    root = write_family(tmp_path)
    out = tmp_path / "out"
    experts = [f"--{name}={root[name]}" for name in ("task", "language")]
    walked = modules_run("merge", f"--out={out}", *experts)
    assert (out / "model.safetensors").is_file()
    assert "layerswap.merge.writer" in walked
    assert len(walked) <= 41, walked


@pytest.mark.slow
def test_a_sweep_passes_through_few_modules(world, tmp_path):
    out = tmp_path / "out"
    walked = modules_run("sweep", write_sweep(world, tmp_path / "sweep.yaml"), f"--out={out}")
    assert (out / "board.json").is_file()
    assert "layerswap.engine.sweep" in walked
    assert len(walked) <= 80, walked


def test_every_module_is_within_reach():
    """Of a command or of the public names."""
    import layerswap
    from layerswap.cli import COMMANDS

    seen, left = set(STARTED_BY_PATH), ["layerswap", "layerswap.cli", *NAMED_IN_YAML]
    left += [f"layerswap.cli.{where.partition(':')[0]}" for where, *_ in COMMANDS.values()]
    left += [f"layerswap.{home.partition(':')[0]}" for home in layerswap._HOME.values()]
    left += [name for name in FILES if name.startswith("layerswap.methods.")]  # found by listing
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += [*IMPORTS[name], *filter(None, [name.rpartition(".")[0]])]
    assert not set(FILES) - seen


def offered() -> dict[str, set[str]]:
    """What a user can type or give."""
    from layerswap.checkpoint.kinds import KINDS
    from layerswap.cli import app
    from layerswap.evaluation.settings import EvaluationSettings
    from layerswap.reading.origins import Origin

    def named(group: Any, before: str = "") -> Iterator[str]:
        for name, command in group.commands.items():
            inner = hasattr(command, "commands")
            yield from named(command, f"{name} ") if inner else [before + name]

    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    (formats,) = (kind for kind in get_args(Origin.model_fields["format"].annotation)
                  if kind is not type(None))  # fmt: skip
    return {
        "commands": set(named(get_command(app))),
        "extras": set(project["optional-dependencies"]),
        "engines": set(get_args(EvaluationSettings.model_fields["engine"].annotation)),
        "formats": set(get_args(formats)),
        "inputs": set(KINDS),
    }


@pytest.mark.parametrize("kind", ["commands", "extras", "engines", "formats", "inputs"])
def test_nothing_is_added_without_something_that_leaves(kind):
    """The list of what is offered is tests/house.yaml, with a reason for each entry."""
    listed = yaml.safe_load((Path(__file__).parent / "house.yaml").read_text("utf-8"))[kind]
    assert set(listed["entries"]) == offered()[kind]
    assert len(listed["entries"]) <= listed["most"]
    assert all(listed["entries"].values())


def test_every_public_name_can_be_had():
    import layerswap

    for name in layerswap.__all__:
        assert getattr(layerswap, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        layerswap.frobnicate  # noqa: B018


LIBRARIES = (
    "transformers", "trl", "peft", "lm_eval", "accelerate", "datasets", "huggingface_hub", "vllm",
    "typer",
)  # fmt: skip
DOCUMENTED = {
    *LIBRARIES, "transformers.utils", "typer.core", "accelerate.utils", "datasets.exceptions",
    "huggingface_hub.errors", "huggingface_hub.utils", "lm_eval.evaluator", "lm_eval.tasks",
    "lm_eval.api.registry", "lm_eval.utils", "lm_eval.models.huggingface",
}  # fmt: skip
"""Modules whose names the libraries' documentation gives, or their own plugins use."""
OTHERS = {
    "_asdict", "_replace", "_fields", "_exit",  # of Python
    "_parameters", "_buffers", "_version",  # of torch
}  # fmt: skip


def test_the_inside_of_a_library_is_used_in_one_module_each():
    """Private names, and modules that are not documented, are in modules called `*_inside`."""
    trees = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
    ours = set(OTHERS)
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            ours.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            ours.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            ours.add(node.id)
    wrong = [
        f"{module} uses {name}"
        for module, tree in trees.items()
        if not module.endswith("_inside")
        for name in inside_names(tree, ours)
    ]
    assert not wrong


def inside_names(tree: ast.Module, ours: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            whole = isinstance(node, ast.ImportFrom)
            modules = [node.module or ""] if whole else [alias.name for alias in node.names]
            private = [a.name for a in node.names if a.name.startswith("_")] if whole else []
            for module in modules:
                if module.partition(".")[0] in LIBRARIES:
                    yield from private
                    if module not in DOCUMENTED:
                        yield module
        elif isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            if node.attr not in ours:
                yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"getattr", "hasattr"}:
            name = getattr(node.args[1], "value", "")
            if re.match(r"_[^_]", str(name)) and name not in ours:
                yield name
