"""Building a mix: every source drawn in a seeded order through the filters, shared out, shuffled.

The result depends on the mix, the data and the seed alone. Rows of a source are looked at in random
order until it has given what it should, so a cap is a fair sample of what passes the filters, and
a large source costs no more than its share.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from layerswap.errors import DataError, LayerswapError
from layerswap.training.expert.rows import former
from layerswap.training.mix.contamination import ItemIndex
from layerswap.training.mix.filters import FilterPipeline, build_filters, check_languages
from layerswap.training.mix.mapping import MixExample, example_maker, used_columns
from layerswap.training.mix.sources import keep_where, open_rows

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from numpy.typing import NDArray

    from layerswap.training.mix.schema import Mix

Progress = Callable[[str, int, int], None]
"""Called with a source's name, the rows looked at, and the rows that it has."""


@dataclass
class Tally:
    """What became of one source's rows.

    Attributes:
        origin: where they came from.
        rows: how many it has, or how many were read of it.
        looked_at: how many were drawn before it had given its share.
        not_wanted: left out by `where`.
        empty: without a prompt, a completion or a text.
        kept: examples in the mix, validation included.
    """

    origin: str
    rows: int
    looked_at: int = 0
    not_wanted: int = 0
    empty: int = 0
    kept: int = 0


@dataclass
class BuiltMix:
    """A mix that is ready to train on.

    Attributes:
        mix: what it was built from.
        train: rows `{"prompt", "completion"}`, `{"messages"}` or `{"text"}`, shuffled.
        validation: as many rows as the mix wants for validation; may be empty.
        tallies: by source, what became of its rows.
        sieve: what the filters dropped.
        index: the evaluation items, if the mix names any.
        examples: the examples of `train` and then `validation`, in their order.
    """

    mix: Mix
    train: Dataset
    validation: Dataset
    tallies: dict[str, Tally]
    sieve: FilterPipeline
    index: ItemIndex | None
    examples: list[MixExample] = field(repr=False)


class _Files(NamedTuple):
    folder: Path
    local: Path | None
    limit: int | None


class _Opened(NamedTuple):
    rows: Dataset
    keep: Callable[[dict[str, Any]], bool]
    make: Callable[[dict[str, Any]], MixExample | None]
    tally: Tally


