"""A source with `task`: the benchmark's prompt, answers and labels make the rows."""

import json

import pytest
import yaml
from lm_eval.utils import apply_template
from refusals import refused

from layerswap.evaluation.suites.suites import parts_of
from layerswap.ground.errors import LayerswapError
from layerswap.study.plan import plan_study
from layerswap.study.spec import read_study
from layerswap.training.mix.build import build_mix
from layerswap.training.mix.schema import mix_text, parse_mix, read_mix

OWN = {
    "title": "Moods",
    "source": "https://example.org",
    "licence": "CC0-1.0",
    "languages": ["sw", "en"],
    "metric": ["acc", "none"],
    "size": {"documents": 1, "read": 9},
    "task_name": "moods_${code}",
    "splits": ["test"],
    "development": "dev",
    "labels": ["glad", "sad"],
    "data": {"files": ["moods/${code}.${split}.jsonl"], "columns": ["text", "label"]},
    "exemplars": {"code": "en", "split": "train"},
    "task": {
        "doc_to_text": "Text {of any} in ${code}: {{text}}\nMood:",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "${labels}",
    },
}


def write(folder, name="moods.yaml", **changes):
    folder.joinpath(name).write_text(yaml.safe_dump({**OWN, **changes}), "utf-8")


def rows(path, *values):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values), "utf-8")


def mix(folder, **source):
    text = yaml.safe_dump({"name": "m", "kind": "prompt-completion", "separator": "",
                           "sources": {"a": source}})  # fmt: skip
    (folder / "mix.yaml").write_text(text, "utf-8")
    return read_mix(folder / "mix.yaml")


def built(folder, **source):
    made = build_mix(mix(folder, **source), folder=folder)
    return sorted((row["prompt"], row["completion"]) for row in made.train), made.tallies["a"]


READY = {
    "sib200-english": ("sib200", "text", "category", {}),
    "masakhanews-english": ("masakhanews", "headline", "category", {}),
    "tweeteval-english": ("afrisenti", "text", "label", {"label": 1}),
}


@pytest.mark.parametrize("name", READY)
def test_a_ready_mix_asks_as_lm_eval_does(name, tmp_path):
    suite, text, label, numbers = READY[name]
    benchmark = parts_of(suite)[0].benchmark
    for given in ({label: benchmark.labels[1]}, numbers or {label: benchmark.labels[0]}):
        rows(tmp_path / "rows.jsonl", {text: "It {is} so.", **given}, {text: "No.", label: "other"})
        whole = yaml.safe_load(mix_text(name)) | {"total": 1, "validation": 0}
        (source,) = whole["sources"].values()
        for key in ("id", "config", "split", "files", "format", "delimiter"):
            source.pop(key, None)
        source["path"] = "rows.jsonl"
        (row,) = build_mix(parse_mix(yaml.safe_dump(whole)), folder=tmp_path).train
        named = (
            benchmark.labels[1] if numbers or given[label] != benchmark.labels[0] else given[label]
        )
        document = {"text": "It {is} so.", "label": named}
        assert row["prompt"] == apply_template(benchmark.task["doc_to_text"], document)
        assert row["completion"] == f" {named}"


def test_the_rows_of_the_benchmark_itself(tmp_path):
    write(tmp_path)
    rows(tmp_path / "moods" / "sw.train.jsonl", {"text": "Sawa", "label": "glad"},
         {"text": "Hapana", "label": "odd"})  # fmt: skip
    made, tally = built(tmp_path, task="moods.yaml", language="sw")
    assert made == [("Text {of any} in sw: Sawa\nMood:", " glad")]
    assert (tally.kept, tally.not_wanted) == (1, 1)
    with pytest.raises(LayerswapError, match=r"moods has no split 'test' to train on; there are "
                                             r"train, dev"):  # fmt: skip
        mix(tmp_path, task="moods.yaml", language="sw", split="test")


