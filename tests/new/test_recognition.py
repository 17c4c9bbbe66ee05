"""Tables are recognised by their columns, and training and benchmark have one prompt."""

import gzip
import json
import math
import re
import unicodedata
from collections import Counter
from dataclasses import replace

import pytest
from lab_files import write_tsv
from refusals import refused

from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
from layerswap.evaluation.suites.suites import write_suite
from layerswap.ground.errors import DataError
from layerswap.ground.yaml_file import dump_yaml
from layerswap.new.tables import Table, code_of, read_parallel, read_table, read_texts, recognise
from layerswap.new.tasks import Task, found_in, read_task, target
from layerswap.training.mix.build import build_mix
from layerswap.training.mix.examples import ExampleMaker
from layerswap.training.mix.schema import MixSource, parse_mix
from layerswap.training.mix.templates import parse_template


def table(*rows):
    return Table("rows.jsonl", list(rows[0]), list(rows), {"path": "/rows.jsonl"})


def task_of(*rows):
    return Task(table(*rows), recognise(table(*rows), {}))


SIZE = {"documents": 1, "read": 9, "written": 16}


def loaded_benchmark(task, documents, folder):
    """The benchmark of a task, with these documents in Swahili as its test, in lm-eval."""
    from layerswap.evaluation.harness import load_tasks

    for name in ("data", "benchmarks"):
        (folder / name).mkdir()
    lines = "".join(json.dumps(one) + "\n" for one in documents)
    (folder / "data" / "sw.test.jsonl").write_text(lines)
    file = folder / "benchmarks" / "x.yaml"
    file.write_text(dump_yaml(task.benchmark("x", ["sw"], SIZE)))
    tasks = TaskFolder(folder / "tasks")
    (written,) = write_suite(str(file), ["sw"], tasks, data=DataFolder(None))
    return load_tasks([written.name], include=[tasks.root])["tasks"][written.name]


def write_labelled(path, texts, labels):
    """Write a table of texts and of labels in turns; gives its path."""
    rows = [(text, labels[i % len(labels)]) for i, text in enumerate(texts)]
    write_tsv(path, ("text", "label"), rows)
    return str(path)


HEADLINES = [{"headline": f"News {i}", "category": ("sports", "health")[i % 2], "url": "x"}
             for i in range(6)]  # fmt: skip
TABLES = {
    "labels": (HEADLINES, "Text: News 0\nTopic: sports"),
    "prompts": ([{"prompt": "2 + 2 =", "completion": "4"}], "2 + 2 = 4"),
    "answers": ([{"question": "Two and two?", "answer": "It is #### 4"}],
                "Question: Two and two?\nAnswer: It is #### 4"),
    "passages": ([{"context": "A river.", "question": "What?", "answer": "A river"}],
                 "A river.\nQuestion: What?\nAnswer: A river"),
    "choices": ([{"question": "Red?", "choices": ["yes", "no"], "answer": "B"}],
                "Question: Red?\nAnswer: no"),
    "messages": ([{"messages": [{"role": "user", "content": "Hi {x}"},
                                {"role": "assistant", "content": "Hello"}]}], "Hi {x} Hello"),
    "pairs": ([{"premise": "A dog.", "hypothesis": "A cat.", "label": f"l{i % 2}"}
               for i in range(4)], "Premise: A dog.\nHypothesis: A cat.\nLabel: l0"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [one for one in TABLES if one != "pairs"])
def test_training_and_benchmark_have_one_prompt(kind, tmp_path):
    rows, wanted = TABLES[kind]
    task = task_of(*rows)
    assert task.shape.kind == kind
    document = task.documents(rows)[0]
    example = ExampleMaker(MixSource(**task.source("x.jsonl")), "x").make(document)
    assert f"{example.prompt}{example.completion}" == wanted

    loaded = loaded_benchmark(task, [target(task, document, "en")], tmp_path)
    named = {"x": task.source("x.jsonl", "benchmarks/x.yaml")}
    mix = parse_mix(dump_yaml({"name": "m", "sources": named}), folder=tmp_path)
    assert ExampleMaker(mix.sources["x"], "x").make(document) == example
    assert "prompt" not in named["x"]
    (asked,) = loaded.eval_docs
    prompt = loaded.doc_to_text(asked)
    assert prompt == example.prompt
    answer = loaded.doc_to_target(asked)
    if kind in ("labels", "choices"):
        answer = loaded.doc_to_choice(asked)[answer if isinstance(answer, int) else
                                             loaded.doc_to_choice(asked).index(answer)]  # fmt: skip
        assert f"{prompt} {answer}" == wanted
    else:
        assert str(answer) == {"prompts": "4", "answers": "4", "messages": "Hello",
                               "passages": "A river"}[kind]  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "prompt"),
    [(("text", "headline"), "Text: {question}\nHeadline:"), (("q", "a"), "Q: {question}\nA:"),
     (("en", "sw"), "English: {question}\nSwahili:"),
     (("problem", "headline"), "Question: {question}\nAnswer:")],
)  # fmt: skip
def test_the_prompt_names_the_columns(columns, prompt):
    whole = table(dict.fromkeys(columns, "x"))
    shape = recognise(whole, dict(zip(("question", "answer"), columns, strict=True)))
    assert Task(whole, shape).prompt == prompt


