"""Writes a measurement of linearity: its table and its figure, in one folder."""

from __future__ import annotations

from pathlib import Path

from layerswap.checkpoint import atomic_folder, refuse_target
from layerswap.evaluation.linearity import Linearity
from layerswap.report.drawing import draw_linearity

TABLE = "linearity.parquet"


def refuse_linearity(out: Path, *, overwrite: bool) -> None:
    """Refuse a folder that cannot be written, before anything is measured."""
    refuse_target(out, marker=TABLE, overwrite=overwrite)


def write_linearity(found: Linearity, out: Path, *, overwrite: bool = False) -> Path:
    """Write `linearity.parquet` and the figure as SVG, PDF and PNG.

    Args:
        found: the measurement.
        out: the folder to create.
        overwrite: replace a folder that this wrote.

    Returns:
        The absolute folder.

    Raises:
        LayerswapError: the folder cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = out.expanduser().absolute()
    with atomic_folder(target, marker=TABLE, overwrite=overwrite) as folder:
        pq.write_table(pa.Table.from_pylist(found.rows()), folder / TABLE)
        draw_linearity(found.line, found.sums).save(folder / "linearity")
    return target
