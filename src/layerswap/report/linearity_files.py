"""Measuring linearity and writing it down: a table and a figure in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from layerswap.checkpoint import atomic_folder, open_checkpoint, refuse_target
from layerswap.evaluate.examples import read_examples, tokenize
from layerswap.evaluate.linearity import Additivity, Connectivity, additivity, connectivity
from layerswap.report.delta_map import save_figure
from layerswap.report.linearity import linearity_figure

TABLE = "linearity.parquet"


def refuse_linearity(out: Path, *, overwrite: bool) -> None:
    """Refuse a folder that cannot be written, before anything is measured."""
    refuse_target(out.expanduser().absolute(), marker=TABLE, overwrite=overwrite)


def write_linearity(
    base: str,
    task: str,
    language: str,
    text: Path,
    out: Path,
    *,
    steps: int = 4,
    max_length: int = 256,
    overwrite: bool = False,
) -> list[str]:
    """Measure two experts on the texts of a file, and write `linearity.parquet` and the figure.

    Returns:
        What to tell the user, a line each.

    Raises:
        LayerswapError: the sources or the texts cannot be read, or the folder not be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    examples = read_examples(text)
    tokenizer = AutoTokenizer.from_pretrained(open_checkpoint(base).folder)
    read = (tokenize(example, tokenizer, max_length) for example in examples)
    texts = [(t.ids[: t.predicted.start], t.ids[t.predicted.start :]) for t in read if t.predicted]
    line = connectivity(task, language, texts, steps=steps)
    sums = additivity(base, task, language, texts)
    target = out.expanduser().absolute()
    with atomic_folder(target, marker=TABLE, overwrite=overwrite) as folder:
        pq.write_table(pa.Table.from_pylist(list(_rows(line, sums))), folder / TABLE)
        save_figure(linearity_figure(line, sums), folder / "linearity")
    worst = max(range(len(line.layers)), key=lambda layer: line.layers[layer].barrier)
    return [
        f"loss: task expert {line.whole.losses[0]:.4f}, language expert "
        f"{line.whole.losses[-1]:.4f}; barrier {line.whole.barrier:.4f} nats per token",
        f"largest barrier of one layer: {line.layers[worst].barrier:.4f} in layer {worst}",
        f"both deltas at once depart from the sum of their effects by {sums.layers[-1]:.1%} after "
        f"the last layer, {sums.logits:.1%} in the logits",
        f"wrote {target}",
    ]


def _rows(line: Connectivity, sums: Additivity) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for layer, one in [(None, line.whole), *enumerate(line.layers)]:
        rows += [
            {"measure": "loss_nats_per_token", "layer": layer, "position": at, "value": loss}
            for at, loss in zip(one.positions, one.losses, strict=True)
        ]
    departures = [*enumerate(sums.layers), (None, sums.logits)]
    rows += [
        {"measure": "departure_share", "layer": layer, "position": None, "value": value}
        for layer, value in departures
    ]
    return rows
