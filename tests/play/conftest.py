"""A page on the lab that a thread serves, and clients of its routes."""

from __future__ import annotations

import pytest
from play_pages import Client, serve


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        page = serve(tmp_path_factory.mktemp("play"), patch)
        yield page
        page.stop()


@pytest.fixture
def client(served):
    return Client(served.url)
