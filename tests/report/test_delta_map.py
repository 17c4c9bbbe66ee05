"""The map as a figure and as a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from layerswap.checkpoint import Place
from layerswap.delta import Atlas
from layerswap.delta.measure import Change
from layerswap.errors import LayerswapError
from layerswap.report.atlas_files import write_atlas
from layerswap.report.delta_map import map_figure, map_of
from layerswap.report.delta_page import delta_page

NAMES = {"w1": "mlp.gate_proj", "wq": "self_attn.q_proj", "wk": "self_attn.k_proj"}


def atlas(experts=("math", "</script>&swahili"), layers: int = 3) -> Atlas:
    rng = np.random.default_rng(0)
    places, changes = {}, {}
    for layer in range(layers):
        for name in NAMES.values():
            tensor = f"model.layers.{layer}.{name}.weight"
            places[tensor] = Place(layer, "mlp" if "mlp" in name else "attention")
            for i, expert in enumerate(experts):
                rows = rng.exponential(1e-5 * (1 + i), 64).astype(np.float32)
                changes[expert, tensor] = Change(rows, 1e-5, 1e-5, 1e-4, 1.0, 0.01, 0.0, 0.4, True)
        norm = f"model.layers.{layer}.input_layernorm.weight"
        places[norm] = Place(layer, "norm")
        for expert in experts:
            one = np.array([1e-5], dtype=np.float32)
            changes[expert, norm] = Change(one, 1e-5, 1e-5, 1e-4, 1.0, 0.01, 0.0, 0.4, True)
    return Atlas("base", tuple(experts), "input", places, changes, {})


def test_a_map_has_the_papers_columns_and_no_vectors():
    found = map_of(atlas(), "math", 1e-5)
    assert found.columns == ("wq", "wk", "w1")
    assert len(found.cells) == 9
    tensor = "model.layers.1.mlp.gate_proj.weight"
    assert found.cells[1, "w1"] == float((atlas().changes["math", tensor].rows > 1e-5).mean())


def test_the_last_layer_is_on_top():
    figure = map_figure([map_of(atlas(), "math", 1e-5)])
    assert figure.axes[0].get_images()[0].origin == "lower"
    low, high = figure.axes[0].get_ylim()
    assert low < high


def page_data(html: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(found[1])


def test_the_page_holds_the_fraction_at_every_threshold():
    one = atlas()
    data = page_data(delta_page(one, 1e-5))
    assert data["experts"] == list(one.experts)
    assert data["thresholds"][data["start"]] == pytest.approx(1e-5, rel=1e-3)
    for expert in one.experts:
        for step in (0, data["start"], 60, len(data["thresholds"]) - 1):
            for key, fractions in data["fractions"][expert].items():
                layer, column = key.split(" ")
                tensor = f"model.layers.{layer}.{NAMES[column]}.weight"
                want = one.fraction(expert, tensor, data["thresholds"][step])
                # The page rounds thresholds to four digits: a row or two may change sides.
                assert abs(fractions[step] / 1000 - want) <= 2 / 64 + 0.001


def test_the_page_stays_small_for_a_large_model():
    assert len(delta_page(atlas(layers=80), 1e-5)) < 2_000_000


def test_names_cannot_break_out_of_the_page():
    html = delta_page(atlas(), 1e-5)
    assert html.count("</script>") == 2
    assert "&lt;/script&gt;" in html
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "https://" not in html


def test_the_folder_and_what_the_user_is_told(tmp_path):
    written = write_atlas(atlas(("math", "swahili")), tmp_path / "out")
    files = {f.name for f in (tmp_path / "out").iterdir()}
    assert files == {
        "atlas.json", "rows.parquet", "tensors.parquet", "map.svg", "map.pdf", "map.png", "map.html"
    }  # fmt: skip
    assert written.lines[1] == (
        "warning: much of the delta of math is lost to bfloat16; save experts in float32"
    )
    with pytest.raises(LayerswapError, match="exists already; choose another output"):
        write_atlas(atlas(), tmp_path / "out")
    write_atlas(atlas(("math", "swahili")), tmp_path / "again")
    for name in ("map.svg", "map.pdf", "map.png", "map.html"):
        first, second = (Path(tmp_path / folder / name).read_bytes() for folder in ("out", "again"))
        assert first == second, name
