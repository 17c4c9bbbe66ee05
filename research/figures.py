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

from layerswap.checkpoint.loading import load_tokenizer
from layerswap.compose.presets import default_zones
from layerswap.deltas.atlas import measure_delta
from layerswap.engine.sweep import Sweep
from layerswap.experiment.compare import choose
from layerswap.experiment.conditions import grid_plans
from layerswap.experiment.spec import Grid
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.quickstart import BOTTOMS, DEVELOPMENT_QUESTIONS, TOPS, lab_plan
from layerswap.lab.scoring import sweep_correct
from layerswap.report.charts import draw_heat_map
from layerswap.report.delta_map import Map, draw_maps, map_of
from layerswap.report.drawing import Drawing
from research.lab.datasets import language_stream, task_stream
from research.lab.scoring import load, questions
from research.lab.train import Training, Trainings, train
from research.lab.world import world_of

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
    save_svg(_grid(lab, "furo"), arguments.out / "grid-furo")
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
    plan = lab_plan(lab, language)
    default = default_zones(plan.composition.layers)
    plans = grid_plans(Grid(bottom=[*BOTTOMS], top=[*TOPS]), plan, print)
    asked = questions("task_target", language, "development", DEVELOPMENT_QUESTIONS)
    sweep = Sweep(list(plans.values()), dtype="float32")
    right = sweep_correct(sweep, load_tokenizer(lab.base), asked)
    shares = {one: float(scores.mean()) for one, scores in zip(plans, right, strict=True)}
    cells = {one: (one.zones.bottom, one.zones.top) for one in plans if one.zones}
    values = {cells[one]: share for one, share in shares.items()}
    assert len(values) == len(BOTTOMS) * len(TOPS)
    return draw_heat_map(
        values,
        row_label=f"bottom layers from the {language} expert",
        column_label="top layers",
        best=cells[choose(shares)],
        default=(default.bottom, default.top),
    )


def _maps(lab: Lab) -> Drawing:
    """Maps of experts trained in full, with as many changed rows as in the paper's."""
    usual, language = Trainings(), lab.languages[0]
    mix = usual.language_mix
    with TemporaryDirectory() as folder:
        experts = {
            "task expert": _trained(
                lab, replace(usual.task, part=None), task_stream(world_of(lab), seed=SEED), folder
            ),
            f"{language} expert": _trained(
                lab,
                replace(usual.language, part=None),
                language_stream(world_of(lab), language, mix, seed=SEED),
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
