"""The figure of linearity: loss along the line between experts, and departure from additivity."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import atomic_folder, open_checkpoint, refuse_target
from layerswap.errors import CheckpointError
from layerswap.evaluation.examples import read_examples, tokenize
from layerswap.evaluation.linearity import Additivity, Connectivity, additivity, connectivity
from layerswap.report.delta_map import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DARK, LIGHT = "#00224e", "#a59c74"
"""Two colours of cividis: apart for colour-blind readers, and in grey."""


def linearity_figure(line: Connectivity, sums: Additivity) -> Figure:
    """Three panels: loss along the line, the same for each layer, and additivity by layer.

    Args:
        line: loss between two experts.
        sums: additivity of their deltas, over as many layers.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.3), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.plot(line.whole.positions, line.whole.losses, marker="o", markersize=3, color=DARK)
    loss_at = dict(zip(line.whole.positions, line.whole.losses, strict=True))
    left.plot((0, 1), (loss_at[0.0], loss_at[1.0]), linestyle=":", color="grey")
    left.set_title("all layers interpolated", fontsize="medium")
    _draw_layers(figure, middle, line)
    for axis in (left, middle):
        axis.set_xticks((0, 1), ("task expert", "language expert"))
        axis.set_ylabel("loss, nats per token")
    _draw_departures(right, sums)
    return figure


def _draw_layers(figure: Figure, axis: Axes, line: Connectivity) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    last, shades = max(1, len(line.layers) - 1), colormaps["cividis_r"]
    for layer, one in enumerate(line.layers):
        axis.plot(one.positions, one.losses, color=shades(layer / last))
    figure.colorbar(ScalarMappable(Normalize(0, last), shades), ax=axis, label="layer")
    axis.set_title(f"one layer interpolated, {line.elsewhere} elsewhere", fontsize="medium")


def _draw_departures(axis: Axes, sums: Additivity) -> None:
    layers = range(len(sums.layers))
    axis.barh([layer + 0.2 for layer in layers], sums.layers, height=0.4, color=LIGHT,
              label="all layers changed")  # fmt: skip
    if sums.alone:
        axis.barh([layer - 0.2 for layer in layers], sums.alone, height=0.4, color=DARK,
                  label="this layer alone")  # fmt: skip
    axis.axvline(sums.logits, linestyle=":", color="black", label="logits")
    axis.set_yticks(layers[:: max(1, len(layers) // 16)])
    axis.set_ylabel("layer")
    axis.set_xlabel("departure from the sum of effects")
    axis.set_title("both deltas at once", fontsize="medium")
    axis.legend(fontsize="x-small", loc="lower right")


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
    max_length: int = 256,
    dtype: str = "float32",
    device: str = "cpu",
    overwrite: bool = False,
    **settings: Any,
) -> list[str]:
    """Measure two experts on the texts of a file, and write `linearity.parquet` and the figure.

    Args:
        base: what both were fine-tuned from; its tokenizer reads the texts.
        task: an expert.
        language: another.
        text: texts, one on each line or as JSON Lines; of a completion after a prompt the
            completion alone counts for the loss.
        out: the folder to create.
        max_length: most tokens of a text.
        dtype: of weights and arithmetic.
        device: where the models run.
        overwrite: replace a folder that this wrote.
        settings: `elsewhere`, `steps` and `beyond` of `connectivity`.

    Returns:
        What to tell the user, a line each.

    Raises:
        LayerswapError: the sources or the texts cannot be read, or the folder not be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    examples = read_examples(text)
    tokenizer = _tokenizer(base)
    read = [tokenize(example, tokenizer, max_length) for example in examples]
    texts = [tokens for tokens in read if tokens.predicted]
    line = connectivity(task, language, texts, base=base, dtype=dtype, device=device, **settings)
    sums = additivity(base, task, language, texts, dtype=dtype, device=device)
    target = out.expanduser().absolute()
    with atomic_folder(target, marker=TABLE, overwrite=overwrite) as folder:
        pq.write_table(pa.Table.from_pylist(list(_rows(line, sums))), folder / TABLE)
        save_figure(linearity_figure(line, sums), folder / "linearity")
    counted = sum(len(tokens.predicted) for tokens in texts)
    left_out = f", {len(read) - len(texts)} left out" if len(texts) < len(read) else ""
    return [f"{len(texts)} texts{left_out}, {counted} tokens predicted",
            *_findings(line, sums), f"wrote {target}"]  # fmt: skip


def _tokenizer(source: str) -> Any:
    from transformers import AutoTokenizer

    checkpoint = open_checkpoint(source)
    try:
        return AutoTokenizer.from_pretrained(checkpoint.folder)
    except (OSError, ValueError, KeyError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{checkpoint.identity}: has no usable tokenizer ({why})") from None


def _findings(line: Connectivity, sums: Additivity) -> list[str]:
    loss_at = dict(zip(line.whole.positions, line.whole.losses, strict=True))
    worst = max(range(len(line.layers)), key=lambda layer: line.layers[layer].barrier)
    found = [
        f"loss: task expert {loss_at[0.0]:.4f}, language expert {loss_at[1.0]:.4f}; "
        f"barrier {line.whole.barrier:.4f} nats per token",
        f"largest barrier of one layer: {line.layers[worst].barrier:.4f} in layer {worst}",
        f"both deltas at once depart from the sum of their effects by {sums.layers[-1]:.1%} after "
        f"the last layer, {sums.logits:.1%} in the logits",
    ]
    if sums.alone:
        low, high = min(sums.alone), max(sums.alone)
        found.append(f"within one layer they depart by {low:.1%} to {high:.1%}")
    return found


def _rows(line: Connectivity, sums: Additivity) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for layer, one in [(None, line.whole), *enumerate(line.layers)]:
        rows += [
            {"measure": "loss_nats_per_token", "layer": layer, "position": at, "value": loss}
            for at, loss in zip(one.positions, one.losses, strict=True)
        ]
    departures: list[tuple[str, int | None, float]]
    departures = [("departure_share", at, v) for at, v in enumerate(sums.layers)]
    departures += [("departure_alone_share", at, v) for at, v in enumerate(sums.alone)]
    departures.append(("departure_logits_share", None, sums.logits))
    rows += [
        {"measure": measure, "layer": layer, "position": None, "value": value}
        for measure, layer, value in departures
    ]
    return rows
