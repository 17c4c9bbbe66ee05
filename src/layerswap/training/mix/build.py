"""Builds a mix: draws rows in a seeded order, filters them, shares them by weight, and shuffles.

The result depends on the mix, the data and the seed alone. Rows of a source are drawn in random
order until its share is full. So a share is a fair sample of the rows that pass the filters, and
a large source costs no more than it.
"""

from __future__ import annotations

import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from layerswap.evaluation.identifier import Identifier, learn_identifier
from layerswap.ground.errors import DataError, error_context
from layerswap.reading.origins import check_columns, open_rows, where_filter, where_for
from layerswap.training.mix.examples import ExampleMaker, MixExample, mix_rows
from layerswap.training.mix.filters import FilterPipeline, ItemIndex, build_filters, check_language
from layerswap.training.mix.schema import Mix
from layerswap.versions import need_extras

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from numpy.typing import NDArray

SourceProgress = Callable[[str, int, int], None]
"""Called with a source's name, the number of rows read so far, and the number of its rows."""


@dataclass
class Tally:
    """Counts of one source's rows.

    A source that skips the evaluation filter has contaminated examples, by evaluation set.
    """

    origin: str
    rows: int  # rows that the source holds, up to its `read`
    looked_at: int = 0  # rows drawn before its share was full
    not_wanted: int = 0  # rows excluded by `where` and `answers`
    empty: int = 0  # rows without a prompt, a completion or a text
    kept: int = 0  # examples in the mix, validation included
    contaminated: dict[str, int] = field(default_factory=dict)


@dataclass
class BuiltMix:
    """A mix that is ready to train on."""

    mix: Mix
    train: Dataset  # rows {"prompt", "completion"}, {"messages"} or {"text"}, shuffled
    validation: Dataset  # rows held out; may be empty
    tallies: dict[str, Tally]  # by source
    filters: FilterPipeline
    index: ItemIndex | None  # None if the mix names no evaluation items
    examples: list[MixExample] = field(repr=False)  # of `train`, then of `validation`
    identifier: Identifier | None = None  # None: py3langid, or no language filter


def build_mix(
    mix: Mix,
    *,
    folder: Path | None = None,
    local: Path | None = None,
    limit: int | None = None,
    progress: SourceProgress = lambda name, done, total: None,
) -> BuiltMix:
    """Build a mix: filter its examples, share them by weight, and shuffle them.

    Args:
        mix: the mix.
        folder: base of its relative paths; the working folder if not given.
        local: a folder with downloaded data sets, as `<owner>/<name>` or `<name>`.
        limit: maximum number of rows to read of every source, for a trial.
        progress: called as rows are read.

    Example: `build_mix(read_mix("swahili"), local=Path("downloads")).train`
    """
    folder = folder or Path()
    if local is not None and not local.is_dir():
        raise DataError(f"--local {local}: no such folder")
    identifier = _check_languages(mix, folder)
    index = _index_items(mix, folder, local)
    filters = build_filters(mix.filters, index, mix.seed, identifier)
    # Open every source before reading any, so that a missing one fails at once.
    streams, tallies = {}, {}
    for name, source in mix.sources.items():
        with error_context(f"source {name!r} ({source.named})"):
            rows, origin = open_rows(source, folder=folder, local=local, limit=limit)
            tallies[name] = Tally(origin, len(rows))
            streams[name] = _stream(
                mix, name, rows, tally=tallies[name], filters=filters, progress=progress
            )
    drawn = _draw(mix, streams)
    if not drawn:
        raise DataError(_nothing_left(mix, tallies, filters))
    _count_kept(mix, tallies, drawn, index)
    examples = [drawn[i] for i in _order(len(drawn), mix.seed, mix.name)]
    split = len(examples) - _held_out(mix, len(examples))
    train, validation = mix_rows(mix, examples[:split]), mix_rows(mix, examples[split:])
    return BuiltMix(mix, train, validation, tallies, filters, index, examples, identifier)


def _held_out(mix: Mix, count: int) -> int:
    """Number of validation examples among `count`.

    A share gives at least one and never all. A number gives at most half, because sources may hold
    fewer examples than expected.
    """
    wanted = mix.validation
    if 0 < wanted < 1:
        return min(max(1, round(wanted * count)), count - 1)
    return min(int(wanted), count // 2)


def share(total: int, weights: dict[str, float]) -> dict[str, int]:
    """Divide `total` by weight into whole numbers; the largest remainders are rounded up.

    Example: `share(10, {"a": 2, "b": 1})` is `{"a": 7, "b": 3}`.
    """
    whole = sum(weights.values())
    exact = {name: total * weight / whole for name, weight in weights.items()}
    shares = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (shares[name] - exact[name], name))
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


