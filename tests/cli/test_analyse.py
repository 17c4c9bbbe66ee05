"""`layerswap delta` and `layerswap analyse`, from checkpoints and texts to files."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

import layerswap as ls
from layerswap.evaluation.linearity import Additivity, Connectivity, Line
from layerswap.report.charts import draw_linearity


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [{"prompt": "a b c", "completion": "d"}, {"text": "e f a"}, {"text": "b"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_delta_writes_tables_maps_and_the_page(layerswap, experts, tmp_path):
    out = tmp_path / "atlas"
    result = layerswap.done("delta", "--base", experts.base, *experts.pair, "--out", out)
    assert {f.name for f in out.iterdir()} == {
        "atlas.json", "rows.parquet", "tensors.parquet", "map.svg", "map.pdf",
        "map.png",
    }  # fmt: skip
    lines = result.out.splitlines()
    assert lines[0].startswith("task: deltas of up to ")
    assert "saved in bfloat16 it would lose " in lines[0]
    assert lines[1].startswith("language: deltas of up to ")
    assert lines[-1] == f"wrote {out}; open {out / 'map.svg'}"
    delta = load_file(f"{experts.task}/model.safetensors")
    start = load_file(f"{experts.base}/model.safetensors")
    name = "model.layers.3.mlp.down_proj.weight"
    rows = (delta[name] - start[name]).abs().mean(dim=0)
    table = pq.read_table(out / "rows.parquet").to_pylist()
    (row,) = [r for r in table if (r["expert"], r["tensor"]) == ("task", name)]
    assert (row["layer"], row["role"], row["matrix"]) == (3, "mlp", "w2")
    assert row["row_mav"] == pytest.approx(rows.tolist(), rel=1e-5)
    atlas, fresh = ls.Atlas.load(out), ls.delta(experts.base, experts.task, experts.language)
    for threshold in (0.001, 0.008, 0.02):
        for tensor in fresh.places:
            found = atlas.fraction("task", tensor, threshold)
            assert found == fresh.fraction("task", tensor, threshold)


@pytest.mark.slow
def test_delta_takes_experts_as_merge_does(layerswap, experts, tmp_path):
    def names(*given):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        result = layerswap.done("delta", "--base", experts.base, *given, "--out", out, "--json")
        facts = json.loads(result.out)
        return list(facts["experts"])

    copied = shutil.copytree(experts.task, tmp_path / "math")
    assert names("--task", experts.task, "--language-expert", experts.language) == [
        "task", "language",
    ]  # fmt: skip
    assert names("--task-expert", copied) == ["task"]
    assert names("--expert", copied, "--language", experts.language) == ["language", "math"]
    assert names("--expert", copied, "--expert", experts.language) == ["math", "language"]
    none = layerswap("delta", "--base", experts.base, "--out", tmp_path / "none")
    assert (none.code, none.err) == (2, "error: give an expert to compare with the base\n")


def test_delta_refuses_before_it_reads(layerswap, experts, tmp_path):
    given = ("delta", "--base", experts.base, "--expert", experts.task, "--out")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes.txt").write_text("mine")
    layerswap.refused(*given, tmp_path / "here", "--overwrite")
    assert (tmp_path / "here" / "notes.txt").read_text() == "mine"
    result = layerswap(*given, tmp_path / "x", "--axis", "diagonal")
    assert result.err.startswith("error: Invalid value for '--axis'")
    inside = f"{experts.base}/atlas"
    result = layerswap.refused(*given, inside)
    assert result.err == f"error: {inside}: would write into the checkpoint of the base\n"


def test_delta_warns_in_one_line_where_bfloat16_has_taken_much(layerswap, experts, tmp_path):
    """Deltas a tenth of bfloat16's steps: nearly all of them round away."""
    for name, scale in (("base", 0.0), ("expert", 0.003)):
        folder = shutil.copytree(experts.base, tmp_path / name)
        start = load_file(f"{experts.base}/model.safetensors")
        end = load_file(f"{experts.task}/model.safetensors")
        near = {n: v.bfloat16().float() + scale * (end[n] - v) for n, v in start.items()}
        path = folder / "model.safetensors"
        save_file({n: v.bfloat16() for n, v in near.items()}, path, metadata={"format": "pt"})
    given = ("--base", tmp_path / "base", "--expert", tmp_path / "expert")
    result = layerswap.done("delta", *given, "--out", tmp_path / "out")
    assert [line for line in result.out.splitlines() if line.startswith("warning")] == [
        "warning: much of the delta of expert is lost to bfloat16; save experts in float32"
    ]


@pytest.mark.slow
def test_delta_notes_other_tokens(layerswap, experts, tmp_path):
    for name, vocabulary in (("base", {"a": 0, "b": 1}), ("language", {"b": 0, "a": 1})):
        shutil.copytree(getattr(experts, name), tmp_path / name)
        content = json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}})
        (tmp_path / name / "tokenizer.json").write_text(content)
    given = ("delta", "--base", tmp_path / "base", "--expert")
    noted = layerswap.done(*given, tmp_path / "language", "--out", tmp_path / "noted")
    assert "note: tokenizers of base and language differ" in noted.err
    alike = layerswap(*given, experts.language, "--out", tmp_path / "alike")
    assert "tokenizers" not in alike.err


