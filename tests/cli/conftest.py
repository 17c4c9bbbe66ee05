from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from merging import copied, save_expert, save_near, save_tokenizer, tiny_llama

from layerswap.cli import main


@pytest.fixture(scope="session")
def experts(tmp_path_factory):
    """Folders of a base and two experts of 8 layers, each a little way from the base."""
    root = tmp_path_factory.mktemp("experts")
    config = tiny_llama(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=8,
        num_attention_heads=2,
    )  # fmt: skip
    base = save_expert(root / "base", config, 0)
    near = (save_near(root / n, base, i, 0.01 * i) for i, n in enumerate(("task", "language"), 1))
    base, task, language = map(str, (base, *near))
    pair = ("--task", task, "--language", language)
    return SimpleNamespace(base=base, task=task, language=language, pair=pair)


@pytest.fixture
def with_tokenizer(tmp_path):
    """Copies a checkpoint, with a tokenizer of a few words."""

    def copy(source, name):
        return save_tokenizer(copied(Path(source), tmp_path / name))

    return copy


@pytest.fixture
def layerswap(monkeypatch, capsys):
    """Runs the command in this process; gives exit code, standard output and error.

    `done` and `refused` also see the exit code to be 0 or 2.
    """

    def run(*arguments: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["layerswap", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        output = capsys.readouterr()
        return SimpleNamespace(code=code, out=output.out, err=output.err)

    def done(*arguments: object) -> SimpleNamespace:
        result = run(*arguments)
        assert result.code == 0, result.err
        return result

    def refused(*arguments: object) -> SimpleNamespace:
        result = run(*arguments)
        assert result.code == 2, result.err
        return result

    run.done, run.refused = done, refused
    return run
