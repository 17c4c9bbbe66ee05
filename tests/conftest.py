"""Settings of every test, before torch is imported."""

import os
import signal
from functools import cache
from pathlib import Path

import pytest
from effort import drawn
from hypothesis import HealthCheck, settings

# A busy machine is no fault of the code: only tests that look for a hang set a deadline.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# As many workers as processors run beside each other: threads of their own would only get in the
# way, and make the tests several times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What a test asks of the Hub is not there: without a net it would be asked for again and again.
os.environ["HF_HUB_OFFLINE"] = "1"
# A background job of a script ignores interrupts, and so would everything that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _no_flushing():
    """Thousands of small outputs need not survive a power cut: on some disks that takes minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _lm_eval_index():
    """Leaves most tasks out of lm-eval's index, which takes 15 s to read; gives the whole one."""
    from layerswap.evaluation import harness

    @cache
    def part():
        from lm_eval import tasks

        folders = [Path(tasks.__file__).parent / name for name in ("belebele", "gsm8k", "mgsm")]
        return tasks.TaskManager(include_path=folders, include_defaults=False)

    whole = harness._lm_eval_manager
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "_lm_eval_manager", part)
        yield whole


@pytest.fixture
def whole_index(_lm_eval_index, monkeypatch):
    """All tasks of lm-eval."""
    from layerswap.evaluation import harness

    monkeypatch.setattr(harness, "_lm_eval_manager", _lm_eval_index)
    harness._manager.cache_clear()
    yield
    harness._manager.cache_clear()


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Two tiny experts with a byte-level tokenizer, and a folder of lm-eval tasks: read only."""
    from lm_eval_world import make_harness_world

    return make_harness_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def browser():
    from accessibility import open_browser

    with open_browser() as opened:
        yield opened


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A half of the tests for each worker, which build most fixtures once; the idle one steals."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_modifyitems(config, items):
    """Draws from the grids. The longest tests come first: no worker waits for the other's last."""
    left = [item for item in items if item.get_closest_marker("grid") and not drawn(item.nodeid)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    items.sort(key=lambda item: item.path.name not in ("test_docs.py", "test_simulations.py"))