def linearity(experts, base, texts, out, *more):
    given = ("--base", base, *experts.pair, "--text", texts, "--out", out)
    return ("analyse", "linearity", *given, *more)


@pytest.mark.slow
def test_linearity_writes_a_table_and_figures(layerswap, experts, with_tokenizer, texts, tmp_path):
    base, out = with_tokenizer(experts.base, "base"), tmp_path / "out"
    arguments = linearity(experts, base, texts, out, "--steps", 2)
    result = layerswap.done(*arguments)
    lines = result.out.splitlines()
    assert lines[0] == "2 texts, 1 left out, 3 tokens predicted"
    assert lines[-1] == f"wrote {out}"
    rows = pq.read_table(out / "linearity.parquet").to_pylist()
    count = {}
    for row in rows:
        count[row["measure"]] = count.get(row["measure"], 0) + 1
    assert count == {
        "loss_nats_per_token": 9 * 3, "departure_share": 8, "departure_logits_share": 1,
    }  # fmt: skip
    whole = [r for r in rows if r["measure"] == "loss_nats_per_token" and r["layer"] is None]
    assert [row["position"] for row in whole] == [0.0, 0.5, 1.0]
    assert lines[1].startswith(f"loss: task expert {whole[0]['value']:.4f}, ")
    written = {file.name for file in out.iterdir()}
    assert written == {"linearity.parquet", "linearity.svg", "linearity.pdf", "linearity.png"}
    again = layerswap.refused(*arguments)
    assert "--overwrite" in again.err
    svg = (out / "linearity.svg").read_bytes()
    layerswap.done(*arguments, "--overwrite")
    assert (out / "linearity.svg").read_bytes() == svg


def test_linearity_refuses_in_one_line(layerswap, experts, texts, tmp_path):
    out = tmp_path / "out"
    none = layerswap.refused(*linearity(experts, experts.base, texts, out))
    assert none.err.startswith(f"error: {experts.base}: its tokenizer cannot be loaded (")
    assert none.err.count("\n") == 1
    assert not out.exists()


def test_the_figure_of_linearity_shows_the_measured_values():
    line = Line((0.0, 0.5, 1.0), (1.0, 1.75, 2.0))
    found = Connectivity(line, (line, line, line))
    sums = Additivity((0.1, 0.2, 0.3), 0.4)
    left, middle, right, _ = draw_linearity(found, sums).figure.axes
    assert tuple(left.lines[0].get_ydata()) == line.losses
    assert tuple(left.lines[1].get_ydata()) == (1.0, 2.0)
    assert len(middle.lines) == 3
    assert "task expert elsewhere" in middle.get_title()
    assert [bar.get_width() for bar in right.patches] == [0.1, 0.2, 0.3]
    assert right.lines[0].get_xdata()[0] == 0.4


@pytest.fixture
def fisher(layerswap, experts, with_tokenizer, tmp_path):
    """Runs the command on the task expert; gives its result."""
    expert = with_tokenizer(experts.task, "expert")
    given = ("analyse", "fisher", expert, "--out", tmp_path / "fisher", "--data")
    return lambda *more: layerswap(*given, *more)


def test_fisher_from_data_to_a_merge(layerswap, fisher, tmp_path):
    (tmp_path / "texts.txt").write_text("a b c\nd e f\nc b a\n")
    result = fisher(tmp_path / "texts.txt", "--examples", 2)
    assert result.code == 0, result.err
    assert result.out == f"wrote {tmp_path / 'fisher'}\n"
    assert json.loads((tmp_path / "fisher" / "fisher.json").read_text())["examples"] == 2
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"experts:\n  math: {{source: {tmp_path / 'expert'}, fisher: {tmp_path / 'fisher'}}}\n"
        "merge: {method: fisher, experts: [math]}\n"
    )
    merged = tmp_path / "merged"
    layerswap.done("merge", recipe, "--out", merged)
    layerswap.done("verify", merged, "--full")


def test_fisher_refuses_in_one_line(fisher, texts, tmp_path):
    missing = fisher(tmp_path / "none.txt")
    assert (missing.code, missing.err) == (
        2, f"error: {tmp_path}/none.txt: cannot be read (No such file or directory)\n"
    )  # fmt: skip


def test_composability_ranks_signals(layerswap, tmp_path):
    table = tmp_path / "merges.csv"
    lines = ["pair,mgsm_sw,[red]reading[/red],english[/x]"]  # as they are, not as markup
    lines += [f"p{i},{i / 10},{(i * i) / 50},{[3, 1, 2, 5, 4, 0][i]}" for i in range(6)]
    table.write_text("\n".join(lines) + "\n")
    given = ("analyse", "composability", table, "--merged")
    done = layerswap.done(*given, "mgsm_sw")
    assert done.out.index("[red]reading[/red]") < done.out.index("english[/x]")
    assert "1.000" in done.out
    wrong = layerswap.refused(*given, "mgsm")
    assert "did you mean 'mgsm_sw'" in wrong.err
