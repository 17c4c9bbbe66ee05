"""`sweep`, `eval` and `compare`: real benchmarks' rows on a tiny model, end to end."""

import json
import re
import sqlite3
from pathlib import Path

import pytest
import torch
import yaml
from lm_eval_world import make_harness_world
from merging import save_adapter
from typer.main import get_command

from layerswap.cli import app
from layerswap.evaluation.asked import AskedFields
from layerswap.evaluation.settings import Asked
from layerswap.experiment.answers import kept_answers, read_answers
from layerswap.experiment.spec import SweepSpec
from layerswap.study.spec import EvaluationSpec, Experts

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two random Llamas with room for long prompts, with an adapter, a swap and a user's tasks."""
    root = tmp_path_factory.mktemp("models")
    make_harness_world(root, max_position_embeddings=8192)
    save_adapter(root / "adapter", root / "task", 5, r=2, target_modules=["q_proj"])
    recipe = {
        "experts": {"task": str(root / "task"), "language": str(root / "language")},
        "swap": {"bottom": 1, "top": 1},
    }
    (root / "swap.yaml").write_text(yaml.safe_dump(recipe))
    return root


def results(out, model):
    return json.loads((out / model / "results.json").read_text())


@pytest.mark.slow
def test_programs_run_only_with_permission(layerswap, models, tmp_path):
    common = ["eval", models / "task", "--suite", "mbpp", "--language", "en", "--data", DATA]
    refused = layerswap.refused(*common, "--limit", 2, "--out", tmp_path / "no")
    assert "allow it with --allow-code" in refused.err
    layerswap.done(*common, "--limit", 2, "--out", tmp_path / "yes", "--allow-code")
    assert results(tmp_path / "yes", "task")["results"]["mbpp_en_0shot"]["pass_at_1,none"] == 0


def test_a_folder_of_something_else_is_left_alone(layerswap, models, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    done = layerswap.refused(
        "eval", models / "task", "--suite", "mgsm", "--language", "sw", "--out", tmp_path
    )
    assert "not written by `layerswap eval`" in done.err
    layerswap.refused("compare", tmp_path)


@pytest.mark.slow
def test_other_results_in_the_folder_are_kept(layerswap, models, tmp_path):
    """A second `eval` replaces its own models and tasks in the table, and no others."""
    out = tmp_path / "out"

    def run(model, language):
        done = layerswap.done(
            "eval", models / model, "--suite", "mgsm", "--language", language, "--shots", 0,
            "--data", DATA, "--limit", 1, "--gen-kwargs", "max_gen_toks=1", "--out", out,
        )  # fmt: skip
        return done.err

    assert "earlier results" not in run("task", "sw")
    assert f"kept earlier results in {out} of task\n" in run("language", "sw")
    assert f"kept earlier results in {out} of language, task\n" in run("task", "en")
    replaced = run("task", "sw")
    assert f"replaced earlier results in {out}: task on mgsm_sw_0shot\n" in replaced
    rows = {(row.model, row.task) for row in read_answers(out)}
    assert all(row.target for row in read_answers(out) if row.main)
    assert rows == {("task", "mgsm_sw_0shot"), ("language", "mgsm_sw_0shot"),
                    ("task", "mgsm_en_0shot")}  # fmt: skip
    assert set(results(out, "task")["results"]) == {"mgsm_sw_0shot", "mgsm_en_0shot"}


def test_another_model_of_the_same_name_replaces_all_rows(tmp_path):
    scores(tmp_path, m=[1], weights="old")
    (row,) = read_answers(tmp_path)
    new = {"m": {"samples": {"another": []}}}
    assert kept_answers([row], new, {"m": "old"}) == ([row], [])
    assert kept_answers([row], new, {"m": "new"}) == ([], [f"m on {row.task}"])


def test_a_study_is_no_suite(layerswap, tmp_path):
    (tmp_path / "study.yaml").write_text("base: b\ntask: {}\nevaluate: {suite: mgsm}\n")
    given = ("--suite", tmp_path / "study.yaml", "--language", "sw", "--out", tmp_path / "out")
    done = layerswap("eval", "model", *given)
    assert (done.code, done.err) == (2, (
        f"error: {tmp_path}/study.yaml: is a study, not a suite or a benchmark; run it by "
        "`layerswap study run`, or give the file in its evaluate.suite\n"
    ))  # fmt: skip


def test_a_table_that_is_damaged_is_one_line(layerswap, tmp_path):
    (tmp_path / "answers.parquet").write_bytes(b"not parquet at all")
    done = layerswap.refused("compare", tmp_path)
    assert "answers.parquet: cannot be read" in done.err


@pytest.mark.parametrize(
    ("column", "values"),
    [("metric", [3]), ("score", ["x"]), ("document", [None]), ("task", [["a"]]), ("model", [7])],
)
def test_a_table_of_other_values_is_one_line(layerswap, tmp_path, column, values):
    import pyarrow as pa
    import pyarrow.parquet as pq

    scores(tmp_path / "a", one=[1], two=[0])
    path = tmp_path / "a" / "answers.parquet"
    rows = [{**row, column: values[0]} for row in pq.read_table(path).to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows), path)
    done = layerswap.refused("compare", tmp_path / "a")
    assert done.err == f"error: {path}: not a table of `layerswap eval` or `sweep`\n"


