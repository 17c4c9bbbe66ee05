from __future__ import annotations

import json
import shutil

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from layerswap.evaluation.linearity import Additivity, Connectivity, Line
from layerswap.report.charts import draw_linearity


@pytest.fixture
def base(experts, tmp_path):
    """A copy of the base, with a tokenizer of a few words."""
    folder = tmp_path / "base"
    shutil.copytree(experts.base, folder)
    vocab = {word: i for i, word in enumerate(["<unk>", *"abcdef"])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [{"prompt": "a b c", "completion": "d"}, {"text": "e f a"}, {"text": "b"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def given(experts, base, texts, out, *arguments):
    pair = ("--task-expert", experts.task, "--language-expert", experts.language)
    return ("linearity", "--base", base, *pair, "--text", texts, "--out", out, *arguments)


@pytest.mark.slow
def test_a_table_and_figures(layerswap, experts, base, texts, tmp_path):
    out = tmp_path / "out"
    arguments = given(experts, base, texts, out, "--steps", 2)
    result = layerswap(*arguments)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0] == "2 texts, 1 left out, 3 tokens predicted"
    assert lines[-1] == f"wrote {out}"
    rows = pq.read_table(out / "linearity.parquet").to_pylist()
    count = {}
    for row in rows:
        count[row["measure"]] = count.get(row["measure"], 0) + 1
    assert count == {
        "loss_nats_per_token": 9 * 3, "departure_share": 8, "departure_alone_share": 8,
        "departure_logits_share": 1,
    }  # fmt: skip
    whole = [r for r in rows if r["measure"] == "loss_nats_per_token" and r["layer"] is None]
    assert [row["position"] for row in whole] == [0.0, 0.5, 1.0]
    assert lines[1].startswith(f"loss: task expert {whole[0]['value']:.4f}, ")
    written = {file.name for file in out.iterdir()}
    assert written == {"linearity.parquet", "linearity.svg", "linearity.pdf", "linearity.png"}
    again = layerswap(*arguments)
    assert again.code == 2
    assert "--overwrite" in again.err
    svg = (out / "linearity.svg").read_bytes()
    assert layerswap(*arguments, "--overwrite").code == 0
    assert (out / "linearity.svg").read_bytes() == svg


def test_refusals_are_one_line(layerswap, experts, base, texts, tmp_path):
    out = tmp_path / "out"
    wrong = layerswap(*given(experts, base, texts, out, "--elsewhere", "soup"))
    assert (wrong.code, wrong.err) == (
        2, "error: elsewhere is 'soup'; it is task, language or base\n",
    )  # fmt: skip
    none = layerswap(*given(experts, experts.base, texts, out))
    assert none.code == 2
    assert none.err.startswith(f"error: {experts.base}: its tokenizer cannot be loaded (")
    assert none.err.count("\n") == 1
    short = tmp_path / "short.txt"
    short.write_text("a\n")
    empty = layerswap(*given(experts, base, short, out))
    assert (empty.code, empty.err) == (2, "error: there is no text to measure on\n")
    assert not out.exists()


def test_the_figure_shows_what_was_measured():
    line = Line((-0.5, 0.0, 0.5, 1.0, 1.5), (3.0, 1.0, 1.75, 2.0, 4.0))
    found = Connectivity(line, (line, line, line), "base")
    sums = Additivity((0.1, 0.2, 0.3), 0.4, (0.01, 0.02, 0.03))
    left, middle, right, _ = draw_linearity(found, sums).figure.axes
    assert tuple(left.lines[0].get_ydata()) == line.losses
    assert tuple(left.lines[1].get_ydata()) == (1.0, 2.0)
    assert len(middle.lines) == 3
    assert "base elsewhere" in middle.get_title()
    assert [bar.get_width() for bar in right.patches] == [0.1, 0.2, 0.3, 0.01, 0.02, 0.03]
    assert right.lines[0].get_xdata()[0] == 0.4
    *_, right, _ = draw_linearity(found, Additivity(sums.layers, 0.4, ())).figure.axes
    assert len(right.patches) == 3
