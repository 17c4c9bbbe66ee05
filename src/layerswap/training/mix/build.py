"""Builds a mix: draws rows in a seeded order, filters them, shares them by weight, and shuffles.

The result depends on the mix, the data and the seed alone. Rows of a source are drawn in random
order until its share is full, so a cap is a fair sample of the rows that pass the filters, and a
large source costs no more than its share.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from layerswap.errors import DataError, LayerswapError
from layerswap.training.mix.filters import FilterPipeline, ItemIndex, build_filters, check_languages
from layerswap.training.mix.mapping import MixExample, example_maker, row_maker, used_columns
from layerswap.training.mix.sources import keep_where, open_rows

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from numpy.typing import NDArray

    from layerswap.training.mix.schema import Mix, Origin

SourceProgress = Callable[[str, int, int], None]
"""Called with a source's name, the number of rows read so far, and the number of its rows."""


@dataclass
class Tally:
    """Counts of one source's rows.

    Attributes:
        origin: where the rows came from.
        rows: number of its rows, or of those that were read.
        looked_at: rows drawn before its share was full.
        not_wanted: rows excluded by `where`.
        empty: rows without a prompt, a completion or a text.
        kept: examples in the mix, validation included.
        contaminated: examples in the mix that contain an evaluation item, by evaluation set, where
            the source skips that filter.
    """

    origin: str
    rows: int
    looked_at: int = 0
    not_wanted: int = 0
    empty: int = 0
    kept: int = 0
    contaminated: dict[str, int] = field(default_factory=dict)


@dataclass
class BuiltMix:
    """A mix that is ready to train on.

    Attributes:
        mix: its definition.
        train: rows `{"prompt", "completion"}`, `{"messages"}` or `{"text"}`, shuffled.
        validation: as many rows as the mix holds out for validation; may be empty.
        tallies: counts by source.
        filters: the filters with their counts.
        index: the evaluation items, if the mix names any.
        examples: the examples of `train` and then of `validation`, in their order.
    """

    mix: Mix
    train: Dataset
    validation: Dataset
    tallies: dict[str, Tally]
    filters: FilterPipeline
    index: ItemIndex | None
    examples: list[MixExample] = field(repr=False)


def build_mix(
    mix: Mix,
    *,
    folder: Path | None = None,
    local: Path | None = None,
    limit: int | None = None,
    progress: SourceProgress = lambda name, done, total: None,
) -> BuiltMix:
    """The examples of a mix, filtered, shared by weight and shuffled.

    Args:
        mix: the mix.
        folder: base of its relative paths; the working folder if not given.
        local: a folder with downloaded data sets, as `<owner>/<name>` or `<name>`.
        limit: read at most so many rows of every source, for a trial.
        progress: called as rows are read.

    Raises:
        DataError: a data set is not available or does not fit the mix, or the filters leave
            nothing.

    Example: `build_mix(read_mix("swahili"), local=Path("downloads")).train`
    """
    folder = folder or Path()
    if local is not None and not local.is_dir():
        raise DataError(f"--local {local}: no such folder")
    if mix.filters.language is not None:
        asked = mix.filters.language.allow or [
            source.language for source in mix.sources.values()
            if source.language and "language" not in source.skip
        ]  # fmt: skip
        check_languages(asked)
    index = _index(mix, folder, local)
    filters = build_filters(mix.filters, index, mix.seed)
    make_rows = row_maker(mix, folder)
    # Open every source before reading any, so that a missing one fails at once.
    streams, tallies = {}, {}
    for name, source in mix.sources.items():
        with _naming(f"source {name!r}", source):
            rows, origin = open_rows(source, folder=folder, local=local, limit=limit)
            tallies[name] = Tally(origin, len(rows))
            streams[name] = _Stream(
                name, mix, rows, tally=tallies[name], filters=filters, progress=progress
            )
    drawn = _draw(mix, {name: stream.examples() for name, stream in streams.items()})
    if not drawn:
        raise DataError(_nothing_left(mix, tallies, filters))
    for name, count in Counter(example.source for example in drawn).items():
        tallies[name].kept = count
    for name, source in mix.sources.items():
        if index is not None and "evaluation" in source.skip:
            found = (index.find(example.whole) for example in drawn if example.source == name)
            tallies[name].contaminated = dict(Counter(item[0] for item in found if item))
    examples = [drawn[i] for i in _order(len(drawn), mix.seed, mix.name)]
    split = len(examples) - min(mix.validation, max(0, len(examples) - 1))
    train, validation = make_rows(examples[:split]), make_rows(examples[split:])
    return BuiltMix(mix, train, validation, tallies, filters, index, examples)