def test_a_prompt_with_logic_reads_other_columns(tmp_path):
    write(tmp_path, task={"doc_to_text": "{{ text | upper }}?", "doc_to_target": "{{label}}",
                          "target_delimiter": "="})  # fmt: skip
    rows(tmp_path / "rows.jsonl", {"line": "so", "label": "sad"})
    made, _ = built(tmp_path, task="moods.yaml", path="rows.jsonl", columns={"text": "line"})
    assert made == [("SO?", "=sad")]
    made, _ = built(tmp_path, task="moods.yaml", path="rows.jsonl", columns={"text": "line"},
                    template="jinja", completion="{{ label }}")  # fmt: skip
    assert made == [("SO?", "sad")]


BAD = {
    "unknown": ({"task": "sib20"}, "no suite 'sib20'; did you mean 'sib200'"),
    "suite": ({"task": "layer-swapping"}, "layer-swapping is a suite; name one of its benchmarks"),
    "language": ({"task": "masakhanews", "language": "fi"}, "masakhanews does not have fi"),
    "no language": ({"task": "masakhanews"}, "the source names no rows; give language, id or path"),
    "split": ({"task": "sib200", "language": "sw", "split": "test"},
              "sib200 has no split 'test' to train on; there are train, dev"),
    "function": ({"task": "mbpp", "language": "en"},
                 "a function reads the rows of mbpp; give id or path"),
    "prompt of lm-eval": ({"task": "mgsm", "path": "x.jsonl"}, "mgsm has no single prompt"),
    "several prompts": ({"task": "flores", "path": "x.jsonl"}, "flores has no single prompt"),
    "no code": ({"task": "coded.yaml", "path": "x.jsonl"},
                "the prompt names the language; give the source's language"),
    "no answers": ({"task": "moods.yaml", "path": "x.jsonl"},
                   "moods has no template of its answers; write completion"),
    "column": ({"task": "sib200", "path": "x.jsonl", "columns": {"label": "a", "txt": "b"}},
               "columns: no 'txt' in the data; did you mean 'text'"),
    "kind": ({"task": ["sib200"]}, "task: write a text"),
    "no task": ({"path": "x.jsonl", "columns": {"text": "a"}},
                "columns rename those of a benchmark; name it in task"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line_that_names_the_source(case, tmp_path):
    source, message = BAD[case]
    write(tmp_path, task={"doc_to_text": "{{text}}"}, labels=[])
    write(tmp_path, "coded.yaml")
    (line,) = refused(LayerswapError, mix, tmp_path, **source).splitlines()
    assert f"{tmp_path / 'mix.yaml'}, source 'a'" in line
    assert message in line


@pytest.mark.parametrize(("typo", "key"), [("taks", "task"), ("colums", "columns")])
def test_a_misspelt_key_of_a_task_is_recognised(tmp_path, typo, key):
    keys = {"task": "sib200", "columns": {"text": "a"}}
    source = {"path": "x.jsonl", typo: keys.pop(key), **({} if key == "task" else keys)}
    with pytest.raises(
        LayerswapError, match=rf"sources\.a\.{typo}: unknown key; did you mean '{key}'"
    ):
        mix(tmp_path, **source)


def test_parameters_of_earlier_benchmark_files_lack_the_dollar(tmp_path):
    write(tmp_path, task={**OWN["task"], "doc_to_text": "{code_name}: {{text}}"})
    rows(tmp_path / "rows.jsonl", {"text": "Sawa", "label": "sad"})
    made, _ = built(tmp_path, task="moods.yaml", path="rows.jsonl", language="sw")
    assert made == [("Swahili: Sawa", " sad")]


def test_another_prompt_is_another_key_of_a_studys_data(tmp_path):
    rows(tmp_path / "rows.jsonl", {"text": "Sawa", "label": "sad"})
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({
        "name": "s", "base": "owner/base-1b", "evaluate": {"suite": "moods.yaml"},
        "task": {"data": "mix.yaml", "runs": [{}]},
        "languages": {"sw": {"experts": ["owner/expert"]}},
    }))  # fmt: skip
    keys = []
    for prompt in ("Text: {{text}}", "{{text}}"):
        write(tmp_path, task={**OWN["task"], "doc_to_text": prompt})
        mix(tmp_path, task="moods.yaml", path="rows.jsonl")
        spec = read_study(tmp_path / "study.yaml")
        keys.append(plan_study(spec, tmp_path).keys["data/task"])
    assert keys[0] != keys[1]
