"""Merges of every method, dtype and kind of source have their recorded hashes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from effort import sampled
from output_bytes import CASES, KEPT, merged
from plain_checkpoints import TOKENS, WIDTH


def test_the_embedding_is_longer_than_a_chunk():
    assert TOKENS * WIDTH > 1 << 18


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sources")


@pytest.mark.parametrize("case", sampled(CASES, *(c for c in CASES if "float32" not in c)))
def test_a_merge_gives_the_bytes_it_always_gave(case, sources, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # thousands of them take minutes
    expected = json.loads(KEPT.read_text())[case]
    for threads in (1, 2) if "float32" in case else (2,):
        assert merged(case, sources, tmp_path / f"{threads}", threads) == expected
