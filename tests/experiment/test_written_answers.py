"""Written answers are scored by their likeness to the right ones, alike in `eval` and `compare`."""

import json
from random import Random

import numpy as np
import pyarrow.parquet as pq
import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

import layerswap as ls
from layerswap.evaluation.metrics import rouge_l, token_f1

RIGHT = [["mvua kubwa ilinyesha usiku", "mvua ilinyesha"], ["watoto walienda shule leo"]] * 3
BENCHMARK = """
title: Headlines
source: made here
licence: none
languages: [sw]
metric: [chrf++, whole]
size: {documents: 6, read: 9, written: 12}
task_name: headlines_${code}
splits: [test]
data: {files: ["${code}.${split}.jsonl"], columns: [question, answer]}
task:
  dataset_path: json
  dataset_kwargs: {data_files: "${files}"}
  test_split: test
  num_fewshot: "${shots}"
  doc_to_text: "{{question}}"
  doc_to_target: "{{answer}}"
  output_type: generate_until
  generation_kwargs: {until: ["@@"], max_gen_toks: 12, do_sample: false}
  filter_list: [{name: whole, filter: [{function: remove_whitespace}, {function: take_first}]}]
  metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
  metadata: {version: 1, written: [chrf++, rouge_l, token_f1]}
"""


class Words:
    def tokenize(self, text):
        return text.split()


def test_rouge_is_that_of_its_library_and_f1_that_of_words():
    random, scorer = Random(0), RougeScorer(["rougeL"], tokenizer=Words())
    for _ in range(200):
        one, other = (" ".join(random.choices("abcdef", k=random.randint(0, 8))) for _ in range(2))
        assert rouge_l(one, other) == pytest.approx(scorer.score(other, one)["rougeL"].fmeasure)
    assert token_f1("Lagos, the city", "city of Lagos") == pytest.approx(2 / 3)
    assert token_f1("", "city") == token_f1("town", "city") == 0
    thai = "วันนี้อากาศดีมาก"
    assert 0.8 < rouge_l(thai[:-3], thai) < 1 == rouge_l(thai, thai)


@pytest.fixture(scope="module")
def done(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    (folder / "headlines.yaml").write_text(BENCHMARK)
    rows = [{"question": f"swali {i}", "answer": answers} for i, answers in enumerate(RIGHT)]
    (folder / "sw.test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = [world["task"], world["language"]]
    return ls.evaluate(models, suite=str(folder / "headlines.yaml"), language="sw",
                       out=folder / "results")  # fmt: skip


def test_written_answers_have_likeness_and_shares(done):
    rows = pq.read_table(done.folder / "answers.parquet").to_pylist()
    by = {}
    for row in rows:
        by.setdefault((row["model"], row["metric"]), []).append(row)
    main = [row for row in rows if row["main"]]
    assert {row["metric"] for row in main} == {"chrf++"}
    for row in main:
        right = [sacrebleu.sentence_chrf(row["answer"], [text], word_order=2).score
                 for text in RIGHT[row["document"]]]  # fmt: skip
        assert row["score"] == pytest.approx(max(right))
    shown = {(row["model"], row["metric"]): row for row in done.records()}
    assert shown["task", "chrf++"]["score"] == pytest.approx(
        np.mean([row["score"] for row in by["task", "chrf++"]])
    )
    for metric in ("rouge_l", "token_f1", "answer_empty", "answer_cut", "answer_copied"):
        assert shown["task", metric]["n"] == 6
    # The random model never stops, and writes nothing of its prompt.
    assert shown["task", "answer_cut"]["score"] > 0.5
    assert shown["task", "answer_copied"]["score"] == 0


def test_models_are_compared_by_their_likeness_with_paired_intervals(done):
    first, other = (
        ls.compare(done.folder, models=["task", "language"]).to_pandas().to_dict("records")
    )
    assert first["metric"] == other["metric"] == "chrf++"
    assert other["difference"] == pytest.approx(other["score"] - first["score"])
    assert other["lower"] <= other["difference"] <= other["upper"]


def test_a_metric_that_is_none_is_refused_before_the_model_is_asked(world, tmp_path):
    (tmp_path / "x.yaml").write_text(BENCHMARK.replace("rouge_l,", "rouge_w,"))
    (tmp_path / "sw.test.jsonl").write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")
    with pytest.raises(ls.LayerswapError, match=r"written: there are chrf\+\+, rouge_l, token_f1"):
        ls.evaluate(world["task"], suite=str(tmp_path / "x.yaml"), language="sw",
                    out=tmp_path / "results")  # fmt: skip
