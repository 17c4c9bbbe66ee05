"""A Hub that cannot be reached."""

import pytest


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path_factory):
    """No test may reach for the Hub, or leave something in the user's cache."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
