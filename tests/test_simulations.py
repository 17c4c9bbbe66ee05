"""Simulations of macOS and Windows give the bytes of Linux; see tests/helpers/simulations.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from plain_checkpoints import write_adapter, write_family
from simulations import SYSTEMS, simulated

import layerswap as ls
from layerswap.compose.recipe import check_recipe
from layerswap.merge.api import make_plan

HERE = Path(__file__).parent
ROOMS = [
    ("windows", "checkpoint"), ("windows", "merge"), ("windows", "ground"), ("macos", "ground"),
]  # fmt: skip
"""Rooms whose code calls `ground/system.py`, or is tested on the outputs of those that do. macOS is
a POSIX system: only the calls themselves differ from Linux."""


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    root = tmp_path_factory.mktemp("family")
    folders = write_family(root)
    for number, name in enumerate(("one", "two")):
        write_adapter(root / name, folders["base"], number, 3)
    return {**folders, "one": root / "one", "two": root / "two"}


def outputs(family, out):
    """Copies, blends, a method, adapters and a map of changes, each written twice."""
    pair = {"task": family["task"], "language": family["language"], "base": family["base"]}
    experts = {name: str(family[name]) for name in ("task", "language")}
    ties = {
        "experts": experts,
        "base": str(family["base"]),
        "merge": {"method": "ties", "experts": [*experts]},
    }
    plans = {
        "swap": ls.swap(**pair, bottom=1, top=1),
        "ties": make_plan(check_recipe(ties, where="ties")),
        "adapter": ls.swap(task=family["one"], language=family["two"], base=family["base"]),
    }  # fmt: skip
    for name, plan in plans.items():
        plan.save(out / name)
        plan.save(out / name, overwrite=True)
        assert not ls.verify(out / name).findings
    ls.delta(family["base"], family["task"]).save(out / "map")
    return {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_bytes_are_those_of_linux(name, family, tmp_path):
    expected = outputs(family, tmp_path / "linux")
    with simulated(name):
        found = outputs(family, tmp_path / name)
    assert found == expected
    assert not [path for path in (tmp_path / name).iterdir() if "." in path.name]
    for text in ("README.md", "layerswap.json", "config.json"):
        assert b"\r" not in found[Path("swap", text)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "room"), ROOMS)
def test_a_whole_room(name, room):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "simulations"]
    path = os.pathsep.join([str(HERE / "helpers"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "-p", "no:xdist", "-m", "not slow", str(HERE / room)], cwd=HERE.parent,
        env={**os.environ, "LAYERSWAP_SIMULATED": name, "PYTHONPATH": path}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
