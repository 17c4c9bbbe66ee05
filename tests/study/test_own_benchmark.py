"""Studies of one's own language: a benchmark in a file, inherited runs, and the commands."""

import importlib.util
import json
import re
import shutil

import pytest
import yaml
from effort import sampled
from safetensors.torch import load_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from layerswap.cli import app
from layerswap.evaluation.statistics import Interval
from layerswap.experiment.sections import scored
from layerswap.ground.errors import LayerswapError, RecipeError
from layerswap.lab.assets import shipped
from layerswap.study import kinds
from layerswap.study.finishing import FINISH, FinishStep
from layerswap.study.journal import StudyJournal
from layerswap.study.plan import plan_study
from layerswap.study.preflight import check_data, check_here, check_plan
from layerswap.study.report import merge_models, write_study_report
from layerswap.study.runner import Context, run_graph
from layerswap.study.spec import read_study, ready_studies
from layerswap.training.mix.schema import ready_recipes

BENCHMARK = """
title: Moods
source: https://example.org/moods
licence: CC0
languages: [swa]
metric: [acc, none]
size: {documents: 30, read: 20}
task_name: moods_{code}
splits: [test]
development: dev
labels: [moja, mbili]
data:
  files: ["../data/{code}.{split}.tsv"]
  columns: {text: text, label: mood}
task:
  dataset_path: json
  dataset_kwargs: {data_files: "{files}"}
  output_type: multiple_choice
  test_split: test
  num_fewshot: "{shots}"
  doc_to_text: "{{text}} ="
  doc_to_target: "{{label}}"
  doc_to_choice: "{labels}"
  metric_list: [{metric: acc}]
"""


def write_rows(path, count):
    rows = [f"{a} x {a + 1}\t{('moja', 'mbili')[a % 3 == 0]}" for a in range(count)]
    path.write_text("\n".join(["text\tmood", *rows]) + "\n")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folder of a study whose benchmark is a file; read from another folder."""
    folder = tmp_path / "igbo"
    for name in ("benchmarks", "data"):
        (folder / name).mkdir(parents=True)
    (folder / "benchmarks" / "moods.yaml").write_text(BENCHMARK)
    write_rows(folder / "data" / "swa.test.tsv", 30)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAYERSWAP_DATA", raising=False)
    return folder


def planned(folder, **changes):
    models = shipped().base.parent
    evaluate = {"suite": "benchmarks/moods.yaml", **changes.pop("evaluate", {})}
    data = {
        "name": "own", "base": str(shipped().base), "dtype": "float32", "change": False,
        "task": {"experts": [str(models / "task-1")]},
        "languages": {"sw": {"experts": [str(models / "language-nela-1")]}},
        "baselines": ["weighted soup"], "soup_shares": [0.5], "evaluate": evaluate, **changes,
    }  # fmt: skip
    (folder / "study.yaml").write_text(json.dumps(data))
    return plan_study(read_study(folder / "study.yaml"), folder)


def results(graph, out):
    """The scores of a study that ran, by treatment, and the words of its report."""
    check_plan(graph)
    check_here(graph, device=True)
    assert not run_graph(graph, out, kinds.step_functions()).failed
    numbers = json.loads((StudyJournal(out, graph).folder("tables") / "tables.json").read_text())
    return numbers["languages"]["sw"]["moods"], write_study_report(out).read_text()


def test_a_changed_benchmark_is_evaluated_anew(own):
    before = planned(own).keys
    assert planned(own).keys == before
    for path in ("data/swa.test.tsv", "benchmarks/moods.yaml"):
        text = (own / path).read_text()
        (own / path).write_text(text + " \n")
        after = planned(own).keys
        assert {name for name in before if before[name] != after[name]} == {"evaluate/sw", "tables"}
        (own / path).write_text(text)
    write_rows(own / "data" / "swa.dev.tsv", 3)
    assert planned(own).keys["evaluate/sw"] != before["evaluate/sw"]
    shutil.copy(own / "benchmarks" / "moods.yaml", own / "more.yaml")
    (own / "suite.yaml").write_text("title: S\nbenchmarks: {benchmarks/moods.yaml: 0}\n")
    suite = planned(own, evaluate={"suite": "suite.yaml"})
    assert {str(own / "suite.yaml"), str(own / "data/swa.test.tsv")} <= {
        path.replace("benchmarks/../", "") for path in suite["evaluate/sw"].inputs
    }
    with pytest.raises(RecipeError, match=r"none\.yaml: cannot be read"):
        planned(own, evaluate={"suite": "none.yaml"})


@pytest.mark.slow
def test_a_study_that_chooses_nothing_reports_all_documents(own):
    rows, page = results(planned(own), own / "out")
    assert {row["n"] for row in rows.values()} == {30}
    assert "Nothing is chosen on documents" in page
    assert (own / "out" / "best" / "sw.yaml").is_file()


def write_encoder(folder):
    """A tiny encoder with random weights, as sentence-transformers saves one."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel

    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 16, "vocab_size": 4096}  # fmt: skip
    plain = folder.with_name("bert")
    BertModel(BertConfig(**size)).save_pretrained(plain)
    AutoTokenizer.from_pretrained(shipped().base).save_pretrained(plain)
    words = Transformer(str(plain))
    SentenceTransformer(modules=[words, Pooling(16)], device="cpu").save(str(folder))


