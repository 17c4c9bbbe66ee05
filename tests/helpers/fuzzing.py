"""Fuzzing of file readers: any bytes are either read, or refused in one line, at little cost."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layerswap.ground.errors import CheckpointError

FUZZ = settings(
    max_examples=int(os.environ.get("LAYERSWAP_FUZZ_EXAMPLES", examples(500))),
    deadline=20_000,  # milliseconds: far from the noise, near enough to catch a hang
    suppress_health_check=list(HealthCheck),
    derandomize="LAYERSWAP_FUZZ_EXAMPLES" not in os.environ,
    database=None,
)


@contextmanager
def file_with(content: bytes, suffix: str) -> Iterator[Path]:
    """A file with these bytes."""
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        yield Path(file.name)


def read_or_refuse(read: Callable[[Path], Any], path: Path) -> Any:
    """The result of a reader; None if it refuses the file in one printable line."""
    try:
        return read(path)
    except CheckpointError as error:
        message = str(error)
        assert message.startswith(f"{path}: ")
        assert message.isprintable()
        assert len(message) < 1000
        return None


@st.composite
def mutated(draw, files, replacements, reach=1 << 20):
    """A file with bits flipped, or a piece cut out, copied, inserted or replaced.

    Args:
        draw: by Hypothesis.
        files: a strategy for honest files.
        replacements: a strategy for bytes to insert or to write over others.
        reach: bytes from the beginning within which mutations start.
    """
    content = bytearray(draw(files))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, min(len(content), reach)))
        high = min(len(content), at + draw(st.integers(0, 200)))
        kind = draw(st.sampled_from(["flip", "truncate", "cut", "copy", "insert", "replace"]))
        if kind == "flip" and at < len(content):
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "truncate":
            del content[at:]
        elif kind == "cut":
            del content[at:high]
        elif kind == "copy":
            content[at:at] = content[at:high]
        elif kind in ("insert", "replace"):
            data = draw(replacements)
            content[at : at + len(data) * (kind == "replace")] = data
    return bytes(content)


def both_kinds(check: Callable[[bytes], bool], files, count: int) -> bool:
    """True if some of the files are accepted and some refused."""
    seen = set()

    @settings(FUZZ, max_examples=count)
    @given(files)
    def explore(content):
        seen.add(check(content))

    explore()
    return seen == {True, False}


@contextmanager
def at_most(seconds: float, mib: int) -> Iterator[None]:
    """Assert that the block takes little time of the processor, and little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    yield
    assert time.process_time() - start < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < mib * 1024  # KiB
