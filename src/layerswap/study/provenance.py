"""Where the numbers of a report come from: steps, their keys and what did them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from layerswap.report.page import Section, Table
from layerswap.study.journal import Entry


def provenance(
    entries: Sequence[Entry], told: str, seeds: Mapping[str, int] | None = None
) -> Section:
    """A section with a row for each step that is done.

    Args:
        entries: what the journal says of the steps, in order.
        told: which numbers are of which step, in a sentence or two.
        seeds: of the steps that have one, by name.
    """
    seeds = seeds or {}
    rows: list[Sequence[str | float | None]] = [
        [entry.name, entry.key[:16], str(seeds.get(entry.name, "")), f"{entry.seconds:.1f}",
         entry.where]
        for entry in entries
    ]  # fmt: skip
    versions: dict[str, set[str]] = {}
    for entry in entries:
        for package, number in entry.versions.items():
            versions.setdefault(package, set()).add(number)
    made = ", ".join(f"{name} {' and '.join(sorted(v))}" for name, v in sorted(versions.items()))
    return Section(
        "Where the numbers come from",
        f"{told} Made with {made}.",
        table=Table(["step", "key", "seed", "seconds", "machine"], rows,
                    caption="A step's output is in steps/<kind>-<key>."),
    )  # fmt: skip