@pytest.mark.slow
def test_an_encoder_and_english_documents_stand_beside_the_models(own, tmp_path):
    write_rows(own / "data" / "swa.dev.tsv", 24)
    write_rows(own / "data" / "eng.test.tsv", 30)
    text = BENCHMARK.replace("[swa]", "[swa, eng]")
    (own / "benchmarks" / "moods.yaml").write_text(text)
    write_encoder(tmp_path / "encoder")
    graph = planned(own, encoder=str(tmp_path / "encoder"), baselines=["experts", "weighted soup"],
                    soup_shares=[0.3, 0.7], cautions=["The base hardly reads it."])  # fmt: skip
    rows, page = results(graph, own / "out")
    assert "The base hardly reads it." in page
    (merged,) = merge_models(own / "out", log=print)
    card = (merged / "README.md").read_text()
    assert re.search(r"On moods in sw it is worth (more|fewer) than \d+ labels", card)
    free = {"chance", "commonest label", "linear classifier, on the development labels",
            "sentence vectors, on the development labels"}  # fmt: skip
    assert free <= set(rows)
    assert rows["commonest label"]["mean"] == pytest.approx(2 / 3)
    assert rows["chance"]["mean"] == pytest.approx(0.5)
    assert {rows[name]["n"] for name in free} == {30}
    # The English documents are the same here, and so is the score of the task expert.
    expert = Interval(**{key: rows["task expert"][key] for key in ("mean", "low", "high", "n")})
    assert f"In English, on the same documents, the task expert reaches {scored(expert)}" in page
    assert rows["task expert"]["mean"] == 0 or "what labels give" in page


@pytest.mark.slow
@pytest.mark.parametrize("development", [0, 8])
def test_the_task_expert_on_a_translated_test_is_paired_on_the_same_documents(own, development):
    if development:
        write_rows(own / "data" / "swa.dev.tsv", development)
    shutil.copy(own / "data" / "swa.test.tsv", own / "english.tsv")
    graph = planned(own, baselines=["experts", "weighted soup"], soup_shares=[0.3, 0.7],
                    translated={"sw": {"test": "english.tsv"}})  # fmt: skip
    rows, page = results(graph, own / "out")
    translate_test = rows["task expert, on the translated test"]
    assert {row["n"] for row in rows.values()} == {30 if development else 15}
    same = ("mean", "low", "high", "n", "balanced_accuracy")
    assert [translate_test[key] for key in same] == [rows["task expert"][key] for key in same]
    assert "--model &#x27;task expert, on the translated test" not in page


@pytest.mark.parametrize(
    ("given", "changes", "said"),
    [
        ("text\tmood\n" + "x\tmoja\n" * 29, {},
         "english.tsv: has 29 documents, and the test has 30; translate each of them"),
        ("text\tmood\n" + "x\tmoja\n" * 30, {},
         "english.tsv: document 1 has the label 'moja', and the test 'mbili'; keep the"),
        ("mood\n" + "moja\n" * 30, {}, "english.tsv: has no column 'text'"),
        ("", {"translated": {"ha": {"test": "english.tsv"}}}, "ha is none of the languages"),
        ("", {"baselines": ["base"]}, "a test needs a suite, and the baseline `experts`"),
        ("", {"translated": {"sw": {"task": "english.tsv"}}}, "`translated.task` needs training"),
    ],
)  # fmt: skip
def test_a_translated_test_that_does_not_fit_is_refused_before_anything_runs(
    own, given, changes, said
):
    (own / "english.tsv").write_text(given)
    translated = {"sw": {"test": "english.tsv"}}
    with pytest.raises(LayerswapError) as refused:
        check_data(planned(own, **{"baselines": ["experts"], "translated": translated, **changes}),
                   fetch=False)  # fmt: skip
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_benchmark_without_english_documents_has_no_score_in_english(own):
    (own / "benchmarks" / "moods.yaml").write_text(BENCHMARK.replace("[swa]", "[swa, eng]"))
    graph = planned(own, baselines=["experts"])
    assert "english" in [step.name.split("/")[0] for step in graph]
    rows, page = results(graph, own / "out")
    assert {"task expert", "commonest label"} <= set(rows)
    assert "In English" not in page


