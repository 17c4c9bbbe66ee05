"""A real chat model, SmolLM2-135M-Instruct, where LAYERSWAP_SMOLLM2 names its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from layerswap.cli import app
from layerswap.engine.sweep import Sweep
from layerswap.evaluation.harness import open_models
from layerswap.evaluation.settings import PromptOptions

FOLDER = Path(os.environ.get("LAYERSWAP_SMOLLM2", "missing"))
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="LAYERSWAP_SMOLLM2 is not set")
CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome"}
TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{rows}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "What is the capital of {{{{country}}}}?"
doc_to_target: "{{{{capital}}}}"
generation_kwargs: {{until: [], max_gen_toks: 24, do_sample: false}}
filter_list: [{{name: word, filter: [{{function: regex, regex_pattern: "(Paris|Tokyo|Rome)"}},
                                     {{function: take_first}}]}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"country": country, "capital": capital} for country, capital in CAPITALS.items()]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "capitals.yaml").write_text(TASK.format(rows=folder / "rows.jsonl"))
    return folder


def test_a_task_is_asked_as_a_chat_by_both_engines(tasks, tmp_path):
    found = {}
    for engine in ("sweep", "hf"):
        asked = ["eval", str(FOLDER), "--tasks", "capitals", "--include", str(tasks),
                 "--dtype", "float32", "--apply-chat-template", "--engine", engine,
                 "--out", str(tmp_path / engine)]  # fmt: skip
        done = CliRunner().invoke(app, asked)
        assert not done.exit_code, done.output
        [path] = (tmp_path / engine).glob("*/results.json")
        found[engine] = json.loads(path.read_text())["results"]["capitals"]
    assert found["sweep"] == found["hf"]
    assert found["sweep"]["exact_match,word"] >= 2 / 3
    plain = CliRunner().invoke(
        app,
        ["eval", str(FOLDER), "--tasks", "capitals", "--include", str(tasks), "--limit", "1",
         "--dtype", "float32", "--out", str(tmp_path / "plain")],
    )  # fmt: skip
    assert "has a chat template, which is not applied" in plain.output


def test_texts_end_where_the_generation_configuration_says():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    options = PromptOptions(apply_chat_template=True)
    prompt = options.prompt_ids(tokenizer, "What is the capital of France?")
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    assert prompt == expected
    [plan] = open_models([str(FOLDER)]).values()
    [[text]] = Sweep([plan], dtype="float32").generate([prompt], max_new_tokens=40)
    assert text.reason == "eos"
    assert tokenizer.decode(text.tokens[-1:]) == "<|im_end|>"
    assert "Paris" in tokenizer.decode(text.tokens)