def _check_languages(mix: Mix, folder: Path) -> Identifier | None:
    """Check the codes of the language filter, and learn its identifier if it names texts."""
    settings = mix.filters.language
    if settings is None:
        return None
    identifier = None
    if settings.texts:
        need_extras("an identifier that is learned from texts", "train")
        files = {code: folder / Path(file).expanduser() for code, file in settings.texts.items()}
        with error_context("filters.language.texts"):
            identifier = learn_identifier(files)
    for name, source in mix.sources.items():
        if source.language and "language" not in source.skip:
            with error_context(f"source {name!r}"):
                check_language(source.language, identifier)
    return identifier


def _index_items(mix: Mix, folder: Path, local: Path | None) -> ItemIndex | None:
    settings = mix.filters.evaluation
    if settings is None:
        return None
    index = ItemIndex()
    for name, origin in settings.against.items():
        with error_context(f"evaluation set {name!r} ({origin.named})"):
            rows = open_rows(origin, folder=folder, local=local).rows
            keep = where_filter(origin, rows)
            check_columns(origin.columns, rows.column_names, "columns")
        rows = rows.select_columns(sorted({*origin.columns, *origin.where}))
        cells = (row[column] for row in rows if keep(row) for column in origin.columns)
        index.add(name, (str(text) for cell in cells
                         for text in (cell if isinstance(cell, list) else [cell])))  # fmt: skip
    return index


def _stream(
    mix: Mix, name: str, rows: Dataset, *, tally: Tally, filters: FilterPipeline,
    progress: SourceProgress,
) -> Iterator[MixExample]:  # fmt: skip
    """Check the columns of a source, and return its examples in a random order, made lazily."""
    source = mix.sources[name]
    keep, maker = where_filter(source, rows), ExampleMaker(source, name)
    maker.check(rows)
    for column, values in where_for(rows, "train").items():
        if column not in source.where:
            kept = ", ".join(map(str, values))
            warnings.warn(f"source {name!r}: its column {column!r} has other rows than {kept}, and "
                          "all are trained on; to leave them out, write "
                          f"where: {{{column}: [{kept}]}}", stacklevel=2)  # fmt: skip
    rows = rows.select_columns(sorted(maker.columns | set(source.where)))
    seed = mix.seed if source.seed is None else source.seed

    def examples() -> Iterator[MixExample]:
        for position in _order(len(rows), seed, name):
            tally.looked_at += 1
            if tally.looked_at % 100 == 0 or tally.looked_at == tally.rows:
                progress(name, tally.looked_at, tally.rows)
            row = rows[int(position)]
            if not keep(row):
                tally.not_wanted += 1
                continue
            with error_context(f"source {name!r} ({source.named}): row {position + 1}"):
                example = maker.make(row)
            if example is None:
                tally.empty += 1
            elif source.answers and example.completion.strip() not in source.answers:
                tally.not_wanted += 1
            elif filters.keeps(example, source.skip):
                yield example

    return examples()


def _draw(mix: Mix, streams: dict[str, Iterator[MixExample]]) -> list[MixExample]:
    drawn: list[MixExample] = []
    open_sources = list(streams)
    if mix.total is None:
        return [*chain.from_iterable(streams.values())]
    while open_sources and len(drawn) < mix.total:
        # The other sources make up a shortfall, by weight.
        weights = {name: mix.sources[name].weight for name in open_sources}
        shares = share(mix.total - len(drawn), weights)
        taken = {name: [*islice(streams[name], shares[name])] for name in open_sources}
        drawn.extend(chain.from_iterable(taken.values()))
        open_sources = [name for name, part in taken.items() if len(part) == shares[name]]
    return drawn


def _count_kept(
    mix: Mix, tallies: dict[str, Tally], drawn: list[MixExample], index: ItemIndex | None
) -> None:
    for name, count in Counter(example.source for example in drawn).items():
        tallies[name].kept = count
    for name, source in mix.sources.items():
        if index is not None and "evaluation" in source.skip:
            matches = (index.find(example.whole) for example in drawn if example.source == name)
            tallies[name].contaminated = dict(Counter(match[0] for match in matches if match))


def _nothing_left(mix: Mix, tallies: dict[str, Tally], filters: FilterPipeline) -> str:
    reasons = {
        "empty": sum(tally.empty for tally in tallies.values()),
        "where and answers": sum(tally.not_wanted for tally in tallies.values()),
        **{name: sum(counts.values()) for name, counts in filters.counts.items()},
    }
    dropped = ", ".join(f"{name} {count:,}" for name, count in reasons.items() if count)
    return f"mix {mix.name!r}: no example is left; dropped: {dropped}"


def _order(count: int, seed: int, name: str) -> NDArray[np.int64]:
    """Permute `count` numbers; the order depends on the seed and the name alone."""
    import numpy as np

    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    order: NDArray[np.int64] = generator.permutation(count)
    return order