@pytest.mark.parametrize("development", sampled([None, 6, "none"], 6))
def test_a_grid_is_chosen_on_a_split_on_drawn_documents_or_not_at_all(own, development):
    evaluate = {}
    if development == "none":
        evaluate["development"] = "none"
    elif development:
        write_rows(own / "data" / "swa.dev.tsv", development)
    graph = planned(own, grid={"bottom": [0, 2], "top": 0}, soup_shares=[0.3, 0.7],
                    evaluate=evaluate)  # fmt: skip
    rows, page = results(graph, own / "out")
    documents, said, chosen = {
        None: (15, "15 drawn documents, which are left out here", True),
        6: (30, "Choices are made on the 6 documents of the development split", True),
        "none": (30, "Nothing is chosen on documents", False),
    }[development]
    assert {row["n"] for row in rows.values()} == {documents}
    assert said in page
    assert ("swap, chosen on development" in rows) == chosen
    if not chosen:
        assert {"weighted soup, task 0.3", "weighted soup, task 0.7", "swap, default"} <= set(rows)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"moods: no ../data/swa.test.tsv beside moods.yaml, or in the folder"),
        ("text\tmood\nHabari\ttatu\n", "no row has a label of moods .moja, mbili.; found 'tatu'"),
    ],
)
def test_data_that_cannot_be_evaluated_on_are_named_before_anything_runs(own, text, said):
    path = own / "data" / "swa.test.tsv"
    path.unlink()
    if text:
        path.write_text(text)
    graph = planned(own)
    with pytest.raises(LayerswapError, match=said):
        check_here(graph, device=True)
    run = CliRunner().invoke(app, ["study", "run", str(own / "study.yaml"), "--out", "o",
                                   "--dry-run"])  # fmt: skip
    assert isinstance(run.exception, LayerswapError)


def test_columns_of_training_data_are_checked_before_anything_runs(own):
    (own / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    languages = {"sw": {"data": {"train": "rows.jsonl"}}}
    with pytest.raises(LayerswapError, match="has columns question, answer; a trainer takes"):
        check_data(planned(own, languages=languages), fetch=False)
    source = {"path": "rows.jsonl", "prompt": "{question}", "completion": "{anwser}"}
    (own / "mix.yaml").write_text(yaml.safe_dump({"name": "m", "sources": {"a": source}}))
    languages = {"sw": {"data": "mix.yaml"}}
    with pytest.raises(LayerswapError, match="data/sw, source 'a': completion: no column 'anwser'"):
        check_data(planned(own, languages=languages), fetch=False)


def test_what_the_hub_has_is_not_fetched_for_a_plan(own):
    lines = []
    graph = planned(own, evaluate={"suite": "masakhanews"})
    check_data(graph, fetch=False, log=lines.append)
    assert lines == [
        "masakhanews in sw: masakhane/masakhanews is not on this machine; it will be read from the "
        "Hub"
    ]


@pytest.mark.slow
def test_ready_studies_are_listed_and_shown():
    done = CliRunner().invoke(app, ["study", "list"])
    assert done.exit_code == 0, done.output
    for name, path in ready_studies().items():
        assert name in done.output
        shown = CliRunner().invoke(app, ["study", "show", name])
        assert shown.stdout == path.read_text()
    assert any(mix in done.output for mix in ready_recipes())
    failed = CliRunner().invoke(app, ["study", "show", "topic-transfr"])
    assert "did you mean 'topic-transfer'" in str(failed.exception)


def test_a_device_that_is_not_there_names_the_option(own):
    planned(own, device="cuda:77")
    run = ["study", "run", str(own / "study.yaml"), "--out", str(own / "out")]
    failed = CliRunner().invoke(app, run)
    assert "device 'cuda:77' cannot be used" in str(failed.exception)
    assert str(failed.exception).endswith("run with --device cpu, or where the device is")
    assert not (own / "out").exists()


def test_devices_and_packages_are_checked_on_the_node_that_runs_before_models_are_read(
    own, tmp_path, monkeypatch
):
    (own / "rows.jsonl").write_text('{"text": "jambo"}\n', "utf-8")
    run = {"hyperparameters": {"use_liger_kernel": True}}
    trained = {"data": {"train": "rows.jsonl"}, "runs": [run]}
    graph = planned(own, device="cuda:77", languages={"sw": trained})
    check_plan(graph)  # the login node
    check_here(graph, device=False)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "liger_kernel" else real(name, *more),
    )
    works, node = kinds.step_functions(), tmp_path / "node"
    for kind, why in (("train", "use_liger_kernel needs liger_kernel"),
                      ("evaluate", "device 'cuda:77' cannot be used")):  # fmt: skip
        step = next(one for one in graph if one.kind == kind)
        with pytest.raises(LayerswapError, match=why):
            works[kind](Context(step, node, {}, print))
        assert not node.exists()


