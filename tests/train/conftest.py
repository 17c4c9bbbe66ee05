"""Excerpts of public data sets, and a Hub that cannot be reached."""

import csv
import json
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


def read_jsonl(name):
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


def read_mgsm(language):
    text = (DATA / f"mgsm_{language}.tsv").read_text("utf-8")
    return [tuple(row) for row in csv.reader(text.splitlines(), delimiter="\t", quoting=3)]


def read_lines(name):
    return (DATA / name).read_text("utf-8").splitlines()


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path_factory):
    """No test may reach for the Hub, or leave something in the user's cache."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