def scores(path, *, language="sw", weights="", first=0, **models):
    """Writes a folder of results; `first` is the number of the first document."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"model": name, "benchmark": "mgsm", "language": language, "task": f"mgsm_{language}",
         "metric": "exact_match", "filter": "number", "document": first + i, "score": float(value),
         "main": True, "weights": weights}
        for name, values in models.items() for i, value in enumerate(values)
    ]  # fmt: skip
    path.mkdir(exist_ok=True)
    if (table := path / "answers.parquet").is_file():
        rows = [*pq.read_table(table).to_pylist(), *rows]
    pq.write_table(pa.Table.from_pylist(rows), table)


def cells(shown):
    """The cells of Markdown tables but the balanced ones, by model."""
    lines = [line for line in shown.out.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    found = {}
    for row in rows:
        if row[0] == "model" and row[1] == "balanced accuracy":
            break
        found[row[0]] = row[1:]
    return found


def test_differences_to_the_first_model_have_intervals_and_stars(layerswap, tmp_path):
    scores(tmp_path / "one", base=[1, 0] * 50, better=[1] * 90 + [0] * 10)
    scores(
        tmp_path / "two", worse=[0] * 95 + [1] * 5, same=[1, 0] * 50, hardly=[1, 0] * 48 + [1] * 4
    )
    shown = layerswap("compare", tmp_path / "one", tmp_path / "two", "--to", "markdown")
    found = cells(shown)
    assert found["model"] == ["n", "Swahili", "minus base"]
    assert found["base"] == ["100", "50.0 [40.0, 60.0]", ""]
    assert found["better"][1].startswith("**90.0** [")
    assert re.fullmatch(r"\+40\.0 \[\d\d\.\d to \d\d\.\d\] \*\*", found["better"][2])
    assert re.fullmatch(r"-45\.0 \[-\d\d\.\d to -\d\d\.\d\] \*\*", found["worse"][2])
    assert found["same"][2] == "+0.0 [-3.6 to 3.6]"
    assert found["hardly"][2].startswith("+2.0 [0.0 to ")
    assert "*: the interval of the difference excludes zero; **: also" in shown.out
    latex = layerswap("compare", tmp_path / "one", "--to", "latex").out
    assert r"\textbf{90.0} [" in latex
    assert r"\begin{tabular}{lrrr}" in latex
    chosen = layerswap("compare", tmp_path / "one", tmp_path / "two", "--model", "worse", "--model",
                       "base", "--to", "markdown")  # fmt: skip
    assert list(cells(chosen)) == ["model", "---", "worse", "base"]
    layerswap.refused("compare", tmp_path / "one", "--model", "nobody")


@pytest.mark.slow
def test_means_over_languages_and_their_differences(layerswap, tmp_path):
    for language, right in (("sw", 60), ("yo", 40)):
        scores(tmp_path / "one", language=language, base=[1] * 20 + [0] * 80,
               swap=[1] * right + [0] * (100 - right))  # fmt: skip
    scores(tmp_path / "two", language="sw", other=[1] * 30 + [0] * 70)
    folders = (tmp_path / "one", tmp_path / "two")
    shown = layerswap("compare", *folders, "--to", "markdown").out.split("\n\n|")
    heads = [one.splitlines()[0].strip("| ").split(" | ") for one in shown]
    assert heads == [["model", "n", "Swahili", "Yoruba", "mean"],
                     ["model", "Swahili", "Yoruba", "mean"]]  # fmt: skip
    rows = [one.splitlines() for one in shown]
    swap = next(line for line in rows[0] if "| swap |" in line)
    assert swap.startswith("| swap | 200 | **60.0** [")
    assert "50.0 [" in swap
    assert re.search(r"\| \+30\.0 \[[\d.]+ to [\d.]+\] \* \|$", rows[1][3])
    other = next(line for line in rows[0] if "| other |" in line)
    assert other.count("\N{EN DASH}") == 2
    facts = json.loads(layerswap("compare", *folders, "--json").out)
    means = {row["model"]: row for row in facts["means"]}
    assert {model: row["score"] for model, row in means.items()} == pytest.approx(
        {"base": 0.2, "swap": 0.5}
    )
    assert means["swap"]["lower"] > 0.2
    one = next(row for row in facts["scores"] if (row["model"], row["language"]) == ("swap", "sw"))
    assert (one["documents"], one["n"], one["p_bootstrap"] <= one["p"] < 0.05) == (100, 100, True)


def test_one_model_in_two_folders_is_one(layerswap, tmp_path):
    scores(tmp_path / "one", weights="a", base=[1, 0] * 10)
    scores(tmp_path / "one", weights="b", swap=[1] * 20)
    scores(tmp_path / "two", weights="a", base=[1, 0] * 25)
    scores(tmp_path / "two", weights="c", swap=[1] * 50)
    shown = layerswap("compare", tmp_path / "one", tmp_path / "two", "--to", "markdown")
    found = cells(shown)
    assert [name for name in found if name not in ("model", "---")] == [
        "base", "one/swap", "two/swap",
    ]  # fmt: skip
    assert found["base"][0] == "20 of 50"
    assert shown.err.startswith("note: mgsm sw: compared on the 20 documents that all models have;")
    # With other scores on the same documents it is not the same evaluation.
    scores(tmp_path / "three", weights="a", base=[0, 1] * 10)
    apart = layerswap("compare", tmp_path / "one", tmp_path / "three", "--to", "markdown")
    assert {"one/base", "three/base"} <= set(cells(apart))


@pytest.mark.parametrize("width", [80, 90])
def test_ten_models_fit_a_page(layerswap, monkeypatch, tmp_path, width):
    monkeypatch.setenv("COLUMNS", str(width))
    names = [f"gemma-3-270m-swap-number-{i}" for i in range(10)]
    for language in ("sw", "yo"):
        scores(tmp_path / "one", language=language, **dict.fromkeys(names, [1, 0, 0] * 10))
    lines = layerswap("compare", tmp_path / "one").out.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 66
    shown = [line.split()[0] for line in lines if line.startswith("  gemma")]
    assert shown == [*names, *names]


def test_any_task_is_evaluated_and_compared(layerswap, models, tmp_path):
    asked = ["eval", models / "task", models / "swap.yaml", "--tasks", "maembe_choose"]
    common = ["--include", models / "tasks", "--dtype", "float32"]
    for engine in ("sweep", "hf"):
        done = layerswap.done(*asked, *common, "--engine", engine, "--out", tmp_path / engine)
    mine, theirs = (results(tmp_path / e, "swap")["results"] for e in ("sweep", "hf"))
    assert mine == theirs
    right = mine["maembe_choose"]["acc,none"]
    row = next(line for line in done.out.splitlines() if line.split()[:1] == ["swap"])
    assert row.split()[:3] == ["swap", "maembe_choose", "acc"]
    assert row.split()[3:5] == ["5", f"{100 * right:.1f}"]
    assert re.search(rf" {100 * right:.1f} \[\d+\.\d, \d+\.\d\]", row)
    assert done.err.splitlines()[-1] == f"next: layerswap compare {tmp_path / 'hf'}"
    shown = layerswap.done("compare", tmp_path / "sweep")
    assert "maembe choose" in shown.out


def test_models_that_are_stored_in_several_dtypes_are_evaluated_in_one(layerswap, models, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    narrow = AutoModelForCausalLM.from_pretrained(models / "task", dtype=torch.bfloat16)
    narrow.save_pretrained(tmp_path / "narrow")
    AutoTokenizer.from_pretrained(models / "task").save_pretrained(tmp_path / "narrow")

    def given(out, *arguments):
        asked = ("--tasks", "maembe_choose", "--include", models / "tasks", "--out", tmp_path / out)
        done = layerswap.done("eval", *arguments, *asked)
        with sqlite3.connect(tmp_path / out / "answers.sqlite") as database:
            return set(database.execute("SELECT request, answer FROM answers")), done.err

    wide, _ = given("wide", tmp_path / "narrow", "--dtype", "float32")
    alone, said = given("alone", tmp_path / "narrow")
    assert wide.isdisjoint(alone)
    assert "all are evaluated" not in said
    both, said = given("both", tmp_path / "narrow", models / "task")
    assert wide < both
    assert "models are stored in BF16 (narrow), F32 (task); all are evaluated in float32" in said


@pytest.mark.slow
def test_a_sweep_is_compared_too(layerswap, models, tmp_path):
    sweep = {
        "recipe": yaml.safe_load((models / "swap.yaml").read_text()) | {"swap": {}},
        "grid": {"bottom": [0, 1], "top": [1]}, "tasks": ["maembe_choose"],
        "include": [str(models / "tasks")],
    }  # fmt: skip
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    done = layerswap.done("sweep", tmp_path / "sweep.yaml", "--out", tmp_path / "swept")
    best = tmp_path / "swept" / "best.yaml"
    assert done.err.splitlines()[-1].startswith(f"next: layerswap merge {best} --out merged")
    asked = ["eval", models / "adapter", "--tasks", "maembe_choose", "--include", models / "tasks"]
    layerswap.done(*asked, "--out", tmp_path / "eval")
    shown = layerswap.done("compare", tmp_path / "swept", tmp_path / "eval", "--to", "markdown")
    assert "adapter" in shown.out
    assert "task expert" in shown.out
    # All on the documents of the sweep's test split.
    assert cells(shown)["adapter"][0] == "3 of 5"
    assert cells(shown)["task expert"][0] == "3"

    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep | {"tasks": ["maembe_chose"]}))
    for out in ("new", "swept"):
        refused = layerswap("sweep", tmp_path / "sweep.yaml", "--out", tmp_path / out)
        assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "swept" / "board.json").is_file()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--suite nonsense --language sw", "no suite 'nonsense'"),
        ("--suite mgsm --language xyzzy", "no language 'xyzzy'"),
        ("--suite mgsm --language sw --data nowhere", "--data nowhere: no such folder"),
        ("--suite mgsm --language sw --data {data} --engine vllm", "needs vLLM"),
        ("--suite mgsm", "a suite needs a language (--language)"),
        ("", "give either tasks or a suite (--tasks, --suite)"),
        ("--tasks maembe_choose --suite mgsm", "give either tasks or a suite (--tasks, --suite)"),
        ("--tasks maembe_choose --language sw", "language and data (--data) belong to a suite"),
        ("--tasks maembe_chose", "no task 'maembe_chose'; did you mean 'maembe_choose'?"),
        ("--tasks maembe_choose --apply-chat-template", "has no chat template to apply"),
        ("--tasks maembe_choose --gen-kwargs nonsense", "gen_kwargs"),
        (
            "--tasks maembe_choose --engine hf --engine-args max_model_len=256",
            "needs the engine vllm",
        ),
    ],
)
def test_mistakes_are_one_line(layerswap, models, tmp_path, given, said):
    words = given.format(data=DATA).split() + ["--include", models / "tasks"] * ("--tasks" in given)
    out = tmp_path / "out"
    done = layerswap.refused("eval", models / "task", "--out", out, *words)
    assert said in done.err
    assert "Traceback" not in done.err
    assert not out.exists()


def test_every_setting_of_an_evaluation_is_an_option_and_a_key():
    """Of `eval`, of checkpoint selection, of a sweep and of a study, from one class."""
    root = get_command(app)
    commands = root.commands["eval"], root.commands["analyse"].commands["select"]
    offered = [{param.name: param for param in command.params} for command in commands]
    for name in AskedFields.__annotations__:
        assert all(params[name].help for params in offered), name
        assert all(name in kind.model_fields for kind in (SweepSpec, EvaluationSpec, Asked)), name
    assert Experts.model_fields["by"].annotation is Asked
    assert {"--num-fewshot", "--shots"} == set(offered[0]["num_fewshot"].opts)
