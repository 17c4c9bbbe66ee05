from __future__ import annotations

from pathlib import Path

import pytest
import torch
from merging import copied, save_expert, save_tokenizer, tiny_llama


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def experts(tmp_path_factory) -> dict[str, Path]:
    """Three Llama experts of one base, with one tokenizer; never to be changed."""
    root = tmp_path_factory.mktemp("experts")
    result = {}
    for seed, name in enumerate(("task", "language", "third", "base")):
        result[name] = save_tokenizer(save_expert(root / name, tiny_llama(), seed))
    return result


@pytest.fixture
def pair(experts, tmp_path) -> tuple[Path, Path]:
    """Copies of the task and the language expert, to spoil."""
    root = tmp_path / "spoilt"
    return copied(experts["task"], root / "task"), copied(experts["language"], root / "language")
