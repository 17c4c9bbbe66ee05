"""The public names: examples that run, paths as text or Path, one or many, small displays."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from plain_checkpoints import write_family

import layerswap as ls

EXAMPLES = (
    "Atlas", "Checkpoint", "Place", "Plan", "delta", "instruct", "make_plan", "open_checkpoint",
    "partition", "read_recipe", "revert", "soup", "swap", "verify",
)  # fmt: skip
RECIPE = """
experts: {task: math-expert, language: swahili-expert}
swap: {bottom: 1, top: 1}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with the checkpoints and the recipe that the examples name."""
    root = tmp_path_factory.mktemp("world")
    write_family(root)
    (root / "task").rename(root / "math-expert")
    (root / "language").rename(root / "swahili-expert")
    (root / "recipe.yaml").write_text(RECIPE)
    return root


@pytest.fixture(autouse=True)
def _in_the_world(world, monkeypatch):
    monkeypatch.chdir(world)


@pytest.mark.parametrize("name", [*EXAMPLES, "Plan.grid"])
def test_the_example_of_a_public_name_runs(name, capsys):
    found = ls
    for part in name.split("."):
        found = getattr(found, part)
    examples = doctest.DocTestFinder(recurse=False).find(found, name, globs={})
    assert any(test.examples for test in examples), f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in examples:
        runner.run(test)
    assert not runner.failures, capsys.readouterr().out


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_are_text_or_path(kind, tmp_path):
    task, language, base = (kind(name) for name in ("math-expert", "swahili-expert", "base"))
    plans = [
        ls.swap(task=task, language=language, base=base),
        ls.soup([task, language], base=base),
        ls.partition("C", task=task, language=language, base=base),
        ls.revert(base, task, keep=0.5),
        ls.instruct(base=base, instruct=task, language=language, weight=0.5),
        ls.make_plan(kind("recipe.yaml")),
        ls.make_plan(ls.read_recipe(kind("recipe.yaml"))),
    ]
    for i, plan in enumerate(plans):
        assert isinstance(plan, ls.Plan)
        assert ls.verify(kind(plan.save(kind(tmp_path / f"{i}")))).passed
    atlas = ls.delta(base, task, {"swahili": language})
    atlas.save(kind(tmp_path / "atlas"))
    assert ls.Atlas.load(kind(tmp_path / "atlas")).experts == atlas.experts
    assert ls.open_checkpoint(kind("base")).layers == atlas.layers


def test_one_or_many():
    plan = ls.swap(task="math-expert", language="swahili-expert")
    assert len(plan.grid(bottom=1, top=range(2))) == 2
    one, many = (ls.revert("base", "math-expert", layers=where) for where in (1, ["1"]))
    assert one.composition == many.composition
    with pytest.raises(ls.LayerswapError, match="a soup needs a list of experts"):
        ls.soup("math-expert")


def test_displays_are_small():
    long = {f"expert with a long name {i}": "math-expert" for i in range(9)}
    atlas = ls.delta("base", long)
    plan = ls.soup(long)
    swap = ls.swap(task="math-expert", language="swahili-expert")
    for shown in (plan, plan.composition, swap, swap.composition):
        text = shown._repr_html_()
        assert text.startswith("<pre>")
        assert len(text) < 4000
    assert f"<pre>{swap}</pre>" in swap._repr_html_()
    checked = ls.verify(swap.save("merged", overwrite=True))
    assert repr(checked).endswith("merged: verified>")
    assert repr(swap) == "<Plan: swap of task, language, bottom 1, top 1; 3 layers>"
    assert repr(ls.open_checkpoint("base")) == "<Checkpoint base: 3 layers, 30 tensors, 2.5 MB>"
    for shown in (atlas, checked, swap.composition, swap.grid(bottom=range(3), top=0)):
        assert len(repr(shown)) < 300


def test_a_map_takes_experts_one_by_one_or_in_a_list():
    experts = ["math-expert", Path("swahili-expert")]
    listed, one_by_one = ls.delta("base", experts), ls.delta("base", *experts)
    assert listed.experts == one_by_one.experts == ("math-expert", "swahili-expert")
    assert listed.changes.keys() == one_by_one.changes.keys()
    with pytest.raises(ls.LayerswapError, match="give an expert"):
        ls.delta("base", [])
