from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_server import running_hub
from huggingface_hub import constants
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


@pytest.fixture
def hub(experts, tmp_path, monkeypatch):
    """A hub with both experts and their base, and an empty cache."""
    with running_hub() as running:
        for name in ("task", "language", "base"):
            running.repositories[f"org/{name}"] = experts[name]
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", running.address)
        template = f"{running.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        huggingface_hub.utils.close_session()
        yield running
        huggingface_hub.utils.close_session()