SPANS = {
    "list": ("answer", ["Dodoma", "Dodoma city"]),
    "squad": ("answers", {"text": ["Dodoma", "Dodoma", "Dodoma city"], "answer_start": [1, 1, 1]}),
    "afriqa": ("answers", "['Dodoma', 'Dodoma city']"),
    "trivia": ("answer", {"value": "Dodoma", "aliases": ["Dodoma", "Dodoma city"]}),
}


@pytest.mark.parametrize("kind", SPANS)
def test_several_right_answers_are_read_and_the_first_is_trained(tmp_path, kind):
    column, cell = SPANS[kind]
    rows = [{"question": f"Capital {i}?", column: cell} for i in range(3)]
    rows[2][column] = {"list": "Lagos", "squad": {"text": [], "answer_start": []},
                       "afriqa": "['Lagos']", "trivia": {"value": "Lagos"}}[kind]  # fmt: skip
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = read_task(str(tmp_path / "t.jsonl"), {})
    last = [("Question: Capital 2?\nAnswer:", " Lagos")] * (kind != "squad")
    assert (
        task.rows(3) == [(f"Question: Capital {i}?\nAnswer:", " Dodoma") for i in range(2)] + last
    )
    assert target(task, task.complete[0], "sw")["answer"] == ["Dodoma", "Dodoma city"]
    assert len(task.complete) == 3 - (kind == "squad")


def test_a_text_that_looks_like_a_list_is_a_text():
    rows = [{"question": f"List {i}?", "answer": "['a', 'b']"} for i in range(2)]
    assert task_of(*rows).rows(1)[0][1] == " ['a', 'b']"


CELLS = {"answer": ['["Dodoma", "Dodoma city"]', "['Lagos']", "Nairobi"],
         "answers": ['{"text": ["Dodoma", "Dodoma city"]}', "['Lagos']", "Nairobi"]}  # fmt: skip


@pytest.mark.parametrize("column", CELLS)
def test_lists_in_the_cells_of_csv_are_right_answers(tmp_path, column):
    write_tsv(tmp_path / "t.tsv", ("question", column), enumerate(CELLS[column]))
    task = read_task(str(tmp_path / "t.tsv"), {})
    assert [answer for _, answer in task.rows(3)] == [" Dodoma", " Lagos", " Nairobi"]
    assert target(task, task.complete[0], "sw")["answer"] == ["Dodoma", "Dodoma city"]
    assert "3 rows (1 with several right answers)" in found_in(task)[0]
    write_tsv(tmp_path / "code.tsv", ("question", "answer"), [("a", '["x"]'), ("b", "[1, 2]")])
    assert read_task(str(tmp_path / "code.tsv"), {}).rows(1)[0][1] == ' ["x"]'
    write_tsv(tmp_path / "numpy.tsv", ("question", "answer"), [("a", "['x' 'y']"), ("b", "z")])
    assert "lists as numpy prints them" in refused(DataError, read_task,
                                                   str(tmp_path / "numpy.tsv"), {})  # fmt: skip


