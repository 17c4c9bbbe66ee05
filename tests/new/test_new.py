"""`layerswap new`: bad input is one line and leaves nothing; the study runs on the lab."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from lab_files import write_lab_files, write_tsv
from typer.testing import CliRunner

from layerswap.checkpoint.loading import load_tokenizer
from layerswap.cli import app
from layerswap.ground.errors import LayerswapError
from layerswap.lab.assets import shipped
from layerswap.new import folder, machine
from layerswap.new.inputs import Inputs, check_request
from layerswap.new.machine import Measured
from layerswap.new.study import Settings, expert
from layerswap.study.plan import plan_study
from layerswap.study.spec import read_study
from layerswap.training.mix.build import build_mix
from layerswap.training.mix.schema import read_mix

GIVEN = {
    "--base": "lab", "--language": "qaa", "--text": "qaa.txt", "--task": "problems-en.tsv",
    "--test": "problems-qaa.tsv",
}  # fmt: skip


@pytest.fixture
def files(tmp_path, monkeypatch):
    write_lab_files(tmp_path)
    labels = [(f"a headline number {i}", ("sports", "health")[i % 2]) for i in range(30)]
    write_tsv(tmp_path / "labels-en.tsv", ("text", "label"), labels)
    write_tsv(tmp_path / "labels-qaa.tsv", ("text", "label"),
              [("x y", "sports"), ("z", "religion")])  # fmt: skip
    write_tsv(tmp_path / "strange.tsv", ("foo", "bar"), [(1, 2)])
    write_tsv(tmp_path / "one-row.tsv", ("text", "label"), labels[:1])
    write_tsv(tmp_path / "no-rows.tsv", ("text", "label"), [])
    write_tsv(tmp_path / "one-label.tsv", ("text", "label"), [("x y", "sports")] * 3)
    write_tsv(tmp_path / "two-labels.tsv", ("text", "label"), [("u v", "sports"), ("w", "health")])
    write_tsv(tmp_path / "codes.tsv", ("text", "label"), [("u v", 0), ("w", 1)])
    write_tsv(tmp_path / "comma.tsv", ("text", "label"),
              [("u v", "sports"), ("w", "health"), ("z", "arts, news")])  # fmt: skip
    problems = (tmp_path / "problems-qaa.tsv").read_text("utf-8").splitlines(keepends=True)
    dev = (tmp_path / "problems-qaa-dev.tsv").read_text("utf-8")
    (tmp_path / "mostly-dev.tsv").write_text(dev + problems[1], "utf-8")
    write_tsv(tmp_path / "two.tsv", ("prompt", "answer"), [("a b", 1), ("c d", 2)])
    (tmp_path / "latin.txt").write_bytes("fine\ncaf\xe9\n".encode("latin1"))
    (tmp_path / "short.en").write_text("one\n")
    shutil.copytree(shipped().base, tmp_path / "wordless")
    for file in (tmp_path / "wordless").glob("tokenizer*"):
        file.unlink()
    for name in ("there", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"a":')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def unmeasured(monkeypatch):
    """Takes a speed for granted: the measurement has a test of its own."""
    monkeypatch.setattr(folder, "measure", lambda *_: Measured(1e6, 1e6))


def new(name="demo", /, *more, **changes):
    given = {**GIVEN, **{f"--{key}": value for key, value in changes.items()}}
    options = [part for key, value in given.items() if value for part in (key, value)]
    return CliRunner().invoke(app, ["new", name, *options, *more])


BAD = {
    "encoding": ({"text": "latin.txt"}, (), "latin.txt, line 2: is not UTF-8 text"),
    "columns": ({"task": "strange.tsv"}, (), "strange.tsv: no rule recognises its columns; its "
                "columns are foo, bar"),
    "labels": ({"task": "labels-en.tsv", "test": "labels-qaa.tsv"}, (),
               "labels-qaa.tsv: labels-en.tsv lacks some of its labels (religion); correct them, "
               "or leave their rows out by --leave-out religion"),
    "codes of labels": ({"task": "labels-en.tsv", "test": "codes.tsv"}, (), "codes.tsv: labels-en"
                        ".tsv lacks all of its labels (0, 1); write health, sports in their place"),
    "a label with a comma": (
        {"task": "labels-en.tsv", "test": "comma.tsv"}, ("--leave-out", "arts"),
        "by --leave-out 'arts, news'"
    ),
    "no file": ({}, ("--labels", "qaa="), "--labels qaa=: names no file; write qaa=FILE"),
    "a score of labels": ({"task": "labels-en.tsv"}, ("--metric", "number"), "is for a task file"),
    "one file for both": ({}, ("--parallel", "news.qaa", "news.qaa"), "are both in qaa; give two"),
    "parallel": ({}, ("--parallel", "news.qaa", "short.en"), "has no partner in"),
    "language": ({"language": "zz"}, (), "no language 'zz'; write a code such as sw"),
    "tokenizer": ({"base": "wordless"}, (), "--base wordless: its tokenizer cannot be loaded"),
    "development is the test": (
        {"development": "problems-qaa.tsv"}, (), "of its rows are also in the test",
    ),
    "same file": ({"test": "problems-en.tsv"}, (), "problems-en.tsv: 200 of its 200 rows are also "
                  "in problems-en.tsv, on which the task expert trains; give other documents"),
    "missing option": ({"task": None}, (), "give --task; in a terminal, `layerswap new` asks"),
    "no text": ({"text": None}, (), "give --text"),
    "ready task": ({"task": "orca-math"}, (), "--task orca-math: a ready mix goes with a suite"),
    "suite without the language": ({"test": "mgsm"}, (), "mgsm does not have qaa"),
    "labels of a ready task": (
        {"task": "orca-math", "test": "mgsm", "language": "sw"}, ("--leave-out", "sports"),
        "--leave-out needs a task file; orca-math is a ready mix",
    ),
    "a test of one label": (
        {"task": "labels-en.tsv", "test": "one-label.tsv"}, (), "one-label.tsv: every row has the "
        "label 'sports'; give rows of at least two labels",
    ),
    "labels with a test document": (
        {}, ("--labels", "mostly-dev.tsv"), "mostly-dev.tsv: test documents among its rows: 1; "
        "leave them out, since no model may train on them",
    ),
    "labels with a test document beside development documents": (
        {"development": "problems-qaa-dev.tsv"}, ("--labels", "problems-qaa.tsv"),
        "problems-qaa.tsv: test documents among its rows: 20; leave them out",
    ),
    "a task of one row": ({"task": "one-row.tsv"}, (), "one-row.tsv: has one row; the task expert "
                          "trains on its rows, give more"),
    "a task without rows": ({"task": "no-rows.tsv"}, (), "no-rows.tsv: has no rows"),
    "one language twice": (
        {"language": "sw"}, ("--language", "Swahili=news.qaa"), "--language: sw and "
        "Swahili=news.qaa are the same language; give it once, such as --language sw=FILE",
    ),
    "two texts": (
        {"language": "qaa=news.qaa"}, ("--text", "news.qaa"), "--text: qaa has two files"
    ),
    "a test in another language": (
        {}, ("--test", "sw=labels-qaa.tsv"), "--test sw=labels-qaa.tsv: the study has no "
        "language sw; add --language sw",
    ),
    "two tests": ({}, ("--test", "labels-qaa.tsv"), "--test: qaa has two files"),
    "a file of a drive": ({"test": "C:\\gone.tsv"}, (), "C:\\gone.tsv: no such file"),
    "a translation of another length": (
        {}, ("--translated-test", "two.tsv"), "two.tsv: has 2 documents, and the test has 20; "
        "translate each of them, in the same order",
    ),
    "a translation of written answers": (
        {}, ("--translated-test", "problems-qaa.tsv", "--metric", "chrf++"),
        "--translated-test: answers that are written in two languages cannot be compared; it "
        "takes labels, choices and numbers",
    ),
    "a column of plain text": (
        {}, ("--columns", "qaa=sentence"),
        "--columns qaa=sentence: no file of text in qaa has columns",
    ),
    "a translation without a test": (
        {"test": None}, ("--translated-test", "problems-qaa.tsv"),
        "problems-qaa.tsv: needs a --test file",
    ),
    "a translated task without a test": (
        {"test": None}, ("--translated-task", "problems-qaa.tsv"),
        "--translated-task problems-qaa.tsv: needs a --task file and a --test file",
    ),
    "a task that is not translated": (
        {}, ("--translated-task", "problems-en.tsv"),
        "problems-en.tsv: 200 of its 200 rows are also in problems-en.tsv",
    ),
    "an encoder that is a word": (
        {"encoder": "nonsense"}, (), "encoder: nonsense: no such folder, and not a Hub id"),
    "an encoder that is missing": (
        {"encoder": "./none"}, (), "encoder: ./none: no such folder"),
    "an encoder that is empty": (
        {"encoder": "there"}, (), "encoder: there: cannot be loaded (ValueError: Unrecognized"),
    "an encoder that is broken": (
        {"encoder": "broken"}, (), "encoder: broken: cannot be loaded (OSError: It looks like"),
}  # fmt: skip


OPENED = ("an encoder that is empty", "an encoder that is broken")  # its library loads slowly


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in OPENED)) for case in BAD]
)
def test_bad_input_is_one_line_and_leaves_nothing(case, files):
    changes, more, message = BAD[case]
    before = sorted(files.iterdir())
    done = new("demo", *more, **changes)
    assert isinstance(done.exception, LayerswapError), done.output
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)
    assert sorted(files.iterdir()) == before


def test_a_name_that_exists(files):
    assert "there: exists already; choose another name" in str(new("there").exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there(files):
    assert "device 'cuda' cannot be used" in str(new(device="cuda").exception)


def test_a_disk_that_is_too_small(files, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    found = str(new().exception)
    assert "GB of disk and 0.0 GB are free" in found
    assert not (files / "demo").exists()


@pytest.mark.slow
def test_short_memory_takes_lora_or_says_so(files, monkeypatch, unmeasured):
    _, costs = folder.create(_request(files / "full"))
    monkeypatch.setattr(folder, "memory_gb", lambda _: costs.memory_gb * folder.ROOM * 0.95)
    folder.create(_request(files / "small"))
    runs = [read_study(files / name / "study.yaml").task.runs[0] for name in ("full", "small")]
    assert [bool(run.lora) for run in runs] == [False, True]
    assert runs[1].hyperparameters["learning_rate"] == 1e-4
    monkeypatch.setattr(folder, "memory_gb", lambda _: 0.0)
    with pytest.raises(LayerswapError, match=r"of memory with LoRA and 0\.0 GB are free"):
        folder.create(_request(files / "none"))


@pytest.mark.parametrize(
    ("rows", "said", "task", "language"),
    [
        (16, None, (16, None), (2, None)),
        (4, "a step's 16 rows are computed 4 at a time, with an equal result", (4, 4), (1, 2)),
        (1, "the experts are LoRA adapters", (8, 2), (1, 2)),
    ],
)
def test_the_measured_memory_decides_on_the_batch(files, monkeypatch, rows, said, task, language):
    """The same rows in a step, fewer at a time; LoRA where only single rows have room."""
    tried = []

    def measure(expert, *_):
        tried.append("lora" in expert)
        return Measured(1e6, 1e6, memory_gb=5.25, rows=8 if tried[-1] else rows)

    monkeypatch.setattr(folder, "measure", measure)
    lines = []
    _, costs = folder.create(_request(files / "demo"), lines.append)
    assert str(costs).endswith(" and 5.2 GB of memory")
    assert tried == [False, True][: 2 if rows == 1 else 1]
    short = [line for line in lines if line.startswith("memory is short: ")]
    assert len(short) == bool(said)
    assert not said or said in short[0]
    study = read_study(files / "demo" / "study.yaml")
    for runs, expected in ((study.task.runs, task), (study.languages["qaa"].runs, language)):
        given = runs[0].hyperparameters
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        assert tuple(map(given.get, names)) == expected


@pytest.mark.slow
def test_rows_grow_until_the_next_peak_would_not_fit(files, monkeypatch):
    """Doubled rows add twice as much as the rows before; the first step has no moments yet."""
    peaks = iter([1, 5, 6, 7, 9, *[9] * 9])
    monkeypatch.setattr(machine, "peak_bytes", lambda device: next(peaks) * 10**9)
    monkeypatch.setattr(machine, "free_bytes", lambda device: 11 * 10**9)
    request = _request(files / "demo")
    inputs = check_request(request)
    tried = expert(inputs, Settings(1, lora=False))
    row = inputs.longest_row(tried["hyperparameters"]["max_length"])
    found = machine.measure(tried, row, "cpu")
    assert (found.rows, found.memory_gb) == (4, 9.0)
    assert min(found.train, found.read) > 0
    lengths = [inputs.tokens("".join(row)) for row in inputs.task.rows(inputs.task_count)]
    assert inputs.tokens("".join(row)) == max(lengths)


def _request(name):
    from layerswap.new.inputs import Request

    return Request(
        folder=name, base="lab", languages=["qaa"], task="problems-en.tsv",
        texts={"qaa": "qaa.txt"}, parallel={}, tests={"qaa": "problems-qaa.tsv"}, developments={},
    )  # fmt: skip


@pytest.mark.slow
def test_seeds_follow_the_time(files, monkeypatch):
    seeds = []
    for speed, given in ((1e6, None), (1.0, None), (1.0, 2)):
        monkeypatch.setattr(folder, "measure", lambda *_, speed=speed: Measured(speed, speed))
        request = replace(_request(files / f"at{speed:.0f}-{given}"), seeds=given)
        seeds.append(folder.create(request)[0].seeds)
    assert seeds == [3, 1, 2]


def test_rates_follow_the_size_of_the_base_and_epochs_the_rows(files, monkeypatch):
    inputs = check_request(_request(files / "demo"))
    found = []
    for billions, rows in ((0.04, 200), (0.6, 1499), (7.0, 1500)):
        vars(inputs).update(billions=billions)
        monkeypatch.setattr(Inputs, "task_count", rows)
        given = expert(inputs, Settings(1, lora=False))["hyperparameters"]
        found.append((given["learning_rate"], given["num_train_epochs"]))
    assert found == [(6e-4, 3), (2e-5, 3), (2e-6, 2)]


@pytest.mark.slow
def test_a_plan_has_the_time_that_new_measured(files, monkeypatch):
    from layerswap.study import estimate

    speed = Measured(700.0, 900.0, "cpu")
    monkeypatch.setattr(folder, "measure", lambda *_: speed)
    done = new("demo", device="cpu")
    (said,) = re.findall(r"wrote demo: (about .* of memory);", done.output)
    assert "at this machine's measured speed" in said

    def planned():
        words = ["study", "run", "demo/study.yaml", "--out", "out", "--dry-run"]
        return " ".join(CliRunner().invoke(app, words).output.split())

    assert said in planned()
    assert said in (files / "demo" / "README.md").read_text()
    monkeypatch.setattr(estimate.socket, "gethostname", lambda: "another machine")
    assert "measured" not in planned()


def test_what_is_written(files, unmeasured):
    pair = ("--parallel", "news.qaa", "news.en")
    made = ("--translated-test", "problems-qaa.tsv", "--translated-task", "problems-qaa-dev.tsv")
    done = new("demo", "--development", "problems-qaa-dev.tsv", "--language", "qab=news.qaa",
               *pair, *made)  # fmt: skip
    assert done.exit_code == 0, done.exception
    assert done.output.splitlines()[-1] == (
        "next: layerswap study run demo/study.yaml --out demo/results"
    )
    written = files / "demo"
    study = read_study(written / "study.yaml")
    assert study.grid is not None
    assert list(study.languages) == ["qaa", "qab"]
    mixes = {name: yaml.safe_load((written / "mixes" / f"{name}.yaml").read_text())
             for name in ("qaa", "qab", "problems")}  # fmt: skip
    assert [one["weight"] for one in mixes["qaa"]["sources"].values()] == [3, 1, 1]
    assert "held-out" not in mixes["problems"]["filters"]["evaluation"]["against"]
    assert "held-out" in mixes["qab"]["filters"]["evaluation"]["against"]
    # qab has no test: rows of the task are held out for it, and nothing is proved.
    held = (written / "data" / "qab.test.jsonl").read_text().splitlines()
    kept = (written / "data" / "problems.train.jsonl").read_text().splitlines()
    assert not {json.loads(line)["prompt"] for line in held} & {
        json.loads(line)["prompt"] for line in kept
    }
    assert len(held) + len(kept) == 200
    # The same rows give the task expert's score in English.
    assert (written / "data" / "en.test.jsonl").read_text().splitlines() == held
    assert (
        "en" in yaml.safe_load((written / "benchmarks" / "problems.yaml").read_text())["languages"]
    )
    graph = plan_study(study, written)
    assert {"translated/qaa", "data/qaa/task", "train/qaa/task"} < {step.name for step in graph}
    assert "translated/qaa" in graph["tables"].needs
    assert list(study.translated) == ["qaa"]
    assert [line.partition(":")[0] for line in study.cautions] == [
        "The test in qaa has 20 documents", "qab has no test",
    ]  # fmt: skip
    assert "py3langid does not know qaa; it identifies" in done.output
    readme = (written / "README.md").read_text()
    assert "`qab`): **no test, so the study can prove nothing there.**" in readme
    assert "qaa`): 20 test documents; zones are chosen on 20 development documents" in readme
    assert "    problems-qaa.tsv: 20 test documents in qaa\n      prompt '" in readme


def test_right_answers_decide_on_the_length_and_leave_the_text(files, unmeasured):
    """A right answer of the test is longer than all of the task, and is a line of the text."""
    lines = (files / "qaa.txt").read_text().splitlines()
    tests = [(f"what about {i}", " ".join(lines[i : i + 2])) for i in range(20)]
    write_tsv(files / "answers.tsv", ("prompt", "answer"), [*tests, ("who", "ዋና ከተማዋ አዲስ አበባ ናት")])
    (files / "qaa.txt").write_text("\n".join([*lines, *(answer for _, answer in tests)]))
    done = new("demo", test="answers.tsv")
    assert done.exit_code == 0, done.exception
    said = "No model can write 1 of the 21 right answers in qaa: the base's tokenizer lacks some of"
    assert said in done.output
    study = read_study(files / "demo" / "study.yaml")
    assert any(caution.startswith(said) for caution in study.cautions)
    assert (study.grid, study.evaluate.development) == (None, "none")
    text = (files / "demo" / "study.yaml").read_text()
    assert "# No development split, so nothing is chosen" in text
    assert "The text in qaa has 20 of the 21 test documents; the expert trains" in done.output
    benchmark = yaml.safe_load((files / "demo" / "benchmarks" / "problems.yaml").read_text())
    tokens = load_tokenizer(shipped().base, named="base")
    longest = max(len(tokens(answer)["input_ids"]) for _, answer in tests)
    assert benchmark["task"]["generation_kwargs"]["max_gen_toks"] >= longest > 32
    mix = read_mix(files / "demo" / "mixes" / "qaa.yaml")
    kept = {row["text"] for row in build_mix(mix, folder=files / "demo" / "mixes").train}
    assert kept
    assert not kept & {answer for _, answer in tests}


def test_right_answers_beyond_the_context_are_counted(files, unmeasured):
    long = " ".join((files / "qaa.txt").read_text().split()[:600])
    write_tsv(files / "answers.tsv", ("prompt", "answer"), [("a b", long), ("c d", "basu")])
    done = new("demo", test="answers.tsv")
    assert "No model can write 1 of the 2 right answers in qaa: they have more than" in done.output
    write_tsv(files / "answers.tsv", ("prompt", "answer"), [(f"{long} a", "furo"), ("c d", "basu")])
    done = new("cut", test="answers.tsv")
    assert "1 of the 2 prompts in qaa lose their beginning: they have more than" in done.output


def test_labels_are_development_documents_and_trained_on_at_the_end(files, unmeasured):
    done = new("demo", "--labels", "problems-qaa-dev.tsv")
    assert done.exit_code == 0, done.exception
    written = files / "demo"
    study = read_study(written / "study.yaml")
    assert study.grid is not None
    assert len((written / "data" / "qaa.dev.jsonl").read_text().splitlines()) == 20
    names = {step.name for step in plan_study(study, written)}
    starts = ("base", "task expert", "swap", "soup")
    assert {"data/qaa/labels", "finished/qaa", *(f"finish/qaa/{s}" for s in starts)} < names
    mix = yaml.safe_load((written / study.finish.labels["qaa"]).read_text())
    assert mix["total"] == 20
    assert list(mix["filters"]["evaluation"]["against"]) == ["qaa-test"]
    assert study.finish.run.train == study.task.runs[0].train
    (files / "few.tsv").write_text("prompt\tanswer\na b\t1\nc d\t2\n")
    assert "few.tsv: has 2 complete rows; cross-validation needs 4" in str(
        new("few", "--labels", "few.tsv").exception
    )
    refused = new("again", "--labels", "problems-qaa.tsv")
    assert "of its rows are also in the test, so a choice here would flatter" in str(
        refused.exception
    )


def test_a_text_with_the_test_and_one_in_another_language_are_cautions(files, unmeasured):
    problems = (files / "problems-qaa.tsv").read_text("utf-8").splitlines()[1:]
    lines = [line.partition("\t")[0] for line in problems[:7]]
    with (files / "qaa.txt").open("a", encoding="utf-8") as text:
        text.write("\n".join(f" {line.upper()} " for line in lines))
    assert new("mixed").exit_code == 0
    said = read_study(files / "mixed" / "study.yaml").cautions
    shared = "The text in qaa has 7 of the 20 test documents; the expert trains without them."
    assert said[0] == shared
    assert shared in (files / "mixed" / "README.md").read_text("utf-8")
    english = "Every morning the {} children of the village walk to the old school by the river.\n"
    (files / "english.txt").write_text("".join(english.format(i) for i in range(30)))
    assert new("other", language="sw", text="english.txt").exit_code == 0
    said = read_study(files / "other" / "study.yaml").cautions
    assert said[0].startswith("The text may be in another language than Swahili: py3langid finds "
                              "little sw; it identifies 30 of these texts as en 100%; if they are "
                              "in English, give en instead of sw.")  # fmt: skip
    assert said[1].startswith("The test documents may be in another language than Swahili: ")
    assert new("unknown", language="klingon", text="english.txt").exit_code == 0
    said = read_study(files / "unknown" / "study.yaml").cautions[0]
    assert "py3langid does not know tlh; it identifies 30 of these texts as en 100%; if" in said
    (files / "am.txt").write_text("".join(f"ዋና {'አዲስ ' * i}\n" for i in range(1, 20)), "utf-8")
    done = new("am", language="am", text="am.txt")
    assert "The text in Amharic: 100% of the tokens are '<unk>', because the base's" in done.output


def test_labels_that_yaml_or_a_list_would_cut_stay_whole(files, unmeasured):
    for old, new_one in (("sports", "1e3"), ("health", "0o17")):
        for name in ("labels-en.tsv", "comma.tsv"):
            text = (files / name).read_text("utf-8")
            (files / name).write_text(text.replace(old, new_one), "utf-8")
    done = new("demo", "--leave-out", "arts, news", task="labels-en.tsv", test="comma.tsv")
    assert done.exit_code == 0, done.exception
    mix = read_mix("demo/mixes/labels.yaml")
    assert mix.sources["labels"].answers == ["0o17", "1e3"]


def test_columns_of_texts_are_named_by_language(files, unmeasured):
    pairs = [(f"line {i} in English", f"maneno {i} ya Kiswahili") for i in range(30)]
    write_tsv(files / "pairs.tsv", ("src", "tgt"), pairs)
    done = new("demo", "--parallel", "pairs.tsv", "pairs.tsv", "--columns", "sw=tgt,en=src",
               text=None, language="sw")  # fmt: skip
    assert done.exit_code == 0, done.exception
    sources = yaml.safe_load((files / "demo" / "mixes" / "sw.yaml").read_text())["sources"]
    assert [source["text"] for source in sources.values()] == [
        "{tgt}", "English: {src}\nSwahili: {tgt}", "Swahili: {tgt}\nEnglish: {src}"
    ]  # fmt: skip
    assert "  text 'maneno 2 ya Kiswahili'" in done.output


def test_ready_names(files, unmeasured):
    done = new("ready", task="masakhanews-english", text="hausa-news", language="ha",
               test="masakhanews")  # fmt: skip
    assert done.exit_code == 0, done.exception
    study = read_study(files / "ready" / "study.yaml")
    assert (study.task.data, study.languages["ha"].data) == ("masakhanews-english", "hausa-news")
    assert study.evaluate.suite == "masakhanews"


@pytest.mark.slow
def test_from_files_to_a_model_on_the_lab(files):
    """New, the trial of one percent, and the whole study."""
    done = new("demo", "--trial", "--seeds", "1", "--translated-test", "problems-qaa.tsv",
               "--translated-task", "problems-qaa-dev.tsv")  # fmt: skip
    assert done.exit_code == 0, done.exception
    assert "tokens/s in training" in (files / "demo" / "README.md").read_text()
    for name in ("trial", "study"):
        out = files / "demo" / f"{name}-results"
        ran = CliRunner().invoke(app, ["study", "run", f"demo/{name}.yaml", "--out", str(out)])
        assert ran.exit_code == 0, ran.output
        assert "estimate: about" in ran.output
        page = (out / "report.html").read_text()
        assert "task expert, on the translated test" in page
        assert "task expert, trained on the translated task" in page
        assert "the base does not read qaa" in page
        assert (out / "merged" / "qaa" / "model.safetensors").is_file()
