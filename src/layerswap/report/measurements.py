"""Writes an atlas, or a measurement of linearity, as a folder of tables, figures and a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import atomic_folder
from layerswap.deltas.atlas import ATLAS, Atlas
from layerswap.deltas.measure import Sums
from layerswap.report.charts import draw_linearity
from layerswap.report.delta_map import delta_page, draw_maps, map_of
from layerswap.versions import missing_of

if TYPE_CHECKING:
    from layerswap.evaluation.linearity import Linearity

LOSS = 0.3
"""Share of a delta lost to bfloat16 above which a warning is given."""


@dataclass(frozen=True)
class Written:
    """A folder that was written, with lines that describe its content."""

    folder: Path
    lines: tuple[str, ...]


def write_atlas(
    atlas: Atlas,
    out: Path,
    *,
    threshold: float | None = None,
    numbers: bool = False,
    overwrite: bool = False,
) -> Written:
    """Write tables (Parquet), the map (SVG, PDF, PNG) and the interactive page (HTML).

    Without the extra `report`, write the tables alone, as JSON Lines.

    Args:
        atlas: the measured experts.
        out: the folder to create.
        threshold: row MAV above which a row counts; the top 15% of each expert's rows when None.
        numbers: write the fractions into the cells of the figure.
        overwrite: replace a folder that this function wrote.
    """
    target = out.expanduser().absolute()
    with atomic_folder(target, marker=ATLAS, overwrite=overwrite) as folder:
        atlas.save(folder)
        if not (missing := missing_of("report")):
            at = thresholds_of(atlas, threshold)
            maps = [map_of(atlas, expert, at[expert]) for expert in atlas.experts]
            above = ", ".join(f"{value:.2g} ({expert})" for expert, value in at.items())
            if threshold is not None:
                above = f"{threshold:.2g}"
            caption = f"rows ({atlas.axis} features) with a MAV above {above}"
            draw_maps(maps, caption=caption, numbers=numbers).save(folder / "map")
            (folder / "map.html").write_text(delta_page(atlas, threshold), "utf-8")
    lines = _lines(atlas, target)
    if missing:
        lines[-1] = f"wrote tables to {target}"
        lines.append(f'figures need {", ".join(missing)}: pip install "layerswap[report]"')
    return Written(target, tuple(lines))


def thresholds_of(atlas: Atlas, threshold: float | None) -> dict[str, float]:
    """The row MAV above which a row counts, by expert: as given, or that of its top 15%."""
    return {
        expert: atlas.threshold(expert) if threshold is None else threshold
        for expert in atlas.experts
    }


def atlas_facts(atlas: Atlas, threshold: float | None = None) -> dict[str, Any]:
    """The size of each expert's delta and the conflict of each pair, as plain data."""
    experts = {
        expert: {
            "largest_relative_norm": max(change.relative_norm for change in atlas.of(expert)),
            "lost_to_bfloat16_share": atlas.lost(expert),
        }
        for expert in atlas.experts
    }
    totals = {pair: sum(by.values(), start=Sums()) for pair, by in atlas.sums.items()}
    return {
        "base": atlas.base,
        "axis": atlas.axis,
        "thresholds_mav": thresholds_of(atlas, threshold),
        "experts": experts,
        "pairs": [
            {"first": first, "second": second, "cosine": total.cosine,
             "opposite_signs_share": total.disagreement}
            for (first, second), total in totals.items()
        ],
    }  # fmt: skip


def _lines(atlas: Atlas, folder: Path) -> list[str]:
    lines = []
    for expert in atlas.experts:
        lost, changes = atlas.lost(expert), atlas.of(expert)
        biggest = max(change.relative_norm for change in changes)
        measured = all(change.lost_is_measured for change in changes if change.norm)
        if not biggest:
            lines.append(
                f"note: {expert} has the weights of its base: its training changed nothing"
            )
            continue
        lines.append(
            f"{expert}: deltas of up to {biggest:.2%} of their tensor's norm; "
            + (
                f"saved in bfloat16 it would lose {lost:.1%} of its delta"
                if measured
                else f"rounding to bfloat16 has cost about {min(lost, 1):.1%} of its delta, and at "
                f"most {atlas.lost_at_most(expert):.1%} of the delta's size"
            )
        )
        if lost > LOSS:
            lines.append(
                f"warning: much of the delta of {expert} "
                + (
                    "would be lost in bfloat16; keep experts in float32"
                    if measured
                    else "is lost to bfloat16; save experts in float32"
                )
            )
    for first, second in atlas.sums:
        total = sum(atlas.sums[first, second].values(), start=Sums())
        lines.append(
            f"{first} against {second}: cosine {total.cosine:.3f}, opposite signs in "
            f"{total.disagreement:.1%} of what both changed"
        )
    return [*lines, f"wrote {folder}; open {folder / 'map.html'}"]


TABLE = "linearity.parquet"


def write_linearity(measured: Linearity, out: Path, *, overwrite: bool = False) -> Path:
    """Write `linearity.parquet` and the figure as SVG, PDF and PNG; returns the absolute folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = out.expanduser().absolute()
    with atomic_folder(target, marker=TABLE, overwrite=overwrite) as folder:
        pq.write_table(pa.Table.from_pylist(measured.rows()), folder / TABLE)
        draw_linearity(measured.line, measured.sums).save(folder / "linearity")
    return target