def build_mix(
    mix: Mix,
    *,
    folder: Path | None = None,
    local: Path | None = None,
    limit: int | None = None,
    progress: Progress = lambda name, done, total: None,
) -> BuiltMix:
    """The examples of a mix, filtered, shared out and shuffled.

    Args:
        mix: what to build.
        folder: what its relative paths are relative to; the working folder if not given.
        local: a folder with downloaded data sets, as `<owner>/<name>` or `<name>`.
        limit: read at most so many rows of every source, for a trial.
        progress: called as rows are looked at.

    Raises:
        DataError: a data set that is not to be had, or is not what the mix says, or filters that
            leave nothing.

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
    sieve = build_filters(mix.filters, index, mix.seed)
    former_of_rows = former(mix, folder)
    files = _Files(folder, local, limit)
    # All are opened before any is read, so that what is missing is known at once.
    opened = {name: _open(name, mix, files) for name in mix.sources}
    drawn = _draw(
        mix, {name: _stream(name, mix, opened[name], sieve, progress) for name in mix.sources}
    )
    tallies = {name: rows.tally for name, rows in opened.items()}
    if not drawn:
        raise DataError(_nothing_left(mix, tallies, sieve))
    for name, count in Counter(example.source for example in drawn).items():
        tallies[name].kept = count
    examples = [drawn[i] for i in _order(len(drawn), mix.seed, mix.name)]
    held_out = min(mix.validation, max(0, len(examples) - 1))
    split = len(examples) - held_out
    train, validation = former_of_rows(examples[:split]), former_of_rows(examples[split:])
    return BuiltMix(mix, train, validation, tallies, sieve, index, examples)


def share(total: int, weights: dict[str, float]) -> dict[str, int]:
    """`total` shared out by weight in whole numbers, the largest remainders rounded up.

    Example: `share(10, {"a": 2, "b": 1})` is `{"a": 7, "b": 3}`.
    """
    whole = sum(weights.values())
    exact = {name: total * weight / whole for name, weight in weights.items()}
    shares = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (shares[name] - exact[name], name))
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


def _nothing_left(mix: Mix, tallies: dict[str, Tally], sieve: FilterPipeline) -> str:
    reasons = {
        "empty": sum(tally.empty for tally in tallies.values()),
        "where": sum(tally.not_wanted for tally in tallies.values()),
        **{name: sum(counts.values()) for name, counts in sieve.counts.items()},
    }
    told = ", ".join(f"{name} {count:,}" for name, count in reasons.items() if count)
    return f"mix {mix.name!r}: no example is left; dropped: {told}"


def _index(mix: Mix, folder: Path, local: Path | None) -> ItemIndex | None:
    wanted = mix.filters.evaluation
    if wanted is None:
        return None
    index = ItemIndex(wanted.words, wanted.characters)
    for name, origin in wanted.against.items():
        try:
            rows = open_rows(origin, folder=folder, local=local).rows
            keep = keep_where(origin, rows, also=origin.columns)
        except LayerswapError as error:
            raise error.within(f"evaluation set {name!r} ({origin.id or origin.path})") from None
        rows = rows.select_columns(sorted({*origin.columns, *origin.where}))
        index.add(name, (str(row[c]) for row in rows if keep(row) for c in origin.columns))
    return index


def _open(name: str, mix: Mix, files: _Files) -> _Opened:
    source = mix.sources[name]
    try:
        rows, origin = open_rows(source, folder=files.folder, local=files.local, limit=files.limit)
        keep = keep_where(source, rows)
        make = example_maker(source, name, rows.column_names)
    except LayerswapError as error:
        raise error.within(f"source {name!r} ({source.id or source.path})") from None
    rows = rows.select_columns(sorted(used_columns(source) | set(source.where)))
    return _Opened(rows, keep, make, Tally(origin, len(rows)))


def _stream(
    name: str, mix: Mix, opened: _Opened, sieve: FilterPipeline, progress: Progress
) -> Iterator[MixExample]:
    source, (rows, keep, make, tally) = mix.sources[name], opened
    for position in _order(len(rows), mix.seed if source.seed is None else source.seed, name):
        tally.looked_at += 1
        if tally.looked_at % 100 == 0 or tally.looked_at == tally.rows:
            progress(name, tally.looked_at, tally.rows)
        row = rows[int(position)]
        if not keep(row):
            tally.not_wanted += 1
            continue
        try:
            example = make(row)
        except LayerswapError as error:
            raise error.within(f"source {name!r} ({source.id or source.path})") from None
        if example is None:
            tally.empty += 1
        elif sieve.keeps(example, source.skip):
            yield example


def _draw(mix: Mix, streams: dict[str, Iterator[MixExample]]) -> list[MixExample]:
    drawn: list[MixExample] = []
    given: Counter[str] = Counter()

    def take(name: str, count: int | None) -> bool:
        """Take `count` examples more, or all; False once the source has no more to give."""
        cap = mix.sources[name].cap
        room = None if cap is None else cap - given[name]
        wanted = min((n for n in (count, room) if n is not None), default=None)
        while wanted is None or wanted > 0:
            example = next(streams[name], None)
            if example is None:
                return False
            drawn.append(example)
            given[name] += 1
            wanted = None if wanted is None else wanted - 1
        return cap is None or given[name] < cap

    open_sources = list(streams)
    if mix.total is None:
        for name in open_sources:
            take(name, None)
    while mix.total is not None and open_sources and len(drawn) < mix.total:
        # What a source cannot give, the others make up for, again by their weights.
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
