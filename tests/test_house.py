"""The house rules that a test can hold: cheap imports, one-way imports, small rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "layerswap"
ORDER = (
    "errors", "checkpoint", "compose", "delta", "merge", "evaluate", "train", "report", "study",
    "lab", "cli",
)  # fmt: skip
MODULES = sorted(SOURCE.rglob("*.py"))
HEAVY = (
    "torch", "transformers", "accelerate", "numpy", "huggingface_hub", "jinja2", "matplotlib",
    "pyarrow", "pandas", "scipy", "lm_eval", "trl", "peft", "datasets", "optuna", "langcodes",
)  # fmt: skip


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("statement", ["import layerswap", "import layerswap.cli"])
def test_importing_the_package_loads_nothing_heavy(statement):
    loaded = run_python(f"{statement}\nimport sys; print(*sys.modules)").split()
    assert not set(HEAVY) & set(loaded)


def test_help_loads_nothing_heavy():
    code = (
        "import sys\nfrom layerswap.cli import main\nsys.argv = ['layerswap', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nprint(*sys.modules)"
    )
    loaded = run_python(code).splitlines()[-1].split()
    assert "layerswap.cli.merge" in loaded
    assert not set(HEAVY) & set(loaded)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(module):
    room = module.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        pytest.skip("the front door opens every room")
    tree = ast.parse(module.read_text())
    for node in ast.walk(tree):
        names = (
            [node.module or ""] if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else []
        )  # fmt: skip
        for name in names:
            if name.startswith("layerswap."):
                other = name.split(".")[1]
                assert ORDER.index(other) <= ORDER.index(room), f"{room} imports {name}"


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_modules_and_functions_are_small(module):
    text = module.read_text()
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= 40, f"{node.name} has {lines} lines"


def test_every_public_name_can_be_had():
    import layerswap

    for name in layerswap.__all__:
        assert getattr(layerswap, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        layerswap.frobnicate  # noqa: B018
