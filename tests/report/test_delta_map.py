"""The map of changes as a figure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from layerswap.checkpoint import Place
from layerswap.deltas.atlas import Atlas
from layerswap.deltas.measure import TensorChange
from layerswap.ground.errors import LayerswapError
from layerswap.report.delta_map import draw_maps, label_of, map_of, write_atlas

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
                changes[expert, tensor] = TensorChange(
                    rows, 1e-5, 1e-5, 1e-4, 1.0, 0.01, 0.0, 0.4, True
                )
        norm = f"model.layers.{layer}.input_layernorm.weight"
        places[norm] = Place(layer, "norm")
        for expert in experts:
            one = np.array([1e-5], dtype=np.float32)
            changes[expert, norm] = TensorChange(one, 1e-5, 1e-5, 1e-4, 1.0, 0.01, 0.0, 0.4, True)
    return Atlas("base", tuple(experts), "input", places, changes)


def test_a_map_has_the_papers_columns_and_no_vectors():
    found = map_of(atlas(), "math", 1e-5)
    assert found.columns == ("wq", "wk", "w1")
    assert len(found.cells) == 9
    tensor = "model.layers.1.mlp.gate_proj.weight"
    assert found.cells[1, "w1"] == float((atlas().changes["math", tensor].rows > 1e-5).mean())


def test_names_that_the_atlas_does_not_have():
    with pytest.raises(LayerswapError, match="no expert 'maths' in the atlas; it has math, </scri"):
        atlas().fraction("maths", "model.layers.1.mlp.gate_proj.weight", 1e-5)
    with pytest.raises(LayerswapError, match="no tensor 'gate' in the atlas"):
        atlas().fraction("math", "gate", 1e-5)
    with pytest.raises(LayerswapError, match="no expert 'maths'"):
        atlas().threshold("maths")


def test_the_last_layer_is_on_top():
    found = map_of(atlas(), "math", 1e-5)
    axes = draw_maps([found]).figure.axes[0]
    shares = axes.collections[0].get_array()
    assert shares[0].tolist() == [found.cells[0, column] for column in found.columns]
    low, high = axes.get_ylim()
    assert low < high


def test_each_expert_has_a_threshold_of_its_own():
    """An expert that changed everything little does not look unchanged beside another."""
    one = atlas()
    for change in one.of("math"):
        change.rows[:] *= 1e-3
    shared = max(one.threshold(expert) for expert in one.experts)
    assert max(map_of(one, "math", shared).cells.values()) == 0
    for expert in one.experts:
        cells = map_of(one, expert, one.threshold(expert)).cells.values()
        assert sum(cells) / len(cells) == pytest.approx(0.15, abs=0.005)


def test_a_column_has_the_familys_own_name_and_the_papers():
    assert label_of("w1", "model.layers.0.mlp.gate_proj.weight") == "gate_proj (w1)"
    assert label_of("w1", "layers.0.feed_forward.w1.weight") == "w1"
    assert label_of("w2", "model.layers.0.mlp.experts.3.down_proj.weight") == "down_proj (w2)"
    assert label_of("attn.c_attn", "transformer.h.0.attn.c_attn.weight") == "attn.c_attn"


def test_experts_of_a_mixture_share_a_cell_by_rows():
    """Two of six rows of one and one of two of the other are three of eight."""
    names = [f"model.layers.0.mlp.experts.{i}.up_proj.weight" for i in (0, 1)]
    rows = [np.array(r, dtype=np.float32) for r in ([2, 2, 0, 0, 0, 0], [0, 2])]
    changes = {
        ("e", n): TensorChange(r, 1, 1, 1, 1, 1, 0, 0, True)
        for n, r in zip(names, rows, strict=True)
    }
    places = dict.fromkeys(names, Place(0, "mlp"))
    found = map_of(Atlas("base", ("e",), "input", places, changes), "e", 1.0)
    assert found.cells == {(0, "w3"): 3 / 8}


def test_an_expert_that_is_its_base_is_named(tmp_path):
    found = atlas(("math", "swahili"))
    same = {key: replace(change, norm=0.0, relative_norm=0.0, lost=0.0)
            for key, change in found.changes.items() if key[0] == "math"}  # fmt: skip
    lines = write_atlas(replace(found, changes={**found.changes, **same}), tmp_path / "out")
    assert lines[0] == ("note: math has the weights of its base: its training changed nothing")
    assert lines[1].startswith("swahili: deltas of up to")


def test_what_the_user_is_told_and_equal_maps(tmp_path):
    lines = write_atlas(atlas(("math", "swahili")), tmp_path / "out")
    assert lines[1] == (
        "warning: much of the delta of math would be lost in bfloat16; keep experts in float32"
    )
    with pytest.raises(LayerswapError, match="exists already; choose another output"):
        write_atlas(atlas(), tmp_path / "out")
    write_atlas(atlas(("math", "swahili")), tmp_path / "again")
    for name in ("map.svg", "map.pdf", "map.png"):
        first, second = (Path(tmp_path / folder / name).read_bytes() for folder in ("out", "again"))
        assert first == second, name
