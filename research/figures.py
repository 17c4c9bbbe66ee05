"""The figures of docs/lab.md: maps of the lab's experts beside the papers', and the sweeps.

    python -m research.figures --out docs/images

The values printed in the first paper's appendix, figures 4 and 6, are those of the tests.

The lab's experts are trained here, in full and in their own part, from the shipped base with one
fresh seed; about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from layerswap.compose import default_zones
from layerswap.deltas.atlas import measure_delta
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.datasets import language_stream, task_stream
from layerswap.lab.quickstart import BOTTOMS, TOPS, lab_plan, score_grid
from layerswap.lab.report import cell
from layerswap.lab.scoring import load
from layerswap.lab.train import Training, Trainings, train
from layerswap.report import Drawing, draw_heat_map
from layerswap.report.delta_map import Map, draw_maps, map_of
from layerswap.search.conditions import Condition
from layerswap.search.protocol import choose

PUBLISHED = Path(__file__).parent.parent / "tests" / "data" / "published_maps.json"
SEED = 9000
SHARE = 0.15
"""Share of the rows drawn as changed; the paper's maps show 13% and 15%."""
PAPER = {"math_1": "math expert #1", "swh_1": "Swahili expert #1"}


def main() -> None:
    """Write every figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    published = json.loads(PUBLISHED.read_text("utf-8"))
    maps = [_published(PAPER[name], published[name]) for name in PAPER]
    caption = "Llama 3.1 8B, as printed in Bandarkar et al. (2025), figures 4 and 6"
    save_svg(draw_maps(maps, caption=caption), arguments.out / "maps-paper")
    lab = shipped()
    for language in lab.languages:
        save_svg(_grid(lab, language), arguments.out / f"grid-{language}")
    save_svg(_maps(lab), arguments.out / "maps-lab")


def _published(title: str, printed: dict[str, Any]) -> Map:
    columns = tuple(name.rsplit(".", 1)[1] for name in printed["columns"])
    cells = {
        (int(layer), column): value
        for layer, row in printed["layers"].items()
        for column, value in zip(columns, row, strict=True)
    }
    return Map(title, columns, columns, cells, len(printed["layers"]))


def _grid(lab: Lab, language: str) -> Drawing:
    shares = {one: float(right.mean()) for one, right in score_grid(lab, language).items()}
    default = default_zones(lab_plan(lab, language).composition.layers)
    values = {cell(one): share for one, share in shares.items()}
    assert len(values) == len(BOTTOMS) * len(TOPS)
    return draw_heat_map(
        values,
        row_label=f"bottom layers from the {language} expert",
        column_label="top layers",
        best=cell(choose(shares)),
        default=cell(Condition("swap", zones=default)),
    )


def _maps(lab: Lab) -> Drawing:
    """Maps of experts trained in full, with as many changed rows as in the paper's."""
    usual, language = Trainings(), lab.languages[0]
    mix = usual.language_mix
    with TemporaryDirectory() as folder:
        experts = {
            "task expert": _trained(
                lab, replace(usual.task, part=None), task_stream(lab.world, seed=SEED), folder
            ),
            f"{language} expert": _trained(
                lab,
                replace(usual.language, part=None),
                language_stream(lab.world, language, mix, seed=SEED),
                folder,
            ),
        }
        atlas = measure_delta(lab.base, experts)
    thresholds = {name: atlas.threshold(name, SHARE) for name in experts}
    values = " and ".join(f"{value:.1e}" for value in thresholds.values())
    caption = f"the lab's experts trained in full, thresholds {values}"
    return draw_maps([map_of(atlas, name, thresholds[name]) for name in experts], caption=caption)


def _trained(lab: Lab, training: Training, stream: Any, folder: str) -> Path:
    model, tokenizer = load(lab.base)
    model.train()
    train(model, tokenizer, stream, training, seed=SEED)  # type: ignore[arg-type]
    out = Path(folder) / f"expert-{training.steps}"
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def save_svg(drawing: Drawing, stem: Path) -> None:
    """Save a drawing without its PDF and PNG."""
    for path in drawing.save(stem):
        if path.suffix != ".svg":
            path.unlink()


if __name__ == "__main__":
    main()