@pytest.mark.slow
def test_a_run_shows_its_steps_from_the_start_and_how_to_resume(own, monkeypatch):
    planned(own, device="cuda:77")
    run = ["study", "run", str(own / "study.yaml"), "--out", str(own / "out"), "--device", "cpu"]
    real = kinds.step_functions()

    def stopped(context):
        context.log("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kinds, "step_functions", lambda: {**real, "evaluate": stopped})
        stop = CliRunner().invoke(app, run)
    lines = stop.output.splitlines()
    assert lines[0].startswith("estimate: about ")
    assert lines[1].startswith("checking 4 steps")
    assert any(line.startswith("step 1 of 4: select/") for line in lines)
    assert any("step 3 of 4: evaluate/sw, about" in line and "left" in line for line in lines)
    assert f"stopped; run the same command again to resume in {own / 'out'}" in lines
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 0, done.output
    assert "4 steps, 2 of them done before" in done.output
    assert "step 3 of 4: evaluate/sw" in done.output
    assert "loading 2 models and the tasks" in done.output


def finishing(own, first, **changes):
    """A study that finishes two models on labelled rows, the first of which is row `first`."""
    rows = [{"prompt": f"{a} x {a + 1} =", "completion": f" {('moja', 'mbili')[a % 3 == 0]}"}
            for a in range(first, first + 24)]  # fmt: skip
    (own / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rate = 3e-3 if changes else 6e-4
    settings = {"learning_rate": rate, "num_train_epochs": 4, "per_device_train_batch_size": 8}
    finish = {"labels": {"sw": {"train": "labels.jsonl"}}, "starts": ["task expert", "swap"],
              "run": {"hyperparameters": settings, "save_every": 32, **changes},
              "folds": 2}  # fmt: skip
    return planned(own, baselines=["experts"], finish=finish, keep_checkpoints="selected")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"lora": {"r": 4, "lora_alpha": 8}}], ids=["full", "lora"])
def test_models_are_finished_on_labels_and_the_start_is_chosen_without_the_test(
    own, changes, monkeypatch
):
    graph = finishing(own, 40, **changes)
    rows, page = results(graph, own / "out")
    losses = {
        start: json.loads(
            (StudyJournal(own / "out", graph).folder(f"finish/sw/{start}") / FINISH).read_text()
        )
        for start in ("task expert", "swap")
    }
    best, other = sorted(losses, key=lambda start: losses[start]["loss"])
    names = f"finished, from the {best}", f"finished, from the {other}"
    assert {*names, "swap, default", "task expert"} <= {*rows}
    assert rows[names[0]]["mean"] > rows["swap, default"]["mean"]
    assert f"model finished from the {best} and default swap are right" in page
    assert not [*(own / "out").rglob("checkpoint-*")]
    (merged,) = merge_models(own / "out", log=print)
    card = (merged / "README.md").read_text()
    assert f"It is the {best} after a training on 24 labelled rows." in card
    assert "On moods in sw it is worth " in card
    assert f"Selected in sw: {names[0]}." in page
    trained = load_file(merged / "model.safetensors")

    if changes:
        return
    fits = []

    def interrupted(step, *arguments):
        fits.append(arguments)
        if len(fits) == 3:
            raise KeyboardInterrupt
        fit(step, *arguments)

    fit = FinishStep.fit
    monkeypatch.setattr(FinishStep, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_graph(graph, own / "again", kinds.step_functions())
    assert not run_graph(graph, own / "again", kinds.step_functions()).failed
    assert len(fits) == 7  # three for each start, and the interrupted one
    write_study_report(own / "again")
    (again,) = merge_models(own / "again", log=print)
    assert trained.keys() == load_file(again / "model.safetensors").keys()
    assert all(value.equal(trained[name])
               for name, value in load_file(again / "model.safetensors").items())  # fmt: skip


@pytest.mark.slow
def test_a_labelled_row_that_is_a_test_document_is_refused(own):
    graph = finishing(own, 29)
    first, *_ = run_graph(graph, own / "out", kinds.step_functions()).failed
    assert first.why == "labels of sw: row 1 is a test document"


def test_labels_change_no_key_of_other_steps_but_the_tables(own):
    before, after = planned(own, baselines=["experts"]).keys, finishing(own, 40).keys
    assert {name for name in before if before[name] != after[name]} == {"tables"}
    assert {*after} - {*before} == {"finish/sw/task expert", "finish/sw/swap", "finished/sw"}
