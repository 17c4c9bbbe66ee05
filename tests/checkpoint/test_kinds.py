"""Kinds of input: one class is all that a new kind needs, from opening to what it cannot do."""

from dataclasses import replace

import pytest
from plain_checkpoints import write_family

import layerswap as ls
from layerswap.checkpoint import kinds
from layerswap.checkpoint.folder import SafetensorsFolder
from layerswap.ground.errors import RecipeError


class InnerFolder(SafetensorsFolder):
    """A folder whose checkpoint lies in a folder `inner`."""

    cannot = {"dtype": "keeps its dtype"}

    @classmethod
    def takes(cls, given):
        return (given.fetched[0] / "inner").is_dir()

    @classmethod
    def open(cls, given):
        return super().open(replace(given, source=str(given.fetched[0] / "inner")))

    def check(self, name):
        super().check(name)
        if self.layers > 3:
            raise RecipeError(f"{name} has too many layers")


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A task expert of a new kind, and a language expert that is a folder."""
    monkeypatch.setattr(kinds, "KINDS", {"inner": InnerFolder, **kinds.KINDS})
    family = write_family(tmp_path)
    outer = tmp_path / "outer"
    outer.mkdir()
    family["task"].rename(outer / "inner")
    return {"task": outer, "language": family["language"]}


def test_a_new_kind_is_merged_as_its_class_says(pair, tmp_path):
    plan = ls.swap(**pair, bottom=1)
    assert isinstance(plan.experts["task"], InnerFolder)
    plain = ls.swap(task=pair["task"] / "inner", language=pair["language"], bottom=1)
    files = [p.save(tmp_path / n) / "model.safetensors" for p, n in ((plan, "a"), (plain, "b"))]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_new_kind_refuses_what_it_cannot_do(pair, monkeypatch):
    with pytest.raises(RecipeError, match="dtype: task keeps its dtype"):
        ls.swap(**pair, dtype="float16")
    monkeypatch.setattr(InnerFolder, "layers", 4)
    with pytest.raises(RecipeError, match="task has too many layers"):
        ls.swap(**pair, bottom=1)
