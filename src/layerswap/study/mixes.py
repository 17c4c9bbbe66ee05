"""The steps that build the training data of a study."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from layerswap.ground.errors import error_context
from layerswap.ground.types import Log
from layerswap.reading.origins import open_rows, where_filter
from layerswap.study.inputs import existing_path
from layerswap.study.kind import Kind
from layerswap.study.runner import Context
from layerswap.study.spec import StepKind
from layerswap.training.mix.examples import ExampleMaker
from layerswap.training.mix.schema import Mix, parse_mix

MIX = "mix"
FIRST = 100
"""Rows of a source that are read before the first step."""
EVERY = 15.0
"""Seconds between two lines of progress."""


@lru_cache(maxsize=64)
def mix_of(text: str, where: str) -> Mix:
    """Parse the mix of a step, once for its checks and its build."""
    return parse_mix(text, where=where)


class DataStep(Kind):
    """Builds a mix."""

    kind: ClassVar[str] = "data"
    resources: ClassVar[StepKind] = "data"
    mix: str  # YAML
    folder: str  # of the relative paths in it

    def check(self, name: str) -> None:
        """Check the recipe of the mix, and that its local files exist."""
        for source in mix_of(self.mix, name).sources.values():
            for path in source.paths:
                existing_path(Path(self.folder) / path)

    def check_data(self, name: str, *, fetch: bool, log: Log, seen: set[tuple[str, str]]) -> None:
        """Read the first rows of the local sources, and check their columns."""
        for source_name, source in mix_of(self.mix, name).sources.items():
            if source.id is not None:
                continue
            with error_context(f"{name}, source {source_name!r}"):
                rows = open_rows(source, folder=Path(self.folder), limit=FIRST).rows
                where_filter(source, rows)
                ExampleMaker(source, source_name).check(rows)

    def run(self, context: Context) -> None:
        """Build the mix."""
        from layerswap.training.mix.build import build_mix
        from layerswap.training.mix.card import save_mix

        mix = mix_of(self.mix, context.step.name)
        shown = time.monotonic()

        def count(source: str, done: int, total: int) -> None:
            nonlocal shown
            if done == total or time.monotonic() - shown >= EVERY:
                shown = time.monotonic()
                context.log(f"{source}: {done:,} of {total:,} rows read")

        built = build_mix(mix, folder=Path(self.folder), progress=count)
        save_mix(built, context.folder / MIX, recipe=self.mix, overwrite=True)