PRODIGY = [{"text": f"t{i}", "label": "xy"[i % 2], "answer": ("accept", "reject", "ignore")[i // 4]}
           for i in range(12)]  # fmt: skip
PARTED = [{"text": ("train", "test")[i // 9] + f" t{i}", "label": "xy"[i % 2],
           "fold": ("Train", "valid", "test")[i // 4]} for i in range(12)]  # fmt: skip


ACCEPTED = [{"text": row["text"], "options": [], "accept": [row["label"]], "answer": row["answer"]}
            for row in PRODIGY]  # fmt: skip
KTO = [
    {"prompt": row["text"], "completion": f"{i}", "label": i < 4} for i, row in enumerate(PARTED)
]
SETS = [row | {"fold": ("Training set", "Dev set", "Test set")[i // 4]}
        for i, row in enumerate(PARTED)]  # fmt: skip
FLAGGED = [{"text": row["text"], "label": row["label"], "is_train": int(i < 4)}
           for i, row in enumerate(PARTED)]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "kept"),
    [(PRODIGY, "answer: accept"), (ACCEPTED, "answer: accept"), (PARTED, "fold: Train"),
     (FLAGGED, "is_train: 1"), (KTO, "label: True"), (SETS, "fold: Training set")],
)  # fmt: skip
def test_rows_of_another_part_are_not_trained(tmp_path, rows, kept):
    (tmp_path / "t.jsonl").write_text("".join(map("{}\n".format, map(json.dumps, rows))))
    task = read_task(str(tmp_path / "t.jsonl"), {})
    texts = [row.get("text", row.get("prompt")) for row in task.table.rows]
    assert [text[-2:] for text in texts] == ["t0", "t1", "t2", "t3"]
    assert f"4 rows (only rows with {kept})" in found_in(task)[0]
    column, value = kept.split(": ")
    tested, remark = task.read_test(str(tmp_path / "t.jsonl"), {}, [], "test") if (
        rows is PARTED) else (range(4), "test")  # fmt: skip
    assert (len(tested), "test" in remark) == (4, True)
    text = f"{{{next(iter(rows[0]))}}}"
    source = {"path": "t.jsonl", "prompt": text, "completion": text}
    mix = parse_mix(json.dumps({"name": "m", "sources": {"s": source}}))
    with pytest.warns(UserWarning, match=re.escape(f"write where: {{{column}: [{value}]}}")):
        assert len(build_mix(mix, folder=tmp_path).train) == 12


def test_a_conversation_of_several_turns_is_refused(tmp_path):
    turns = [{"role": role, "content": f"t{i}"}
             for i, role in enumerate(("system", "user", "assistant"))]  # fmt: skip
    (tmp_path / "t.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 2)
    why = refused(DataError, read_task, str(tmp_path / "t.jsonl"), {})
    assert "row 1: 2 messages stand before the answer" in why


def test_what_decides_about_answers_comes_from_the_task_and_the_tests():
    task = task_of(*({"question": f"{i}", "answer": f"#### {i}"} for i in range(4)))

    def asked(*answers):
        tests = [("sw", [{"question": "q", "answer": answer} for answer in answers])]
        return replace(task, tests=tests).benchmark("x", ["sw"], SIZE)

    assert asked("5")["metric"] == ["exact_match", "number"]
    assert asked("Mvua kubwa ilinyesha usiku kucha")["metric"] == ["chrf++", "whole"]
    lines = asked("moja\nmbili")
    assert lines["metric"] == ["token_f1", "whole"]
    assert asked("5 km", "5 kg")["metric"] == ["exact_match", "whole"]
    for likeness in ("rouge_l", "chrf++"):
        task = replace(task, scoring=likeness)
        assert asked("5")["metric"] == [likeness, "whole"]
        assert task.own_texts(task.complete) == ["question", "answer"]
    assert lines["task"]["generation_kwargs"]["until"] == ["\nQuestion:"]
    # Short sums that lead to the number that a test asks for, and all right answers.
    task = task_of(*({"question": f"{i}", "answer": f"{i} + 5 = {i + 5}"} for i in range(4)))
    assert asked("5", "7")["metric"] == ["exact_match", "number"]
    several = {"question": "q", "answer": "5", "references": ["5", "tano"]}
    task = replace(task, tests=[("sw", [several])])
    assert task.answers[1] == ("sw", ["5", "tano"])
    assert not task.numeric


def test_further_right_answers_are_read_beside_the_answer(tmp_path):
    rows = [{"question": f"q{i}", "answer": "Juma", "aliases": ["bwana Juma", "Juma"]}
            for i in range(3)]  # fmt: skip
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = read_task(str(tmp_path / "t.jsonl"), {})
    assert [row["references"] for row in task.complete] == [["Juma", "bwana Juma"]] * 3
    assert task.pairs(task.complete)[0][1] == " Juma"


def test_different_answers_with_one_number_are_counted():
    worked = "{} bags hold {} apples each, so all of them together hold #### {}"
    rows = [{"question": f"q{i}", "answer": worked.format(i, 12 // i, 12)} for i in (1, 2, 3)]
    assert task_of(*rows).numeric
    assert "2 of 3 different answers in en end in the number of" in found_in(task_of(*rows))[1]


def test_texts_of_one_document_are_kept_out_of_the_training():
    rows = [{"question": f"q {i}", "answer": f"It rained in town number {i} all night"}
            for i in range(4)]  # fmt: skip
    task = task_of(*rows)
    assert task.own_texts(rows) == ["question", "answer"]
    stock = [{**row, "answer": "I do not know that at all"} for row in rows]
    assert task_of(*rows).own_texts(stock) == ["question"]
    short = [{**row, "answer": f"town {i}"} for i, row in enumerate(rows)]
    assert task_of(*short).own_texts(short) == ["question"]
    several = [
        {**row, "references": [row["answer"], f"village {i}"]} for i, row in enumerate(short)
    ]
    assert task_of(*short).own_texts(several) == ["question"]
    assert task_of(*HEADLINES).own_texts(task_of(*HEADLINES).complete) == ["text"]


def test_what_is_held_out_is_trained_in_no_spelling():
    rows = [{"text": text, "label": ("sports", "health")[i % 2]}
            for i in range(40) for text in (f"Headline {i}.", f"HÉADLINE {i}")]  # fmt: skip
    rows += [{"text": f"Rain {i}", "label": f"weather {i}"} for i in range(30)]
    rows += [{"text": "Disputed", "label": "sports"},
             {"text": "disputed!", "label": "health"}, {"text": "", "label": "sports"}]  # fmt: skip
    held = task_of(*rows).held_out(100)
    assert [by[1] for by in held] == [by[0] + 1 for by in held]
    assert Counter(rows[first]["label"] for first, _ in held) == {"sports": 2, "health": 2}
    assert held == task_of(*rows).held_out(100)
    assert len(task_of(*rows).held_out(3)) == 3
    alone = task_of({"text": "a", "label": "x"}, {"text": "b", "label": "y"}, rows[0])
    assert len(alone.held_out(100)) == 1


def test_sixty_intents_are_labels():
    rows = [{"text": f"text {i}", "intent": f"intent {i % 60}"} for i in range(180)]
    assert len(task_of(*rows).labels) == 60


def test_every_row_of_a_task_is_read_and_every_text_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("layerswap.new.tables.LOOK", 4)
    rows = [(f"review {i}", ("awful", "good", "great")[i // 4]) for i in range(12)]
    write_tsv(tmp_path / "t.tsv", ("text", "label"), rows)
    task = read_task(str(tmp_path / "t.tsv"), {})
    assert (len(task.complete), task.labels) == (12, ["awful", "good", "great"])
    (tmp_path / "t.txt").write_text("".join(f"line {i}\n" for i in range(10)))
    for given in ("t.txt", "t.tsv"):
        texts = read_texts(str(tmp_path / given))
        assert (len(texts.rows), texts.count) == (4, 10 if given == "t.txt" else 12)
    assert texts.rows[-1]["text"] == "review 9"


def test_choices_that_are_digits_are_told_by_their_position(tmp_path):
    rows = [{"question": f"{i} + 1?", "choices": ["1", "2", "3"], "answer": str(i + 1)}
            for i in range(3)]  # fmt: skip
    task = task_of(*rows)
    documents = [target(task, one, "sw") for one in task.documents(rows)]
    loaded = loaded_benchmark(task, documents, tmp_path)
    assert [loaded.doc_to_target(one) for one in loaded.eval_docs] == [0, 1, 2]
    assert loaded.doc_to_choice(loaded.eval_docs[0]) == ["1", "2", "3"]


def test_a_pair_of_sentences_with_labels():
    rows, wanted = TABLES["pairs"]
    task = task_of(*rows)
    prompt, completion = task.rows(1)[0]
    assert prompt + completion == wanted.replace("Label:", "Relation:")
    assert task.labels == ["l0", "l1"]


def test_numbers_are_scored_as_numbers_and_texts_as_texts():
    numbers = table({"question": "a", "answer": "So 1,200."}, {"question": "b", "answer": "7"})
    texts = table({"question": "a", "answer": "Abuja"})
    long = table({"question": "a", "answer": "Rain fell in Abuja all night."})
    thai = table({"question": "a", "answer": "ฝนตกหนักทั้งคืนในเมือง"})
    found = [Task(one, recognise(one, {})) for one in (numbers, texts, long, thai)]
    assert [one.numeric for one in found] == [True, False, False, False]
    written = [one.benchmark("x", ["sw"], SIZE) for one in found]
    assert [one["metric"] for one in written] == [
        ["exact_match", "number"], ["token_f1", "whole"], *[["chrf++", "whole"]] * 2
    ]  # fmt: skip
    assert [one["task"]["metadata"]["written"] for one in written] == [
        [], ["token_f1"], *[["chrf++", "rouge_l"]] * 2
    ]  # fmt: skip
    assert target(found[0], {"question": "a", "answer": "So 1,200."}, "en")["answer"] == "1200"


@pytest.mark.parametrize(
    ("answers", "numeric"),
    [(["1/2", "5/8", "12"], True), (["It is 1,200", "it is 12."], True), (["10:30", "7:30"], False),
     (["1963-12-12", "2001-05-12"], False), (["A1", "B1"], False), (["2:3", "4:3"], False),
     (["5 × 10^3", "7 × 10^3"], False), (["2³", "2⁴"], False), ([".5", "\u200f۵\u200f"], True),
     (["3 March 1990", "4 June 1990"], False), (["Genesis 1", "Exodus 1", "Exodus 2"], False),
     (["3 Mai 1990", "4 Mai 1990"], False), (["block A room 1", "block B room 1"], False),
     (["0, 1, 7", "1, 2, 7"], False), (["1 200", "3 200"], True), (["#### 4", "8"], True),
     (["5 km", "7km"], True), (["5 km", "5 kg"], False), (["print(1 + 2)", "print(3 + 4)"], False),
     (["let total = 3", "let total = 17"], False)],
)  # fmt: skip
def test_dates_times_and_codes_are_texts(answers, numeric):
    rows = [{"question": f"q{i}", "answer": answer} for i, answer in enumerate(answers)]
    task = task_of(*rows)
    assert task.numeric is numeric
    assert len({target(task, row, "en")["answer"] for row in rows}) == len(answers)


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_answers_have_the_letters_of_the_training(form):
    rows = [{"question": "q", "answer": unicodedata.normalize(form, "Ọjọ́ é")}] * 2
    task = task_of(*rows)
    test = {"question": "q", "answer": unicodedata.normalize("NFD", "Ọjọ́ é")}
    assert target(task, test, "yo")["answer"] == rows[0]["answer"]


@pytest.mark.parametrize(
    ("file", "name"), [("Nul.tsv", "task"), ("com1.csv", "task"), ("?.csv", "task"), ("a:b|", "a")]
)
def test_a_task_has_a_name_that_every_system_can_have(file, name):
    whole = replace(table(*HEADLINES), name=file)
    assert Task(whole, recognise(whole, {})).name == name


def test_what_was_recognised_is_shown_with_three_rows_as_they_are_trained(tmp_path):
    task = task_of(*HEADLINES)
    assert found_in(task) == [
        "rows.jsonl: 6 rows, columns text=headline, label=category; labels health, sports",
        r"  prompt 'Text: News 0\nTopic:', answer ' sports'",
        r"  prompt 'Text: News 1\nTopic:', answer ' health'",
        r"  prompt 'Text: News 2\nTopic:', answer ' sports'",
    ]
    labelled = write_labelled(tmp_path / "sw.tsv", ["Habari", "Moja"], ("sports", "health"))
    assert found_in(task.translation(labelled, {}))[1:] == [
        r"  prompt 'Text: Habari\nTopic:', answer ' sports'",
        r"  prompt 'Text: Moja\nTopic:', answer ' health'",
    ]


def test_two_columns_for_one_role_need_a_choice():
    both = table(*({**row, "text": "body"} for row in HEADLINES))
    assert refused(DataError, recognise, both, {}) == (
        "rows.jsonl: headline and text may both be the text; choose one, such as --columns "
        "text=headline"
    )
    assert recognise(both, {"text": "headline"}).columns["text"] == "headline"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "rows.jsonl: no rule recognises its columns; its columns are foo, bar. Name them, "
             "such as --columns text=COLUMN,label=COLUMN or --columns "
             "question=COLUMN,answer=COLUMN"),
        ({"text": "baz"}, "rows.jsonl: has no column 'baz'; its columns are foo, bar"),
        ({"texts": "foo"}, "--columns: no role 'texts'; there are text, label, prompt, question, "
                           "answer, messages, premise, hypothesis, choices, context"),
    ],
)  # fmt: skip
def test_columns_that_no_rule_recognises(given, message):
    assert refused(DataError, recognise, table({"foo": 1, "bar": 2}), given) == message


def test_files_as_they_lie_on_the_disk(tmp_path):
    fields = [("a\nb", "x\u2028y"), ("c", 'say "hi"')]
    write_tsv(tmp_path / "t.tsv", ("text", "label"), fields)
    (tmp_path / "t.csv").write_text("text;label\na;x\n")
    (tmp_path / "t.jsonl").write_text('{"text": "a", "label": "x"}\n')
    (tmp_path / "lines.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "blocks.txt").write_text("one\ntwo\n\nthree\n")
    (tmp_path / "n.ig").write_text("bu\nso\n")
    (tmp_path / "n.en").write_text("is\nthus\n")
    read = read_table(str(tmp_path / "t.tsv"))
    assert [tuple(row.values()) for row in read.rows] == fields
    assert read_table(str(tmp_path / "t.csv")).rows == [{"text": "a", "label": "x"}]
    assert read_table(str(tmp_path / "t.jsonl")).columns == ["text", "label"]
    assert len(read_texts(str(tmp_path / "lines.txt")).rows) == 3
    assert [row["text"] for row in read_texts(str(tmp_path / "blocks.txt")).rows] == [
        "one\ntwo", "three",
    ]  # fmt: skip
    pairs = read_parallel((str(tmp_path / "n.ig"), str(tmp_path / "n.en")), ("ig", "en"))
    assert pairs.rows[1] == {"ig": "so", "en": "thus"}
    assert pairs.source(tmp_path / "x")["parallel"] == {"ig": "../n.ig", "en": "../n.en"}


def test_compressed_files_are_read_by_their_inner_name(tmp_path):
    for name, text in {
        "t.JSONL.gz": '{"text": "a", "n": 1}\n{"text": "b"}\n',
        "t.csv.gz": "n;text\n1;a\n2;b\n",
        "t.txt.gz": "a\nb\n",
        "blocks.txt.gz": "a\n\nb\n",
    }.items():
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        read = read_texts(str(tmp_path / name))
        assert read.rows[0]["text"] == "a"
        assert read.keys.get("format") == {"t.txt.gz": "text", "blocks.txt.gz": "paragraphs"}.get(
            name
        )


def test_values_of_different_kinds_are_named(tmp_path):
    rows = [("a", "x"), ("b", 3), ("c", None), (math.nan, "x"), ("d", "y")]
    lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(
        DataError, match=r"t\.jsonl: row 2: label is a number, but a text in row 1$"
    ):
        read_task(str(file), {})
    del lines[1]
    file.write_text("\n".join(lines))
    assert found_in(read_task(str(file), {}))[0].endswith(
        "t.jsonl: 4 rows (2 incomplete, left out), columns text=text, label=label; labels x, y"
    )
    file.write_text('{"text": {"sw": "a"}}\n')
    with pytest.raises(DataError, match=r"t\.jsonl: row 1: text is an object, not a text; write"):
        read_texts(str(file))


def test_numbered_labels_are_read_by_their_names_beside_them():
    rows = [{"text": f"t{i}", "label": i % 2, "label_text": ("no", "yes")[i % 2]} for i in range(4)]
    task = task_of(*rows)
    assert task.labels == ["no", "yes"]
    assert task.prompt.endswith("\nLabel:")
    given = recognise(table(*rows), {"label": "label"})
    assert Task(table(*rows), given).labels == ["0", "1"]


@pytest.mark.parametrize(
    ("choices", "answers", "right"),
    [
        (["2", "3", "4"], ["3", "4"], ["3", "4"]),  # the text, though it is a position too
        (["2", "3", "4"], ["3", "1"], "row 2: .*'1' is none of the choices"),
        (["x", "y", "z"], ["b", "C"], ["y", "z"]),
        (["x", "y", "z"], [0, 2], ["x", "z"]),
        (["x", "y", "z"], [1, 2] * 20, "no answer is choice 0;"),  # perhaps counted from 1
        (["x", "y", "z"], ["A", "z"], None),
        (["x", "y", "z"], ["AB", "A"], None),
        (["x", "y", "z"], ["x", None], ["x"]),
        (["x", "y", "z"], ["\u00b2", "A"], None),
        (["x", None], ["x", "x"], None),
        ("yes", [0, 0], "row 1: the choices are not a list of texts, but yes; write"),
        ({"text": ["x", "y"], "label": ["A", "B"]}, ["B", None], ["y"]),  # ARC
        ({"text": ["x", "y"], "label": ["1", "2"]}, [2, 1], ["y", "x"]),  # named from 1
        ({"text": ["A", "B"], "label": ["B", "A"]}, ["A", "B"], ["B", "A"]),
        ({"text": ["x", "y"], "label": ["A", "B"]}, ["B", "y"], None),
        ({"text": ["x", "y"], "label": ["A"]}, ["A", "A"], None),
        ({"text": ["x", "y"]}, ["x", "x"], None),
    ],
)
def test_an_answer_names_a_choice(tmp_path, choices, answers, right):
    file = tmp_path / "t.jsonl"
    rows = [
        {"question": f"{i}", "choices": choices, "answer": one} for i, one in enumerate(answers)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    if right is None or isinstance(right, str):
        with pytest.raises(DataError, match=rf"t\.jsonl: {right or 'row [12]: '}"):
            read_task(str(file), {})
        return
    task = read_task(str(file), {})
    assert [one["choices"][int(one["label"])] for one in task.documents(rows)] == right
    assert [answer for _, answer in task.pairs(task.complete)] == [f" {one}" for one in right]


@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        ([("user", "a"), ("assistant", "b"), ("user", "c")], ["b"]),
        ([("user", "a"), ("assistant", None)], []),
    ],
)
def test_a_conversation_ends_with_its_last_answer(turns, wanted):
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    assert [one["answer"] for one in task_of(row, row).complete] == wanted * 2


def test_a_conversation_whose_content_is_no_text_is_refused():
    row = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
    task = task_of(row)
    with pytest.raises(DataError, match=r"^row 1: messages: the content of a message is not a"):
        task.documents([row])


def test_sharegpt_is_a_conversation():
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    task = task_of(row, row)
    assert task.documents([row]) == [{"prompt": "a", "answer": "b"}]


@pytest.mark.parametrize(
    ("row", "own"),
    [
        ({"instruction": "Add.", "input": "2 + 2", "output": "4"},
         "prompt=instruction,answer=output"),
        ({"background": "A river.", "question": "What?", "answer": "it"},
         "question=question,answer=answer"),
        ({"question": "What?", "A": "x", "B": "y", "answer": "A"},
         "question=question,answer=answer"),
        ({"question": "What?", "option_a": "x", "answer": "A"}, "question=question,answer=answer"),
        ({"instruction": "Add.", "output": "4", "history": [["a", "b"]]},
         "prompt=instruction,answer=output"),
        ({"messages": [{"role": "user", "content": "a"}], "system": "In Swahili."},
         "messages=messages"),
        ({"messages": [{"role": "user", "content": "a"}], "System_Message": "In Swahili."},
         "messages=messages"),
    ],
)  # fmt: skip
def test_no_part_of_a_prompt_is_left_out_in_silence(row, own):
    part = next(name for name in row if name not in own)
    first = own.partition("=")[2].partition(",")[0]
    assert refused(DataError, recognise, table(row, row), {}) == (
        f"rows.jsonl: column '{part}' seems a part of the prompt, which would be '{first}' alone; "
        f"join them in one column, or leave it out by --columns {own}"
    )
    given = dict(pair.split("=") for pair in own.split(","))
    assert recognise(table(row), given).columns == given
    assert (
        recognise(table(row | {name: "" for name in row if name not in own}), {}).columns == given
    )


@pytest.mark.parametrize(
    ("labels", "other", "shown"),
    [
        (["yes", "no", "Yes"], [], "'Yes' and 'yes'"),
        (["0", "1", "1.0"], [], "'1' and '1.0'"),
        (["n\u00e9", "non"], ["ne\u0301", "non"], r"'n\xe9' of {} and 'ne\u0301'"),
        (["True", "False"], ["true", "false"], "'False' of {} and 'false'"),
        (["sport", "news", "\u200fsport"], [], r"'sport' and '\u200fsport'"),
    ],
)
def test_labels_that_read_alike_are_named(tmp_path, labels, other, shown):
    def write(name, known):
        texts = [f"{name} {i}" for i in range(9 if known else 0)]
        return write_labelled(tmp_path / f"{name}.tsv", texts, known)

    def read():
        task = read_task(write("train", labels), {})
        return task.labels, task.read_test(write("test", other), {}, [], "test")

    file = tmp_path / ("test.tsv" if other else "train.tsv")
    shown = shown.format(tmp_path / "train.tsv")
    message = f"{file}: the labels {shown} read alike; write them in one form"
    assert refused(DataError, read) == message


def test_rows_of_a_test_that_are_incomplete_repeated_or_trained_on(tmp_path):
    def write(name, texts):
        return write_labelled(tmp_path / f"{name}.tsv", texts, ("yes", "no"))

    task = read_task(write("train", [f"Text {i}" for i in range(9)]), {})
    documents, remark = task.read_test(write("test", ["a", " ", "A", "b", "c"]), {}, [], "test")
    assert [len(documents), remark] == [4, " (1 incomplete rows left out, 1 repeated)"]
    assert task.read_test(write("whole", ["a", "b"]), {}, [], "test")[1] == ""
    with pytest.raises(DataError, match=r"9 of its 9 rows are also in .*train\.tsv"):
        task.read_test(write("same", [f"TEXT\u00a0 {i}" for i in range(9)]), {}, [], "test")
    asked = [{"question": "Which?", "choices": [choice, "b"], "label": "0"} for choice in "ac"]
    table = [{"question": f"{i}", "choices": ["a", "b"], "answer": "a"} for i in range(3)]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, table)))
    assert read_task(str(tmp_path / "c.jsonl"), {}).shared(asked[:1], asked[1:]) == 0


@pytest.mark.parametrize(
    ("name", "language"),
    [
        ("news.ig", "ig"), ("news.ibo.txt", "ig"), ("ig.txt", "ig"), ("en.txt", "en"),
        ("ibo_Latn.devtest", "ig"), ("flores.eng_Latn", "en"), ("news_en.txt.gz", "en"),
        ("x.en-ig.ig", "ig"), ("igbo.txt", "ig"), ("english.txt", "en"), ("news.fra", "fr"),
        ("texts_new.txt", None), ("texts-old.txt", None), ("a.txt", None), ("news", None),
    ],
)  # fmt: skip
def test_the_language_in_the_name_of_a_parallel_file(name, language):
    assert code_of(name, "ig") == language
    assert code_of(name, "ig-NG") == ("ig-NG" if language == "ig" else language)


def test_signs_and_marks_tell_labels_apart(tmp_path):
    labels = ["-1", "1", "C", "C#", "+", "-"]
    path = write_labelled(tmp_path / "t.tsv", [f"a{i}" for i in range(12)], labels)
    assert read_task(path, {}).labels == sorted(labels)


@pytest.mark.parametrize("name", ["head:line", "a[b]", "x!", "{x}"])
def test_a_column_that_no_template_can_name(tmp_path, name):
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps({name: c, 'y': c})}\n" for c in "ab"))
    why = refused(DataError, read_texts, str(tmp_path / "t.jsonl"), "sw", {"sw": name})
    assert "cannot be used in a template; rename it with letters" in why
    # Rows of a task are written with the names of roles.
    task = read_task(str(tmp_path / "t.jsonl"), {"question": name, "answer": "y"})
    assert ": b\n" in parse_template(task.prompt, "plain").render(task.complete[1])


def test_text_files_that_hold_nothing_to_train_on(tmp_path):
    for name, content, why in [
        ("null.jsonl", '{"text": null}\n' * 3, "has no text; give more"),
        ("one.txt", "only one\n", "has one text; give more"),
        ("same.txt", "only one\n" * 9, "has one text; give more"),
        ("array.txt", '[{"text": "a"},\n{"text": "b"}]', "is json, not plain text"),
        ("torn.txt.gz", gzip.compress(b"some text\n" * 99)[:-9], "cannot be read"),
        ("bad.xz", b"not packed", "cannot be read"),
    ]:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(DataError, match=rf"{name}: {why}"):
            read_texts(str(tmp_path / name))
    (tmp_path / "two.txt").write_text("another\n")
    assert read_texts(str(tmp_path / "[ot][nw]*.txt")).count == 2


def test_a_table_whose_quotation_marks_are_ordinary(tmp_path):
    (tmp_path / "t.tsv").write_text('text\tlabel\n"So, he said\tx\nb\ty\n')
    read = read_table(str(tmp_path / "t.tsv"))
    assert [row["text"] for row in read.rows] == ['"So, he said', "b"]


def test_too_many_labels(tmp_path):
    labels = [f"l{i}" for i in range(60)]
    with pytest.raises(DataError, match="has 60 different labels in 60 rows; a task of labels"):
        read_task(write_labelled(tmp_path / "t.tsv", labels, labels), {})


def test_a_label_in_a_list_of_one_is_a_label(tmp_path):
    rows = [{"text": f"a{i}", "label": ["xy"[i % 2]]} for i in range(6)]
    (tmp_path / "t.jsonl").write_text("".join(map("{}\n".format, map(json.dumps, rows))))
    task = read_task(str(tmp_path / "t.jsonl"), {})
    assert task.labels == ["x", "y"]
    assert task.rows(1) == [("Text: a0\nLabel:", " x")]
    rows[3]["label"] = ["x", "y"]
    with pytest.raises(DataError, match="row 4: label is a list of 2, not a text"):
        recognise(table(*rows), {})


def test_contradictory_labels_are_a_caution_and_most_of_them_are_refused(tmp_path):
    rows = [("a", "x"), ("A", "y"), ("b", "x"), ("b", "x"), ("c", "y"), ("d", "y")]
    write_tsv(tmp_path / "t.tsv", ("text", "label"), rows)
    task = read_task(write_labelled(tmp_path / "train.tsv", [f"t{i}" for i in range(9)], "xyz"), {})
    said = ("1 of the 4 texts in t.tsv have contradictory labels, such as 'a' (x, y); keep one "
            "label of each.")  # fmt: skip
    doubts = [*task.translation(str(tmp_path / "t.tsv"), {}).doubts()]
    assert doubts == ["Labels of the task have no row in t.tsv: z.", said]
    documents, remark = task.read_test(str(tmp_path / "t.tsv"), {}, [], "test")
    assert (remark, [*task.contradictions(documents, "t.tsv")]) == (" (2 repeated)", [said])
    write_tsv(tmp_path / "t.tsv", ("text", "label"), rows[:2])
    with pytest.raises(DataError, match=r"t.tsv: 1 of the 1 texts in it have contradictory label"):
        task.read_test(str(tmp_path / "t.tsv"), {}, [], "test")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            {"id": 1, "annotations": [{}], "data": {"text": "a"}},
            "in objects or lists (annotations, data) are not read: export the table as CSV, or wr",
        ),
        (
            {"row_idx": 1, "row": {"text": "a"}},
            "; texts and labels in objects or lists (row) are not read: export",
        ),
        (
            {"text": "a", "sports": 1, "health": 0},
            "texts and labels in columns (sports, health) are",
        ),
        ({"title": "a", "paragraphs": [{"context": "b"}]}, "in objects or lists (paragraphs)"),
        ({"a headline of the news": 1, "b": 2}, "answer=COLUMN, or add a header line"),
    ],
)
def test_columns_that_cannot_be_named_say_why(row, why):
    with pytest.raises(DataError, match=re.escape(why)):
        recognise(table(row, row), {})


@pytest.mark.parametrize(
    ("name", "row", "given", "fields"),
    [
        ("a.tsv", {"client_id": "ab{}", "sentence": "sw {}", "up_votes": "2"}, {}, ["sentence"]),
        ("a.tsv", {"English": "en {}", "Swahili": "sw {}"}, {}, ["Swahili", "English"]),
        ("a.jsonl", {"translation": {"en": "en {}", "sw": "sw {}"}}, {},
         ["translation[sw]", "translation[en]"]),
        ("a.tsv", {"src": "en {}", "tgt": "sw {}"}, {"sw": "tgt", "en": "src"}, ["tgt", "src"]),
        ("a.tsv", {"src": "en {}", "tgt": "sw {}"}, {}, "give --columns sw=COLUMN, or add a head"),
        ("a.tsv", {"text": "sw {}"}, {"sw": "txt"}, "no rule finds its texts in sw among text; gi"),
        ("a.tsv", {"1000": "1{}", "swh": "swh", "a": "b"}, {}, "no rule finds its texts in sw am"),
    ],
)  # fmt: skip
def test_columns_of_texts_are_found_by_name_or_language(tmp_path, name, row, given, fields):
    rows = [json.loads(json.dumps(row).replace("{}", str(i))) for i in range(3)]
    if name == "a.tsv":
        write_tsv(tmp_path / name, list(row), [list(row.values()) for row in rows])
    else:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = str(tmp_path / name)
    if isinstance(fields, str):
        with pytest.raises(DataError, match=re.escape(fields)):
            read_texts(file, "sw", given)
        return
    read = read_texts(file, "sw", given)
    assert [row["text"] for row in read.rows] == ["sw 0", "sw 1", "sw 2"]
    assert read.template("{text}") == f"{{{fields[0]}}}"
    if fields[1:]:
        pairs = read_parallel((file, file), ("sw", "en"), given)
        assert pairs.rows[1] == {"sw": "sw 1", "en": "en 1"}
        template = parse_template(pairs.template("{en} = {sw}"), "plain")
        assert template.render(rows[2]) == "en 2 = sw 2"