def share(total: int, weights: dict[str, float]) -> dict[str, int]:
    """`total` divided by weight into whole numbers, the largest remainders rounded up.

    Example: `share(10, {"a": 2, "b": 1})` is `{"a": 7, "b": 3}`.
    """
    whole = sum(weights.values())
    exact = {name: total * weight / whole for name, weight in weights.items()}
    shares = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (shares[name] - exact[name], name))
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


@contextmanager
def _naming(what: str, origin: Origin) -> Iterator[None]:
    """Name the source in every error."""
    try:
        yield
    except LayerswapError as error:
        raise error.within(f"{what} ({origin.id or origin.path})") from None


def _nothing_left(mix: Mix, tallies: dict[str, Tally], filters: FilterPipeline) -> str:
    reasons = {
        "empty": sum(tally.empty for tally in tallies.values()),
        "where": sum(tally.not_wanted for tally in tallies.values()),
        **{name: sum(counts.values()) for name, counts in filters.counts.items()},
    }
    dropped = ", ".join(f"{name} {count:,}" for name, count in reasons.items() if count)
    return f"mix {mix.name!r}: no example is left; dropped: {dropped}"


def _index(mix: Mix, folder: Path, local: Path | None) -> ItemIndex | None:
    wanted = mix.filters.evaluation
    if wanted is None:
        return None
    index = ItemIndex(wanted.words, wanted.characters)
    for name, origin in wanted.against.items():
        with _naming(f"evaluation set {name!r}", origin):
            rows = open_rows(origin, folder=folder, local=local).rows
            keep = keep_where(origin, rows, also=origin.columns)
        rows = rows.select_columns(sorted({*origin.columns, *origin.where}))
        index.add(name, (str(row[c]) for row in rows if keep(row) for c in origin.columns))
    return index


class _Stream:
    """The examples of one opened source, in a random order, as far as they are asked for."""

    def __init__(
        self, name: str, mix: Mix, rows: Dataset, *, tally: Tally, filters: FilterPipeline,
        progress: SourceProgress,
    ) -> None:  # fmt: skip
        self.name, self.source, self.tally = name, mix.sources[name], tally
        self.filters, self.progress = filters, progress
        self.seed = mix.seed if self.source.seed is None else self.source.seed
        self.keep = keep_where(self.source, rows)
        self.make = example_maker(self.source, name, rows.column_names)
        self.rows = rows.select_columns(sorted(used_columns(self.source) | set(self.source.where)))

    def examples(self) -> Iterator[MixExample]:
        tally = self.tally
        for position in _order(len(self.rows), self.seed, self.name):
            tally.looked_at += 1
            if tally.looked_at % 100 == 0 or tally.looked_at == tally.rows:
                self.progress(self.name, tally.looked_at, tally.rows)
            row = self.rows[int(position)]
            if not self.keep(row):
                tally.not_wanted += 1
                continue
            with _naming(f"source {self.name!r}", self.source):
                example = self.make(row)
            if example is None:
                tally.empty += 1
            elif self.filters.keeps(example, self.source.skip):
                yield example


def _draw(mix: Mix, streams: dict[str, Iterator[MixExample]]) -> list[MixExample]:
    drawn: list[MixExample] = []
    given: Counter[str] = Counter()

    def take(name: str, count: int | None) -> bool:
        """Take `count` examples more, or all; False once the source has no more to give."""
        cap = mix.sources[name].cap
        room = None if cap is None else cap - given[name]
        wanted = min((n for n in (count, room) if n is not None), default=None)
        taken = list(islice(streams[name], wanted))
        drawn.extend(taken)
        given[name] += len(taken)
        return len(taken) == wanted and (cap is None or given[name] < cap)

    open_sources = list(streams)
    if mix.total is None:
        for name in open_sources:
            take(name, None)
    while mix.total is not None and open_sources and len(drawn) < mix.total:
        # The other sources, again by their weights, replace what a source cannot give.
        weights = {name: mix.sources[name].weight for name in open_sources}
        shares = share(mix.total - len(drawn), weights)
        open_sources = [name for name in open_sources if take(name, shares[name])]
    return drawn


def _order(count: int, seed: int, name: str) -> NDArray[np.int64]:
    """A permutation that depends on the seed and the name, and on nothing else."""
    import numpy as np

    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    order: NDArray[np.int64] = generator.permutation(count)
    return order
