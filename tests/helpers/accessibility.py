"""axe-core on a page: set LAYERSWAP_AXE to an `axe.min.js`, which no package of ours holds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

AXE = os.environ.get("LAYERSWAP_AXE") or None
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip


@contextmanager
def open_browser() -> Iterator[Any]:
    """Chromium, or the browser that LAYERSWAP_BROWSER names; skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    found = os.environ.get("LAYERSWAP_BROWSER") or next(
        filter(None, map(shutil.which, BROWSERS)), None
    )
    with playwright.sync_playwright() as started:
        try:
            opened = started.chromium.launch(executable_path=found, args=QUIET)
        except playwright.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


def found_by_axe(page: Any) -> list[str]:
    """The rules of axe-core that an open page breaks, with the first element that breaks each."""
    assert AXE is not None
    page.evaluate(Path(AXE).read_text("utf-8"))
    found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found]


def violations(browser: Any, path: Path, **context: Any) -> list[str]:
    """The same of a file."""
    opened = browser.new_context(**context)
    page = opened.new_page()
    page.goto(path.absolute().as_uri())
    found = found_by_axe(page)
    opened.close()
    return found
